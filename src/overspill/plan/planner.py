"""From what was asked, what the model is and what the machine can hold, to the plan. Refusals come before any I/O."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from overspill.config import OffloadConfig, Settings, format_bytes
from overspill.errors import ConfigError
from overspill.machine.arena import packed_bytes, page_bytes
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes
from overspill.model.map import conversions
from overspill.model.weights import ModelMap, Weight
from overspill.plan.capacity import Limit, capacity_warnings, refuse_capacity
from overspill.plan.converted import conversion_note
from overspill.plan.disk import Layout, within_memory
from overspill.plan.experts import nothing_saved
from overspill.plan.loading import loading_peak
from overspill.plan.mapped import Mapped
from overspill.plan.placement import MemoryForecast, Placement, Plan, StepForecast
from overspill.plan.policy import Choice, choose
from overspill.plan.server_cache import server_cache_tokens, server_memory
from overspill.plan.staging import Staging, staging_for
from overspill.plan.tiers import Access, Tier

PROCESS_BYTES = 32 << 20
"""What a process takes after its plan was made, besides what is planned: stacks, allocators, libraries' first use."""


@dataclass(frozen=True)
class Available:
    """Bytes that a plan may take: of the device, of the host, and of what machine and control group leave in all."""

    device_bytes: int
    host_bytes: int
    process_bytes: int = sys.maxsize


def refuse_device(settings: Settings, device: Device) -> None:
    """Offload to host memory on a device whose memory is the host's own; needs no model.

    A placement of experts on the CPU is no such thing: there it has nothing to do, and the plan says so.
    """
    if not device.unified:
        return
    stream = settings.offload.extension.expert_stream
    backend = settings.offload.resolved_backend
    asked = backend if backend is not None else "expert_stream" if stream.on and stream.tier != "disk" else None
    if asked is not None:
        raise ConfigError(
            f"{device.name}: host memory is this device's own memory, so a weight moved there would free nothing "
            f"(asked: {asked})",
            hint="take the offload settings away, or try them with --device emulated"
            + ('; experts can stream from disk ("tier": "disk")' if asked == "expert_stream" else ""),
        )


def make_plan(model: ModelMap, settings: Settings, device: Device, *, context_tokens: int) -> Plan:
    """Place every weight of `model`. Nothing is allocated.

    Raises ConfigError where the settings move nothing or name nothing, CapacityError where the device or the host
    does not hold what the plan would place there.
    """
    refuse_device(settings, device)
    environment = settings.environment
    pinned = not environment.disable_pin_memory
    zero_copy = pinned and not environment.disable_uva
    buffers_bytes = _rebuilt_buffer_bytes(model)
    mapped = Mapped(model, settings.offload.extension.mmap, device.unified)

    available = _available(device, settings)

    def lay_out(choice: Choice, available: Available) -> Layout:
        ring, experts, moved = choice.ring, choice.experts, _moved(choice)
        moved |= mapped.moved(moved)
        placements = tuple(_place(weight, moved) for weight in model)
        tokens = settings.engine.max_num_batched_tokens or context_tokens * settings.engine.max_num_seqs
        staging = staging_for(experts.placed, experts.slots, ring, tokens, unified=device.unified)
        mapped_bytes = sum(p.weight.nbytes for p in placements if p.mapped) if device.unified else 0
        memory = _memory(model, placements, choice, staging, buffers_bytes, mapped_bytes, available, settings)
        if device.unified:
            resident = (p.weight for p in placements if p.tier is Tier.DEVICE)
            memory = replace(memory, loading_bytes=buffers_bytes + loading_peak(resident))
        return Layout(choice, placements, staging, memory)

    def laid_out(offload: OffloadConfig, available: Available = available) -> Layout:
        choice = choose(model, offload, zero_copy=zero_copy, unified=device.unified)
        lay = partial(lay_out, available=available)
        return within_memory(model, offload, lay(choice), lay, unified=device.unified)

    def memory_within(limit: Limit, nbytes: int) -> MemoryForecast:
        """The forecast if `limit` were `nbytes`."""
        if limit is Limit.HOST:
            changed = replace(available, host_bytes=nbytes)
        elif limit is Limit.STATED:
            changed = replace(available, device_bytes=nbytes, process_bytes=sys.maxsize)
        else:
            stated = settings.engine.memory_limit_bytes or sys.maxsize
            changed = replace(available, device_bytes=min(stated, nbytes), process_bytes=nbytes)
        return laid_out(settings.offload, changed).memory

    layout = laid_out(settings.offload)
    choice, memory = layout.choice, layout.memory
    experts = choice.experts
    mapping = mapped.told(layout.placements, memory.available_host_bytes - memory.host_bytes - memory.staging_bytes)
    plan = Plan(
        model=model,
        backend=settings.offload.resolved_backend,
        order=settings.offload.extension.order,
        device_kind=device.kind,
        device_name=device.name,
        context_tokens=context_tokens,
        sequences=settings.engine.max_num_seqs,
        placements=layout.placements,
        ring=choice.ring,
        placed=experts.placed,
        slots=experts.slots,
        staging=layout.staging,
        pinned=pinned and device.kind == "cuda",
        memory=memory,
        step=_step(layout, settings.engine.max_num_seqs, device),
        buffers_bytes=buffers_bytes,
        prefault=mapping.prefault,
        kv_cache_tokens=server_cache_tokens(memory, model.trace, settings.engine),
        notes=(
            *settings.notes,
            *_idle_limit(settings),
            *experts.notes,
            *choice.notes,
            *mapping.notes,
            *_model_notes(model, layout.placements),
        ),
        warnings=(
            *settings.warnings,
            *experts.warnings,
            *([told] if experts.slots is not None and (told := nothing_saved(experts.slots)) is not None else []),
            *choice.warnings,
            *mapping.warnings,
            *capacity_warnings(memory),
        ),
    )
    refuse_capacity(
        plan,
        settings,
        unified=device.unified,
        forecast=lambda offload: laid_out(offload).memory,
        within=memory_within,
    )
    return replace(plan, notes=(*plan.notes, conversion_note(model, plan.converted))) if plan.converted else plan


def _moved(choice: Choice) -> dict[str, tuple[Tier, Access, str]]:
    """Tier, access and why of what leaves the device's memory for the host's, or is brought from disk."""
    moved = choice.experts.moved() | {name: (Tier.HOST, *rest) for name, rest in choice.moved.items()}
    for layer in choice.ring.on(Tier.DISK) if choice.ring is not None else ():
        moved |= {w.full: (Tier.DISK, *moved[w.full][1:]) for w in layer.weights}
    return moved


def _available(device: Device, settings: Settings) -> Available:
    free_bytes = host_available_bytes()
    host_bytes = min(free_bytes, settings.engine.memory_limit_bytes or sys.maxsize)
    if not device.unified:
        return Available(device.memory_bytes, host_bytes)
    process_bytes = max(0, free_bytes - PROCESS_BYTES)
    return Available(min(device.memory_bytes, process_bytes), host_bytes, process_bytes)


def _idle_limit(settings: Settings) -> list[str]:
    """A line where more was allowed than there is."""
    stated, free_bytes = settings.engine.memory_limit_bytes, host_available_bytes()
    if stated is None or stated <= free_bytes:
        return []
    return [
        f"memory: {format_bytes(stated)} are allowed, and machine and control group leave {format_bytes(free_bytes)}, "
        "which is what counts"
    ]


def _place(weight: Weight, moved: Mapping[str, tuple[Tier, Access, str]]) -> Placement:
    return Placement(weight, *moved.get(weight.full, (Tier.DEVICE, Access.RESIDENT, "not offloaded")))


def _rebuilt_buffer_bytes(model: ModelMap) -> int:
    held = {name for weight in model for name in (weight.full, *weight.aliases)}
    return packed_bytes(
        buffer.numel() * buffer.element_size() for name, buffer in model.skeleton.named_buffers() if name not in held
    )


def _memory(
    model: ModelMap,
    placements: tuple[Placement, ...],
    choice: Choice,
    staging: Staging,
    buffers_bytes: int,
    mapped_bytes: int,
    available: Available,
    settings: Settings,
) -> MemoryForecast:
    sizes = {
        tier: packed_bytes(p.weight.nbytes for p in placements if p.tier is tier) for tier in (Tier.DEVICE, Tier.HOST)
    }
    traced = model.trace if model.trace.failure is None else None
    experts = choice.experts
    memory = MemoryForecast(
        weights_bytes=sizes[Tier.DEVICE] + buffers_bytes,
        mapped_bytes=mapped_bytes,
        buffer_pool_bytes=choice.ring.pool_bytes if choice.ring is not None else 0,
        expert_slots_bytes=experts.slots.pool_bytes if experts.slots is not None else 0,
        kv_cache_bytes=traced.kv_cache_bytes if traced is not None else None,
        working_bytes=traced.working_bytes if traced is not None else None,
        host_bytes=page_bytes(sizes[Tier.HOST]) if sizes[Tier.HOST] else 0,
        staging_bytes=staging.nbytes,
        available_device_bytes=available.device_bytes,
        available_host_bytes=available.host_bytes,
        available_process_bytes=available.process_bytes,
    )
    return server_memory(memory, traced, settings.engine) if traced is not None else memory


def _step(layout: Layout, tokens: int, device: Device) -> StepForecast:
    zero_copy = [p.weight for p in layout.placements if p.access is Access.ZERO_COPY]
    ring, placed, slots = layout.choice.ring, layout.choice.experts.placed, layout.choice.experts.slots
    linked = ring is not None and device.link is not None
    return StepForecast(
        tokens=tokens,
        zero_copy_bytes=sum(weight.step_bytes(tokens) for weight in zero_copy),
        prefetch_bytes=ring.pass_bytes if ring is not None and linked else 0,
        in_place_bytes=tokens * sum(b.hidden_size * next(iter(b.weights.values())).dtype.itemsize for b in placed),
        stream_bytes=slots.expected_bytes(tokens) if slots is not None else 0.0,
        disk_bytes=ring.disk_pass_bytes if ring is not None else 0,
        transfers=sum(weight.reads.times for weight in zero_copy)
        + (ring.transfers if ring is not None and linked else 0)
        + len(placed),
        link=device.link,
    )


def _model_notes(model: ModelMap, placements: Sequence[Placement]) -> list[str]:
    notes = list(model.notes)
    if decoded := conversions(tuple(p.weight for p in placements if p.tier is not Tier.DISK)):
        operations = [f"{count} {why}" for why, count in sorted(Counter(why for _, why in decoded).items())]
        total = sum(weight.nbytes for weight, _ in decoded)
        notes.append(
            f"{len(decoded)} weights ({format_bytes(total)}) are transformed while loading: {'; '.join(operations)}"
        )
    if model.unused:
        notes.append(f"{len(model.unused)} checkpoint tensors are not part of this architecture: {_few(model.unused)}")
    if model.trace.failure is not None:
        notes.append(
            "the architecture could not be traced, so KV cache and working memory are not forecast "
            f"({model.trace.failure})"
        )
    if model.trace.decode_failure is not None:
        notes.append(
            "a decode step could not be traced: a weight that only decoding reads outside its layer is not known "
            f"({model.trace.decode_failure})"
        )
    return notes


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
