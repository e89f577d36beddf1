"""Everything that was asked for, in one frozen value: document, flags, engine and environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from overspill.config.document import (
    SUBJECT,
    OffloadConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
    document_fields,
    parse_offload_config,
)
from overspill.config.environment import Environment, apply_environment
from overspill.config.experts import (
    ExpertStreamConfig,
    PlacementConfig,
    read_override,
    refuse_half_a_size,
    refuse_targets,
)
from overspill.config.extension import idle_fit, idle_mmap, placement_warnings, stream_warnings
from overspill.config.refusals import Frozen, did_you_mean, shown, validated
from overspill.config.sizes import GIB, parse_bandwidth, parse_bytes, parse_duration
from overspill.errors import ConfigError

FLAGS: Mapping[str, tuple[str, ...]] = {
    "offload_backend": ("offload_backend",),
    "cpu_offload_gb": ("uva", "cpu_offload_gb"),
    "cpu_offload_params": ("uva", "cpu_offload_params"),
    "offload_group_size": ("prefetch", "offload_group_size"),
    "offload_num_in_group": ("prefetch", "offload_num_in_group"),
    "offload_prefetch_step": ("prefetch", "offload_prefetch_step"),
    "offload_params": ("prefetch", "offload_params"),
    "cpu_moe": ("overspill", "placement", "cpu_moe"),
    "n_cpu_moe": ("overspill", "placement", "n_cpu_moe"),
    "override_tensor": ("overspill", "placement", "overrides"),
    "fit": ("overspill", "placement", "fit"),
    "expert_cache": ("overspill", "expert_stream", "cache_bytes"),
    "expert_policy": ("overspill", "expert_stream", "policy"),
}
"""The flat flags, vLLM's and those of the extension, and where each stands in the document."""

_SECTIONS: Mapping[str, type[Frozen]] = {
    "uva": UVAOffloadConfig,
    "prefetch": PrefetchOffloadConfig,
    "placement": PlacementConfig,
    "expert_stream": ExpertStreamConfig,
}


def _text(parse: Callable[..., float], field: str) -> BeforeValidator:
    def read(value: object) -> object:
        return parse(value, field=field) if isinstance(value, str) else value

    return BeforeValidator(read)


class EngineSettings(Frozen):
    """What runs the model, and how much of it. Texts with units are read: "2GiB", "16GB/s", "10us"."""

    device: Literal["auto", "cuda", "cpu", "emulated"] = Field(
        default="auto", description="what computes: auto, cuda, cpu or emulated"
    )
    device_memory_bytes: Annotated[int, _text(parse_bytes, "device_memory_bytes"), Field(gt=0, strict=True)] | None = (
        Field(default=None, description="bytes of device memory that may be used")
    )
    link_bandwidth: (
        Annotated[
            float,
            _text(parse_bandwidth, "link_bandwidth"),
            Field(gt=0, strict=True, allow_inf_nan=False),
        ]
        | None
    ) = Field(default=None, description="bytes per second of the emulated device's link")
    link_latency_s: (
        Annotated[
            float,
            _text(parse_duration, "link_latency_s"),
            Field(ge=0, strict=True, allow_inf_nan=False),
        ]
        | None
    ) = Field(default=None, description="seconds that a copy over the emulated device's link takes to begin")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="what weights are computed in; auto is the checkpoint's own"
    )
    max_model_len: Annotated[int, Field(gt=0, strict=True)] | None = Field(
        default=None, description="tokens of prompt and answer together; absent is the model's own limit"
    )
    max_num_seqs: int = Field(default=1, gt=0, strict=True, description="sequences that memory is planned for")
    max_num_batched_tokens: int | None = Field(
        default=None, gt=0, strict=True, description="tokens that one pass of a server computes; absent but there"
    )
    kv_cache_memory_bytes: (
        Annotated[int, _text(parse_bytes, "kv_cache_memory_bytes"), Field(gt=0, strict=True)] | None
    ) = Field(default=None, description="bytes of a server's KV cache; absent is what requests need or the device has")
    memory_limit_bytes: Annotated[int, _text(parse_bytes, "memory_limit_bytes"), Field(gt=0, strict=True)] | None = (
        Field(default=None, description="host bytes for weights, buffers and KV cache; absent is what there is")
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub model")
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True, description="seed of sampling")
    trust_remote_code: bool = Field(default=False, strict=True, description="whether a model may bring code of its own")
    debug: bool = Field(
        default=False, strict=True, description="check every access by address and poison released buffers"
    )

    @model_validator(mode="after")
    def _fits_device(self) -> Self:
        if self.device == "cpu" and self.device_memory_bytes is not None:
            raise ConfigError(
                f'"device_memory_bytes" is {self.device_memory_bytes}, but the cpu has no memory of its own: '
                "it computes in host memory",
                hint='remove it, or use device "emulated" or "cuda"',
            )
        if self.kv_cache_memory_bytes is not None and self.max_num_batched_tokens is None:
            raise ConfigError(
                f'"kv_cache_memory_bytes" is {self.kv_cache_memory_bytes}, but only a server shares out a KV cache',
                hint="overspill serve, or max_num_seqs and max_model_len, which say what the cache must hold",
            )
        for field, value in (
            ("link_bandwidth", self.link_bandwidth),
            ("link_latency_s", self.link_latency_s),
        ):
            if value is not None and self.device != "emulated":
                raise ConfigError(
                    f'"{field}" is {value}, but device is "{self.device}": only the emulated link can be set',
                    hint=f'use device "emulated", or remove "{field}"',
                )
        return self


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for, judged. `notes` (what won over what) and `warnings` are lines to print once."""

    offload: OffloadConfig
    engine: EngineSettings
    environment: Environment
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def resolve(
    document: str | Mapping[str, object] | OffloadConfig | None = None,
    flags: Mapping[str, object] | None = None,
    engine: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Judges everything that can be judged without a model. No model file is opened.

    `document` may be `@file`; `flags` are the flat ones (`FLAGS`); `engine` holds EngineSettings fields.
    In both None means not given. Raises ConfigError, also for a flag and a document that disagree.
    """
    if isinstance(document, str):
        document = read_document(document)
    given = _given(flags)
    fields = document_fields(document)
    if given or not isinstance(document, OffloadConfig):
        offload = parse_offload_config(_with_flags(fields, given))
    else:
        offload = parse_offload_config(document)

    overridden = apply_environment(offload.overspill, environ)
    warnings: tuple[str, ...] = ()
    if (extension := overridden.extension) is not None:
        root = _root(fields)
        refuse_half_a_size(extension.expert_stream, root=root, origins=overridden.origins)
        refuse_targets(extension.placement, root=root, origins=overridden.origins)
        stated = offload.resolved_backend is not None or extension.expert_stream.on
        warnings = (
            *placement_warnings(extension, root=root),
            *idle_fit(extension.placement.fit, stated=stated, root=root),
            *idle_mmap(extension, root=root),
            *stream_warnings(extension, root=root),
        )
        offload = offload.model_copy(update={"overspill": extension})
    environment = Environment.read(environ)
    return Settings(
        offload=offload,
        engine=validated(EngineSettings, _given(engine), subject="engine settings"),
        environment=environment,
        notes=(*overridden.notes, *environment.notes),
        warnings=warnings,
    )


def read_document(text: str) -> str:
    """The text itself, or what the file after `@` holds. Raises ConfigError if that cannot be read."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'{SUBJECT}: cannot read the file "{text[1:]}": {error}',
            hint="after @ stands the path of a JSON file",
        ) from error


def _given(options: Mapping[str, object] | None) -> dict[str, object]:
    return {name: value for name, value in (options or {}).items() if value is not None}


def _with_flags(fields: dict[str, Any], flags: Mapping[str, object]) -> dict[str, Any]:
    for flag, value in flags.items():
        if flag not in FLAGS:
            raise ConfigError(
                f'unknown offload flag "{flag}" (expected one of: {" ".join(FLAGS)})',
                hint=did_you_mean(flag, FLAGS),
            )
        path = FLAGS[flag] if FLAGS[flag][0] != "overspill" else (_root(fields), *FLAGS[flag][1:])
        *sections, key = path
        holder: Any = fields
        for section in sections:
            holder = holder.setdefault(section, {}) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            break  # a section that is no object: the document is refused whole
        meant = _meant(flag, value)
        if key in holder and not _agree(sections, key, holder[key], meant):
            raise ConfigError(
                f'"{".".join(path)}" is {shown(holder[key])} in the offload document, but the flag '
                f"--{flag.replace('_', '-')} says {shown(value)}",
                hint="give it in one of the two places",
            )
        holder[key] = meant
        if sections[-1:] == ["expert_stream"] and holder.get("enabled") is False:
            raise ConfigError(
                f'"{".".join(sections)}.enabled" is false in the offload document, but the flag '
                f"--{flag.replace('_', '-')} says {shown(value)}",
                hint="take one of the two away",
            )
    return fields


def _root(fields: Mapping[str, object]) -> str:
    """How the document spells the extension."""
    return "vllm_cpp" if "vllm_cpp" in fields else "overspill"


def _meant(flag: str, value: object) -> object:
    """What the flag's own spelling means in the document, which judges it."""
    if flag == "cpu_offload_gb" and isinstance(value, str) and not _is_number(value):
        return parse_bytes(value, bare="GiB", field=flag) / GIB
    if flag == "expert_cache" and isinstance(value, str | int | float):
        return parse_bytes(value, bare="GiB", field=flag)
    if flag == "override_tensor":
        entries = [value] if isinstance(value, str) else value
        if isinstance(entries, list | tuple):
            return [read_override(entry, field=flag) if isinstance(entry, str) else entry for entry in entries]
    return value


def _is_number(text: str) -> bool:
    """Whether vLLM reads this as a number of GiB; what it then is worth is judged with the document."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _agree(sections: list[str], key: str, stated: object, flag: object) -> bool:
    """Whether both mean the same value, whatever their spelling (4 and 4.0, a list in another order)."""
    if not sections:
        return stated == flag
    model = _SECTIONS[sections[-1]]
    meanings = [
        getattr(validated(model, {key: value}, subject=SUBJECT, at=tuple(sections)), key) for value in (stated, flag)
    ]
    return bool(meanings[0] == meanings[1])
