"""The ring of static buffers that prefetched layers share.

Layer i of `count` offloaded layers uses buffer i % step. When it has run, its buffer is free, and the layer that
comes `step` places later is copied into it; the last layers of a pass refill the ring for the first of the next.
vLLM's rule, whose vectors the tests hold (anchors: vllm-offload 8.3).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from overspill.machine.arena import packed_bytes
from overspill.model.weights import Weight
from overspill.plan.tiers import Tier


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
    """A layer whose weights come as one run of bytes; `weights` lie in it in this order, 64-byte aligned.

    They come from `tier`: host memory, or the checkpoint on disk.
    """

    stack: str
    number: int
    weights: tuple[Weight, ...]
    tier: Tier = Tier.HOST

    @property
    def path(self) -> str:
        return f"{self.stack}.{self.number}"

    @property
    def nbytes(self) -> int:
        return packed_bytes(weight.nbytes for weight in self.weights)


@dataclass(frozen=True)
class Ring:
    """`step` device buffers, each as large as the largest of `layers` (in the order in which they run).

    With `look_ahead` False nothing is copied before the layer that needs it runs.
    """

    layers: tuple[RingLayer, ...]
    step: int
    look_ahead: bool = True

    @property
    def buffer_bytes(self) -> int:
        return max(layer.nbytes for layer in self.layers)

    @property
    def pool_bytes(self) -> int:
        return self.step * self.buffer_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all its layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def copied(self) -> tuple[RingLayer, ...]:
        """The layers that each pass copies. One that has a buffer to itself stays there once it has come."""
        if not self.look_ahead:
            return self.layers
        users = Counter(buffer_of(index, self.step) for index in range(len(self.layers)))
        return tuple(layer for i, layer in enumerate(self.layers) if users[buffer_of(i, self.step)] > 1)

    @property
    def pass_bytes(self) -> int:
        """Bytes that come in one pass over the model."""
        return sum(layer.nbytes for layer in self.copied)

    @property
    def disk_pass_bytes(self) -> int:
        """Those of them that are read from disk."""
        return sum(layer.nbytes for layer in self.copied if layer.tier is Tier.DISK)

    def on(self, tier: Tier) -> tuple[RingLayer, ...]:
        return tuple(layer for layer in self.layers if layer.tier is tier)
