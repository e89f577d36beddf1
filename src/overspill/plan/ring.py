"""The ring of static buffers that prefetched layers share.

Layer i of `count` offloaded layers uses buffer i % step. When it has run, its buffer is free, and the layer that
comes `step` places later is copied into it; the last layers of a pass refill the ring for the first of the next.
vLLM's rule, whose vectors the tests hold (anchors: vllm-offload 8.3).
"""

from __future__ import annotations


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
