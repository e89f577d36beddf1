"""Did weights leave the device, and did the link carry what the plan says?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from overspill.compare.results import Generation, Pass, RunResult
from overspill.compare.verdicts.expert_use import expert_checks, expert_figures
from overspill.compare.verdicts.records import Check, Figure, Outcome, Verdict
from overspill.config import format_bytes

_AHEAD = "counted over whole answers, since copies run ahead of the step that needs them"
_READ_AHEAD = "counted over whole answers, since reads run ahead of the step that needs them"
_WHERE = {"host": "in host memory", "disk": "on disk"}


def bytes_moved(candidate: Sequence[RunResult]) -> Verdict:
    """Whether weights left the device, as many as planned, crossed the link as planned, and were used as planned.

    Each pass, or each answer where copies run ahead, is held against the least and the most that the plan allows.
    They are one number but for routed experts in a pass over several tokens, which may share their experts or not.
    What came into expert slots depends on what they held, so it is held against the slots' own account. What layers on
    disk took is held against what their reader counted.
    """
    run = candidate[0]
    ledger, planned = run.offloaded_ledger_bytes, run.plan.offloaded_bytes
    off = next((r.offloaded_ledger_bytes for r in candidate if r.offloaded_ledger_bytes != planned), None)
    if ledger == 0:
        claim = Check(Outcome.FAIL, f"nothing was offloaded: {_why_nothing(run)}")
    elif off is not None:
        claim = Check(Outcome.FAIL, f"the ledger has {off} bytes off the device, the plan {planned}")
    else:
        claim = Check(Outcome.PASS, f"{_tiers(run)}, to the byte as planned")
    generations = [generation for r in candidate for generation in r.generations]
    checks = [claim]
    if run.plan.prefetch_bytes or run.plan.streamed:
        checks += _ahead(run, generations)
    elif run.plan.in_place_bytes or (run.plan.zero_copy_bytes and run.zero_copy_counted):
        checks += _step_by_step(generations)
    checks += _read(candidate)
    if run.plan.zero_copy_bytes and not run.zero_copy_counted:
        checks.append(
            Check(
                Outcome.NOT_JUDGED,
                "zero-copy traffic is not counted: the GPU reads host memory by itself, and no software sees it",
            )
        )
    checks += expert_checks(candidate)
    figures = (
        Figure("offloaded, planned", planned, "bytes"),
        Figure("offloaded, in the ledger", ledger, "bytes"),
        Figure("over the link per token, planned", run.plan.link_bytes, "bytes"),
        Figure("over the link per token, counted", _counted_per_token(run, generations), "bytes"),
        Figure("read from disk a step for layers, planned", run.plan.disk_bytes, "bytes"),
        Figure("read from disk a step, counted", median(r.step_read_bytes for r in candidate), "bytes"),
        *expert_figures(candidate),
    )
    return Verdict("bytes moved", format_bytes(ledger), tuple(checks), figures)


def _why_nothing(run: RunResult) -> str:
    if run.plan.ways:
        return f"no weight lies off the device, and the plan says {', '.join(run.plan.ways)}"
    inert = (note for note in run.notes if note.startswith("device placement:"))
    return next(inert, "the plan moves no weight")


def _tiers(run: RunResult) -> str:
    """Where the weights off the device are."""
    tiers: Counter[str] = Counter()
    for weight in run.weights:
        tiers[weight.tier] += weight.bytes
    told = [f"{format_bytes(tiers[tier])} of weights lie {where}" for tier, where in _WHERE.items() if tiers[tier]]
    return " and ".join(told)


def _counted_per_token(run: RunResult, generations: Sequence[Generation]) -> float | None:
    """Median of the decode steps; where copies run ahead, of the answers' averages; None where nothing counts them."""
    if run.plan.prefetch_bytes or run.plan.streamed:
        return median(generation.link_bytes / len(generation.passes) for generation in generations)
    steps = [p.link_bytes for generation in generations for p in generation.decode]
    return median(steps) if steps and run.zero_copy_counted else None


def _ahead(run: RunResult, generations: Sequence[Generation]) -> list[Check]:
    if run.device_kind == "cpu":
        return []  # no link: what is read from disk lands where it is used
    for generation in generations:
        came = generation.slots.bytes if generation.slots is not None else 0
        if not _within(generation.link_bytes - came, generation.passes):
            slots = f", with {came} bytes into expert slots" if generation.slots is not None else ""
            return [
                Check(
                    Outcome.FAIL,
                    f"{generation.link_bytes} bytes crossed the link in {len(generation.passes)} passes{slots}, "
                    f"the plan says {_planned(generation.passes, came)} ({_AHEAD})",
                )
            ]
    passes = [p for generation in generations for p in generation.passes]
    average = format_bytes(round(sum(g.link_bytes for g in generations) / len(passes)))
    as_planned = "as planned and as the expert slots counted" if run.plan.streamed else "as planned"
    return [Check(Outcome.PASS, f"{len(passes)} passes carried {average} each over the link, {as_planned} ({_AHEAD})")]


def _read(candidate: Sequence[RunResult]) -> list[Check]:
    """What the reader of layers on disk counted, against what the plan reads and the blocks of the disk round up."""
    plan = candidate[0].plan
    generations = [generation for run in candidate for generation in run.generations]
    for generation in generations:
        passes, read_bytes = len(generation.passes), generation.layers_read_bytes
        if not passes * plan.disk_bytes <= read_bytes <= passes * plan.disk_most_bytes:
            text = (
                f"{read_bytes} bytes were read from disk for layers in {passes} passes, the plan says "
                f"{passes * plan.disk_bytes}, and {passes * plan.disk_most_bytes} at the most with what lies beside "
                f"them in the disk's blocks ({_READ_AHEAD})"
            )
            return [Check(Outcome.FAIL, text)]
    if not plan.disk_bytes:
        return []
    passes = sum(len(generation.passes) for generation in generations)
    average = sum(generation.layers_read_bytes for generation in generations) / passes
    text = (
        f"{passes} passes read {format_bytes(round(average))} of layers each from disk, as planned: "
        f"{plan.disk_bytes} bytes and {average / plan.disk_bytes - 1:.2%} of alignment ({_READ_AHEAD})"
    )
    return [Check(Outcome.PASS, text)]


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


def _planned(passes: Sequence[Pass], more: int = 0) -> str:
    low, high = _bounds(passes)
    return f"{low + more}" if low == high else f"{low + more} to {high + more}"


def _bounds(passes: Sequence[Pass]) -> tuple[int, int]:
    return round(sum(p.planned_low for p in passes)), round(sum(p.planned_high for p in passes))
