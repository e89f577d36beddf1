"""The ring of static buffers that prefetched layers share.

Layer i of `count` offloaded layers uses buffer i % step. When it has run, its buffer is free, and the layer that
comes `step` places later is copied into it; the last layers of a pass refill the ring for the first of the next.
vLLM's rule, whose vectors the tests hold (anchors: vllm-offload 8.3).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from overspill.machine.arena import ALIGNMENT, aligned_bytes, bits_alignment, packed_bytes, page_bytes
from overspill.machine.read_requests import ALIGNMENT as DISK_ALIGNMENT
from overspill.model.converted import needs_conversion
from overspill.model.sources import Extents, runs_by
from overspill.model.weights import Weight
from overspill.plan.tiers import Tier

LARGE_BYTES = 64 * DISK_ALIGNMENT
"""A weight from which on it pays to lose up to DISK_ALIGNMENT for its being read in place."""


def disk_remainder(weight: Weight) -> int | None:
    """What its address must leave, divided by the disk's alignment, for the weight to be read in place; None: nothing.

    What is converted lies at multiples of the disk's alignment in the file that is made of it.
    """
    if weight.nbytes < LARGE_BYTES:
        return None
    if needs_conversion(weight):
        return 0
    runs = runs_by(weight.source, weight.nbytes)[0] if isinstance(weight.source, Extents) else []
    if len(runs) != 1 or runs[0].offset % bits_alignment(weight.dtype):
        return None
    return runs[0].offset % DISK_ALIGNMENT


def _place_in_files(weight: Weight) -> tuple[str, int]:
    first = min(weight.source.extents, key=lambda e: e.at) if isinstance(weight.source, Extents) else None
    return ("", 0) if first is None else (str(first.file), first.offset)


def buffer_of(index: int, step: int) -> int:
    """The buffer that offloaded layer `index` uses, of `step` buffers."""
    return index % step


def next_index(index: int, step: int, count: int) -> int:
    """The layer to copy when layer `index` has run.

    Where the ring wraps and the plain rule would name a layer of another buffer, whose reader may not be done, the
    layer of the next pass that uses this very buffer is taken instead.
    """
    following = (index + step) % count
    if step < count and buffer_of(following, step) != buffer_of(index, step):
        return buffer_of(index, step)
    return following


@dataclass(frozen=True)
class RingLayer:
    """A layer whose weights come as one run of bytes; `weights` lie in it in this order, at `offsets`.

    They come from `tier`: host memory, or the checkpoint on disk. Each is 64-byte aligned; on disk a large one instead
    where its address has the remainder, by the disk's alignment, that its place in the file has, since then it can be
    read where it stays.
    """

    stack: str
    number: int
    weights: tuple[Weight, ...]
    tier: Tier = Tier.HOST

    @property
    def path(self) -> str:
        return f"{self.stack}.{self.number}"

    def from_disk(self) -> RingLayer:
        """The layer read from the checkpoint, its weights in the order in which they lie there."""
        return replace(self, tier=Tier.DISK, weights=tuple(sorted(self.weights, key=_place_in_files)))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each of `weights` starts, in bytes from the layer's own start."""
        starts, end = [], 0
        for weight in self.weights:
            remainder = disk_remainder(weight) if self.tier is Tier.DISK else None
            gap = -end % ALIGNMENT if remainder is None else (remainder - end) % DISK_ALIGNMENT
            starts.append(end + gap)
            end += gap + weight.nbytes
        return tuple(starts)

    @property
    def nbytes(self) -> int:
        if not self.weights:
            return 0
        end = self.offsets[-1] + self.weights[-1].nbytes
        return aligned_bytes(end)


@dataclass(frozen=True)
class Ring:
    """`step` device buffers, each as large as the largest of `layers` (in the order in which they run).

    With `look_ahead` False nothing is copied before the layer that needs it runs. A pass runs all of them `rounds`
    times, one round after the other.
    """

    layers: tuple[RingLayer, ...]
    step: int
    look_ahead: bool = True
    rounds: int = 1

    @property
    def buffer_bytes(self) -> int:
        largest = max(layer.nbytes for layer in self.layers)
        return page_bytes(largest) if self.on(Tier.DISK) and largest >= LARGE_BYTES else largest

    @property
    def pool_bytes(self) -> int:
        return self.step * self.buffer_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that its layers would take elsewhere."""
        return sum(packed_bytes(weight.nbytes for weight in layer.weights) for layer in self.layers)

    @property
    def copied(self) -> tuple[RingLayer, ...]:
        """The layers that each round copies. One that has a buffer to itself stays there once it has come."""
        if not self.look_ahead:
            return self.layers
        users = Counter(buffer_of(index, self.step) for index in range(len(self.layers)))
        return tuple(layer for i, layer in enumerate(self.layers) if users[buffer_of(i, self.step)] > 1)

    @property
    def pass_bytes(self) -> int:
        """Bytes that come in one pass over the model."""
        return self.rounds * sum(layer.nbytes for layer in self.copied)

    @property
    def disk_pass_bytes(self) -> int:
        """Those of them that are read from disk."""
        on_disk = (layer for layer in self.copied if layer.tier is Tier.DISK)
        return self.rounds * sum(weight.nbytes for layer in on_disk for weight in layer.weights)

    @property
    def transfers(self) -> int:
        """How many layers come in one pass over the model."""
        return self.rounds * len(self.copied)

    def on(self, tier: Tier) -> tuple[RingLayer, ...]:
        return tuple(layer for layer in self.layers if layer.tier is tier)
