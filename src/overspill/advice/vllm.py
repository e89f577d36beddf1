"""A plan as `vllm serve`: backend, budget and selectors as vLLM 0.33 really takes them, and what it then moves."""

from __future__ import annotations

from overspill.advice.facts import dtype_name, environment_of, gguf_file, is_gguf, is_packed, off_device, unified
from overspill.advice.record import Advice
from overspill.advice.vllm_tensors import host_bytes
from overspill.advice.vllm_ways import Way, nearest_way
from overspill.advice.vllm_words import cannot_do, no_gguf, no_room, what_moves
from overspill.config import Settings, format_bytes
from overspill.config.environment import DISABLE_PIN_MEMORY
from overspill.plan import Plan


def advise_vllm(
    plan: Plan, settings: Settings, model_name: str, *, ranks: int = 1, device_total_bytes: int | None = None
) -> Advice:
    """`engines.advise` for vLLM; `device_total_bytes` are all that the GPU has, None where that is not known."""
    named = gguf_file(plan, model_name) if is_gguf(plan) else model_name
    command = ["vllm", "serve", named, "--dtype", dtype_name(plan)]
    command += ["--max-model-len", str(plan.context_tokens), "--max-num-seqs", str(plan.sequences)]
    if ranks > 1:
        command += ["--tensor-parallel-size", str(ranks)]
    command += _of_the_checkpoint(settings)
    if unified(plan):
        return _in_host_memory(plan, tuple(command), ranks)

    share, notes = _device_share(plan, device_total_bytes)
    command += share
    environment = environment_of(settings)
    way = nearest_way(plan, settings, ranks)
    command += way.flags
    notes += what_moves(plan, way, ranks)
    cannot = cannot_do(plan, way)
    taken_bytes, host_notes, lacking = _host(plan, way, ranks, environment)
    notes += [*host_notes, *_limits(plan, way)]
    copied = settings.environment.disable_uva if way.budget_bytes else DISABLE_PIN_MEMORY in environment
    if way.taken and copied:
        command.append("--enforce-eager")  # neither staged nor pageable copies go into CUDA graphs
    told = (*cannot, *lacking, *no_room(plan, way, ranks))
    return Advice("vllm", tuple(command), environment, tuple(notes), told, taken_bytes)


def _of_the_checkpoint(settings: Settings) -> list[str]:
    engine = settings.engine
    flags = ["--revision", engine.revision] if engine.revision is not None else []
    flags += ["--seed", str(engine.seed)] if engine.seed else []
    return flags + (["--trust-remote-code"] if engine.trust_remote_code else [])


def _device_share(plan: Plan, total: int | None) -> tuple[list[str], list[str]]:
    """The share that is what the plan may take: vLLM's default is another, and more than is free is refused there."""
    allowed = plan.memory.available_device_bytes
    if total is None or allowed > total:
        return [], [
            f"this plan has {format_bytes(allowed)} of device memory, vLLM a share of what the GPU has in all, 0.92 "
            f"unless it is told: --gpu-memory-utilization is {allowed} divided by the GPU's bytes"
        ]
    return ["--gpu-memory-utilization", f"{max(1, allowed * 10**4 // total) / 10**4:g}"], []


def _host(
    plan: Plan, way: Way, ranks: int, environment: dict[str, str]
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """What vLLM takes of host memory, notes, and what is lacking; may switch pinning off in `environment`."""
    if not way.taken:
        return 0, (), ()
    exact, rounded = (host_bytes(way.taken, ranks, rounded=each) for each in (False, True))
    available = plan.memory.available_host_bytes
    of_ranks = f" over {ranks} ranks" if ranks > 1 else ""
    notes = [
        f"host memory: {format_bytes(exact)} ({exact} bytes) of weights{of_ranks}; pinned, each tensor takes the next "
        f"power of two: {format_bytes(rounded)}, {rounded / exact:.2f} x"
    ]
    if DISABLE_PIN_MEMORY not in environment and rounded > available:
        environment[DISABLE_PIN_MEMORY] = "1"
        effect = (
            "copies then come from pageable memory and hold up the computing"
            if way.whole
            else "vLLM then maps exact sizes, and reads them in place all the same"
        )
        notes.append(f"{DISABLE_PIN_MEMORY}=1: rounded, the {format_bytes(available)} there are would not do; {effect}")
    taken = exact if DISABLE_PIN_MEMORY in environment else rounded
    lacking = (
        [f"hold its part in host memory: it takes {format_bytes(taken)}, and {format_bytes(available)} are available"]
        if taken > available
        else []
    )
    return taken, tuple(notes), tuple(lacking)


def _limits(plan: Plan, way: Way) -> list[str]:
    """What the figures do not hold for."""
    notes = []
    if is_packed(plan):
        notes.append(
            f"the checkpoint is packed; the figures are for its weights as {dtype_name(plan)}, vLLM keeps what it can "
            "packed"
        )
    if len(plan.model.stacks) > 1 and way.taken:
        others = ", ".join(stack.path for stack in plan.model.stacks[1:])
        notes.append(
            f"the model has more stacks of layers ({others}): where vLLM builds one with the same helper, a budget "
            "without selectors takes it first, and prefetch refuses it"
        )
    return notes


def _in_host_memory(plan: Plan, command: tuple[str, ...], ranks: int) -> Advice:
    """The device is the CPU: vLLM has nothing to offload there, and holds every weight in memory."""
    total, available = plan.model.nbytes, plan.memory.available_host_bytes
    cannot = []
    if on_disk := sum(p.weight.nbytes for p in off_device(plan)):
        cannot.append(
            f"leave {format_bytes(on_disk)} of weights on disk, as this plan does "
            f"({', '.join(plan.ways)}): it holds all of them in memory"
        )
    if total > available:
        cannot.append(f"hold the model: {format_bytes(total)} of weights, and {format_bytes(available)} are available")
    notes = ("on a CPU nothing is offloaded: vLLM's own build for CPUs reads weights where they are",)
    return Advice("vllm", command, {}, notes, (*cannot, *no_gguf(plan)), total)
