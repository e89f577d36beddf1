"""vLLM's `OffloadConfig`, and the one door through which a document becomes one.

Field names, types, defaults, bounds, the two errors and the three warnings are vLLM 0.33's, word for word.
Where vLLM takes a document that moves nothing, the door refuses it or warns.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, PlainSerializer, model_validator
from pydantic_core import PydanticKnownError

from overspill.config.extension import ExtensionConfig
from overspill.config.refusals import Frozen, shown, validated
from overspill.config.selectors import check_selector
from overspill.config.sizes import GIB
from overspill.errors import ConfigError, OverspillWarning

SUBJECT = "offload config"

Backend = Literal["uva", "prefetch"]


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


def _integer(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _set(value: object) -> object:
    if not isinstance(value, list | tuple | set | frozenset):
        raise PydanticKnownError("set_type")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Integer = Annotated[int, BeforeValidator(_integer)]
Selectors = Annotated[frozenset[str], BeforeValidator(_set), PlainSerializer(sorted, return_type=list[str])]


class UVAOffloadConfig(Frozen):
    """Weights that the device reads in place, over the link, wherever they are used."""

    cpu_offload_gb: Number = Field(
        default=0.0, ge=0, description="GiB of weights kept off the device, for each device; 0 is off"
    )
    cpu_offload_params: Selectors = Field(
        default=frozenset(), description="a list of the weights to take, by selector; empty takes any"
    )

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes: 1024^3 to the GiB, a fraction of a byte cut off."""
        return int(self.cpu_offload_gb * GIB)


class PrefetchOffloadConfig(Frozen):
    """Layers that are copied to the device ahead of their turn."""

    offload_group_size: Integer = Field(
        default=0, ge=0, description="layers in a group, of which the last few are offloaded; 0 is off"
    )
    offload_num_in_group: Integer = Field(
        default=1, ge=1, description="how many layers of each group are offloaded, at most the group's size"
    )
    offload_prefetch_step: Integer = Field(
        default=1, ge=0, description="how many offloaded layers ahead a copy starts, at least 1"
    )
    offload_params: Selectors = Field(
        default=frozenset(),
        description="a list of the weights to take of an offloaded layer, by selector; empty takes all",
    )


class OffloadConfig(Frozen):
    """What to offload and how.

    Construction raises pydantic's ValidationError, as in vLLM; `parse_offload_config` raises ConfigError and
    judges more.
    """

    offload_backend: Literal["auto", "uva", "prefetch"] = Field(
        default="auto", description="auto takes prefetch if a group size is set, else uva if a budget is set"
    )
    uva: UVAOffloadConfig = Field(default_factory=UVAOffloadConfig)
    prefetch: PrefetchOffloadConfig = Field(default_factory=PrefetchOffloadConfig)
    overspill: ExtensionConfig | None = Field(default=None, validation_alias=AliasChoices("overspill", "vllm_cpp"))

    @model_validator(mode="before")
    @classmethod
    def _one_extension(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and "overspill" in fields and "vllm_cpp" in fields:
            raise ConfigError(
                '"overspill" and "vllm_cpp" are two names of one object, and both are given',
                hint='move everything into "overspill"',
            )
        return fields

    @model_validator(mode="after")
    def _as_vllm_judges(self) -> Self:
        size, number = self.prefetch.offload_group_size, self.prefetch.offload_num_in_group
        step = self.prefetch.offload_prefetch_step
        if self.offload_backend == "prefetch" or size > 0:
            if number > size:
                raise ConfigError(
                    f"offload_num_in_group ({number}) must be <= offload_group_size ({size})",
                    hint='raise "prefetch.offload_group_size" or lower "prefetch.offload_num_in_group"',
                )
            if step < 1:
                raise ConfigError(
                    f"offload_prefetch_step ({step}) must be >= 1 when prefetch offloading is enabled "
                    "(offload_group_size > 0)",
                    hint='set "prefetch.offload_prefetch_step" to 1 or more',
                )
        uva, prefetch = self.uva.cpu_offload_gb > 0, size > 0
        if self.offload_backend == "uva" and prefetch:
            _warn("Prefetch offload fields are set but offload_backend='uva'. Prefetch settings will be ignored.")
        elif self.offload_backend == "prefetch" and uva:
            _warn("UVA offload fields are set but offload_backend='prefetch'. UVA settings will be ignored.")
        elif self.offload_backend == "auto" and uva and prefetch:
            _warn(
                "Both UVA and prefetch offload fields are set with offload_backend='auto'. "
                "Prefetch backend will be selected. Set offload_backend explicitly to suppress this warning."
            )
        return self

    @property
    def resolved_backend(self) -> Backend | None:
        """The backend that is asked for: an explicit one even if it moves nothing, None for neither."""
        if self.offload_backend != "auto":
            return self.offload_backend
        if self.prefetch.offload_group_size > 0:
            return "prefetch"
        return "uva" if self.uva.cpu_offload_gb > 0 else None

    @property
    def backend_offloads(self) -> bool:
        """Whether the resolved backend has something to move (vLLM's `is_offloading_enabled`)."""
        if self.resolved_backend == "prefetch":
            return self.prefetch.offload_group_size > 0
        return self.resolved_backend == "uva" and self.uva.cpu_offload_gb > 0

    @property
    def offloads(self) -> bool:
        """Whether anything is asked to leave the device: by the backend, a placement, streamed experts, a mapping."""
        extension = self.extension
        elsewhere = extension.placement.on or extension.expert_stream.on or bool(extension.mmap.enabled)
        return self.backend_offloads or elsewhere

    @property
    def extension(self) -> ExtensionConfig:
        """`overspill`, or its defaults where it is absent."""
        return self.overspill or ExtensionConfig()


def parse_offload_config(document: str | Mapping[str, object] | OffloadConfig | None) -> OffloadConfig:
    """The door: a JSON text, a mapping or a config in, a config that moves what it says out.

    None, blank text and `null` mean nothing asked for. Raises ConfigError for everything that cannot be
    honoured; warns (OverspillWarning) of what yields to something else.
    """
    if isinstance(document, OffloadConfig):
        config = document
    else:
        config = validated(OffloadConfig, document_fields(document), subject=SUBJECT)
    _refuse_what_moves_nothing(config)
    return config


def document_fields(document: str | Mapping[str, object] | OffloadConfig | None) -> dict[str, Any]:
    """What a document states, not yet judged, as a fresh dict without the absent (null) fields.

    Raises ConfigError for malformed JSON, a key written twice, and what is no object.
    """
    try:
        stated = _stated(_parsed(document) if isinstance(document, str) else document)
    except RecursionError as error:
        raise ConfigError(f"{SUBJECT}: nested too deeply", hint=_EXAMPLE) from error
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise ConfigError(f"{SUBJECT}: must be a JSON object, not {shown(document)}", hint=_EXAMPLE)
    return stated


_EXAMPLE = """for example '{"uva": {"cpu_offload_gb": 4}}'"""


def _parsed(text: str) -> object:
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{SUBJECT}: malformed JSON: {error.msg} ({where})", hint=_EXAMPLE) from error
    except ValueError as error:
        raise ConfigError(f"{SUBJECT}: malformed JSON: {error}", hint=_EXAMPLE) from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f'the key "{key}" is written twice in one object')
        fields[key] = value
    return fields


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _stated(value: object) -> Any:
    if isinstance(value, Frozen):
        return _stated(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        return {key: _stated(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_stated(inner) for inner in value]
    return value


def _refuse_what_moves_nothing(config: OffloadConfig) -> None:
    uva, prefetch = config.uva, config.prefetch
    if math.isinf(uva.cpu_offload_gb):
        raise ConfigError(
            f'{SUBJECT}: "uva.cpu_offload_gb" is {uva.cpu_offload_gb}: a budget must be finite',
            hint="to move every weight that may move, give a budget larger than the model",
        )
    if uva.cpu_offload_gb > 0 and uva.budget_bytes == 0:
        raise ConfigError(
            f'{SUBJECT}: "uva.cpu_offload_gb" is {uva.cpu_offload_gb}, less than a byte: nothing would move',
            hint="the unit is GiB",
        )
    if config.offload_backend == "uva" and uva.cpu_offload_gb == 0:
        raise ConfigError(
            f'{SUBJECT}: "offload_backend" is "uva" but "uva.cpu_offload_gb" is 0: nothing would move',
            hint='give "uva.cpu_offload_gb" a budget in GiB, or remove "offload_backend"',
        )
    for field, selectors, switch, active in (
        ("uva.cpu_offload_params", uva.cpu_offload_params, "uva.cpu_offload_gb", uva.cpu_offload_gb > 0),
        (
            "prefetch.offload_params",
            prefetch.offload_params,
            "prefetch.offload_group_size",
            prefetch.offload_group_size > 0,
        ),
    ):
        for selector in sorted(selectors):
            check_selector(selector, field=field)
        if selectors and not active:
            raise ConfigError(
                f'{SUBJECT}: "{field}" is {shown(sorted(selectors))} but "{switch}" is 0: nothing would move',
                hint=f'set "{switch}", or remove "{field}"',
            )
    _warn_of_what_changes_nothing(config)


def _warn_of_what_changes_nothing(config: OffloadConfig) -> None:
    prefetch = config.prefetch
    if prefetch.offload_group_size == 0:
        for name, value in (
            ("offload_num_in_group", prefetch.offload_num_in_group),
            ("offload_prefetch_step", prefetch.offload_prefetch_step),
        ):
            if value != PrefetchOffloadConfig.model_fields[name].default:
                _warn(
                    f'"prefetch.{name}" is {value} but "prefetch.offload_group_size" is 0: '
                    "prefetching is off, and it changes nothing."
                )
    if config.extension.order == "declaration" and config.resolved_backend != "uva":
        _warn('"overspill.order" is "declaration" but there is no uva budget to fill: it changes nothing.')


def _warn(text: str) -> None:
    warnings.warn(text, OverspillWarning, stacklevel=3)
