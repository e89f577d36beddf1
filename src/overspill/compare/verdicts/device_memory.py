"""Does the device hold less, by what the plan says, and was the forecast right?"""

from __future__ import annotations

from collections.abc import Sequence

from overspill.compare.results import RunResult
from overspill.compare.verdicts.records import Check, Evidence, Figure, Outcome, Verdict
from overspill.config import format_bytes
from overspill.machine.arena import ALIGNMENT

FORECAST_TOLERANCE = 0.05
"""How far a memory forecast may be off (design.md, "Numbers to reach")."""

CUDA_BLOCK_ROUNDING_BYTES = 2 << 20
"""What CUDA may add to an allocation; each side has at most three (weights, buffer pool, expert slots)."""


def device_memory(evidence: Evidence) -> Verdict:
    """Whether the device really holds less, by what the plan says, and how good the forecast was."""
    if evidence.baseline_missing is not None:
        held = evidence.candidate[0].weights_and_pool_bytes
        claim = Check(Outcome.NOT_JUDGED, evidence.baseline_missing)
        figure = Figure("weights and pool, candidate", held, "bytes")
        forecast = _forecast_check("candidate", evidence.candidate)
        return Verdict("device memory", format_bytes(held), (claim, forecast), (figure,))
    baseline, candidate = evidence.baseline[0], evidence.candidate[0]
    planned = candidate.plan.saved_bytes - baseline.plan.saved_bytes
    tolerance = _tolerance_bytes(baseline, candidate)
    falls = [
        b.weights_and_pool_bytes - c.weights_and_pool_bytes
        for b, c in zip(evidence.baseline, evidence.candidate, strict=True)
    ]
    fell = max(falls, key=lambda fall: abs(fall - planned))
    headline = f"−{format_bytes(fell)}" if fell > 0 else f"+{format_bytes(-fell)}"
    pools = (("the buffer pool", candidate.plan.buffer_pool_bytes), ("expert slots", candidate.plan.expert_slots_bytes))
    taken = " and ".join(name for name, nbytes in pools if nbytes)
    net = f", net of {taken}" if taken else ""
    told = (
        f"the device holds {headline[1:]} {'less' if fell > 0 else 'more'} than with the baseline{net}: "
        f"planned {planned} bytes, off by {fell - planned:+d} ({tolerance} allowed for alignment)"
    )
    # Two offloads may be compared, and then the candidate may be planned to hold more.
    right = abs(fell - planned) <= tolerance and (fell > 0 or bool(baseline.plan.ways))
    checks = (
        Check(Outcome.PASS if right else Outcome.FAIL, told),
        _forecast_check("candidate", evidence.candidate),
        _forecast_check("baseline", evidence.baseline),
    )
    figures = (
        Figure("weights and pool, baseline", baseline.weights_and_pool_bytes, "bytes"),
        Figure("weights and pool, candidate", candidate.weights_and_pool_bytes, "bytes"),
        Figure("fell by", fell, "bytes"),
        Figure("planned to fall by", planned, "bytes"),
        Figure("tolerance", tolerance, "bytes"),
    )
    return Verdict("device memory", headline, checks, figures)


def _tolerance_bytes(baseline: RunResult, candidate: RunResult) -> int:
    """Every weight starts at an aligned address; CUDA rounds each allocation besides."""
    allocations = sum(block.tier == "device" for run in (baseline, candidate) for block in run.blocks)
    rounding = allocations * CUDA_BLOCK_ROUNDING_BYTES if candidate.device_kind == "cuda" else 0
    return ALIGNMENT * len(candidate.weights) + rounding


def _forecast_check(side: str, runs: Sequence[RunResult]) -> Check:
    """Forecast against measured, working memory left out: weights and pools, and the KV cache where a run filled it."""
    error, what = max((_forecast_error(run) for run in runs), key=lambda pair: abs(pair[0]))
    text = f"{side}: the forecast of {what} is off by {error:+.1%} ({FORECAST_TOLERANCE:.0%} allowed)"
    return Check(Outcome.PASS if abs(error) <= FORECAST_TOLERANCE else Outcome.FAIL, text)


def _forecast_error(run: RunResult) -> tuple[float, str]:
    """(forecast / measured - 1, of what)."""
    forecast = run.plan.weights_bytes + run.plan.pools_bytes
    held = "weights, expert slots" if run.plan.expert_slots_bytes else "weights"
    measured = run.weights_and_pool_bytes
    if run.device_kind == "cpu" and run.plan.mapped_bytes:  # the page cache is the same memory
        forecast, measured = forecast + run.plan.mapped_bytes, measured + run.mapped_ledger_bytes
        held = f"{held}, mapped files"
    cache, cache_forecast = run.memory.kv_cache_peak_bytes, run.plan.kv_cache_bytes
    if cache_forecast is None:
        return forecast / measured - 1, f"{held} and buffer pool (the KV cache is not forecast)"
    planned_tokens = run.plan.context_tokens * run.plan.sequences
    if run.longest_tokens + 1 < planned_tokens and cache <= cache_forecast:
        filled = f"answers filled {run.longest_tokens} of the KV cache's {planned_tokens} tokens"
        return forecast / measured - 1, f"{held} and buffer pool ({filled})"
    return (forecast + cache_forecast) / (measured + cache) - 1, f"{held}, buffer pool and KV cache"
