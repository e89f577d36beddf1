"""What fit chose, chosen again for an engine that holds other bytes: ranks with their shares, a file left packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from overspill.config import Settings, format_bytes
from overspill.machine.device import Device
from overspill.model.weights import Weight
from overspill.plan import Plan, Tier
from overspill.plan.fit import fit, wants_fit
from overspill.plan.planner import planner_of

_TRIES = 8


@dataclass(frozen=True)
class Held:
    """`why` an engine holds other bytes than the plan; what one device of its holds of a weight, and of KV cache."""

    why: str
    weight: Callable[[Weight], int]
    kv_cache_bytes: int

    def short_bytes(self, plan: Plan) -> int:
        """What the device lacks there for what `plan` leaves on it; below 0 where room is left."""
        memory = plan.memory
        weights = sum(self.weight(p.weight) for p in plan.placements if p.tier is Tier.DEVICE)
        pools = math.ceil(memory.pools_bytes * self._share(plan))
        taken = weights + pools + plan.buffers_bytes + self.kv_cache_bytes + (memory.working_bytes or 0)
        return taken - memory.available_device_bytes

    def _share(self, plan: Plan) -> float:
        return sum(map(self.weight, plan.model)) / plan.model.nbytes

    def excess_here(self, plan: Plan, short_bytes: int) -> int:
        """`short_bytes` of the engine's as bytes of the plan's, as though all weights were held in the same share."""
        return math.ceil(short_bytes / self._share(plan))


def fitted_again(plan: Plan, settings: Settings, device: Device, held: Held) -> Plan:
    """`plan` where its offload was stated; where fit chose it, what fit would choose for `held`, and a note of it."""
    chosen = wants_fit(settings.offload) and plan.offload != settings.offload
    if not chosen or plan.memory.unified or plan.weight_budget_bytes is not None:
        return plan
    planner = planner_of(plan, settings, device)
    whole = planner.plan(settings.offload)
    short = held.short_bytes(whole)
    if short <= 0:
        told = f"{held.why}: it fits without offload, with {format_bytes(-short)} to spare"
        return replace(whole, warnings=(), notes=(told, *whole.notes))
    for _ in range(_TRIES):
        room_bytes = whole.memory.device_bytes - held.excess_here(plan, short)
        planner.available = replace(planner.available, device_bytes=room_bytes)
        ways = fit(plan.model, settings.offload, planner.plan, plan.rates)
        if not ways:
            break
        still = []
        for way in ways:
            memory = replace(way.plan.memory, available_device_bytes=plan.memory.available_device_bytes)
            told = f"{held.why}: {way.settings} was chosen"
            again = replace(way.plan, memory=memory, notes=(told, *way.plan.notes))
            still.append(held.short_bytes(again))
            if still[-1] <= 0:
                return again
        short += min(still)
    return replace(plan, notes=(*plan.notes, f"{held.why}: what fits then was not found; this is for one device"))
