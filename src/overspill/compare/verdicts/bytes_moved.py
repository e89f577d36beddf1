"""Did weights leave the device, and did the link carry what the plan says?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from overspill.compare.results import Generation, Pass, RunResult
from overspill.compare.verdicts.records import Check, Figure, Outcome, Verdict
from overspill.config import format_bytes

_AHEAD = "counted over whole answers, since copies run ahead of the step that needs them"


def bytes_moved(candidate: Sequence[RunResult]) -> Verdict:
    """Whether weights left the device, as many as planned, and crossed the link as planned.

    Each pass, or each answer where copies run ahead, is held against the least and the most that the plan allows.
    They are one number but for routed experts in a pass over several tokens, which may share their experts or not.
    """
    run = candidate[0]
    ledger, planned = run.host_ledger_bytes, run.plan.offloaded_bytes
    off = next((r.host_ledger_bytes for r in candidate if r.host_ledger_bytes != planned), None)
    if ledger == 0:
        claim = Check(Outcome.FAIL, "nothing was offloaded: no weight lies in host memory")
    elif off is not None:
        claim = Check(Outcome.FAIL, f"the ledger has {off} bytes in host memory, the plan {planned}")
    else:
        claim = Check(Outcome.PASS, f"{format_bytes(ledger)} of weights lie in host memory, to the byte as planned")
    generations = [generation for r in candidate for generation in r.generations]
    checks = [claim]
    if run.plan.prefetch_bytes:
        checks.append(_ahead(generations))
    elif run.plan.zero_copy_bytes and run.zero_copy_counted:
        checks += _step_by_step(generations)
    if run.plan.zero_copy_bytes and not run.zero_copy_counted:
        checks.append(
            Check(
                Outcome.NOT_JUDGED,
                "zero-copy traffic is not counted: the GPU reads host memory by itself, and no software sees it",
            )
        )
    figures = (
        Figure("offloaded, planned", planned, "bytes"),
        Figure("offloaded, in the ledger", ledger, "bytes"),
        Figure("over the link per token, planned", run.plan.link_bytes, "bytes"),
        Figure("over the link per token, counted", _counted_per_token(run, generations), "bytes"),
    )
    return Verdict("bytes moved", format_bytes(ledger), tuple(checks), figures)


def _counted_per_token(run: RunResult, generations: Sequence[Generation]) -> float | None:
    """Median of the decode steps; where copies run ahead, of the answers' averages; None where nothing counts them."""
    if run.plan.prefetch_bytes:
        return median(generation.link_bytes / len(generation.passes) for generation in generations)
    steps = [p.link_bytes for generation in generations for p in generation.decode]
    return median(steps) if steps and run.zero_copy_counted else None


def _ahead(generations: Sequence[Generation]) -> Check:
    for generation in generations:
        if not _within(generation.link_bytes, generation.passes):
            return Check(
                Outcome.FAIL,
                f"{generation.link_bytes} bytes crossed the link in {len(generation.passes)} passes, "
                f"the plan says {_planned(generation.passes)} ({_AHEAD})",
            )
    passes = [p for generation in generations for p in generation.passes]
    average = format_bytes(round(sum(g.link_bytes for g in generations) / len(passes)))
    return Check(Outcome.PASS, f"{len(passes)} passes carried {average} each over the link, as planned ({_AHEAD})")


def _step_by_step(generations: Sequence[Generation]) -> list[Check]:
    checks = []
    decode = [p for generation in generations for p in generation.decode]
    prompts = [generation.passes[0] for generation in generations]
    wrong = [p for p in (*decode, *prompts) if not _within(p.link_bytes, [p])]
    if wrong:
        what = f"a pass over {wrong[0].tokens} token{'s' if wrong[0].tokens > 1 else ''}"
        text = f"{what} carried {wrong[0].link_bytes} bytes over the link, the plan says {_planned(wrong[:1])}"
        return [Check(Outcome.FAIL, text)]
    if decode:
        each = format_bytes(round(median(p.link_bytes for p in decode)))
        text = f"each of {len(decode)} decode steps carried {each} over the link, to the byte as planned"
        checks.append(Check(Outcome.PASS, text))
    if any(p.planned_low != p.planned_high for p in prompts):
        text = "prompt passes stayed between their bounds (how many experts their tokens share is not known before)"
        checks.append(Check(Outcome.PASS, text))
    return checks


def _within(link_bytes: int, passes: Sequence[Pass]) -> bool:
    low, high = _bounds(passes)
    return low <= link_bytes <= high


def _planned(passes: Sequence[Pass]) -> str:
    low, high = _bounds(passes)
    return f"{low}" if low == high else f"{low} to {high}"


def _bounds(passes: Sequence[Pass]) -> tuple[int, int]:
    return round(sum(p.planned_low for p in passes)), round(sum(p.planned_high for p in passes))
