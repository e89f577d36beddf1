"""One run of one side in a process of its own: load, warm up, generate, measure.

`python -m overspill.compare.worker` reads a Job from stdin and writes its result into the job's folder; the log goes
to stderr. An OverspillError ends it with that error's exit code.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from safetensors.torch import save_file

import overspill
from overspill.api import prepare, start
from overspill.compare.forecasts import forecast_of, pass_of, weights_of
from overspill.compare.results import (
    ERROR,
    LOGITS,
    OBSERVED,
    RESULT,
    Allocation,
    ExpertUse,
    Failure,
    Generation,
    Job,
    Memory,
    RunResult,
    SlotState,
    from_json,
    to_json,
)
from overspill.config import resolve
from overspill.engine import Engine, SamplingParams
from overspill.errors import CheckpointError, OverspillError
from overspill.machine.device import Device
from overspill.machine.observed import remember
from overspill.offload.expert_runs import ExpertRuns
from overspill.offload.expert_slots import SlotCounts
from overspill.offload.expert_sources import DiskSource
from overspill.plan import Plan

PURPOSES = ("weights", "buffer_pool", "expert_slots", "kv_cache", "working")


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
    """Carry `job` out in this process.

    The logits are float32 [generated tokens, vocabulary] by prompt number; beside them is what `job.observe` asks for.
    """
    prepared = prepare(job.model, resolve(job.document, None, job.engine))
    engine = start(prepared)
    device, plan = prepared.device, prepared.plan
    held = {purpose: device.held_bytes(purpose) for purpose in PURPOSES}

    # What is paid once, at the first use of memory and of kernels, is not part of any step.
    engine.generate(job.prompts[0], SamplingParams(max_tokens=min(2, job.max_tokens)))
    device.reset_peak()
    seen = _Seen(device)
    engine.placed.model.register_forward_hook(seen)

    experts = engine.placed.experts
    logits: dict[str, torch.Tensor] = {}
    if job.observe is not None:
        _observe(engine.placed.model.get_submodule(job.observe), device, logits)
    _settle(engine)
    used = _expert_uses(experts)
    generations: list[Generation] = []
    for number, prompt in enumerate(job.prompts):
        traffic, slots = device.traffic.copy(), _counts(experts)
        experts_read_bytes, layers_read_bytes = _experts_read_bytes(experts), _layers_read_bytes(engine)
        completion = engine.generate(prompt, SamplingParams(max_tokens=job.max_tokens))
        happened = _counts(experts) - slots
        _settle(engine)
        generations.append(
            Generation(
                prompt_ids=tuple(completion.prompt_ids),
                token_ids=tuple(completion.token_ids),
                text=completion.text,
                finish_reason=completion.finish_reason,
                passes=tuple(pass_of(step, plan, device, computed=happened.computed > 0) for step in completion.steps),
                link_bytes=(device.traffic - traffic).bytes,
                slots=happened if experts.stream is not None else None,
                experts_read_bytes=_experts_read_bytes(experts) - experts_read_bytes,
                layers_read_bytes=_layers_read_bytes(engine) - layers_read_bytes,
            )
        )
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
        zero_copy_counted=device.sees_the_link,
        plan=forecast_of(engine.placed, generations),
        weights=weights_of(plan, engine.ledger),
        blocks=tuple(
            Allocation(b.purpose, b.tier, b.requested_bytes, b.allocated_bytes, b.pinned) for b in engine.ledger.blocks
        ),
        memory=memory,
        load_seconds=engine.ledger.load_seconds,
        read_bytes=engine.ledger.read_bytes,
        generations=tuple(generations),
        experts=_since(used, _expert_uses(experts)),
        slots=_slot_state(experts),
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
    _remember(device, plan, result)
    return result, logits


def _remember(device: Device, plan: Plan, result: RunResult) -> None:
    """Keep what a decode step took beside its forecast, for `overspill plan --calibrate`."""
    times, measured_s = result.plan.times, result.decode_median_s
    if times is None or measured_s is None:
        return
    with contextlib.suppress(CheckpointError):  # a comparison needs no note of it
        remember(device, plan.model.architecture, ", ".join(plan.ways), forecast_s=times.step_s, measured_s=measured_s)


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


def _observe(module: torch.nn.Module, device: Device, found: dict[str, torch.Tensor]) -> None:
    """Keep in `found` what the next call gives `module` and gets of it, copied to the host as it is."""

    def keep(_: Any, args: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> None:
        hook.remove()
        given = [value for value in (*args, *named.values()) if isinstance(value, torch.Tensor)]
        with device.host_execution():
            found.update((name, t.detach().cpu().clone()) for name, t in zip(OBSERVED, (*given, output), strict=True))

    hook = module.register_forward_hook(keep, with_kwargs=True)


# -- routed experts ----------------------------------------------------------------------------------------------------


def _settle(engine: Engine) -> None:
    """Wait for what was fetched ahead of passes that do not come, so that the link and the disk are idle."""
    if engine.placed.prefetcher is not None:
        engine.placed.prefetcher.settle()
    stream = engine.placed.experts.stream
    if stream is not None:
        with engine.placed.running():
            for key in list(stream.cache):
                stream.arrived(key)
        engine.placed.device.synchronize()


def _counts(experts: ExpertRuns) -> SlotCounts:
    """What happened to expert slots so far; nothing where there are none."""
    return experts.stream.counts.copy() if experts.stream is not None else SlotCounts()


def _slot_state(experts: ExpertRuns) -> SlotState | None:
    if experts.stream is None:
        return None
    cache = experts.stream.cache
    return SlotState(cache.count, cache.count - cache.free, cache.counts.copy())


def _layers_read_bytes(engine: Engine) -> int:
    """From files, for layers on disk, since loading began to read ahead."""
    prefetcher = engine.placed.prefetcher
    reads = prefetcher.source.reads if prefetcher is not None else None
    return reads.bytes_read if reads is not None else 0


def _experts_read_bytes(experts: ExpertRuns) -> int:
    """From files, for streamed experts."""
    source = experts.stream.source if experts.stream is not None else None
    return source.reads.bytes_read if isinstance(source, DiskSource) else 0


def _expert_uses(experts: ExpertRuns) -> tuple[ExpertUse, ...]:
    return tuple(
        ExpertUse(path, run.access.value, run.block.expert_bytes, run.use.calls, run.use.tokens, run.use.bytes)
        for path, run in experts.by_module()
    )


def _since(before: Sequence[ExpertUse], after: Sequence[ExpertUse]) -> tuple[ExpertUse, ...]:
    return tuple(
        replace(now, calls=now.calls - then.calls, tokens=now.tokens - then.tokens, bytes=now.bytes - then.bytes)
        for then, now in zip(before, after, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
