"""Which weights are used where they lie, in the mapped checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from overspill.checkpoint import Extent
from overspill.config import format_bytes
from overspill.config.extension import MmapConfig
from overspill.machine.arena import bits_alignment
from overspill.model.converted import how_converted, needs_conversion
from overspill.model.experts import expert_blocks
from overspill.model.sources import Extents, Live, runs_by
from overspill.model.weights import ModelMap, Role, Weight
from overspill.plan.placement import Placement
from overspill.plan.tiers import Access, Tier

Moved = Mapping[str, tuple[Tier, Access, str]]


def mapped_pieces(weight: Weight, experts: int | None = None) -> tuple[Extent, ...] | None:
    """The weight as it lies in a file: in one piece, or in one for each of `experts`. None where it does neither.

    A stack of experts from one tensor each is often in the latter way: gate and up of an expert lie side by side.
    """
    source = weight.source
    if not isinstance(source, Extents) or needs_conversion(weight):
        return None
    whole = runs_by(source, weight.nbytes)
    if len(whole) == 1 and len(whole[0]) == 1:
        return tuple(whole[0])
    if experts is None:
        return None
    pieces = runs_by(source, weight.nbytes // experts)
    return tuple(run for runs in pieces for run in runs) if all(len(runs) == 1 for runs in pieces) else None


def obstacles(model: ModelMap, *, unified: bool) -> dict[str, str]:
    """Why a weight cannot be used in a mapping, by name; those that can are missing.

    Where the device is the CPU itself, experts may lie apart: the architecture's own loop reads them one by one.
    """
    experts = {w.full: b.experts for b in expert_blocks(model) for w in b.weights.values()} if unified else {}
    found = {}
    for weight in model:
        if (why := _obstacle(weight, experts.get(weight.full))) is not None:
            found[weight.full] = why
    return found


def _obstacle(weight: Weight, experts: int | None) -> str | None:
    if weight.role is Role.BUFFER:
        return "buffers, which a model may write"
    if weight.written:
        return "changed by the architecture while it runs"
    if isinstance(weight.source, Live):
        return "in memory already"
    if needs_conversion(weight):
        return how_converted(weight)
    pieces = mapped_pieces(weight, experts)
    if pieces is None:
        return "in several pieces of a file, so copied"
    if any(piece.offset % bits_alignment(weight.dtype) for piece in pieces):
        return f"in a file at no multiple of {bits_alignment(weight.dtype)} bytes, so copied"
    return None


@dataclass(frozen=True)
class Mapped:
    """What `mmap` asks for, of one model. `unified`: the device's memory is the host's."""

    model: ModelMap
    settings: MmapConfig
    unified: bool

    @cached_property
    def _refused(self) -> dict[str, str]:
        return obstacles(self.model, unified=self.unified)

    def moved(self, moved: Moved) -> dict[str, tuple[Tier, Access, str]]:
        """Tier, access and why of the weights that are used in the mapping.

        Those that would be on the device, where that is the CPU; elsewhere those that the CPU computes with, since a
        device reads pinned memory only.
        """
        found: dict[str, tuple[Tier, Access, str]] = {}
        for weight in self.model if self.settings.enabled else ():
            if weight.full in self._refused or not weight.nbytes:
                continue
            before = moved.get(weight.full)
            if before is None and self.unified:
                found[weight.full] = (Tier.DISK, Access.IN_PLACE, "mmap")
            elif before is not None and before[1] is Access.IN_PLACE:
                found[weight.full] = (Tier.DISK, Access.IN_PLACE, f"{before[2]}, mmap")
        return found

    def told(self, placements: Sequence[Placement], room_bytes: int) -> Told:
        """What there is to say of `placements`; `room_bytes` of host memory are left for the page cache."""
        if not self.settings.enabled:
            return Told(False)
        total = sum(p.weight.nbytes for p in placements if p.mapped)
        left: Counter[str] = Counter()
        for p in placements:
            if not p.mapped and p.weight.nbytes:
                left[self._why_not(p)] += p.weight.nbytes
        others = ", ".join(f"{format_bytes(nbytes)} ({why})" for why, nbytes in left.most_common())
        if not total:
            only = "" if self.unified else "; beside a device it is for experts that the CPU computes (--cpu-moe)"
            return Told(
                False, (), (f"mmap.enabled changes nothing, no weight can be used in a mapped file: {others}{only}",)
            )
        count = sum(p.mapped for p in placements)
        note = f"mmap: {count} weights, {format_bytes(total)}, are used in place in the mapped files"
        note += f"; the others are {others}" if others else ""
        if total <= room_bytes:
            return Told(self.settings.prefault is not False, (note,))
        cramped = (
            f"mmap: {format_bytes(total)} are mapped, and {format_bytes(max(0, room_bytes))} of host memory are left "
            "for the page cache: what it lets go of is read again"
        )
        return Told(self.settings.prefault is True, (note,), (cramped,))

    def _why_not(self, placement: Placement) -> str:
        name = placement.weight.full
        if placement.access in (Access.PREFETCH, Access.STREAM, Access.ZERO_COPY):
            return f"{placement.access.value} from {placement.tier.value}"
        return "on the device" if not self.unified and placement.tier is Tier.DEVICE else self._refused[name]


class Told(NamedTuple):
    """`prefault`: whether the mapped weights are read into the page cache while loading."""

    prefault: bool
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
