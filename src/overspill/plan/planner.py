"""From what was asked, what the model is and what the machine can hold, to the plan. Refusals come before any I/O."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

from overspill.config import OffloadConfig, Settings, format_bytes
from overspill.errors import ConfigError
from overspill.machine.arena import packed_bytes, page_bytes
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes
from overspill.machine.rates import Rates
from overspill.model.map import conversions
from overspill.model.weights import ModelMap, Weight
from overspill.plan.capacity import Limit, capacity_warnings, refuse_capacity
from overspill.plan.converted import conversion_note
from overspill.plan.disk import Layout, within_memory
from overspill.plan.experts import nothing_saved
from overspill.plan.fit import excess_bytes, fit, fit_note, fits, wants_fit
from overspill.plan.loading import loading_peak
from overspill.plan.mapped import Mapped
from overspill.plan.placement import MemoryForecast, Placement, Plan, StepForecast
from overspill.plan.policy import Choice, choose
from overspill.plan.server_cache import server_cache_tokens, server_memory
from overspill.plan.staging import Staging, staging_for
from overspill.plan.tiers import Access, Tier

_BOUNDLESS = 1 << 60

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


def make_plan(
    model: ModelMap,
    settings: Settings,
    device: Device,
    *,
    context_tokens: int,
    rates: Rates | None = None,
    judged: bool = True,
) -> Plan:
    """Place every weight of `model`. Nothing is allocated.

    A model that does not fit, and of which nothing was said, is made to fit. `rates` are how fast the machine is, for
    that choice and for the forecast of time. Without `judged` a plan that memory does not hold comes back too. Raises
    ConfigError where the settings move nothing or name nothing, CapacityError where the device or the host does not
    hold what the plan would place there.
    """
    refuse_device(settings, device)
    planner = Planner(model, settings, device, context_tokens, rates)
    plan = planner.plan(settings.offload)
    if not device.unified and wants_fit(settings.offload) and not fits(plan):
        ways = fit(model, settings.offload, planner.plan, rates)
        if ways:
            chosen = ways[0].plan
            told = tuple((way.settings, way.seconds) for way in ways)
            plan = replace(chosen, notes=(fit_note(ways, plan, rates), *chosen.notes), fitted=told)
    elif (idle := _not_needed(plan)) is not None:
        plan = replace(plan, notes=(*plan.notes, idle))
    if judged:
        refuse_capacity(
            plan,
            settings,
            unified=device.unified,
            forecast=lambda offload: planner.laid_out(offload).memory,
            within=planner.memory_within,
            with_more_host=planner.fitting_host_bytes,
            named_host=device.host_memory_bytes is not None,
        )
    return replace(plan, notes=(*plan.notes, conversion_note(model, plan.converted))) if plan.converted else plan


class Planner:
    """Plans of one model on one device, for whatever offload settings."""

    def __init__(
        self, model: ModelMap, settings: Settings, device: Device, context_tokens: int, rates: Rates | None
    ) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.context_tokens, self.rates = context_tokens, rates
        environment = settings.environment
        self.pinned = not environment.disable_pin_memory
        self.zero_copy = self.pinned and not environment.disable_uva
        self.buffers_bytes = _rebuilt_buffer_bytes(model)
        self.mapped = Mapped(model, settings.offload.extension.mmap, device.unified)
        self.available = _available(device, settings)

    def lay_out(self, choice: Choice, available: Available) -> Layout:
        """What `choice` comes to."""
        model, settings, unified = self.model, self.settings, self.device.unified
        ring, experts, moved = choice.ring, choice.experts, _moved(choice)
        moved |= self.mapped.moved(moved)
        placements = tuple(_place(weight, moved) for weight in model)
        tokens = settings.engine.max_num_batched_tokens or self.context_tokens * settings.engine.max_num_seqs
        staging = staging_for(experts.placed, experts.slots, ring, tokens, unified=unified)
        mapped_bytes = sum(p.weight.nbytes for p in placements if p.mapped) if unified else 0
        memory = _memory(model, placements, choice, staging, self.buffers_bytes, mapped_bytes, available, settings)
        if unified:
            resident = (p.weight for p in placements if p.tier is Tier.DEVICE)
            memory = replace(memory, loading_bytes=self.buffers_bytes + loading_peak(resident))
        return Layout(choice, placements, staging, memory)

    def laid_out(self, offload: OffloadConfig, available: Available | None = None) -> Layout:
        """What `offload` comes to; what memory does not hold is left on disk."""
        unified = self.device.unified
        choice = choose(self.model, offload, zero_copy=self.zero_copy, unified=unified)
        lay = partial(self.lay_out, available=available or self.available)
        return within_memory(self.model, offload, lay(choice), lay, unified=unified)

    def memory_within(self, limit: Limit, nbytes: int) -> MemoryForecast:
        """The forecast if `limit` were `nbytes`."""
        available = self.available
        if limit is Limit.HOST:
            changed = replace(available, host_bytes=nbytes)
        elif limit is Limit.STATED:
            changed = replace(available, device_bytes=nbytes, process_bytes=sys.maxsize)
        else:
            stated = self.settings.engine.memory_limit_bytes or sys.maxsize
            changed = replace(available, device_bytes=min(stated, nbytes), process_bytes=nbytes)
        return self.laid_out(self.settings.offload, changed).memory

    def fitting_host_bytes(self) -> int | None:
        """The least host memory with which fit finds a way; None where no host memory does, or fit is not asked."""
        if self.device.unified or not wants_fit(self.settings.offload):
            return None
        roomy = copy(self)
        roomy.available = replace(self.available, host_bytes=_BOUNDLESS)
        ways = fit(self.model, self.settings.offload, roomy.plan, self.rates)
        return min((w.plan.memory.host_bytes + w.plan.memory.staging_bytes for w in ways), default=None)

    def plan(self, offload: OffloadConfig) -> Plan:
        """The plan of these settings, whether or not memory holds it."""
        model, settings, device = self.model, self.settings, self.device
        layout = self.laid_out(offload)
        choice, memory = layout.choice, layout.memory
        experts = choice.experts
        room_bytes = memory.available_host_bytes - memory.host_bytes - memory.staging_bytes
        mapping = self.mapped.told(layout.placements, room_bytes)
        slots_told = nothing_saved(experts.slots) if experts.slots is not None else None
        return Plan(
            model=model,
            backend=offload.resolved_backend,
            order=offload.extension.order,
            device_kind=device.kind,
            device_name=device.name,
            context_tokens=self.context_tokens,
            sequences=settings.engine.max_num_seqs,
            placements=layout.placements,
            ring=choice.ring,
            placed=experts.placed,
            slots=experts.slots,
            staging=layout.staging,
            pinned=self.pinned and device.kind == "cuda",
            memory=memory,
            step=_step(layout, settings.engine.max_num_seqs, device),
            buffers_bytes=self.buffers_bytes,
            offload=offload,
            rates=self.rates,
            prefault=mapping.prefault,
            kv_cache_tokens=server_cache_tokens(memory, model.trace, settings.engine),
            notes=(
                *settings.notes,
                *_idle_limit(settings, device),
                *_idle_fit(settings, device),
                *experts.notes,
                *choice.notes,
                *mapping.notes,
                *_model_notes(model, layout.placements),
            ),
            warnings=(
                *settings.warnings,
                *experts.warnings,
                *([slots_told] if slots_told is not None else []),
                *choice.warnings,
                *mapping.warnings,
                *capacity_warnings(memory),
            ),
        )


def planner_of(plan: Plan, settings: Settings, device: Device) -> Planner:
    """What made `plan`, for other settings of the same model."""
    return Planner(plan.model, settings, device, plan.context_tokens, plan.rates)


def _not_needed(plan: Plan) -> str | None:
    """A line where the model would fit as it is, and weights leave the device all the same."""
    memory = plan.memory
    saved = plan.offloaded_bytes - memory.pools_bytes
    free = -excess_bytes(plan)
    if plan.memory.unified or not plan.offloads or memory.working_bytes is None or free < saved:
        return None
    return (
        f"the offload is not needed: {format_bytes(free)} are free on the device, "
        f"{format_bytes(plan.offloaded_bytes)} offloaded"
    )


def _moved(choice: Choice) -> dict[str, tuple[Tier, Access, str]]:
    """Tier, access and why of what leaves the device's memory for the host's, or is brought from disk."""
    moved = choice.experts.moved() | {name: (Tier.HOST, *rest) for name, rest in choice.moved.items()}
    for layer in choice.ring.on(Tier.DISK) if choice.ring is not None else ():
        moved |= {w.full: (Tier.DISK, *moved[w.full][1:]) for w in layer.weights}
    return moved


def _available(device: Device, settings: Settings) -> Available:
    free_bytes = _host_bytes(device)
    host_bytes = min(free_bytes, settings.engine.memory_limit_bytes or sys.maxsize)
    if not device.unified:
        return Available(device.memory_bytes, host_bytes)
    process_bytes = max(0, free_bytes - PROCESS_BYTES)
    return Available(min(device.memory_bytes, process_bytes), host_bytes, process_bytes)


def _host_bytes(device: Device) -> int:
    """What the host has left: that beside a device that is not here, or this one."""
    return host_available_bytes() if device.host_memory_bytes is None else device.host_memory_bytes


def _idle_limit(settings: Settings, device: Device) -> list[str]:
    """A line where more was allowed than there is."""
    stated, free_bytes = settings.engine.memory_limit_bytes, _host_bytes(device)
    if stated is None or stated <= free_bytes:
        return []
    return [
        f"memory: {format_bytes(stated)} are allowed, and machine and control group leave {format_bytes(free_bytes)}, "
        "which is what counts"
    ]


def _idle_fit(settings: Settings, device: Device) -> list[str]:
    """A line where fit was asked for, or refused, on a device that leaves nothing to choose."""
    if not device.unified or settings.offload.extension.placement.fit is None:
        return []
    return ["fit: host memory is this device's own, so there is nothing to choose; what it does not hold stays on disk"]


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
