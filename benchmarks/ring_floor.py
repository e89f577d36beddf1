"""The least time of a pass that a ring's rule allows, with layers that take equal times and copies that are ideal."""

from __future__ import annotations

from overspill.plan.ring import next_index

_PASSES = 6  # the first starts with full buffers; a few later every pass takes the same


def ring_seconds(layers: int, group: int, step: int, computing_s: float, link_s: float) -> float:
    """Seconds a pass in a steady run: the last layer of every `group` is offloaded, in a ring of `step` buffers.

    `computing_s` and `link_s` are what all layers compute and all copies take in a pass. Copies run one at a time, in
    the order in which they are asked for; a layer's copy is asked for when its buffer's last layer has run.
    """
    offloaded = {layer: index for index, layer in enumerate(range(group - 1, layers, group))}
    following = [next_index(index, step, len(offloaded)) for index in offloaded.values()]
    copies = sum(other != index for index, other in enumerate(following))  # a layer with a buffer to itself stays
    layer_s, copy_s = computing_s / layers, link_s / copies
    now = link_free = begun = 0.0
    ready = [0.0] * len(offloaded)
    for _ in range(_PASSES):
        begun = now
        for layer in range(layers):
            index = offloaded.get(layer)
            if index is not None:
                now = max(now, ready[index])
            now += layer_s
            if index is not None and following[index] != index:
                link_free = ready[following[index]] = max(link_free, now) + copy_s
    return now - begun
