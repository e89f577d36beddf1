"""What is said beside vLLM's command: what of the plan it does not do, what it moves instead and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from overspill.advice.facts import few, is_gguf, is_packed, off_device, total_bytes
from overspill.advice.vllm_ranks import cache_bytes, rank_bytes
from overspill.advice.vllm_tensors import VllmTensor, taken_by_uva
from overspill.advice.vllm_ways import EXPERTS, Way
from overspill.config import GIB, format_bytes
from overspill.plan import Plan, Tier


def cannot_do(plan: Plan, way: Way) -> tuple[str, ...]:
    """A line for each thing of the plan that vLLM has no way for, with the nearest."""
    lines = []
    if plan.placed:
        nbytes = sum(block.nbytes for block in plan.placed)
        lines.append(
            f"compute experts on the CPU ({len(plan.placed)} layers, {format_bytes(nbytes)}): the nearest is that the "
            "device reads them across the link (uva)"
        )
    if plan.slots is not None:
        lines.append(
            f"keep {plan.slots.count} of {plan.slots.experts} experts in slots on the device: the nearest is that it "
            "reads every chosen expert across the link (uva)"
        )
    if plan.backend is not None and (plan.placed or plan.slots is not None):
        lines.append(f"combine its backends: one budget (uva) stands for experts and {plan.backend} together")
    if on_disk := [p.weight for p in plan.on(Tier.DISK)]:
        what = "mapped files" if plan.mapped else "a disk tier"
        lines.append(
            f"leave weights on disk ({what}, {format_bytes(total_bytes(on_disk))}): they lie in host memory there"
        )
    lines += _out_of_reach(plan)
    return (*no_gguf(plan), *lines, *_another_choice(plan, way))


def no_gguf(plan: Plan) -> list[str]:
    if not is_gguf(plan):
        return []
    return [
        "read a GGUF file by itself, since 0.24: it takes the package vllm-gguf-plugin, and --tokenizer with the name "
        "of the original model"
    ]


def no_room(plan: Plan, way: Way, ranks: int) -> list[str]:
    """A line where what vLLM leaves on a device is so much that it finds no room for the KV cache of one sequence."""
    if is_packed(plan):
        return []
    memory = plan.memory
    taken = sum(tensor.rank_bytes(ranks) for tensor in way.taken)
    weights = sum(rank_bytes(weight, ranks) for weight in plan.model) - taken + way.pool_bytes(ranks) // ranks
    cache = cache_bytes(plan, ranks) // plan.sequences
    left = memory.available_device_bytes - weights - plan.buffers_bytes - (memory.working_bytes or 0)
    if left >= cache:
        return []
    return [
        f"have a KV cache of {plan.context_tokens} tokens ({format_bytes(cache)}): of "
        f"{format_bytes(memory.available_device_bytes)} weights take {format_bytes(weights)} there and a prompt pass "
        f"{format_bytes(memory.working_bytes or 0)}; it does not start, --cpu-offload-gb higher by "
        f"{(cache - left) / GIB:.2f} or a shorter --max-model-len would help"
    ]


def _out_of_reach(plan: Plan) -> list[str]:
    decoder = plan.model.decoder.path
    outside = [p.weight for p in off_device(plan) if p.weight.name.stack != decoder]
    towers = [weight for weight in outside if weight.name.tower]
    others = [weight for weight in outside if not weight.name.tower]
    lines = []
    for weights, why in (
        (others, "its budget reaches the layers only, so embeddings, head and last norm stay on the device"),
        (towers, "a tower is reached only where its architecture wraps it, which is not counted on here"),
    ):
        if weights:
            names = few([weight.full for weight in weights])
            lines.append(f"move {names} ({format_bytes(total_bytes(weights))}): {why}")
    return lines


def _another_choice(plan: Plan, way: Way) -> list[str]:
    """Where vLLM moves other tensors than the plan, or more of one than the plan."""
    moved = {p.weight.full for p in off_device(plan)}
    taken, wanted = _keys(way.taken), _keys(way.wanted)
    lines = []
    if way.wanted and taken != wanted:
        lines.append(
            f"move this plan's weights alone: {len(wanted - taken)} of the {len(wanted)} tensors that hold them stay "
            f"on the device, {len(taken - wanted)} others leave it"
            + (" (a budget takes tensors in declaration order, layer 0 first)" if way.budget_bytes else "")
        )
    parted = [t for t in way.taken if (t.layer, t.name) in wanted and any(w.full not in moved for w in t.weights)]
    if parted:
        more = total_bytes([w for t in parted for w in t.weights if w.full not in moved])
        names = few(sorted({tensor.name for tensor in parted}))
        lines.append(f"move a part of what it has fused: {names} go whole, {format_bytes(more)} more than in this plan")
    return lines


def _keys(tensors: Sequence[VllmTensor]) -> set[tuple[int, str]]:
    return {(tensor.layer, tensor.name) for tensor in tensors}


def what_moves(plan: Plan, way: Way, ranks: int) -> list[str]:
    """Bytes and bytes per step, there and here; and what declaration order costs a sparse model."""
    if not plan.offloads:
        return ["nothing is offloaded"]
    if not way.taken:
        return ["this plan frees no device memory, so no budget is given"]
    tokens = plan.step.tokens
    held = sum(ranks * tensor.rank_bytes(ranks) for tensor in way.taken)
    there, here = way.step_bytes(tokens, ranks), plan.step.link_bytes + plan.step.stream_bytes
    layers = sorted({tensor.layer for tensor in way.taken})
    of = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    pool = way.pool_bytes(ranks)
    notes = [
        f"vLLM moves {len(way.taken)} tensors of {of}, {format_bytes(held)}, and frees {format_bytes(held - pool)} of "
        f"device memory; this plan frees {format_bytes(plan.saved_bytes)}",
        f"a step over {tokens} token{'s' * (tokens != 1)} brings {_size(there)} across the link there, {_size(here)} "
        f"in this plan: {_difference(there, here)}",
    ]
    if way.budget_bytes:
        reached = sum(tensor.nbytes for tensor in way.taken)
        if reached < way.budget_bytes:
            notes.append(
                f"{format_bytes(reached)} is all that the selectors reach, {format_bytes(way.budget_bytes - reached)} "
                "less than this plan frees: the device may run out of memory"
            )
        notes += _order_on_a_sparse_model(way, tokens, ranks)
        if any(tensor.routed for tensor in way.taken):
            notes.append(
                "experts cross once a step in vLLM's Triton kernel for them; others may read them once a token"
            )
    else:
        notes.append(
            f"its static buffers take {format_bytes(pool)} of the device, this plan's "
            f"{format_bytes(plan.memory.buffer_pool_bytes)}"
        )
    return notes


def _order_on_a_sparse_model(way: Way, tokens: int, ranks: int) -> list[str]:
    if not any(tensor.routed for tensor in way.tensors):
        return []
    size = sum(tensor.nbytes for tensor in way.taken)
    now = way.step_bytes(tokens, ranks)
    if way.selectors == EXPERTS:
        plain = way.step_bytes(tokens, ranks, taken_by_uva(way.tensors, way.budget_bytes))
        if plain <= now:
            return []
        return [
            "without the selector vLLM would move attention, norms and routers of the first layers too: "
            f"{_size(plain)} a step, {plain / now:.1f} x"
        ]
    alone = taken_by_uva(way.tensors, size, EXPERTS)
    cost = way.step_bytes(tokens, ranks, alone)
    if sum(tensor.nbytes for tensor in alone) < size or cost >= now:
        return []
    return [
        "declaration order moves attention before experts, and every token reads all of it: with "
        f"--cpu-offload-params experts as many bytes would leave the device for {_size(cost)} a step, "
        f"not {_size(now)}"
    ]


def _size(nbytes: float) -> str:
    return format_bytes(round(nbytes))


def _difference(there: float, here: float) -> str:
    if round(there) == round(here):
        return "the same"
    return f"{_size(abs(there - here))} {'more' if there > here else 'less'}"
