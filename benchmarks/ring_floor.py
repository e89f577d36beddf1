"""The least time of a pass that a ring's rule allows, with layers that take equal times and copies that are ideal."""

from __future__ import annotations

from overspill.plan.ring import buffer_of, next_index

_PASSES = 6  # the first starts with full buffers; a few later every pass takes the same


def ring_seconds(layers: int, group: int, step: int, computing_s: float, link_s: float) -> float:
    """Seconds a pass in a steady run: the last layer of every `group` is offloaded, in a ring of `step` buffers.

    `computing_s` and `link_s` are what all layers compute and all copies take in a pass. Copies run one at a time, in
    the order in which they are asked for; a layer's copy is asked for when its buffer's last layer has run.
    """
    offloaded = [number for number in range(layers) if number % group == group - 1]
    count = len(offloaded)
    layer_s, copy_s = computing_s / layers, link_s / count
    now = link_free = begun = 0.0
    ready = dict.fromkeys(range(min(step, count)), 0.0)
    for number in range(_PASSES):
        if number == _PASSES - 1:
            begun = now
        for layer in range(layers):
            index = offloaded.index(layer) if layer in offloaded else None
            if index is not None:
                now = max(now, ready[index])
            now += layer_s
            if index is not None:
                following = next_index(index, step, count)
                assert buffer_of(following, step) == buffer_of(index, step), "a ring reuses the buffer that is free"
                if following != index or step < count:
                    link_free = ready[following] = max(link_free, now) + copy_s
    return now - begun
