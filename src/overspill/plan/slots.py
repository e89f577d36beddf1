"""The device memory that streamed experts share: slots of one expert each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from overspill.machine.arena import ALIGNMENT, aligned_bytes, bits_alignment, page_bytes
from overspill.machine.read_requests import ALIGNMENT as DISK_ALIGNMENT
from overspill.model.converted import needs_conversion
from overspill.model.experts import ExpertBlock
from overspill.model.sources import Extents, runs_by
from overspill.model.weights import Weight
from overspill.plan.ring import LARGE_BYTES
from overspill.plan.tiers import Tier

Policy = Literal["fetch", "cpu", "auto"]

SWEEP_SLOTS = 2
"""Slots beside the cache, through which a pass that touches nearly all experts streams those that it misses."""


@dataclass(frozen=True)
class Slots:
    """A cache of `count` experts for all of `blocks`, whose experts live in `tier`.

    `policy` says what is done with an expert that is in no slot: it is fetched, or computed on the CPU where it lies,
    or whichever the measured costs say.
    """

    blocks: tuple[ExpertBlock, ...]
    count: int
    policy: Policy
    tier: Tier

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: it holds the largest expert of any block."""
        largest = max(sum(self._room_bytes(w.nbytes // b.experts) for w in b.weights.values()) for b in self.blocks)
        return page_bytes(largest) if self.tier is Tier.DISK and largest >= LARGE_BYTES else largest

    @property
    def pool_bytes(self) -> int:
        return (self.count + SWEEP_SLOTS) * self.slot_bytes

    @property
    def experts(self) -> int:
        """Experts of all blocks."""
        return sum(block.experts for block in self.blocks)

    def of(self, count: int) -> Slots:
        return replace(self, count=min(count, self.experts))

    def span(self, weight: Weight, expert: int) -> slice:
        """Where in a slot the bytes of one weight of an expert lie.

        They start where they have the same address modulo 64 as in a resident stack of experts, since on a CPU the bits
        of a product may depend on that. Large ones on disk start, where bits allow it, where they can be read in place.
        """
        start, nbytes, remainders = self._parts[weight.full]
        remainder = remainders[expert] if remainders is not None else None
        begin = start + (expert * nbytes % ALIGNMENT if remainder is None else (remainder - start) % DISK_ALIGNMENT)
        return slice(begin, begin + nbytes)

    def _room_bytes(self, nbytes: int) -> int:
        """For a weight of `nbytes` wherever it starts."""
        loss = DISK_ALIGNMENT if self.tier is Tier.DISK and nbytes >= LARGE_BYTES else ALIGNMENT
        return aligned_bytes(nbytes + loss - 1)

    @cached_property
    def _parts(self) -> dict[str, _Part]:
        found = {}
        for block in self.blocks:
            start = 0
            for weight in block.weights.values():
                nbytes = weight.nbytes // block.experts
                large = self.tier is Tier.DISK and nbytes >= LARGE_BYTES
                found[weight.full] = _Part(start, nbytes, _remainders(weight, nbytes) if large else None)
                start += self._room_bytes(nbytes)
        return found

    def expected_bytes(self, tokens: int) -> float:
        """Bytes that a pass over `tokens` tokens brings if every expert is as likely as any other."""
        misses = max(0.0, 1 - self.count / self.experts)
        return misses * sum(w.step_bytes(tokens) for block in self.blocks for w in block.weights.values())


class _Part(NamedTuple):
    """Where the room for a weight of an expert starts in a slot, and for each expert what its address must leave,
    divided by the disk's alignment, to be read in place (None: it cannot be)."""

    start: int
    nbytes: int
    remainders: tuple[int | None, ...] | None


def _remainders(weight: Weight, nbytes: int) -> tuple[int | None, ...]:
    experts = range(weight.nbytes // nbytes)
    if needs_conversion(weight):  # what is made of it begins at a multiple of the disk's alignment
        return tuple(expert * nbytes % DISK_ALIGNMENT for expert in experts)
    assert isinstance(weight.source, Extents)
    alignment = bits_alignment(weight.dtype)
    pieces = runs_by(weight.source, nbytes)
    return tuple(
        runs[0].offset % DISK_ALIGNMENT
        if len(runs) == 1 and (runs[0].offset - expert * nbytes) % alignment == 0
        else None
        for expert, runs in enumerate(pieces)
    )
