"""A model that does not fit is made to fit: of the settings that do it, those with the least time per token.

Only what nobody stated is chosen: with a backend, a budget or slots of the user's nothing is; beside experts that the
user placed, the rest. The ways are those that a user has too, so the plan can say which settings it took.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from overspill.config import GIB, OffloadConfig, format_bytes
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.machine.rates import Rates
from overspill.model.experts import expert_blocks
from overspill.model.weights import ModelMap
from overspill.plan.forecast import decode_forecast
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

AS_GOOD = 1.01
"""A way that takes no longer than this many times the least is as good."""

_LARGEST_GROUP = 16
"""Groups up to this size are tried with every number of their layers, larger ones with one."""


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
    return plan.weight_budget_bytes == 0 or excess_bytes(plan) <= 0


def excess_bytes(plan: Plan) -> int:
    """Device bytes that the plan takes beyond what there is, or beyond what was stated for weights and pools."""
    memory, budget = plan.memory, plan.weight_budget_bytes
    excess = memory.device_bytes - memory.available_device_bytes
    return max(excess, memory.lasting_bytes - budget) if budget else excess


def fit(model: ModelMap, offload: OffloadConfig, planned: Planned, rates: Rates | None) -> list[Way]:
    """The ways that make it fit, the one that takes least per token first; of those next to it the one of fewest words.

    Each family of settings is searched for the least that the device holds, since what leaves it grows with them; then
    the host is asked, which may hold a little and not more.
    """
    search = _Search(model, offload, planned)
    found: dict[str, Way] = {}
    for settings in search.settings():
        written = _written(offload, settings)
        if written in found or (plan := search.planned(settings)) is None or not fits(plan):
            continue
        step = decode_forecast(plan, rates or ASSUMED)
        found[written] = Way(written, plan, step.seconds)
    least = min((way.seconds for way in found.values()), default=0.0)

    def rank(way: Way) -> tuple[int, float]:
        return (len(way.settings.split()) if way.seconds <= AS_GOOD * least else sys.maxsize, way.seconds)

    return sorted(found.values(), key=rank)


class _Search:
    """Settings that may make it fit."""

    def __init__(self, model: ModelMap, offload: OffloadConfig, planned: Planned) -> None:
        self._model, self._offload, self._planned = model, offload, planned
        placement = offload.extension.placement
        stated = (placement.cpu_moe, placement.n_cpu_moe, placement.overrides)  # none of them is a statement too
        self._experts = expert_blocks(model) if stated == (None, None, None) else ()

    def planned(self, settings: OffloadConfig) -> Plan | None:
        """None where such settings are refused."""
        try:
            return self._planned(settings)
        except (ConfigError, UnsupportedModelError):
            return None

    def settings(self) -> Iterator[OffloadConfig]:
        offload = self._offload
        yield from self._with_rest(offload)
        yield from self._groups()
        if not self._experts:
            return
        for tier in ("host", "disk"):
            stream = offload.extension.expert_stream.model_copy(update={"enabled": True, "tier": tier})
            yield _extended(offload, expert_stream=stream)
        everywhere = _placed(offload, cpu_moe=True)  # where the CPU reads faster than the device, more is less
        yield everywhere
        yield from self._with_rest(everywhere)
        unread = sum(w.nbytes for w in self._model if w.routing is None and 2 * w.step_bytes(1) < w.nbytes)
        for beside in (offload, _with_budget(offload, unread)) if unread else (offload,):
            least = self._least_experts(beside)
            if least is not None:
                yield _placed(beside, n_cpu_moe=least)
                if least > self._experts[0].layer + 1:
                    yield from self._with_rest(_placed(offload, n_cpu_moe=least - 1))

    def _least_experts(self, offload: OffloadConfig) -> int | None:
        """Of how many layers from the first the experts must be on the CPU; None where all are not enough."""
        counts = range(self._experts[0].layer + 1, self._experts[-1].layer + 1)
        found = bisect_left(counts, True, key=lambda count: self._on_device(_placed(offload, n_cpu_moe=count)))
        return counts[found] if found < len(counts) else None

    def _with_rest(self, offload: OffloadConfig) -> Iterator[OffloadConfig]:
        """`offload` and a budget for what is missing beside it; a hundredth more where whole weights leave a gap."""
        whole = self.planned(offload)
        if whole is None or (missing := excess_bytes(whole)) <= 0:
            return
        tight = _with_budget(offload, missing)
        yield tight if self._on_device(tight) else _with_budget(offload, missing + GIB // 100)

    def _groups(self) -> Iterator[OffloadConfig]:
        """The least layers of each group that are copied ahead, through two buffers and through one."""
        layers = self._model.decoder.layers
        shares: dict[int, tuple[int, int]] = {}  # by the layers that they copy: the smallest group that does
        for size in (*range(1, min(layers, _LARGEST_GROUP) + 1), *range(_LARGEST_GROUP + 1, layers + 1)):
            for number in range(1, size + 1) if size <= _LARGEST_GROUP else (1,):
                copied = sum(layer % size >= size - number for layer in range(layers))
                shares.setdefault(copied, (number, size))
        for step in (2, 1):
            some = [self._grouped(*shares[copied], step) for copied in sorted(shares) if copied >= step]
            found = bisect_left(some, True, key=self._on_device)
            yield from some[found : found + 1]

    def _grouped(self, number: int, size: int, step: int) -> OffloadConfig:
        prefetch = self._offload.prefetch.model_copy(
            update={"offload_group_size": size, "offload_num_in_group": number, "offload_prefetch_step": step}
        )
        return self._offload.model_copy(update={"prefetch": prefetch})

    def _on_device(self, settings: OffloadConfig) -> bool:
        plan = self.planned(settings)
        return plan is not None and excess_bytes(plan) <= 0


def _with_budget(offload: OffloadConfig, nbytes: int) -> OffloadConfig:
    """A budget of as many hundredths of a GiB as hold `nbytes`."""
    uva = offload.uva.model_copy(update={"cpu_offload_gb": -(-nbytes * 100 // GIB) / 100})
    return offload.model_copy(update={"uva": uva})


def _written(before: OffloadConfig, settings: OffloadConfig) -> str:
    """What was chosen beside `before`, as the command line has it."""
    flags = []
    placement, prefetch, stream = settings.extension.placement, settings.prefetch, settings.extension.expert_stream
    if placement != before.extension.placement:
        flags.append("--cpu-moe" if placement.cpu_moe else f"--n-cpu-moe {placement.n_cpu_moe}")
    if settings.uva != before.uva:
        flags.append(f"--cpu-offload-gb {settings.uva.cpu_offload_gb:.2f}")
    if prefetch != before.prefetch:
        flags.append(f"--offload-group-size {prefetch.offload_group_size}")
        flags += [f"--offload-num-in-group {prefetch.offload_num_in_group}"] * (prefetch.offload_num_in_group > 1)
        flags += [f"--offload-prefetch-step {prefetch.offload_prefetch_step}"] * (prefetch.offload_prefetch_step > 1)
    if stream != before.extension.expert_stream:
        document = {"overspill": {"expert_stream": {"enabled": True, "tier": stream.tier}}}
        flags.append(f"--offload-config '{json.dumps(document)}'")
    return " ".join(flags)


def _extended(offload: OffloadConfig, **fields: object) -> OffloadConfig:
    return offload.model_copy(update={"overspill": offload.extension.model_copy(update=fields)})


def _placed(offload: OffloadConfig, **fields: object) -> OffloadConfig:
    return _extended(offload, placement=offload.extension.placement.model_copy(update=fields))


def fit_note(ways: Sequence[Way], whole: Plan, rates: Rates | None) -> str:
    """What was done, in one line; the first of `ways` was taken."""
    memory, best = whole.memory, ways[0]
    needed, limit = memory.device_bytes, memory.available_device_bytes
    if whole.weight_budget_bytes and needed <= limit:
        needed, limit = memory.lasting_bytes, whole.weight_budget_bytes
    others = f", of {len(ways)} ways that fit the one that takes least per token" if ways[1:] else ""
    time = f": about {best.seconds * 1e3:.1f} ms a step" if rates is not None else f" (by {ASSUMED.origin})"
    return (
        f"fit: {format_bytes(needed)} do not fit into {format_bytes(limit)}, so {best.settings} was chosen{others}"
        f"{time if others or rates is not None else ''}; --no-fit leaves it"
    )
