"""The device memory that streamed experts share: slots of one expert each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from overspill.machine.arena import ALIGNMENT, aligned_bytes
from overspill.model.experts import ExpertBlock
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
        return max(sum(_part_bytes(weight.nbytes // b.experts) for weight in b.weights.values()) for b in self.blocks)

    @property
    def pool_bytes(self) -> int:
        return (self.count + SWEEP_SLOTS) * self.slot_bytes

    @property
    def experts(self) -> int:
        """Experts of all blocks."""
        return sum(block.experts for block in self.blocks)

    def of(self, count: int) -> Slots:
        return replace(self, count=min(count, self.experts))

    def expected_bytes(self, tokens: int) -> float:
        """Bytes that a pass over `tokens` tokens brings if every expert is as likely as any other."""
        misses = max(0.0, 1 - self.count / self.experts)
        return misses * sum(w.step_bytes(tokens) for block in self.blocks for w in block.weights.values())


def part_span(block: ExpertBlock, attribute: str, expert: int) -> slice:
    """Where in a slot the bytes of one weight of an expert lie.

    They start where they have the same address modulo 64 as in a resident stack of experts, since on a CPU the bits of
    a product depend on that.
    """
    sizes = {name: weight.nbytes // block.experts for name, weight in block.weights.items()}
    names = list(sizes)
    room = sum(_part_bytes(sizes[name]) for name in names[: names.index(attribute)])
    begin = room + expert * sizes[attribute] % ALIGNMENT
    return slice(begin, begin + sizes[attribute])


def _part_bytes(nbytes: int) -> int:
    return aligned_bytes(nbytes + ALIGNMENT - 1)
