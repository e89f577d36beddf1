"""Plans of tiny models on the emulated accelerator, and what each engine is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from emulated_runs import CONTEXT, emulated, gib, mapped, settings_for
from overspill.advice import Advice, advise
from overspill.config import Settings
from overspill.machine.emulated import EmulatedDevice
from overspill.model.weights import ModelMap
from overspill.plan import Plan, Tier, make_plan

NAME = "someone/model"


@cache
def model_of(folder: Path, dtype: str = "auto") -> ModelMap:
    """Mapped once: planning changes nothing in it."""
    return mapped(folder, dtype)


@dataclass(frozen=True)
class Made:
    plan: Plan
    settings: Settings

    def told(self, engine: str, **options: Any) -> Advice:
        return advise(self.plan, self.settings, engine, model_name=NAME, **options)

    @property
    def moved(self) -> set[str]:
        return {p.weight.full for p in self.plan.placements if p.tier is not Tier.DEVICE}


def made(
    folder: Path, document: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, **engine: Any
) -> Made:
    settings = settings_for(document, environ, **engine)
    model = model_of(folder, settings.engine.dtype)
    return Made(make_plan(model, settings, emulated(), context_tokens=CONTEXT), settings)


def values_of(advice: Advice, flag: str) -> list[str]:
    """The words after `flag`, up to the next option."""
    if flag not in advice.command:
        return []
    rest = advice.command[advice.command.index(flag) + 1 :]
    end = next((at for at, word in enumerate(rest) if word.startswith("-")), len(rest))
    return list(rest[:end])


def value_of(advice: Advice, flag: str) -> str:
    (value,) = values_of(advice, flag)
    return value


def line_with(lines: tuple[str, ...], *words: str) -> str:
    """The one line that has all these words."""
    (found,) = [line for line in lines if all(word in line for word in words)]
    return found


def with_host(made_: Made, available: int) -> Made:
    """The plan where `available` bytes of host memory are."""
    memory = replace(made_.plan.memory, available_host_bytes=available)
    return replace(made_, plan=replace(made_.plan, memory=memory))


def fitted(folder: Path, share: float, document: Mapping[str, Any] | None = None) -> tuple[Made, EmulatedDevice]:
    """Planned for a device that has `share` of what the model takes there, and the device."""
    settings = settings_for(document)
    model = model_of(folder, settings.engine.dtype)
    whole = make_plan(model, settings, emulated(), context_tokens=CONTEXT)
    device = emulated(int(whole.memory.device_bytes * share))
    return Made(make_plan(model, settings, device, context_tokens=CONTEXT), settings), device


def uva(nbytes: int, params: list[str] | None = None, **extension: Any) -> dict[str, Any]:
    """The document of a budget."""
    stated = {"cpu_offload_gb": gib(nbytes), **({"cpu_offload_params": params} if params else {})}
    return {"uva": stated, **({"overspill": extension} if extension else {})}
