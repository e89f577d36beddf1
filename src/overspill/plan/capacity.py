"""Whether device and host hold what a plan places there, and where they do not, the nearest settings that would fit."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from enum import Enum, auto

from overspill.config import GIB, OffloadConfig, Settings, format_bytes
from overspill.errors import CapacityError, ConfigError, UnsupportedModelError
from overspill.machine.memory import host_limit_bytes
from overspill.model.experts import expert_blocks
from overspill.plan.disk import process_bytes
from overspill.plan.least import least_bytes, written
from overspill.plan.placement import MemoryForecast, Plan
from overspill.plan.tiers import Access, Tier

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_SHORTER = "fewer or shorter sequences (--max-num-seqs, --max-model-len)"

_TOKENS = 16
"""A context is advised in multiples of so many."""

_LEAST = "which is the least that would do"
_BOUNDLESS = 1 << 60

DRIFT_BYTES = 4 << 20
"""What a process has taken when it plans differs by so much between two starts."""

Forecast = Callable[[OffloadConfig], MemoryForecast]


class Limit(Enum):
    """What may be too little: host memory beside a device, what was stated for the CPU, what there is for it."""

    HOST = auto()
    STATED = auto()
    PROCESS = auto()


Within = Callable[[Limit, int], MemoryForecast]


def refuse_capacity(
    plan: Plan,
    settings: Settings,
    *,
    unified: bool,
    forecast: Forecast,
    within: Within,
    with_more_host: Callable[[], int | None],
    named_host: bool = False,
) -> None:
    """CapacityError where the host or the device has less than the plan needs.

    `forecast` plans the memory of the same model under other offload settings (ConfigError where those are refused);
    the hint names settings only if they fit. `within` plans the same under another limit; the hint names the least that
    would do. `with_more_host`: with how many bytes of host memory fit would do. `named_host`: the host is one that was
    named, and not this one. `unified`: nothing can be offloaded, and what loading takes counts.
    """
    memory = plan.memory
    host_bytes = memory.host_bytes + memory.staging_bytes
    if host_bytes > memory.available_host_bytes:
        raise CapacityError(
            f"host memory: the plan places {format_bytes(host_bytes)} there, "
            f"{format_bytes(memory.available_host_bytes)} are available (the control group's limit included)",
            hint=f"offload less, or allow {_least_host(memory, settings, within, named_host)}",
        )
    stated = settings.offload.extension.device_fit.weight_budget_bytes
    if stated == 0:  # vllm.cpp's meaning: no verdict before loading
        return
    for limit, with_cache in ((stated, False), (memory.available_device_bytes, True)):
        if limit is None or _needed(memory, with_cache) <= limit:
            continue
        relief = [_smaller(plan, limit) if with_cache else 'a larger "overspill.device_fit.weight_budget_bytes"']
        ways_out = [] if unified else list(_ways_out_of(plan, settings.offload, limit, with_cache, forecast))
        if unified and with_cache:
            relief.append(_least_of_all(memory, settings, within))
        elif not ways_out and (host_bytes := with_more_host() or 0) > memory.available_host_bytes:
            relief.append(_host_memory(host_bytes, memory, settings, named_host, "with which fit finds a way"))
        allow = f"allow {', or '.join(relief)}"
        raise CapacityError(
            _too_little(plan, limit, with_cache),
            hint=", or ".join([*ways_out, allow])
            if ways_out
            else f"moving weights alone is not enough here: {allow}{'' if unified else ', or more device memory'}",
        )
    if unified and process_bytes(memory) > memory.available_process_bytes:
        raise CapacityError(
            f"memory: loading and running take {format_bytes(process_bytes(memory))}, "
            f"{format_bytes(memory.available_process_bytes)} are available (the control group's limit included)",
            hint=f"allow {_SHORTER}, or {_least_of_all(memory, settings, within)}",
        )


def _too_little(plan: Plan, limit: int, with_cache: bool) -> str:
    """What the device is to hold, part by part, beside the limit."""
    memory = plan.memory
    pools = {"buffer pool": memory.buffer_pool_bytes}
    if memory.expert_slots_bytes:
        pools["expert slots"] = memory.expert_slots_bytes
    if memory.mapped_bytes:
        pools["mapped files"] = memory.mapped_bytes
    parts = ["weights", *pools, *(["KV cache"] if with_cache else [])]
    what = f"{', '.join(parts[:-1])} and {parts[-1]}"
    told = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in pools.items())
    largest = max((p.weight for p in plan.on(Tier.DEVICE)), key=lambda w: w.nbytes, default=None)
    named = f"; the largest weight is {largest.full}, {format_bytes(largest.nbytes)}" if largest is not None else ""
    return (
        f"{plan.device_name}: {what} need {format_bytes(_needed(memory, with_cache))} of device memory "
        f"(weights {format_bytes(memory.weights_bytes)}, {told}, "
        f"KV cache {format_bytes(memory.kv_cache_bytes or 0)} for {plan.kv_cache_for}"
        f"{named}), the limit is {format_bytes(limit)}"
    )


def _smaller(plan: Plan, limit: int) -> str:
    """The context, or the sequences, that would do; in words where no such number would."""
    memory, traced = plan.memory, plan.model.trace
    sequences = 1 if plan.kv_cache_tokens is not None else plan.sequences
    room_bytes = limit - memory.lasting_bytes
    cache_bytes, token_bytes = memory.kv_cache_bytes or 0, sequences * traced.kv_token_bytes
    state_bytes = max(0, cache_bytes - token_bytes * plan.context_tokens)

    def taken_bytes(tokens: int) -> int:
        working_bytes = -(-(memory.working_bytes or 0) * tokens // plan.context_tokens)
        return min(cache_bytes, state_bytes + token_bytes * tokens) + working_bytes

    contexts = range(_TOKENS, plan.context_tokens, _TOKENS)
    shorter = bisect_right(contexts, room_bytes, key=taken_bytes)
    several = sequences * room_bytes // max(1, (memory.kv_cache_bytes or 0) + (memory.working_bytes or 0))
    ways = [f"--max-model-len {contexts[shorter - 1]}"] if shorter else []
    ways += [f"--max-num-seqs {several}"] * (1 <= several < sequences)
    return " or ".join(ways) or _SHORTER


def _ways_out_of(plan: Plan, offload: OffloadConfig, limit: int, with_cache: bool, forecast: Forecast) -> Iterator[str]:
    working_bytes = plan.memory.working_bytes or 0 if with_cache else 0  # what is advised leaves room for it
    missing = _needed(plan.memory, with_cache) + working_bytes - limit

    def fits(settings: OffloadConfig) -> bool:
        return _fits(forecast, settings, with_cache, limit - working_bytes)

    return _ways_out(plan, offload, missing, fits)


def capacity_warnings(memory: MemoryForecast) -> tuple[str, ...]:
    """A prompt of the full length is forecast to run out of device memory, though what is exact fits."""
    if memory.device_bytes <= memory.available_device_bytes:
        return ()
    return (
        f"with the working memory of a prompt of the full length ({format_bytes(memory.working_bytes or 0)}, a "
        f"forecast) {format_bytes(memory.device_bytes)} are needed, more than the "
        f"{format_bytes(memory.available_device_bytes)} of the device: a long prompt may run out of memory",
    )


def _needed(memory: MemoryForecast, with_cache: bool) -> int:
    cache_bytes = memory.kv_cache_bytes or 0 if with_cache else 0
    return memory.lasting_bytes + cache_bytes


def _fits(forecast: Forecast, offload: OffloadConfig, with_cache: bool, limit: int) -> bool:
    try:
        found = forecast(offload)
        on_host = found.host_bytes + found.staging_bytes <= found.available_host_bytes
        return on_host and _needed(found, with_cache) <= limit
    except (ConfigError, UnsupportedModelError):
        return False


# -- the least that would do -------------------------------------------------------------------------------------------


def _least_host(memory: MemoryForecast, settings: Settings, within: Within, named: bool) -> str:
    def fits(nbytes: int) -> bool:
        found = within(Limit.HOST, nbytes)
        return found.host_bytes + found.staging_bytes <= nbytes

    whole = within(Limit.HOST, _BOUNDLESS)
    least = least_bytes(fits, 0, whole.host_bytes + whole.staging_bytes)
    assert least is not None, "host memory that holds all of it does"
    return _host_memory(least, memory, settings, named)


def _host_memory(nbytes: int, memory: MemoryForecast, settings: Settings, named: bool, why: str = _LEAST) -> str:
    """So much host memory, in the words of what limits it."""
    if settings.engine.memory_limit_bytes == memory.available_host_bytes:
        return f"--memory-limit {written(nbytes)}, {why}"
    if named:
        return f"--host-memory {written(nbytes)}, {why}"
    return _more_memory(nbytes - memory.available_host_bytes, why)


def _least_of_all(memory: MemoryForecast, settings: Settings, within: Within) -> str:
    """The least limits, of those that were stated and are there, with which the CPU could start."""
    stated = settings.engine.memory_limit_bytes
    limit = Limit.PROCESS

    def fits(nbytes: int) -> bool:
        found = within(limit, nbytes)
        return _needed(found, True) <= found.available_device_bytes and (
            limit is Limit.STATED or process_bytes(found) <= found.available_process_bytes
        )

    ways = []
    enough = process_bytes(within(Limit.STATED, _BOUNDLESS))
    if stated is not None and stated < memory.available_process_bytes:
        limit = Limit.STATED
        if not fits(stated):
            least = least_bytes(fits, 0, enough)
            assert least is not None, "memory that holds all of it does"
            ways.append(f"--memory-limit {written(least)}, {_LEAST}")
    limit = Limit.PROCESS
    least = least_bytes(fits, 0, enough)
    if least is not None and least > memory.available_process_bytes:
        ways.append(_more_memory(least - memory.available_process_bytes))
    return ", and ".join(ways) or "a larger limit"


def _more_memory(missing_bytes: int, why: str = _LEAST) -> str:
    group_bytes = host_limit_bytes()
    if group_bytes is None:
        return f"{written(missing_bytes)} of memory more than the machine has left, {why}"
    return f"{written(group_bytes + missing_bytes + DRIFT_BYTES)} as the control group's limit, {why}"


# -- ways out ----------------------------------------------------------------------------------------------------------

_Fits = Callable[[OffloadConfig], bool]


def _ways_out(plan: Plan, offload: OffloadConfig, missing: int, fits: _Fits) -> Iterator[str]:
    """What would free the `missing` bytes, as settings that fit are written on the command line."""
    larger = next((written for written, found in _larger_offloads(plan, offload, missing) if fits(found)), None)
    if more := [written for written in (larger, _more_on_cpu(plan, offload, fits)) if written is not None]:
        yield f"offload {format_bytes(missing)} more ({', or '.join(more)})"
    if (smaller := _smaller_cache(plan, offload, missing, fits)) is not None:
        yield f"take a smaller expert cache ({smaller})"


def _larger_offloads(plan: Plan, offload: OffloadConfig, missing: int) -> Iterator[tuple[str, OffloadConfig]]:
    """Settings of a backend that offload more, the least first, each with how the command line writes it."""
    if plan.backend == "prefetch":
        prefetch = offload.prefetch
        for size in range(prefetch.offload_group_size - 1, prefetch.offload_num_in_group - 1, -1):
            larger = prefetch.model_copy(update={"offload_group_size": size})
            yield f"--offload-group-size {size}", offload.model_copy(update={"prefetch": larger})
        return
    moved = plan.bytes_by_access()
    hundredths = math.ceil((moved[Access.ZERO_COPY] + moved[Access.PREFETCH] + missing) / GIB * 100)
    everything = math.ceil(plan.model.nbytes / GIB * 100)
    for budget in dict.fromkeys((hundredths, everything)):  # a larger pool may take what a tight budget frees
        larger_uva = offload.uva.model_copy(update={"cpu_offload_gb": budget / 100})
        yield f"--cpu-offload-gb {budget / 100:.2f}", offload.model_copy(update={"uva": larger_uva})


def _more_on_cpu(plan: Plan, offload: OffloadConfig, fits: _Fits) -> str | None:
    """The least layers whose routed experts would have to be computed on the CPU; None where that is no help."""
    extension = offload.extension
    blocks = expert_blocks(plan.model)
    if not blocks or extension.placement.cpu_moe:
        return None

    def with_layers(count: int) -> OffloadConfig:
        placement = extension.placement.model_copy(update={"n_cpu_moe": count})
        return offload.model_copy(update={"overspill": extension.model_copy(update={"placement": placement})})

    # Where experts stream, the last layer with some is left to them.
    layers = blocks[-1].layer + (0 if extension.expert_stream.on else 1)
    counts = range(max(blocks[0].layer, extension.placement.n_cpu_moe or 0) + 1, layers + 1)
    found = bisect_left(counts, True, key=lambda count: fits(with_layers(count)))
    if found == len(counts):
        return None
    return "--cpu-moe" if counts[found] == blocks[-1].layer + 1 else f"--n-cpu-moe {counts[found]}"


def _smaller_cache(plan: Plan, offload: OffloadConfig, missing: int, fits: _Fits) -> str | None:
    """The most that the expert cache may take, where it was stated, written as it was stated."""
    extension, slots = offload.extension, plan.slots
    stream = extension.expert_stream
    if slots is None or (stream.slots is None and stream.cache_bytes is None):
        return None
    count = slots.count - math.ceil(missing / slots.slot_bytes)
    if count < 1:
        return None
    nbytes = count * slots.slot_bytes
    if stream.slots is not None:
        smaller = {"slots": count} if stream.slot_bytes is None else {"slots": count, "slot_bytes": slots.slot_bytes}
        written = '"expert_stream": {' + ", ".join(f'"{name}": {value}' for name, value in smaller.items()) + "}"
    else:
        unit, name = next((unit, name) for unit, name in _UNITS if nbytes >= 100 * unit or unit == 1)
        smaller = {"cache_bytes": nbytes // unit * unit}
        written = f"--expert-cache {nbytes // unit}{name}"
    changed = extension.model_copy(update={"expert_stream": stream.model_copy(update=smaller)})
    return written if fits(offload.model_copy(update={"overspill": changed})) else None
