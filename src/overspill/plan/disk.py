"""What stays on disk because memory does not hold it: experts behind slots, and of every layer a fixed share.

For a scan over all weights the share that is held is the hit rate, whatever is evicted when; so the resident set is
fixed, and the rest is read each step, ahead of its turn, into a ring of buffers. It is spread over the layers evenly,
so that the disk is as busy beside the first layer as beside the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from overspill.config import OffloadConfig, format_bytes
from overspill.model.converted import needs_conversion
from overspill.model.experts import expert_blocks
from overspill.model.sources import Live
from overspill.model.weights import ModelMap, Role, Weight
from overspill.plan.experts import sized
from overspill.plan.placement import MemoryForecast, Placement
from overspill.plan.policy import Choice, ring_layers
from overspill.plan.ring import Ring, RingLayer
from overspill.plan.slots import Slots
from overspill.plan.staging import LAYER_BUFFERS, Staging
from overspill.plan.tiers import Access, Tier

AHEAD_BYTES = 48 << 20
"""So much is on its way while a layer runs, at least: several requests of several MiB, as a disk wants them."""

READER_BYTES = 32 << 20
"""What reading takes for itself: four requests' staging, and threads."""


@dataclass(frozen=True)
class Layout:
    """A choice of weights that leave the device, and what it comes to."""

    choice: Choice
    placements: tuple[Placement, ...]
    staging: Staging
    memory: MemoryForecast


def within_memory(
    model: ModelMap,
    offload: OffloadConfig,
    layout: Layout,
    lay_out: Callable[[Choice], Layout],
    *,
    unified: bool,
) -> Layout:
    """`layout`, with slots as many as there is room for, and what memory does not hold left on disk.

    `unified`: the device's memory is the host's; then whatever does not fit stays on disk. Elsewhere host memory is a
    fixed share of what prefetch copies. A layout that cannot be made to fit comes back as it is, and is refused later.
    """
    if unified:
        layout = _experts_on_disk(model, offload, layout, lay_out)
    layout = _with_slots(layout, lay_out)
    memory, choice = layout.memory, layout.choice
    if unified:
        excess = _excess(layout)
        if excess <= 0 or choice.ring is not None:
            return layout
        moved = choice.experts.moved()
        free = [w for w in model if w.full not in moved and w.role is not Role.BUFFER and w.nbytes]
        found = ring_from_disk(candidates(model, free), lambda weights: ring_layers(model, weights), excess)
        if found is not None:
            found = (replace(found[0], rounds=model.rounds or 1), found[1])
    else:
        excess = memory.host_bytes + memory.staging_bytes - memory.available_host_bytes
        if excess <= 0 or choice.ring is None or not choice.ring.look_ahead:
            return layout
        excess += LAYER_BUFFERS * choice.ring.buffer_bytes
        found = host_share(choice.ring, excess)
    if found is None:
        return layout
    ring, note = found
    reason = "memory: read each step"
    moved_now = dict(choice.moved)
    for layer in ring.on(Tier.DISK):
        moved_now |= {weight.full: (Access.PREFETCH, reason) for weight in layer.weights}
    return lay_out(replace(choice, moved=moved_now, ring=ring, notes=(*choice.notes, note)))


def _excess(layout: Layout) -> int:
    """Bytes that `layout` takes beyond what there is, where device and host are one memory."""
    memory = layout.memory
    asked = asked_bytes(memory) - memory.available_device_bytes
    return max(asked, process_bytes(memory) - memory.available_process_bytes)


def asked_bytes(memory: MemoryForecast) -> int:
    """What a memory limit must allow, where device and host are one memory, for nothing more to stay on disk."""
    return memory.device_bytes + memory.staging_bytes + READER_BYTES


def process_bytes(memory: MemoryForecast) -> int:
    """What loading and running take at the most of the one memory that device and host are."""
    return max(memory.device_bytes + memory.staging_bytes, memory.loading_bytes) + READER_BYTES


def process_binds(memory: MemoryForecast) -> bool:
    """Whether what machine and control group leave the process is scarcer than what weights and cache may take."""
    left = memory.available_process_bytes - process_bytes(memory)
    return memory.unified and left < memory.available_device_bytes - asked_bytes(memory)


def _experts_on_disk(
    model: ModelMap, offload: OffloadConfig, layout: Layout, lay_out: Callable[[Choice], Layout]
) -> Layout:
    """Routed experts behind slots, where memory does not hold the model and nobody said otherwise."""
    choice, stream = layout.choice, offload.extension.expert_stream
    if _excess(layout) <= 0 or choice.experts.slots is not None or stream.enabled is False or model.trace.failure:
        return layout
    blocks = expert_blocks(model)
    if not blocks or not all(lies_on_disk(weight) for block in blocks for weight in block.weights.values()):
        return layout
    stay = _stay(weight for block in blocks for weight in block.weights.values())
    note = f"memory does not hold the model: routed experts {stay}, behind slots"
    experts = replace(choice.experts, slots=Slots(blocks, 0, "fetch", Tier.DISK), notes=(*choice.experts.notes, note))
    return lay_out(replace(choice, experts=experts))


def _with_slots(layout: Layout, lay_out: Callable[[Choice], Layout]) -> Layout:
    """As many slots as there is room for, where nobody said how many."""
    experts, memory = layout.choice.experts, layout.memory
    if experts.slots is None or experts.slots.count:
        return layout
    taken = memory.device_bytes - memory.expert_slots_bytes
    fitting, note = sized(experts.slots, memory.available_device_bytes - taken)
    return lay_out(replace(layout.choice, experts=replace(experts, slots=fitting, notes=(*experts.notes, note))))


LayersOf = Callable[[Sequence[Weight]], tuple[RingLayer, ...]]


def lies_on_disk(weight: Weight) -> bool:
    """Whether a file can hold the weight: the checkpoint, or where it is otherwise there, one of converted weights."""
    return not isinstance(weight.source, Live)


def _stay(weights: Iterable[Weight]) -> str:
    return "stay on disk" if any(map(needs_conversion, weights)) else "stay in the checkpoint"


def candidates(model: ModelMap, free: Sequence[Weight]) -> list[Weight]:
    """Of `free` the weights that a ring can bring from disk."""
    return [weight for weight in free if model.comes_in_turn(weight) and lies_on_disk(weight)]


def ring_from_disk(weights: Sequence[Weight], layers_of: LayersOf, excess: int) -> tuple[Ring, str] | None:
    """A ring that frees `excess` bytes net of its own buffers, and a line about it; None where none frees so much.

    Weights are taken from the layer that has given least so far, its largest first. A ring of one buffer, which cannot
    read while its layer runs, is the last resort.
    """
    for least_step in (2, 1):
        taken: list[Weight] = []
        total = 0
        for weight in _evenly(weights):
            taken.append(weight)
            total += weight.nbytes
            if total <= excess:
                continue
            layers = tuple(layer.from_disk() for layer in layers_of(taken))
            for ring in _rings(layers, least_step):
                if ring.nbytes - ring.pool_bytes >= excess:
                    return ring, (
                        f"memory: {len(taken)} weights, {format_bytes(total)}, {_stay(taken)} and are read "
                        f"each step, through {ring.step} buffers of {format_bytes(ring.buffer_bytes)}"
                    )
    return None


def _evenly(weights: Sequence[Weight]) -> Iterator[Weight]:
    waiting: dict[tuple[str | None, int | None], list[Weight]] = {}
    for weight in sorted(weights, key=lambda w: w.nbytes):
        waiting.setdefault((weight.name.stack, weight.name.layer), []).append(weight)
    given = dict.fromkeys(waiting, 0)
    while any(waiting.values()):
        layer = min((key for key in waiting if waiting[key]), key=lambda key: given[key])
        weight = waiting[layer].pop()
        given[layer] += weight.nbytes
        yield weight


def _rings(layers: tuple[RingLayer, ...], least_step: int) -> Iterator[Ring]:
    """As many buffers as keep AHEAD_BYTES on their way beside the layer that runs, then fewer."""
    largest = max(layer.nbytes for layer in layers)
    wanted = 1 + max(1, -(-AHEAD_BYTES // largest))
    for step in range(min(len(layers) - 1, wanted), least_step - 1, -1):
        yield Ring(layers, step)


def host_share(ring: Ring, excess: int) -> tuple[Ring, str] | None:
    """`ring` with layers left on disk, spread evenly, so that `excess` bytes of host memory are freed; and a line.

    What stays in host memory is a cache of a fixed share. None where too few layers lie on disk as they are used.
    """
    able = [index for index, layer in enumerate(ring.layers) if all(map(lies_on_disk, layer.weights))]
    for count in range(1, len(able) + 1):
        chosen = {able[number * len(able) // count] for number in range(count)}
        freed = sum(ring.layers[index].nbytes for index in chosen)
        if freed >= excess:
            layers = [layer.from_disk() if index in chosen else layer for index, layer in enumerate(ring.layers)]
            stay = _stay(weight for index in chosen for weight in ring.layers[index].weights)
            return replace(ring, layers=tuple(layers)), (
                f"memory: {count} of {len(ring.layers)} offloaded layers, {format_bytes(freed)}, {stay}"
            )
    return None
