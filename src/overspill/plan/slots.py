"""The device memory that streamed experts share: slots of one expert each."""

from __future__ import annotations

from collections.abc import Mapping
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


def part_offsets(block: ExpertBlock) -> Mapping[str, int]:
    """Where in a slot each weight of an expert has its room, by the weight's attribute.

    An expert starts within its room where it has the same address modulo 64 as in a resident stack of experts, since on
    a CPU the bits of a product depend on that.
    """
    offsets, at = {}, 0
    for attribute, weight in block.weights.items():
        offsets[attribute] = at
        at += _part_bytes(weight.nbytes // block.experts)
    return offsets


def _part_bytes(nbytes: int) -> int:
    return aligned_bytes(nbytes + ALIGNMENT - 1)
