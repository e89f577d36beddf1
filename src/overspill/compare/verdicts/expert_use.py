"""Were routed experts used as planned, and does what the slots counted add up?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overspill.compare.results import RunResult, total_counts
from overspill.compare.verdicts.records import Check, Figure, Outcome
from overspill.config import format_bytes
from overspill.offload.expert_slots import SlotCounts

_COUNTED = (
    *("lookups", "hits", "fetched", "streamed", "computed"),
    *("prefetched", "prefetch_used", "prefetch_wasted", "promoted", "evictions"),
)


def expert_checks(candidate: Sequence[RunResult]) -> list[Check]:
    """Every block of experts that is planned to run in a way of its own did, and the slots' account is consistent.

    The account is held against what it was not made of: experts that passes chose, bytes that came, slots in use.
    """
    plan = candidate[0].plan
    checks = []
    idle = [_idle(run) for run in candidate]
    if wrong := next((text for text in idle if text is not None), None):
        checks.append(Check(Outcome.FAIL, wrong))
    elif plan.placed:
        uses = [use for use in candidate[0].experts if use.access == "in_place"]
        calls = sum(use.calls for use in uses)
        read = format_bytes(sum(use.bytes for use in uses))
        checks.append(
            Check(Outcome.PASS, f"the CPU computed the experts of {len(uses)} layers: {calls} calls read {read} there")
        )
    if plan.streamed:
        faults = [fault for run in candidate for fault in _faults(run)]
        if faults:
            checks.append(Check(Outcome.FAIL, f"the expert slots' counts do not add up: {faults[0]}"))
        else:
            checks.append(Check(Outcome.PASS, f"{told(total_counts(candidate))}: the counts add up"))
    return checks


def expert_figures(candidate: Sequence[RunResult]) -> list[Figure]:
    """What happened in all answers of all runs."""
    figures = []
    if candidate[0].plan.placed:
        uses = [use for run in candidate for use in run.experts if use.access == "in_place"]
        figures += [
            Figure("layers with experts on the CPU", len(candidate[0].plan.placed)),
            Figure("calls of experts on the CPU", sum(use.calls for use in uses)),
            Figure("read by experts on the CPU", sum(use.bytes for use in uses), "bytes"),
        ]
    counts = total_counts(candidate)
    if counts is not None:
        figures += [
            Figure("expert slots, hit rate", hit_rate(counts), "ratio"),
            Figure("expert slots, stall", counts.stall_s, "seconds"),
            Figure("expert slots, brought", counts.bytes, "bytes"),
            *(Figure(f"expert slots, {name.replace('_', ' ')}", getattr(counts, name)) for name in _COUNTED),
        ]
    return figures


def hit_rate(counts: SlotCounts) -> float | None:
    """Of the experts that passes chose, the share that was in a slot or on its way; None where none were chosen."""
    return counts.hits / counts.lookups if counts.lookups else None


def told(counts: SlotCounts | None) -> str:
    """Hits and misses, in words."""
    if counts is None or not counts.lookups:
        return "no expert was looked up in the slots"
    kinds = [f"{getattr(counts, kind)} {kind}" for kind in ("fetched", "streamed", "computed") if getattr(counts, kind)]
    misses = f" ({', '.join(kinds)})" if kinds else ""
    return f"{counts.hits} of {counts.lookups} experts chosen were in slots, {counts.misses} were not{misses}"


def _idle(run: RunResult) -> str | None:
    """A block that no answer ran as planned."""
    ran = {(use.path, use.access) for use in run.experts if use.calls}
    for path in run.plan.placed:
        if (path, "in_place") not in ran:
            return f"{path} was planned on the CPU, and never ran there"
    for path in run.plan.streamed:
        if (path, "stream") not in ran:
            return f"{path} was planned behind expert slots, and never ran so"
    return None


def _faults(run: RunResult) -> Iterator[str]:
    counts, state = run.slot_counts, run.slots
    if counts is None or state is None:
        yield "there are none"
        return
    streamed = [use for use in run.experts if use.access == "stream"]
    chosen = sum(use.bytes // use.expert_bytes for use in streamed)
    if chosen != counts.lookups:
        yield f"passes chose {chosen} experts, {counts.hits} hits and {counts.misses} misses were counted"
    came = counts.fills + counts.streamed
    sizes = [use.expert_bytes for use in streamed]
    if sizes and not min(sizes) * came <= counts.bytes <= max(sizes) * came:
        yield f"{came} experts of {min(sizes)} to {max(sizes)} bytes came, {counts.bytes} bytes were counted"
    total = state.counts
    if total.fills - total.evictions != state.held or state.held > state.count:
        yield (
            f"{total.fills} came into {state.count} slots, {total.evictions} were evicted, {state.held} slots are full"
        )
    if total.prefetch_used + total.prefetch_wasted > total.prefetched:
        yield (
            f"{total.prefetched} were prefetched, {total.prefetch_used} of them used and {total.prefetch_wasted} wasted"
        )
    if run.plan.policy == "fetch" and counts.computed:
        yield f"the CPU computed {counts.computed} experts under the policy fetch"
    if run.plan.policy == "cpu" and counts.fetched + counts.streamed:
        yield f"{counts.fetched + counts.streamed} missing experts were fetched under the policy cpu"
    on_disk = any(weight.tier == "disk" and weight.access == "stream" for weight in run.weights)
    read_bytes = sum(generation.experts_read_bytes for generation in run.generations)
    most = counts.bytes + came * run.plan.expert_edges_bytes
    if on_disk and not counts.bytes <= read_bytes <= most:
        yield f"{counts.bytes} bytes came into slots, {read_bytes} were read from files, at most {most} are explained"
