"""Routed experts away from the device: `placement` puts weights on the CPU, `expert_stream` caches experts in slots.

Fields and texts are vllm.cpp's, patterns llama.cpp's; `cache_bytes`, `policy` and `tier` are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from overspill.config.refusals import Boolean, Frozen, Positive, WholeNumber, named, refusal, shown
from overspill.config.sizes import parse_bytes
from overspill.errors import ConfigError

MAX_N_CPU_MOE = 4096
"""Upper bound of `placement.n_cpu_moe` (vllm.cpp's kMaxNCpuMoe; the figure is llama.cpp's for overrides)."""

DEVICES = ("cpu", "cuda", "emulated")
"""Devices that a placement override may name."""

EXPERTS_PATTERN = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""llama.cpp's regular expression for routed experts, by their GGUF names."""

_CUDA = re.compile(r"cuda[0-9]+")
_SEVERAL = re.compile(rf"=({'|'.join(DEVICES)}|{_CUDA.pattern}),", re.IGNORECASE)


def _size(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value, field=str(info.field_name))
    except ConfigError as error:
        raise refusal(error.message.removeprefix(f'"{info.field_name}" ')) from error


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
    """In any case: llama.cpp writes CPU, and CUDA0 for the first of several."""
    word = value.lower()
    device = "cuda" if _CUDA.fullmatch(word) else word
    if device not in DEVICES:
        raise refusal(f'is "{value}", which is not a device (expected one of: {" ".join(DEVICES)})')
    return device


def _array(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise refusal("must be an array of objects")
    return value


class ExpertStreamConfig(Frozen):
    """A bounded cache of routed experts on the device: slots, each of which holds one whole expert.

    A vllm.cpp document counts slices of an expert; its slots x slot_bytes is kept, as the cache's bytes.
    """

    enabled: Boolean | None = Field(
        default=None, description="stream experts through a cache; absent is true where another field is given"
    )
    slots: Positive | None = Field(
        default=None,
        description="how many whole experts the cache holds; with slot_bytes, slots x slot_bytes is its size; absent "
        "is what the device has left",
    )
    slot_bytes: Positive | None = Field(
        default=None, description="bytes of one slot: slots x slot_bytes is the size of the cache"
    )
    cache_bytes: Annotated[Positive, BeforeValidator(_size)] | None = Field(
        default=None,
        description='bytes of the cache, or a size such as "512MiB", in place of slots; absent is what the device has '
        "left",
    )
    policy: Literal["fetch", "cpu", "auto"] | None = Field(
        default=None,
        description="an expert that is not in the cache is fetched, as where it is absent, computed on the CPU, or "
        "(auto) whichever costs less",
    )
    tier: Literal["host", "disk"] | None = Field(
        default=None, description="where streamed experts live: host memory, as where it is absent, or the checkpoint"
    )

    # Its field stands after slots, so that slots are known when it is judged.
    @field_validator("cache_bytes")
    @classmethod
    def _one_size(cls, cache_bytes: int | None, info: ValidationInfo) -> int | None:
        slots = info.data.get("slots")
        if cache_bytes is not None and slots is not None:
            raise refusal(f'({cache_bytes}) cannot be combined with "slots" ({slots}): both say how much it holds')
        return cache_bytes

    @property
    def on(self) -> bool:
        """Whether experts are streamed: as `enabled` says, or else where any other field is given."""
        return bool(self.given) if self.enabled is None else self.enabled

    @property
    def given(self) -> tuple[str, ...]:
        """The fields beside `enabled` that say something."""
        return tuple(name for name in type(self).model_fields if name != "enabled" and getattr(self, name) is not None)


class PlacementOverride(Frozen):
    """Weights whose name a regular expression finds, and the device they are to lie on."""

    pattern: Annotated[str, BeforeValidator(_text), AfterValidator(_regex)] = Field(
        default="", validate_default=True, description="a regular expression, searched in the weight's name"
    )
    device: Annotated[str, BeforeValidator(_text), AfterValidator(_device)] = Field(
        default="", validate_default=True, description="a device, in any case (CPU is cpu); only the cpu takes weights"
    )

    @model_validator(mode="before")
    @classmethod
    def _is_object(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping | PlacementOverride):
            raise refusal('must be an object with "pattern" and "device"')
        return fields


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """`pattern` is searched, unanchored, in a weight's name; of an ordered list the first that matches wins.

    `origin` is the field it comes from: "overrides[0]", "cpu_moe" or "n_cpu_moe".
    """

    pattern: str
    device: str
    origin: str


class PlacementConfig(Frozen):
    """Which weights are computed elsewhere than on the device."""

    overrides: Annotated[tuple[PlacementOverride, ...], BeforeValidator(_array)] | None = Field(
        default=None, description='[{"pattern": regex, "device": name}, …]; the first that matches wins'
    )
    cpu_moe: Boolean | None = Field(default=None, description="all routed experts on the CPU")
    n_cpu_moe: Annotated[WholeNumber, AfterValidator(_layer_count)] | None = Field(
        default=None, description="routed experts of the first N layers on the CPU; 0 is none"
    )
    fit: Boolean | None = Field(
        default=None, description="make a model that does not fit the device fit; absent is true"
    )

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

    @property
    def rules(self) -> tuple[PlacementRule, ...]:
        """In the order in which they are tried, which is vllm.cpp's: overrides as written, all layers, the first N."""
        overrides = [
            PlacementRule(override.pattern, override.device, f"overrides[{index}]")
            for index, override in enumerate(self.overrides or ())
        ]
        everywhere = [PlacementRule(EXPERTS_PATTERN, "cpu", "cpu_moe")] if self.cpu_moe else []
        first = [
            PlacementRule(rf"blk\.{layer}{EXPERTS_PATTERN}", "cpu", "n_cpu_moe") for layer in range(self.n_cpu_moe or 0)
        ]
        return (*overrides, *everywhere, *first)

    @property
    def on(self) -> bool:
        """Whether there is any rule."""
        return bool(self.overrides or self.cpu_moe or self.n_cpu_moe)


def read_override(text: str, *, field: str) -> dict[str, str]:
    """PATTERN=DEVICE as an entry of `overrides`, cut at the last "=", so that a pattern may have "," and "=".

    Raises ConfigError, naming `field`, for a text without "=" and for llama.cpp's several in one.
    """
    pattern, equals, device = text.rpartition("=")
    if not equals:
        raise ConfigError(
            f'"{field}" has the entry {shown(text)} without a "="',
            hint=f"write PATTERN=DEVICE, for example {EXPERTS_PATTERN}=cpu",
        )
    if _SEVERAL.search(pattern):
        raise ConfigError(
            f'"{field}" has the entry {shown(text)}, which is several: a comma is part of a pattern here',
            hint="give each PATTERN=DEVICE by itself; the first that matches wins",
        )
    return {"pattern": pattern, "device": device}


def refuse_half_a_size(stream: ExpertStreamConfig, *, root: str, origins: Mapping[str, str]) -> None:
    """Refuses a size of slots without their number.

    `root` is how the document spells the extension; `origins` says for a path ("expert_stream.slot_bytes") which
    environment variable set it.
    """
    if stream.on and stream.slot_bytes is not None and stream.slots is None:
        key = named(f"{root}.expert_stream.slot_bytes", origins.get("expert_stream.slot_bytes"))
        raise ConfigError(
            f'{key} is {stream.slot_bytes} without "slots": that is no size of a cache',
            hint='give both, or "cache_bytes" alone',
        )


def refuse_targets(placement: PlacementConfig, *, root: str, origins: Mapping[str, str]) -> None:
    """Refuses a rule that leads elsewhere than to the CPU. `root` and `origins` are `refuse_half_a_size`'s."""
    for rule in placement.rules:
        if rule.device != "cpu":
            key = named(f"{root}.placement.{rule.origin}", origins.get("placement.overrides"))
            raise ConfigError(
                f'device placement: cannot host a placed group on "{rule.device}": only "cpu" is supported as a '
                "placement target; the engine may run on any device, it is the destination that is limited",
                hint=f"{key} sends {shown(rule.pattern)} there: write patterns of what goes to the cpu alone, what "
                "none of them finds stays where it would be without them",
            )
