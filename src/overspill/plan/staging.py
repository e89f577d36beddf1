"""Host memory that bytes pass through: hidden states to the CPU and back, experts on their way from disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overspill.machine.arena import aligned_bytes, page_bytes
from overspill.model.experts import ExpertBlock
from overspill.plan.ring import Ring
from overspill.plan.slots import Slots
from overspill.plan.tiers import Tier

STAGED_TOKENS = 1024
"""The most tokens of a pass that go to the CPU in one go."""

STAGED_SETS = 2
"""While one set's result is on its way back, the next is filled."""

READ_BUFFERS = 4
"""Experts that are read from disk, or wait for the link, at once."""

LAYER_BUFFERS = 2
"""Layers that are read from disk, or wait for the link, at once."""

_WIDEST_BYTES = 4  # of a hidden state's element
_INDEX_BYTES = 8


@dataclass(frozen=True)
class Staging:
    """How much of it: `cpu_bytes` for `rows` tokens on their way to the CPU; then `expert_bytes` and `layer_bytes`
    for experts and ring layers that are read from disk."""

    rows: int = 0
    cpu_bytes: int = 0
    expert_bytes: int = 0
    layer_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.cpu_bytes + self.expert_bytes + self.layer_bytes


def staging_for(
    placed: tuple[ExpertBlock, ...], slots: Slots | None, ring: Ring | None, tokens: int, *, unified: bool
) -> Staging:
    """For passes of at most `tokens` tokens. What is read from disk for a `unified` device goes where it is used."""
    rows = cpu_bytes = expert_bytes = layer_bytes = 0
    if blocks := computes_on_cpu(placed, slots):
        rows = min(STAGED_TOKENS, tokens)
        cpu_bytes = STAGED_SETS * 2 * sum(set_bytes(blocks, rows))
    if slots is not None and slots.tier is Tier.DISK and not unified:
        expert_bytes = READ_BUFFERS * slots.slot_bytes
    if ring is not None and ring.on(Tier.DISK) and not unified:
        layer_bytes = LAYER_BUFFERS * ring.buffer_bytes
    return Staging(rows, _whole_pages(cpu_bytes), _whole_pages(expert_bytes), layer_bytes)


def _whole_pages(nbytes: int) -> int:
    """What follows lies as a disk wants it."""
    return page_bytes(nbytes) if nbytes else 0


def set_bytes(blocks: Iterable[ExpertBlock], rows: int) -> tuple[int, int]:
    """Bytes of the hidden states, and of the chosen experts (or their weights), of `rows` tokens of any block."""
    sizes = [(block.hidden_size, block.top_k) for block in blocks]
    hidden = max(size for size, _ in sizes) * rows * _WIDEST_BYTES
    choices = max(top_k for _, top_k in sizes) * rows * _INDEX_BYTES
    return aligned_bytes(hidden), aligned_bytes(choices)


def computes_on_cpu(placed: tuple[ExpertBlock, ...], slots: Slots | None) -> tuple[ExpertBlock, ...]:
    """The blocks of which the CPU may compute experts."""
    return (*placed, *(slots.blocks if slots is not None and slots.policy != "fetch" else ()))
