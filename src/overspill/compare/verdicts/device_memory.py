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
"""What CUDA may add to an allocation; each side has at most two (weights, buffer pool)."""


def device_memory(evidence: Evidence) -> Verdict:
    """Whether the device really holds less, by what the plan says, and how good the forecast was."""
    candidate = evidence.candidate[0]
    held = candidate.weights_and_pool_bytes
    if evidence.baseline_missing is not None:
        claim = Check(Outcome.NOT_JUDGED, evidence.baseline_missing)
        figures = [Figure("weights and pool, candidate", held, "bytes")]
        headline = format_bytes(held)
    else:
        baseline = evidence.baseline[0]
        planned = candidate.plan.saved_bytes - baseline.plan.saved_bytes
        tolerance = _tolerance_bytes(candidate)
        falls = [
            b.weights_and_pool_bytes - c.weights_and_pool_bytes
            for b, c in zip(evidence.baseline, evidence.candidate, strict=True)
        ]
        fell = max(falls, key=lambda fall: abs(fall - planned))
        within = f"planned {planned} bytes, {fell - planned:+d} bytes apart, {tolerance} allowed for alignment"
        if fell <= 0:
            claim = Check(Outcome.FAIL, f"device memory did not fall: {-fell} bytes more are held than by the baseline")
        elif abs(fell - planned) > tolerance:
            claim = Check(Outcome.FAIL, f"device memory fell by {fell} bytes; {within}")
        else:
            claim = Check(
                Outcome.PASS,
                f"device memory fell by {format_bytes(fell)}, the buffer pool subtracted; {within}",
            )
        figures = [
            Figure("weights and pool, baseline", baseline.weights_and_pool_bytes, "bytes"),
            Figure("weights and pool, candidate", held, "bytes"),
            Figure("fell by", fell, "bytes"),
            Figure("planned to fall by", planned, "bytes"),
            Figure("tolerance", tolerance, "bytes"),
        ]
        headline = f"{format_bytes(-fell)}" if fell > 0 else f"+{format_bytes(-fell)}"
    checks = [claim, _forecast_check("candidate", evidence.candidate)]
    if evidence.baseline:
        checks.append(_forecast_check("baseline", evidence.baseline))
    return Verdict("device memory", headline, tuple(checks), tuple(figures))


def _tolerance_bytes(run: RunResult) -> int:
    """Every weight starts at an aligned address; CUDA rounds each allocation besides."""
    rounding = 4 * CUDA_BLOCK_ROUNDING_BYTES if run.device_kind == "cuda" else 0
    return ALIGNMENT * len(run.weights) + rounding


def _forecast_check(side: str, runs: Sequence[RunResult]) -> Check:
    """Forecast against measured, working memory left out: weights and pool, and the KV cache where a run filled it."""
    worst = max((_forecast_error(run) for run in runs), key=lambda pair: abs(pair[0]))
    error, what = worst
    text = f"{side}: the forecast of {what} is {error:+.1%} off what was measured, {FORECAST_TOLERANCE:.0%} allowed"
    return Check(Outcome.PASS if abs(error) <= FORECAST_TOLERANCE else Outcome.FAIL, text)


def _forecast_error(run: RunResult) -> tuple[float, str]:
    """(forecast / measured - 1, of what)."""
    forecast = run.plan.weights_bytes + run.plan.buffer_pool_bytes
    measured = run.weights_and_pool_bytes
    what = "weights and buffer pool"
    if run.plan.kv_cache_bytes is None:
        what += " (the KV cache is not forecast)"
    elif (filled := run.longest_tokens) + 1 < run.plan.context_tokens * run.plan.sequences:
        planned_tokens = run.plan.context_tokens * run.plan.sequences
        what += f" (of the KV cache the answers filled {filled} of {planned_tokens} planned tokens)"
    else:
        forecast += run.plan.kv_cache_bytes
        measured += run.memory.kv_cache_peak_bytes
        what = "weights, buffer pool and KV cache"
    return forecast / measured - 1, what
