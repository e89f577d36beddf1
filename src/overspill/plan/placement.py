"""A plan: for every weight where it will be, how it is reached, and why; and what that will take."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from overspill.config import OffloadConfig
from overspill.machine.device import Link
from overspill.machine.rates import Rates
from overspill.model.converted import needs_conversion
from overspill.model.experts import ExpertBlock
from overspill.model.weights import ModelMap, Weight
from overspill.plan.ring import Ring
from overspill.plan.slots import Slots
from overspill.plan.staging import Staging
from overspill.plan.tiers import Access, Tier


@dataclass(frozen=True)
class Placement:
    weight: Weight
    tier: Tier
    access: Access
    reason: str

    @property
    def mapped(self) -> bool:
        """Used where it lies, in a mapped file of the checkpoint."""
        return self.tier is Tier.DISK and self.access is Access.IN_PLACE


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes by purpose. Working memory is that of a prompt pass at the full length; None where it is not known.

    `staging_bytes` of host memory are what tensors pass through between device, host and disk. Where device and host
    are one memory, `mapped_bytes` are what mapped files hold of the page cache (0 elsewhere), `loading_bytes` what
    loading takes at its most, what it has placed included, and `available_process_bytes` what machine and control group
    leave, whatever was allowed for weights and cache.
    """

    weights_bytes: int
    mapped_bytes: int
    buffer_pool_bytes: int
    expert_slots_bytes: int
    kv_cache_bytes: int | None
    working_bytes: int | None
    host_bytes: int
    staging_bytes: int
    available_device_bytes: int
    available_host_bytes: int
    loading_bytes: int = 0
    available_process_bytes: int = sys.maxsize

    @property
    def unified(self) -> bool:
        """Whether device and host are one memory."""
        return self.available_process_bytes < sys.maxsize

    @property
    def pools_bytes(self) -> int:
        """Device memory that offload takes for itself."""
        return self.buffer_pool_bytes + self.expert_slots_bytes

    @property
    def lasting_bytes(self) -> int:
        """Device memory that is taken whatever is asked of the model."""
        return self.weights_bytes + self.mapped_bytes + self.pools_bytes

    @property
    def device_bytes(self) -> int:
        return self.lasting_bytes + (self.kv_cache_bytes or 0) + (self.working_bytes or 0)


@dataclass(frozen=True)
class StepForecast:
    """What the link must carry in a step that decodes `tokens` tokens at once, and the least time that takes.

    `link_floor_s` is a floor, not a prediction: zero-copy adds it to the computing, prefetch overlaps with it.
    `in_place_bytes` are results of experts that the CPU computes. What streamed experts bring is no part of
    `link_bytes`: nothing where they are all in their slots; `stream_bytes` if any were as likely as any other.
    `disk_bytes` is what layers on disk bring, on a device with a link part of `prefetch_bytes` as well.
    """

    tokens: int
    zero_copy_bytes: float
    prefetch_bytes: int
    in_place_bytes: int
    stream_bytes: float
    disk_bytes: int
    transfers: int
    link: Link | None

    @property
    def link_bytes(self) -> float:
        return self.zero_copy_bytes + self.prefetch_bytes + self.in_place_bytes

    @property
    def link_floor_s(self) -> float | None:
        if self.link is None:
            return None
        return self.link.bandwidth and self.link_bytes / self.link.bandwidth + self.transfers * self.link.latency_s


@dataclass(frozen=True)
class Plan:
    """What will be where. `notes` are said once; `backend` is vLLM's ("uva", "prefetch"), None where neither is asked.

    `placed` are blocks of routed experts that the CPU computes, `slots` those that stream through the device.
    `offload` are the settings that it carries out, those that fit chose included; `fitted` are the ways that fit found,
    as the command line has them, with the seconds of a step, the first of which was chosen. `rates` are the machine's,
    None where they are not known: then no time is forecast.
    `prefault`: what is `mapped` is read into the page cache while loading.
    `buffers_bytes` are rebuilt buffers that no checkpoint holds; they are part of the device's weights.
    `kv_cache_tokens` is about what a server's KV cache holds, None where it holds `sequences` of the whole context.
    """

    model: ModelMap
    backend: str | None
    order: str
    device_kind: str
    device_name: str
    context_tokens: int
    sequences: int
    placements: tuple[Placement, ...]
    ring: Ring | None
    placed: tuple[ExpertBlock, ...]
    slots: Slots | None
    staging: Staging
    pinned: bool
    memory: MemoryForecast
    step: StepForecast
    buffers_bytes: int
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    fitted: tuple[tuple[str, float], ...] = ()
    rates: Rates | None = None
    prefault: bool = False
    kv_cache_tokens: int | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    _by_name: Mapping[str, Placement] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {p.weight.full: p for p in self.placements})

    @property
    def weight_budget_bytes(self) -> int | None:
        """What weights and pools may take on the device, where that was stated; 0 judges nothing."""
        return self.offload.extension.device_fit.weight_budget_bytes

    @property
    def kv_cache_for(self) -> str:
        """What the KV cache is for, for people."""
        if self.kv_cache_tokens is None:
            return f"{self.sequences} x {self.context_tokens} tokens"
        return f"{self.kv_cache_tokens} tokens of up to {self.sequences} requests"

    def of(self, name: str) -> Placement:
        return self._by_name[name]

    def on(self, tier: Tier) -> list[Placement]:
        return [p for p in self.placements if p.tier is tier]

    @property
    def converted(self) -> tuple[Weight, ...]:
        """Weights on disk that are not in the checkpoint as they are computed with: a file of them is made once."""
        return tuple(p.weight for p in self.on(Tier.DISK) if needs_conversion(p.weight))

    @property
    def mapped(self) -> tuple[Weight, ...]:
        """Weights that are used where they lie in the mapped files of the checkpoint."""
        return tuple(p.weight for p in self.placements if p.mapped)

    def bytes_by_access(self) -> Counter[Access]:
        total: Counter[Access] = Counter()
        for placement in self.placements:
            total[placement.access] += placement.weight.nbytes
        return total

    @property
    def offloaded_bytes(self) -> int:
        """Useful bytes off the device (what was asked for)."""
        return sum(p.weight.nbytes for p in self.placements if p.tier is not Tier.DEVICE)

    @property
    def offloads(self) -> bool:
        """Whether any weight lies elsewhere than on the device."""
        return any(p.tier is not Tier.DEVICE for p in self.placements)

    @property
    def ways(self) -> tuple[str, ...]:
        """How weights off the device are used, for people."""
        return tuple(
            word
            for word, there in (
                (self.backend, self.backend is not None),
                ("experts on the CPU", self.placed),
                ("expert slots", self.slots is not None),
                ("mapped files", self.mapped),
                ("layers from disk", self.ring is not None and self.ring.on(Tier.DISK)),
            )
            if there and word is not None
        )

    @property
    def saved_bytes(self) -> int:
        """Device bytes that the offload frees, what it takes for itself subtracted."""
        return self.offloaded_bytes - self.memory.pools_bytes
