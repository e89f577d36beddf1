"""From what was asked, what the model is and what the machine can hold, to the plan. Refusals come before any I/O."""

from __future__ import annotations

from collections import Counter

from overspill.config import OffloadConfig, Settings, format_bytes
from overspill.errors import ConfigError
from overspill.machine.arena import packed_bytes, page_bytes
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes
from overspill.model.map import conversions
from overspill.model.weights import ModelMap, Weight
from overspill.plan.capacity import capacity_warnings, refuse_capacity
from overspill.plan.placement import Access, MemoryForecast, Placement, Plan, StepForecast, Tier
from overspill.plan.policy import Choice, choose
from overspill.plan.server_cache import server_cache_tokens, server_memory


def refuse_device(settings: Settings, device: Device) -> None:
    """Offload to host memory on a device whose memory is the host's own; needs no model."""
    if settings.offload.offloads and device.unified:
        raise ConfigError(
            f"{device.name}: host memory is this device's own memory, so a weight moved there would free nothing "
            f"(asked: {settings.offload.resolved_backend})",
            hint="take the offload settings away, or try them with --device emulated",
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
    choice = choose(model, settings.offload, zero_copy=zero_copy)
    placements = tuple(_place(weight, choice) for weight in model)
    buffers_bytes = _rebuilt_buffer_bytes(model)
    memory = _memory(model, placements, choice, buffers_bytes, device, settings)
    plan = Plan(
        model=model,
        backend=settings.offload.resolved_backend,
        order=settings.offload.extension.order,
        device_kind=device.kind,
        device_name=device.name,
        context_tokens=context_tokens,
        sequences=settings.engine.max_num_seqs,
        placements=placements,
        ring=choice.ring,
        pinned=pinned and device.kind == "cuda",
        memory=memory,
        step=_step(placements, choice, settings.engine.max_num_seqs, device),
        buffers_bytes=buffers_bytes,
        kv_cache_tokens=server_cache_tokens(memory, model.trace, settings.engine),
        notes=(*settings.notes, *choice.notes, *_model_notes(model)),
        warnings=(*choice.warnings, *capacity_warnings(memory)),
    )

    def forecast(offload: OffloadConfig) -> MemoryForecast:
        other = choose(model, offload, zero_copy=zero_copy)
        return _memory(model, tuple(_place(weight, other) for weight in model), other, buffers_bytes, device, settings)

    refuse_capacity(plan, settings, unified=device.unified, forecast=forecast)
    return plan


def _place(weight: Weight, choice: Choice) -> Placement:
    if weight.full in choice.moved:
        access, reason = choice.moved[weight.full]
        return Placement(weight, Tier.HOST, access, reason)
    return Placement(weight, Tier.DEVICE, Access.RESIDENT, "not offloaded")


def _rebuilt_buffer_bytes(model: ModelMap) -> int:
    held = {name for weight in model for name in (weight.full, *weight.aliases)}
    return packed_bytes(
        buffer.numel() * buffer.element_size() for name, buffer in model.skeleton.named_buffers() if name not in held
    )


def _memory(
    model: ModelMap,
    placements: tuple[Placement, ...],
    choice: Choice,
    buffers_bytes: int,
    device: Device,
    settings: Settings,
) -> MemoryForecast:
    sizes = {
        tier: packed_bytes(p.weight.nbytes for p in placements if p.tier is tier) for tier in (Tier.DEVICE, Tier.HOST)
    }
    traced = model.trace if model.trace.failure is None else None
    memory = MemoryForecast(
        weights_bytes=sizes[Tier.DEVICE] + buffers_bytes,
        buffer_pool_bytes=choice.ring.pool_bytes if choice.ring is not None else 0,
        kv_cache_bytes=traced.kv_cache_bytes if traced is not None else None,
        working_bytes=traced.working_bytes if traced is not None else None,
        host_bytes=page_bytes(sizes[Tier.HOST]) if sizes[Tier.HOST] else 0,
        available_device_bytes=device.memory_bytes,
        available_host_bytes=host_available_bytes(),
    )
    return server_memory(memory, traced, settings.engine) if traced is not None else memory


def _step(placements: tuple[Placement, ...], choice: Choice, tokens: int, device: Device) -> StepForecast:
    zero_copy = [p.weight for p in placements if p.access is Access.ZERO_COPY]
    return StepForecast(
        tokens=tokens,
        zero_copy_bytes=sum(weight.step_bytes(tokens) for weight in zero_copy),
        prefetch_bytes=choice.ring.pass_bytes if choice.ring is not None else 0,
        transfers=sum(w.step_reads for w in zero_copy) + (len(choice.ring.copied) if choice.ring is not None else 0),
        link=device.link,
    )


def _model_notes(model: ModelMap) -> list[str]:
    notes = []
    if decoded := conversions(model.weights):
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
