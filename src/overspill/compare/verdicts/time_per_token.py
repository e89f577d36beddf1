"""What does the offload cost per token?"""

from __future__ import annotations

from statistics import median

from overspill.compare.results import spread
from overspill.compare.verdicts.records import Check, Evidence, Figure, Outcome, Verdict


def time_per_token(evidence: Evidence, *, max_slowdown: float | None = None) -> Verdict:
    """Decode step medians, candidate over baseline, run by run; judged only against a limit that was asked for."""
    candidate = evidence.candidate[0]
    emulated = ", emulated, not a GPU's time" if candidate.device_kind == "emulated" else ""
    medians = [run.decode_median_s for run in evidence.candidate]
    steps = [m for m in medians if m is not None]
    if not steps:
        return Verdict("time per token", "–", (Check(Outcome.NOT_JUDGED, "no answer has a second token to time"),))
    figures = [
        Figure("decode step, candidate", median(steps), "seconds"),
        Figure("link floor", candidate.plan.link_floor_s, "seconds"),
    ]
    pairs = zip(evidence.baseline, evidence.candidate, strict=False)
    ratios = [c.decode_median_s / b.decode_median_s for b, c in pairs if c.decode_median_s and b.decode_median_s]
    if evidence.baseline_missing is not None or not ratios:
        reason = evidence.baseline_missing or "no answer of the baseline has a second token to time"
        claim = Check(Outcome.NOT_JUDGED, f"{median(steps) * 1e3:.1f} ms a decode step{emulated}; {reason}")
        return Verdict("time per token", f"{median(steps) * 1e3:.1f} ms", (claim,), tuple(figures))
    least, middle, most = spread(ratios)
    base = median(b.decode_median_s for b in evidence.baseline if b.decode_median_s)
    figures[:0] = [
        Figure("ratio, least", least, "ratio"),
        Figure("ratio, median", middle, "ratio"),
        Figure("ratio, most", most, "ratio"),
        Figure("decode step, baseline", base, "seconds"),
    ]
    told = (
        f"a decode step takes {middle:.2f} times the baseline's ({least:.2f} to {most:.2f} over {len(ratios)} runs; "
        f"medians {base * 1e3:.1f} and {median(steps) * 1e3:.1f} ms{emulated})"
    )
    if max_slowdown is None:
        claim = Check(Outcome.NOT_JUDGED, f"{told}; no limit was asked for")
    elif middle <= max_slowdown:
        claim = Check(Outcome.PASS, f"{told}; at most {max_slowdown:g} were asked for")
    else:
        claim = Check(Outcome.FAIL, f"{told}; at most {max_slowdown:g} were asked for")
    checks = [claim, *_floor_check(evidence, base, median(steps))]
    return Verdict("time per token", f"{middle:.2f}×", tuple(checks), tuple(figures))


def _floor_check(evidence: Evidence, baseline_s: float, candidate_s: float) -> list[Check]:
    """The least that a step could take on this link: zero-copy adds to the computing, prefetch runs beside it.

    Not where experts are computed elsewhere, or come through slots: there the baseline's computing is no measure, or
    the link's share is known only afterwards.
    """
    plan = evidence.candidate[0].plan
    if plan.zero_copy_floor_s is None or plan.prefetch_floor_s is None or evidence.baseline[0].plan.ways:
        return []
    if plan.placed or plan.streamed:
        return []
    least = plan.zero_copy_floor_s + max(baseline_s, plan.prefetch_floor_s)
    return [
        Check(
            Outcome.NOT_JUDGED,
            f"the link alone takes {(plan.link_floor_s or 0) * 1e3:.1f} ms, with the computing at least "
            f"{least * 1e3:.1f} ms: the step took {candidate_s / least:.2f} times that",
        )
    ]
