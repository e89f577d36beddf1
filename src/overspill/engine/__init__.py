"""Generation. The engine, and transformers with it, is imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overspill.engine.sampling import Completion, SamplingParams, Step

if TYPE_CHECKING:
    from overspill.engine.engine import Engine

__all__ = ["Completion", "Engine", "SamplingParams", "Step"]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module 'overspill.engine' has no attribute {name!r}")
    from overspill.engine.engine import Engine

    return Engine
