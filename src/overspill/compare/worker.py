"""One run of one side in a process of its own: load, warm up, generate, measure.

`python -m overspill.compare.worker` reads a Job from stdin and writes its result into the job's folder; the log goes
to stderr. An OverspillError ends it with that error's exit code.
"""

from __future__ import annotations

import logging
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from safetensors.torch import save_file

import overspill
from overspill.api import prepare, start
from overspill.compare.results import (
    ERROR,
    LOGITS,
    RESULT,
    Allocation,
    Failure,
    Forecast,
    Generation,
    Job,
    Memory,
    Pass,
    PlacedWeight,
    RunResult,
    from_json,
    to_json,
)
from overspill.config import resolve
from overspill.engine import Completion, Engine, SamplingParams, Step
from overspill.errors import OverspillError
from overspill.machine.device import Device
from overspill.model.weights import Weight
from overspill.plan import Access, Plan

PURPOSES = ("weights", "buffer_pool", "kv_cache", "working")


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    job = from_json(Job, sys.stdin.buffer.read())
    folder = Path(job.folder)
    try:
        result, logits = measure(job)
    except OverspillError as error:
        (folder / ERROR).write_bytes(to_json(Failure(type(error).__name__, error.message, error.hint)))
        return error.exit_code
    save_file(logits, folder / LOGITS)
    (folder / RESULT).write_bytes(to_json(result))
    return 0


def measure(job: Job) -> tuple[RunResult, dict[str, torch.Tensor]]:
    """Carry `job` out in this process. The logits are float32 [generated tokens, vocabulary] by prompt number."""
    prepared = prepare(job.model, resolve(job.document, None, job.engine))
    engine = start(prepared)
    device, plan = prepared.device, prepared.plan
    held = {purpose: device.held_bytes(purpose) for purpose in PURPOSES}

    # What is paid once, at the first use of memory and of kernels, is not part of any step.
    engine.generate(job.prompts[0], SamplingParams(max_tokens=min(2, job.max_tokens)))
    device.reset_peak()
    seen = _Seen(device)
    engine.placed.model.register_forward_hook(seen)

    generations: list[Generation] = []
    logits: dict[str, torch.Tensor] = {}
    for number, prompt in enumerate(job.prompts):
        before = device.traffic.copy()
        completion = engine.generate(prompt, SamplingParams(max_tokens=job.max_tokens))
        generations.append(_generation(completion, plan, device, (device.traffic - before).bytes))
        logits[str(number)] = seen.take_logits()

    memory = Memory(
        held_bytes=held,
        kv_cache_peak_bytes=seen.cache_peak_bytes,
        peak_bytes=device.peak_bytes(),
        budget_bytes=device.memory_bytes,
        process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    result = RunResult(
        device_kind=device.kind,
        device_name=device.name,
        zero_copy_counted=_zero_copy_counted(device),
        plan=_forecast(plan),
        weights=_weights(engine),
        blocks=tuple(
            Allocation(b.purpose, b.tier, b.requested_bytes, b.allocated_bytes, b.pinned) for b in engine.ledger.blocks
        ),
        memory=memory,
        load_seconds=engine.ledger.load_seconds,
        read_bytes=engine.ledger.read_bytes,
        generations=tuple(generations),
        notes=(*plan.warnings, *plan.notes),
        versions={
            "overspill": overspill.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
        threads=torch.get_num_threads(),
    )
    return result, logits


class _Seen:
    """A forward hook that keeps each pass's last logits, and the most that caches held.

    The logits leave the device at once, so that a comparison takes no more of it than a run does. The engine's own
    hook, which labels the caches, runs before this one.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.cache_peak_bytes = 0
        self._logits: list[np.ndarray] = []

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.cache_peak_bytes = max(self.cache_peak_bytes, self.device.held_bytes("kv_cache"))
        self._logits.append(output.logits[0, -1].float().cpu().numpy().copy())

    def take_logits(self) -> torch.Tensor:
        """Those since the last call: float32 [passes, vocabulary]."""
        logits = torch.from_numpy(np.stack(self._logits))
        self._logits.clear()
        return logits


def _zero_copy_counted(device: Device) -> bool:
    """A GPU reads mapped host memory by itself; no software sees those bytes."""
    return device.kind != "cuda"


def _generation(completion: Completion, plan: Plan, device: Device, link_bytes: int) -> Generation:
    return Generation(
        prompt_ids=tuple(completion.prompt_ids),
        token_ids=tuple(completion.token_ids),
        text=completion.text,
        finish_reason=completion.finish_reason,
        passes=tuple(_pass(step, plan, counted=_zero_copy_counted(device)) for step in completion.steps),
        link_bytes=link_bytes,
    )


def _pass(step: Step, plan: Plan, *, counted: bool) -> Pass:
    low = high = float(plan.step.prefetch_bytes)
    if counted:
        for weight in _zero_copy_weights(plan):
            least, most = _reads(weight, step.tokens)
            low, high = low + least, high + most
    return Pass(step.tokens, step.seconds, step.traffic.bytes, step.traffic.stall_s, low, high)


def _reads(weight: Weight, tokens: int) -> tuple[float, float]:
    """The least and the most bytes that a pass over `tokens` tokens reads of a weight."""
    if weight.routing is None:
        return weight.step_bytes(tokens), weight.step_bytes(tokens)
    share = weight.routing.top_k / weight.routing.experts
    return weight.nbytes * share, weight.nbytes * min(1.0, share * tokens)


def _zero_copy_weights(plan: Plan) -> list[Weight]:
    return [p.weight for p in plan.placements if p.access is Access.ZERO_COPY]


def _forecast(plan: Plan) -> Forecast:
    link, memory, ring = plan.step.link, plan.memory, plan.ring
    zero_copy = _zero_copy_weights(plan)
    zero_copy_bytes = sum(weight.step_bytes(1) for weight in zero_copy)
    transfers = len(ring.copied) if ring is not None else 0
    return Forecast(
        backend=plan.backend,
        offloaded_bytes=plan.offloaded_bytes,
        saved_bytes=plan.saved_bytes,
        weights_bytes=memory.weights_bytes,
        buffer_pool_bytes=memory.buffer_pool_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        working_bytes=memory.working_bytes,
        host_bytes=memory.host_bytes,
        context_tokens=plan.context_tokens,
        sequences=plan.sequences,
        zero_copy_bytes=zero_copy_bytes,
        prefetch_bytes=plan.step.prefetch_bytes,
        zero_copy_floor_s=link.seconds(int(zero_copy_bytes), len(zero_copy)) if link else None,
        prefetch_floor_s=link.seconds(plan.step.prefetch_bytes, transfers) if link else None,
    )


def _weights(engine: Engine) -> tuple[PlacedWeight, ...]:
    """Plan and ledger joined by name; tier and address are the ledger's."""
    entries = {entry.name: entry for entry in engine.ledger.entries}
    rows = []
    for placement in engine.plan.placements:
        weight, entry = placement.weight, entries[placement.weight.full]
        rows.append(
            PlacedWeight(
                name=weight.full,
                aliases=weight.aliases,
                stack=weight.name.stack,
                layer=weight.name.layer,
                role=weight.role,
                dtype=str(weight.dtype).removeprefix("torch."),
                bytes=entry.bytes,
                tier=entry.tier,
                access=entry.access,
                reason=placement.reason,
                address=entry.address,
                host_address=entry.host_address,
            )
        )
    return tuple(rows)


if __name__ == "__main__":
    sys.exit(main())
