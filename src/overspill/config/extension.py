"""The extension object beside vLLM's fields: `overspill`, with vllm.cpp's schema and what is ours.

An absent field is None and leaves things as they are. Texts are vllm.cpp's where it has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from overspill.config.refusals import Frozen, refusal
from overspill.errors import ConfigError

MAX_N_CPU_MOE = 4096
"""Upper bound of `placement.n_cpu_moe` (vllm.cpp's kMaxNCpuMoe; the figure is llama.cpp's for overrides)."""

DEVICES = ("cpu", "cuda", "emulated")
"""Devices that a placement override may name."""


def _boolean(value: object) -> object:
    if not isinstance(value, bool):
        raise refusal("must be a boolean")
    return value


def _integer(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        raise refusal("must be an integer")
    return value


def _positive(value: int) -> int:
    if value <= 0:
        raise refusal(f"must be positive (got {value})")
    return value


def _budget(value: int) -> int:
    if value < 0:
        raise refusal(f'must not be negative (got {value}); 0 means "suppress the device-fit refusal"')
    return value


def _layer_count(value: int) -> int:
    if value < 0:
        raise refusal(f"must not be negative (got {value})")
    if value > MAX_N_CPU_MOE:
        raise refusal(
            f"is {value}, above the bound of {MAX_N_CPU_MOE}; each layer costs one override, so a mistyped "
            "value would build the list until the process died"
        )
    return value


def _text(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise refusal("must be a non-empty string")
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise refusal(f"is not a valid regex: {error}") from error
    return value


def _device(value: str) -> str:
    if value not in DEVICES:
        raise refusal(f'is "{value}", which is not a device (expected one of: {" ".join(DEVICES)})')
    return value


def _array(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise refusal("must be an array of objects")
    return value


Boolean = Annotated[bool, BeforeValidator(_boolean)]
Positive = Annotated[int, BeforeValidator(_integer), AfterValidator(_positive)]


class MmapConfig(Frozen):
    """Weights left in the mapped checkpoint file."""

    enabled: Boolean | None = Field(default=None, description="borrow the weights' bytes from the mapped file")
    prefault: Boolean | None = Field(default=None, description="read the borrowed pages while loading")


class ExpertStreamConfig(Frozen):
    """A bounded cache of expert slices in host memory."""

    enabled: Boolean | None = Field(default=None, description="stream experts through a slot cache")
    slots: Positive | None = Field(default=None, description="how many slices the cache holds")
    slot_bytes: Positive | None = Field(default=None, description="bytes of one slot")


class DeviceFitConfig(Frozen):
    """What the weights on the device may take."""

    weight_budget_bytes: Annotated[int, BeforeValidator(_integer), AfterValidator(_budget)] | None = Field(
        default=None,
        description="bytes that weights may take on the device, instead of its memory; 0 judges nothing",
    )


class PlacementOverride(Frozen):
    """Weights whose name a regular expression finds, and the device they are to lie on."""

    pattern: Annotated[str, BeforeValidator(_text), AfterValidator(_regex)] = Field(
        default="", validate_default=True, description="a regular expression, searched in the weight's name"
    )
    device: Annotated[str, BeforeValidator(_text), AfterValidator(_device)] = Field(
        default="", validate_default=True, description=f"one of {' '.join(DEVICES)}"
    )

    @model_validator(mode="before")
    @classmethod
    def _is_object(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping | PlacementOverride):
            raise refusal('must be an object with "pattern" and "device"')
        return fields


class PlacementConfig(Frozen):
    """Which weights are computed elsewhere than on the device."""

    overrides: Annotated[tuple[PlacementOverride, ...], BeforeValidator(_array)] | None = Field(
        default=None, description='[{"pattern": regex, "device": name}, …]; the first that matches wins'
    )
    cpu_moe: Boolean | None = Field(default=None, description="all routed experts on the CPU")
    n_cpu_moe: Annotated[int, BeforeValidator(_integer), AfterValidator(_layer_count)] | None = Field(
        default=None, description="routed experts of the first N layers on the CPU; 0 is none"
    )
    fit: Boolean | None = Field(default=None, description="choose the placement from the device's memory")

    # Declared last, so that the manual placements are known when it is judged.
    @field_validator("fit")
    @classmethod
    def _alone(cls, fit: bool | None, info: ValidationInfo) -> bool | None:
        if fit and any(info.data.get(name) for name in ("overrides", "cpu_moe", "n_cpu_moe")):
            raise refusal(
                'cannot be combined with a manual placement ("overrides", "cpu_moe" or "n_cpu_moe"); the '
                "resolver would have to override what the operator asked for"
            )
        return fit


class ExtensionConfig(Frozen):
    """What goes beyond vLLM. In a document it is `overspill`, or `vllm_cpp` as the same object."""

    mmap: MmapConfig = Field(default_factory=MmapConfig)
    expert_stream: ExpertStreamConfig = Field(default_factory=ExpertStreamConfig)
    device_fit: DeviceFitConfig = Field(default_factory=DeviceFitConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    order: Literal["traffic", "declaration"] = Field(
        default="traffic",
        description="traffic fills a budget with the bytes that cost least a step, declaration as vLLM does",
    )


def unbuilt_refusals(
    extension: ExtensionConfig, *, root: str = "overspill", origins: Mapping[str, str] | None = None
) -> None:
    """Refuses what is understood but not built in this version; values that ask for nothing pass.

    `root` is how the document spells the object; `origins` says for a path ("placement.cpu_moe") which
    environment variable set it ("VT_CPU_MOE=1"). Raises ConfigError with one line for each.
    """
    mmap, stream, placement = extension.mmap, extension.expert_stream, extension.placement
    slots = stream.enabled is not False
    unbuilt = [
        (path, consequence, way_out)
        for path, asked, consequence, way_out in (
            ("mmap.enabled", mmap.enabled, _READ, _REMOVE),
            ("mmap.prefault", mmap.prefault is not None, _READ, _REMOVE),
            ("expert_stream.enabled", stream.enabled, _UNSTREAMED, _EXPERTS),
            ("expert_stream.slots", slots and stream.slots is not None, _UNSTREAMED, _EXPERTS),
            ("expert_stream.slot_bytes", slots and stream.slot_bytes is not None, _UNSTREAMED, _EXPERTS),
            ("placement.overrides", placement.overrides, _UNPLACED, _SELECT),
            ("placement.cpu_moe", placement.cpu_moe, _UNPLACED_EXPERTS, _EXPERTS),
            ("placement.n_cpu_moe", placement.n_cpu_moe, _UNPLACED_EXPERTS, _EXPERTS),
            ("placement.fit", placement.fit, _UNFITTED, _BUDGET),
        )
        if asked
    ]
    if not unbuilt:
        return
    lines = []
    for path, consequence, _ in unbuilt:
        origin = (origins or {}).get(path)
        key = f'{origin} ("{root}.{path}")' if origin else f'"{root}.{path}"'
        lines.append(f"{key} is understood but not built in this version: {consequence}")
    hints = dict.fromkeys(way_out for _, _, way_out in unbuilt)
    raise ConfigError("\n".join(lines), hint="; ".join(hints))


_READ = "weights would be read into memory all the same"
_UNSTREAMED = "experts would not be streamed"
_UNPLACED = "every weight would stay where the budget puts it"
_UNPLACED_EXPERTS = "every expert would stay where the budget puts it"
_UNFITTED = "no placement would be chosen"
_REMOVE = "remove it"
_SELECT = 'remove it, or use "uva" with "cpu_offload_params"'
_EXPERTS = 'remove it, or use "uva" with "cpu_offload_params": ["experts"]'
_BUDGET = 'remove it, or give "uva.cpu_offload_gb" a budget'
