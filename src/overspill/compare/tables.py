"""The figures that a terminal and a page show alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from overspill.compare.report import Report, SideReport
from overspill.compare.results import PlacedWeight, RunResult, total_counts
from overspill.compare.verdicts.expert_use import hit_rate
from overspill.config import format_bytes


@dataclass(frozen=True)
class MemoryRow:
    """One purpose of memory, in bytes; None where there is no such figure. `error` is forecast / measured - 1."""

    purpose: str
    forecast: int | None
    asked: int | None
    allocated: int | None
    measured: int | None
    error: float | None


def memory_rows(runs: Sequence[RunResult]) -> list[MemoryRow]:
    """Device memory by purpose, all of it, and host memory; measured is the most of any run."""
    run = max(runs, key=lambda r: r.memory.peak_bytes)
    plan, memory = run.plan, run.memory
    blocks = {block.purpose: block for block in run.blocks}
    reserved = max(plan.kv_cache_bytes or 0, memory.kv_cache_peak_bytes)
    working = max(0, memory.peak_bytes - run.weights_and_pool_bytes - reserved)
    known = plan.kv_cache_bytes is not None and plan.working_bytes is not None
    in_all = plan.weights_bytes + plan.pools_bytes + (plan.kv_cache_bytes or 0) + (plan.working_bytes or 0)
    figures: list[tuple[str, str, int | None, int | None]] = [
        ("weights", "weights", plan.weights_bytes, memory.held_bytes["weights"]),
        ("mapped files", "", plan.mapped_bytes, run.mapped_ledger_bytes),
        ("buffer pool", "buffer_pool", plan.buffer_pool_bytes, memory.held_bytes["buffer_pool"]),
        ("expert slots", "expert_slots", plan.expert_slots_bytes, memory.held_bytes["expert_slots"]),
        ("KV cache", "kv_cache", plan.kv_cache_bytes, memory.kv_cache_peak_bytes),
        ("working memory", "working", plan.working_bytes, working),
        ("device, in all", "", in_all if known else None, memory.peak_bytes),
        ("host", "host", plan.host_bytes, None),
        ("staging", "staging", plan.staging_bytes, None),
    ]
    rows = []
    for label, purpose, forecast, measured in figures:
        block = blocks.get(purpose)
        if not forecast and not measured and block is None:
            continue
        rows.append(
            MemoryRow(
                label,
                forecast,
                block.requested_bytes if block else None,
                block.allocated_bytes if block else None,
                measured,
                forecast / measured - 1 if forecast is not None and measured else None,
            )
        )
    return rows


@dataclass(frozen=True)
class LedgerRow:
    """Weights of one tier and access: how many, and their bytes in the ledger."""

    tier: str
    access: str
    weights: int
    bytes: int


def ledger_rows(weights: Sequence[PlacedWeight]) -> list[LedgerRow]:
    found: dict[tuple[str, str], list[int]] = {}
    for weight in weights:
        found.setdefault((weight.tier, weight.access), []).append(weight.bytes)
    return [LedgerRow(tier, access, len(sizes), sum(sizes)) for (tier, access), sizes in sorted(found.items())]


@dataclass(frozen=True)
class MeasuredRow:
    """One figure of both sides, as text."""

    name: str
    baseline: str
    candidate: str


def measured_rows(report: Report) -> list[MeasuredRow]:
    """Medians over the runs, both sides beside each other."""

    def row(name: str, figure: Callable[[Sequence[RunResult]], str]) -> MeasuredRow:
        baseline = figure(report.baseline.runs) if report.baseline is not None else "–"
        return MeasuredRow(name, baseline, figure(report.candidate.runs))

    return [
        row("weights and pool on the device", lambda runs: format_bytes(runs[0].weights_and_pool_bytes)),
        row("device memory, peak", lambda runs: format_bytes(max(r.memory.peak_bytes for r in runs))),
        row("host memory, allocated", lambda runs: format_bytes(_host_bytes(runs[0]))),
        row("read from files", lambda runs: format_bytes(runs[0].read_bytes)),
        *disk_rows(report),
        row("load", lambda runs: f"{median(r.load_seconds for r in runs):.2f} s"),
        row("prompt pass", lambda runs: _ms(median(r.prompt_median_s for r in runs))),
        row("decode step", lambda runs: _ms(_median([r.decode_median_s for r in runs]))),
        *forecast_rows(report),
        row("link floor of a decode step", lambda runs: _ms(runs[0].plan.link_floor_s or None)),
        *expert_rows(report),
    ]


def disk_rows(report: Report) -> list[MeasuredRow]:
    """What each pass read from disk, for layers and for experts together; none where neither side did."""
    told = {side.name: median(run.step_read_bytes for run in side.runs) for side in report.sides}
    if not any(told.values()):
        return []
    figures = [format_bytes(round(told[name])) if name in told else "–" for name in ("baseline", "candidate")]
    return [MeasuredRow("read from disk a step", *figures)]


def forecast_rows(report: Report) -> list[MeasuredRow]:
    """What a decode step was forecast to take, and how that was met; none where nothing was forecast."""
    told = {"baseline": "–", "candidate": "–"}
    for side in report.sides:
        times = side.runs[0].plan.times
        measured_s = _median([run.decode_median_s for run in side.runs])
        if times is not None and measured_s is not None:
            told[side.name] = f"{_ms(times.step_s)}, measured {measured_s / times.step_s:.2f} times that"
    return [MeasuredRow("decode step, forecast", **told)] if set(told.values()) != {"–"} else []


def expert_rows(report: Report) -> list[MeasuredRow]:
    """What became of routed experts that the CPU computes or that are in slots, over all answers of all runs."""
    told = {side.name: _experts_told(side.runs) for side in report.sides}
    names = dict.fromkeys(name for rows in told.values() for name in rows)
    return [
        MeasuredRow(name, *(told.get(side, {}).get(name, "–") for side in ("baseline", "candidate"))) for name in names
    ]


def _experts_told(runs: Sequence[RunResult]) -> dict[str, str]:
    rows = {}
    if runs[0].plan.placed:
        uses = [use for run in runs for use in run.experts if use.access == "in_place"]
        rows["layers of experts on the CPU"] = str(len(runs[0].plan.placed))
        rows["calls of these, bytes read"] = f"{sum(u.calls for u in uses)}, {format_bytes(sum(u.bytes for u in uses))}"
    counts = total_counts(runs)
    if counts is not None:
        rate = hit_rate(counts)
        passes = sum(len(generation.passes) for run in runs for generation in run.generations)
        rows |= {
            "expert slots": str(runs[0].plan.slots),
            "hit rate of chosen experts": "–" if rate is None else f"{rate:.1%} of {counts.lookups}",
            "misses: fetched, streamed, on the CPU": f"{counts.fetched}, {counts.streamed}, {counts.computed}",
            "prefetched: used, wasted": f"{counts.prefetched}: {counts.prefetch_used}, {counts.prefetch_wasted}",
            "promoted, evicted": f"{counts.promoted}, {counts.evictions}",
            "brought into slots": format_bytes(counts.bytes),
            "waiting for experts, a pass": _ms(counts.stall_s / passes),
        }
    return rows


def side_words(side: SideReport) -> str:
    """What a side does, in a few words."""
    plan = side.runs[0].plan
    if not plan.ways:
        return "nothing offloaded"
    return f"{', '.join(plan.ways)}, {format_bytes(plan.offloaded_bytes)} offloaded"


def _host_bytes(run: RunResult) -> int:
    return sum(block.allocated_bytes for block in run.blocks if block.tier == "host")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"
