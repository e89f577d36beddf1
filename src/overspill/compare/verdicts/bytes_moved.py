"""Did weights leave the device, and did the link carry what the plan says?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from overspill.compare.results import Pass, RunResult
from overspill.compare.verdicts.records import Check, Figure, Outcome, Verdict
from overspill.config import format_bytes


def bytes_moved(candidate: Sequence[RunResult]) -> Verdict:
    """Whether weights left the device, as many as planned, and crossed the link as planned."""
    run = candidate[0]
    ledger, planned = run.host_ledger_bytes, run.plan.offloaded_bytes
    off = next((r for r in candidate if r.host_ledger_bytes != planned), None)
    if ledger == 0:
        claim = Check(Outcome.FAIL, "nothing was offloaded: no weight lies in host memory")
    elif off is not None:
        claim = Check(
            Outcome.FAIL,
            f"the ledger has {off.host_ledger_bytes} bytes in host memory, the plan {planned} bytes",
        )
    else:
        claim = Check(Outcome.PASS, f"{format_bytes(ledger)} of weights lie in host memory, to the byte as planned")
    carried = _carried_per_pass(candidate)
    figures = (
        Figure("offloaded, planned", planned, "bytes"),
        Figure("offloaded, in the ledger", ledger, "bytes"),
        Figure("over the link per token, planned", run.plan.link_bytes, "bytes"),
        Figure("over the link per token, counted", carried, "bytes"),
    )
    return Verdict("bytes moved", format_bytes(ledger), (claim, *_link_checks(candidate)), figures)


def _carried_per_pass(candidate: Sequence[RunResult]) -> float | None:
    """Median link bytes of a decode step; where copies run ahead, of a pass averaged over its generation."""
    if candidate[0].plan.prefetch_bytes:
        return median(g.link_bytes / len(g.passes) for run in candidate for g in run.generations)
    steps = [p.link_bytes for run in candidate for g in run.generations for p in g.decode]
    return median(steps) if steps and candidate[0].zero_copy_counted else None


def _link_checks(candidate: Sequence[RunResult]) -> list[Check]:
    """The traffic against the plan, by the rule that the access methods allow; one check for each rule used."""
    run = candidate[0]
    checks = []
    generations = [g for r in candidate for g in r.generations]
    decode = [p for g in generations for p in g.decode]
    if run.plan.prefetch_bytes:  # a copy may begin in one step and end in the next
        wrong = [g for g in generations if not _within(g.link_bytes, g.passes)]
        passes = sum(len(g.passes) for g in generations)
        rule = "counted over whole answers, since copies run ahead of the step that needs them"
        if wrong:
            low, high = (
                sum(p.planned_low for p in wrong[0].passes),
                sum(p.planned_high for p in wrong[0].passes),
            )
            checks.append(
                Check(
                    Outcome.FAIL,
                    f"{wrong[0].link_bytes} bytes crossed the link in {len(wrong[0].passes)} passes, "
                    f"the plan says {_range(low, high)} ({rule})",
                )
            )
        else:
            each = format_bytes(round(run.plan.link_bytes if run.zero_copy_counted else run.plan.prefetch_bytes))
            checks.append(
                Check(
                    Outcome.PASS,
                    f"{passes} passes carried {each} each over the link, exactly as planned ({rule})",
                )
            )
    elif run.zero_copy_counted and run.plan.zero_copy_bytes:
        checks += _zero_copy_checks([g.passes[0] for g in generations], decode, run.plan.link_bytes)
    if run.plan.zero_copy_bytes and not run.zero_copy_counted:
        checks.append(
            Check(
                Outcome.NOT_JUDGED,
                "zero-copy traffic is not counted: the GPU reads host memory by itself, and no software sees it",
            )
        )
    return checks


def _zero_copy_checks(prompts: Sequence[Pass], decode: Sequence[Pass], planned: float) -> list[Check]:
    checks = []
    if decode:
        wrong = next((p for p in decode if not _within(p.link_bytes, [p])), None)
        if wrong is not None:
            expected = _range(wrong.planned_low, wrong.planned_high)
            checks.append(
                Check(
                    Outcome.FAIL,
                    f"a decode step carried {wrong.link_bytes} bytes over the link, the plan says {expected}",
                )
            )
        else:
            each = format_bytes(round(planned))
            checks.append(
                Check(
                    Outcome.PASS,
                    f"each of {len(decode)} decode steps carried {each} over the link, to the byte as planned",
                )
            )
    wrong = next((p for p in prompts if not _within(p.link_bytes, [p])), None)
    if wrong is not None:
        expected = _range(wrong.planned_low, wrong.planned_high)
        checks.append(
            Check(
                Outcome.FAIL,
                f"a prompt pass of {wrong.tokens} tokens carried {wrong.link_bytes} bytes, the plan says {expected}",
            )
        )
    elif any(p.planned_low != p.planned_high for p in prompts):
        checks.append(
            Check(
                Outcome.PASS,
                "prompt passes stayed between their bounds; how many experts their tokens share is not known beforehand",
            )
        )
    return checks


def _within(link_bytes: int, passes: Sequence[Pass]) -> bool:
    return round(sum(p.planned_low for p in passes)) <= link_bytes <= round(sum(p.planned_high for p in passes))


def _range(low: float, high: float) -> str:
    return f"{round(low)}" if round(low) == round(high) else f"{round(low)} to {round(high)}"
