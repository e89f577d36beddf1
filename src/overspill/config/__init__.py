"""What was asked for: vLLM's offload document, the extension, the engine's settings, judged before any I/O.

Imports neither torch nor transformers, so that a wrong setting is told at once.
"""

from __future__ import annotations

from overspill.config.document import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig, parse_offload_config
from overspill.config.environment import Environment, apply_environment
from overspill.config.experts import ExpertStreamConfig, PlacementConfig, PlacementOverride, PlacementRule
from overspill.config.extension import ExtensionConfig, placement_warnings
from overspill.config.selectors import WeightName, check_selector, closest, matches
from overspill.config.settings import FLAGS, EngineSettings, Settings, read_document, resolve
from overspill.config.sizes import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_gib,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

__all__ = [
    "FLAGS",
    "GIB",
    "KIB",
    "MIB",
    "TIB",
    "EngineSettings",
    "Environment",
    "ExpertStreamConfig",
    "ExtensionConfig",
    "OffloadConfig",
    "PlacementConfig",
    "PlacementOverride",
    "PlacementRule",
    "PrefetchOffloadConfig",
    "Settings",
    "UVAOffloadConfig",
    "WeightName",
    "apply_environment",
    "check_selector",
    "closest",
    "format_bytes",
    "format_gib",
    "matches",
    "parse_bandwidth",
    "parse_bytes",
    "parse_duration",
    "parse_offload_config",
    "placement_warnings",
    "read_document",
    "resolve",
]
