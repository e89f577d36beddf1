"""A model that does not fit is made to fit: of the settings that do it, those with the least time per token.

Only what nobody stated is chosen: with a backend, a budget or slots of the user's nothing is; beside experts that the
user placed, the rest. The ways are those that a user has too, so the plan can say which settings it took.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from overspill.config import GIB, OffloadConfig, format_bytes
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.machine.rates import Rates
from overspill.model.experts import expert_blocks
from overspill.model.weights import ModelMap
from overspill.plan.forecast import pass_forecast
from overspill.plan.placement import Plan

Planned = Callable[[OffloadConfig], Plan]

ASSUMED = Rates(
    origin="assumed figures of a machine that was not measured (`overspill bench` does)",
    read_bytes_s={"bfloat16": 500e9},
    flops={"bfloat16": 50e12},
    layer_s=0.3e-3,
    expert_bytes_s=30e9,
    expert_flops=0.5e12,
    disk_bytes_s=2e9,
    asynchronous=True,
)
"""For the choice alone, where nothing better is known; no time is forecast by them."""


@dataclass(frozen=True)
class Way:
    """Settings that make the model fit, what they come to, and the seconds of a decode step."""

    settings: str
    plan: Plan
    seconds: float


def wants_fit(offload: OffloadConfig) -> bool:
    """Whether there is anything that nobody stated."""
    extension = offload.extension
    stated = offload.resolved_backend is not None or extension.expert_stream.on
    return extension.placement.fit is not False and not stated


def fits(plan: Plan) -> bool:
    """Whether device and host hold the plan, working memory of the longest prompt included."""
    memory = plan.memory
    if memory.host_bytes + memory.staging_bytes > memory.available_host_bytes:
        return False
    budget = plan.weight_budget_bytes
    if budget is not None:
        return budget == 0 or memory.lasting_bytes <= budget
    return memory.device_bytes <= memory.available_device_bytes


def fit(model: ModelMap, offload: OffloadConfig, planned: Planned, rates: Rates | None) -> list[Way]:
    """The ways that make it fit, the one that takes least per token first."""
    found = []
    for written, settings in _ways(model, offload, planned(offload), planned):
        plan = planned(settings)
        step = pass_forecast(plan, rates or ASSUMED, plan.sequences, kept_tokens=plan.context_tokens // 2)
        found.append(Way(written, plan, step.seconds))
    return sorted(found, key=lambda way: way.seconds)


def excess_bytes(plan: Plan) -> int:
    """Device bytes that the plan takes beyond what there is."""
    memory, budget = plan.memory, plan.weight_budget_bytes
    if budget is not None:
        return memory.lasting_bytes - budget
    return memory.device_bytes - memory.available_device_bytes


def _ways(
    model: ModelMap, offload: OffloadConfig, whole: Plan, planned: Planned
) -> Iterator[tuple[str, OffloadConfig]]:
    """Settings that make it fit, each with how the command line writes them."""

    def works(settings: OffloadConfig) -> bool:
        try:
            return fits(planned(settings))
        except (ConfigError, UnsupportedModelError):
            return False

    experts = expert_blocks(model) if not offload.extension.placement.on else ()
    if experts:
        yield from _with_experts(model, offload, works)
    for found in (_budget(offload, excess_bytes(whole), works), _groups(model, offload, works)):
        if found is not None:
            yield found
    if experts and not works(_placed(offload, cpu_moe=True)):
        both = _placed(offload, cpu_moe=True)
        try:
            missing = excess_bytes(planned(both))
        except (ConfigError, UnsupportedModelError):
            return
        if (rest := _budget(both, missing, works)) is not None:
            yield f"--cpu-moe {rest[0]}", rest[1]


def _budget(
    offload: OffloadConfig, missing: int, works: Callable[[OffloadConfig], bool]
) -> tuple[str, OffloadConfig] | None:
    if missing <= 0:
        return None
    hundredths = -(-missing * 100 // GIB)
    for budget in (hundredths, hundredths + 1):
        uva = offload.uva.model_copy(update={"cpu_offload_gb": budget / 100})
        settings = offload.model_copy(update={"uva": uva})
        if works(settings):
            return f"--cpu-offload-gb {budget / 100:.2f}", settings
    return None


def _groups(
    model: ModelMap, offload: OffloadConfig, works: Callable[[OffloadConfig], bool]
) -> tuple[str, OffloadConfig] | None:
    """The least layers, one or two of each group, that are copied ahead through two buffers, or one."""
    sizes = range(model.decoder.layers, 0, -1)
    shares = sorted({(1, size) for size in sizes} | {(2, size) for size in sizes if size % 2 and size > 2}, key=_share)
    for step in (2, 1):

        def grouped(share: tuple[int, int], step: int = step) -> OffloadConfig:
            number, size = share
            prefetch = offload.prefetch.model_copy(
                update={"offload_group_size": size, "offload_num_in_group": number, "offload_prefetch_step": step}
            )
            return offload.model_copy(update={"prefetch": prefetch})

        found = bisect_left(shares, True, key=lambda share: works(grouped(share)))
        if found < len(shares):
            number, size = shares[found]
            written = f"--offload-group-size {size}"
            written += f" --offload-num-in-group {number}" if number > 1 else ""
            return written + (f" --offload-prefetch-step {step}" if step > 1 else ""), grouped(shares[found])
    return None


def _share(share: tuple[int, int]) -> float:
    number, size = share
    return number / size


def _with_experts(
    model: ModelMap, offload: OffloadConfig, works: Callable[[OffloadConfig], bool]
) -> Iterator[tuple[str, OffloadConfig]]:
    """Experts of the least layers on the CPU, and of all; through as many slots as there is room for."""
    blocks = expert_blocks(model)
    counts = range(blocks[0].layer + 1, blocks[-1].layer + 2)
    found = bisect_left(counts, True, key=lambda count: works(_placed(offload, n_cpu_moe=count)))
    if found < len(counts) - 1:
        yield f"--n-cpu-moe {counts[found]}", _placed(offload, n_cpu_moe=counts[found])
    if works(everywhere := _placed(offload, cpu_moe=True)):  # where the CPU reads faster than the device, more is less
        yield "--cpu-moe", everywhere
    for tier in ("host", "disk"):
        extension = offload.extension
        stream = extension.expert_stream.model_copy(update={"enabled": True, "tier": tier})
        settings = offload.model_copy(update={"overspill": extension.model_copy(update={"expert_stream": stream})})
        if works(settings):
            document = '{"overspill": {"expert_stream": {"enabled": true, "tier": "' + tier + '"}}}'
            yield f"--offload-config '{document}'", settings
            return


def _placed(offload: OffloadConfig, **fields: object) -> OffloadConfig:
    extension = offload.extension
    placement = extension.placement.model_copy(update=fields)
    return offload.model_copy(update={"overspill": extension.model_copy(update={"placement": placement})})


def fit_note(ways: Sequence[Way], whole: Plan, rates: Rates | None) -> str:
    """What was done, in one line; the first of `ways` was taken."""
    memory, best = whole.memory, ways[0]
    limit = whole.weight_budget_bytes or memory.available_device_bytes
    needed = memory.lasting_bytes if whole.weight_budget_bytes is not None else memory.device_bytes
    others = f", of {len(ways)} ways that fit the one that takes least per token" if ways[1:] else ""
    time = f": about {best.seconds * 1e3:.1f} ms a step" if rates is not None else f" (by {ASSUMED.origin})"
    return (
        f"fit: {format_bytes(needed)} do not fit into {format_bytes(limit)}, so {best.settings} was chosen{others}"
        f"{time if others or rates is not None else ''}; --no-fit leaves it"
    )
