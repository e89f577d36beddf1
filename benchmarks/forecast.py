"""What plans forecast of time and memory, held against what then happens.

Before each way and after it the machine is measured (`overspill bench`'s figures, in this very process), since it
changes within minutes; between them the way is planned, loaded and run: a prompt, and decode steps of one sequence. The
forecast is the mean of what both measurements say. Emulated links of three speeds, experts on the CPU,
the CPU itself, and layers read from disk.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import models
from benchmarks.limits import evict
from benchmarks.report import Bar, Report
from overspill.api import prepare, start
from overspill.bench import measure_machine
from overspill.config import Settings, resolve
from overspill.engine import SamplingParams
from overspill.machine.device import Device
from overspill.machine.rates import Rates
from overspill.machine.select import select_device
from overspill.plan.forecast import pass_forecast

COLUMNS = (
    "model",
    "way",
    "limited_by",
    "forecast_ms",
    "measured_ms",
    "time_ratio",
    "forecast_bytes",
    "measured_bytes",
    "memory_ratio",
)
TIME_REACH, MEMORY_REACH = 0.20, 0.05


@dataclass(frozen=True)
class Scale:
    hidden: int
    layers: int
    experts: int
    prompt: int
    tokens: int
    links: tuple[str, ...]
    disk: bool = True
    """Not at sizes that the reader's own memory exceeds."""
    measured_each: bool = True
    """Before and after each way; else once for each kind of device."""


SCALES = {
    "toy": Scale(64, 4, 8, 8, 4, ("4GB/s",), disk=False, measured_each=False),
    "quick": Scale(1024, 8, 16, 32, 8, ("2GB/s", "8GB/s")),
    "full": Scale(1536, 12, 32, 64, 24, ("1GB/s", "4GB/s", "16GB/s")),
}


@dataclass(frozen=True)
class Case:
    """One way of one model: engine settings, and the offload document for the model's bytes."""

    model: str
    way: str
    engine: dict[str, Any]
    document: Callable[[int], dict[str, Any]]


def measure(scale: Scale, cache: Path, tell: Callable[[str], None]) -> Report:
    report = Report("forecast", "Forecast against measurement, a decode step of one sequence", COLUMNS)
    torch.set_num_threads(1)  # the emulated link's thread has the other core
    folders = _models(scale, cache)
    measured: dict[str, Rates] = {}
    sizes = {name: sum(f.stat().st_size for f in folder.glob("*.safetensors")) for name, folder in folders.items()}
    for case in _cases(scale):
        nbytes = sizes[case.model]
        engine = {"max_model_len": scale.prompt + scale.tokens, **case.engine}
        if share := engine.pop("memory_share", None):
            engine["memory_limit_bytes"] = int(share * nbytes)
        settings = resolve(case.document(nbytes), engine=engine, environ={})
        device = select_device(settings.engine)
        torch.set_num_threads(1)
        tell(f"{case.model}, {case.way}")

        def rates(settings: Settings = settings) -> Rates:
            gc.collect()
            kind = settings.engine.device
            if not scale.measured_each and kind in measured:
                return measured[kind]
            found = measure_machine(select_device(settings.engine), cache).rates
            torch.set_num_threads(1)
            gc.collect()
            measured[kind] = found
            return found

        report.rows.append(_row(case, folders[case.model], settings, device, rates, scale))
    times = [abs(row["time_ratio"] - 1) for row in report.rows]
    memories = [abs(row["memory_ratio"] - 1) for row in report.rows]
    report.bars = [
        Bar("largest error of a forecast time", max(times), TIME_REACH),
        Bar("largest error of forecast memory", max(memories), MEMORY_REACH, timed=False),
    ]
    report.notes.append(
        f"median error of time {median(times):.0%}; times on the emulated accelerator are no GPU's; one thread"
    )
    return report.finish()


def _models(scale: Scale, cache: Path) -> dict[str, Path]:
    heads = max(2, scale.hidden // 64)
    dense = models.llama(
        scale.hidden, scale.layers, intermediate=3 * scale.hidden, heads=heads, vocabulary=8192, tokens=1024
    )
    sparse = models.qwen3_moe(
        scale.layers // 2, hidden=scale.hidden, experts=scale.experts, intermediate=scale.hidden // 2, heads=heads
    )
    return {
        "dense, float32": models.checkpoint(dense, torch.float32, cache),
        "sparse, bfloat16": models.checkpoint(sparse, torch.bfloat16, cache),
    }


def _cases(scale: Scale) -> Iterator[Case]:
    dense, sparse = "dense, float32", "sparse, bfloat16"
    for link in scale.links:
        engine = {"device": "emulated", "link_bandwidth": link}
        yield Case(dense, f"uva, half, {link}", engine, lambda n: {"uva": {"cpu_offload_gb": n / 2 / (1 << 30)}})
        yield Case(dense, f"prefetch, every second, {link}", engine, lambda _: {"prefetch": {"offload_group_size": 2}})
        yield Case(sparse, f"experts in place, {link}", engine, lambda _: _extension(placement={"cpu_moe": True}))
    emulated = {"device": "emulated", "link_bandwidth": scale.links[-1]}
    yield Case(dense, "resident, emulated", emulated, lambda _: {})
    yield Case(dense, "CPU", {"device": "cpu"}, lambda _: {})
    if scale.disk:
        yield Case(
            dense, "CPU, 60 % of memory: the rest from disk", {"device": "cpu", "memory_share": 0.6}, lambda _: {}
        )


def _extension(**fields: object) -> dict[str, Any]:
    return {"overspill": fields}


def _row(
    case: Case, folder: Path, settings: Settings, device: Device, rates: Callable[[], Rates], scale: Scale
) -> dict[str, Any]:
    before = rates()
    prepared = prepare(folder, settings, device)
    evict(sorted(folder.glob("*.safetensors")))
    engine = start(prepared)
    prompt = [(7 * i) % 1000 + 3 for i in range(scale.prompt)]
    device.reset_peak()
    answer = engine.generate(prompt, SamplingParams(max_tokens=scale.tokens), ignore_eos=True)
    steps = [step.seconds for step in answer.steps[1:]]
    plan, peak = prepared.plan, device.peak_bytes()
    del engine, answer
    kept_tokens = scale.prompt + scale.tokens // 2
    forecasts = [pass_forecast(plan, known, 1, kept_tokens=kept_tokens) for known in (before, rates())]
    seconds = sum(forecast.seconds for forecast in forecasts) / 2
    expected = plan.memory.device_bytes - (0 if device.kind == "emulated" else plan.memory.working_bytes or 0)
    return {
        "model": case.model,
        "way": case.way,
        "limited_by": forecasts[0].limit,
        "forecast_ms": seconds * 1e3,
        "measured_ms": median(steps) * 1e3,
        "time_ratio": median(steps) / seconds,
        "forecast_bytes": expected,
        "measured_bytes": peak,
        "memory_ratio": peak / expected,
        "samples": {
            "steps_s": steps,
            "forecasts_s": [f.seconds for f in forecasts],
            "parts_s": [dict(f.parts) for f in forecasts],
        },
    }
