"""A memory limit as all that tells two sides apart: does it leave weights on disk?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from overspill.api import prepare
from overspill.config import Settings, format_bytes
from overspill.errors import CapacityError, ConfigError
from overspill.plan import Plan
from overspill.plan.disk import asked_bytes
from overspill.plan.least import next_less, written


def refuse_idle_limit(model: str | Path, settings: Settings, limited: Plan, unlimited: Plan) -> None:
    """ConfigError where `settings` with their memory limit come to the plan that they come to without.

    The hint names the largest limit that has something to do.
    """
    if _places(limited) != _places(unlimited):
        return
    memory, limit = unlimited.memory, settings.engine.memory_limit_bytes
    assert limit is not None
    unified = limited.device_kind == "cpu"
    takes = asked_bytes(memory) if unified else memory.host_bytes + memory.staging_bytes
    if not takes:
        raise ConfigError(
            "the candidate moves nothing, so there is nothing to compare: a memory limit is of host memory, and no "
            "weight is there",
            hint="say what to offload, for example --offload-group-size 4",
        )
    raise ConfigError(
        f"the memory limit leaves nothing on disk, so there is nothing to compare: {format_bytes(limit)} are allowed, "
        f"{format_bytes(takes)} are what {'the model' if unified else 'host memory'} takes at the most",
        hint=_way_out(model, settings, unlimited, next_less(takes)),
    )


def _way_out(model: str | Path, settings: Settings, unlimited: Plan, nbytes: int) -> str:
    smaller = replace(settings, engine=settings.engine.model_copy(update={"memory_limit_bytes": nbytes}))
    try:
        if _places(prepare(model, smaller).plan) != _places(unlimited):
            return f"--memory-limit {written(nbytes)}, which is the most that leaves something there"
    except CapacityError:
        pass
    return "a larger model: what this one could leave on disk is less than the buffers that it would be read into"


def _places(plan: Plan) -> list[tuple[object, ...]]:
    slots = plan.slots.count if plan.slots is not None else 0
    return [(slots,), *((placement.tier, placement.access) for placement in plan.placements)]
