"""Run language models whose weights do not fit the device, and prove what happened.

`plan` says from a checkpoint's headers what would be where; `load` carries it out and gives an `Engine`; `offload` does
the same to a transformers model that is already in memory; `compare` runs both sides and judges.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overspill.config import OffloadConfig
from overspill.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DefectError,
    DeviceOutOfMemoryError,
    LinkDefect,
    ModelError,
    OverspillError,
    OverspillWarning,
    PlacementDefect,
    UnsupportedModelError,
    VerdictError,
)

if TYPE_CHECKING:
    from overspill.api import load, offload, plan
    from overspill.compare import compare
    from overspill.engine import Completion, Engine, SamplingParams
    from overspill.plan import Plan

__version__ = "0.1.0"

_HEAVY = {  # imported when first used: a wrong setting is told before torch has been imported
    "Completion": "overspill.engine",
    "Engine": "overspill.engine",
    "Plan": "overspill.plan",
    "SamplingParams": "overspill.engine",
    "compare": "overspill.compare",
    "load": "overspill.api",
    "offload": "overspill.api",
    "plan": "overspill.api",
}

__all__ = [
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DefectError",
    "DeviceOutOfMemoryError",
    "Engine",
    "LinkDefect",
    "ModelError",
    "OffloadConfig",
    "OverspillError",
    "OverspillWarning",
    "PlacementDefect",
    "Plan",
    "SamplingParams",
    "UnsupportedModelError",
    "VerdictError",
    "compare",
    "load",
    "offload",
    "plan",
]


class _Face(ModuleType):
    """`overspill.plan` and `overspill.compare` are functions, though rooms of the same name are imported too."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HEAVY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'overspill' has no attribute {name!r}")
    return getattr(import_module(_HEAVY[name]), name)
