"""What the process environment says: vLLM's two switches, and vllm.cpp's overrides of the extension.

A variable wins over the document, the document over the default, field by field and in both directions. A
value that cannot be read is refused by the variable's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from overspill.config.extension import ExtensionConfig
from overspill.config.refusals import shown, validated
from overspill.errors import ConfigError

DISABLE_PIN_MEMORY = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"
DISABLE_UVA = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"

_FALSE = ("", "0", "false", "off", "no")
_TRUE = ("1", "true", "on", "yes")
_DIGITS = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Environment:
    """vLLM's switches. `disable_pin_memory`: host weights stay pageable. `disable_uva`: no zero-copy."""

    disable_pin_memory: bool = False
    disable_uva: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Reads both as vLLM does, `bool(int(...))`. Raises ConfigError for what is no integer."""
        return cls(_vllm_switch(DISABLE_PIN_MEMORY, environ), _vllm_switch(DISABLE_UVA, environ))

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each switch that is on."""
        return tuple(
            f"environment: {variable} is on: {effect}"
            for variable, on, effect in (
                (DISABLE_PIN_MEMORY, self.disable_pin_memory, "host weights are not pinned"),
                (DISABLE_UVA, self.disable_uva, "no zero-copy views of host weights"),
            )
            if on
        )


@dataclass(frozen=True, slots=True)
class Overridden:
    """The extension after the environment had its say.

    `notes` are lines to print once; `origins` maps a path ("placement.cpu_moe") to what set it
    ("VT_CPU_MOE=1").
    """

    extension: ExtensionConfig | None
    notes: tuple[str, ...]
    origins: Mapping[str, str]


def apply_environment(extension: ExtensionConfig | None, environ: Mapping[str, str]) -> Overridden:
    """Merges the VT_* variables over the extension, field by field; None stays None where none is set.

    Raises ConfigError for a value that is not understood and for a merged whole that cannot be honoured.
    """
    fields: dict[str, Any] = extension.model_dump(exclude_unset=True) if extension is not None else {}
    said: dict[tuple[str, str], str] = {}
    for variable, (section, key, read) in OVERRIDES.items():
        text = environ.get(variable)
        value = None if text is None else read(variable, text)
        if value is not None:
            fields.setdefault(section, {})[key] = value
            said[section, key] = f"{variable}={text}"
    if not said:
        return Overridden(extension, (), {})
    merged = validated(
        ExtensionConfig, fields, subject=f"offload config under {', '.join(said.values())}", at=("overspill",)
    )
    before, after, notes = (extension or ExtensionConfig()).model_dump(), merged.model_dump(), []
    for (section, key), origin in said.items():
        stated = before[section][key]
        if stated is None:
            notes.append(f'environment: {origin} sets "overspill.{section}.{key}"')
        elif stated != after[section][key]:
            notes.append(f'environment: {origin} wins over "overspill.{section}.{key}" = {shown(stated)}')
    return Overridden(merged, tuple(notes), {".".join(where): origin for where, origin in said.items()})


def _switch(variable: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _FALSE + _TRUE:
        raise ConfigError(
            f"{variable} is {shown(text)}, which is no switch",
            hint="use 1, true, on or yes; 0, false, off, no or nothing",
        )
    return word in _TRUE


def _count(variable: str, text: str) -> int | None:
    """An empty variable is one that is not set."""
    if not text.strip():
        return None
    if _DIGITS.fullmatch(text.strip()) is None:
        raise ConfigError(f"{variable} is {shown(text)}, which is no whole number", hint="use digits only")
    return int(text)


def _overrides(variable: str, text: str) -> list[dict[str, str]]:
    """llama.cpp's `pattern=device,…`: split at commas, then at the first `=`. Empty text is no override."""
    entries = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        pattern, equals, device = entry.partition("=")
        if not equals:
            raise ConfigError(
                f'{variable} has the entry {shown(entry)} without a "="',
                hint="write pattern=device, entries separated by commas",
            )
        entries.append({"pattern": pattern, "device": device})
    return entries


def _vllm_switch(variable: str, environ: Mapping[str, str]) -> bool:
    text = environ.get(variable, "0")
    try:
        return bool(int(text))
    except ValueError as error:
        raise ConfigError(f"{variable} is {shown(text)}, which is no integer", hint="use 0 or 1") from error


Reader = Callable[[str, str], object]

OVERRIDES: Mapping[str, tuple[str, str, Reader]] = {
    "VT_GGUF_MMAP": ("mmap", "enabled", _switch),
    "VT_GGUF_PREFAULT": ("mmap", "prefault", _switch),
    "VT_MOE_EXPERT_STREAM": ("expert_stream", "enabled", _switch),
    "VT_MOE_EXPERT_STREAM_SLOTS": ("expert_stream", "slots", _count),
    "VT_MOE_EXPERT_STREAM_SLOT_BYTES": ("expert_stream", "slot_bytes", _count),
    "VT_DEVICE_WEIGHT_BUDGET_BYTES": ("device_fit", "weight_budget_bytes", _count),
    "VT_PLACEMENT_OVERRIDES": ("placement", "overrides", _overrides),
    "VT_CPU_MOE": ("placement", "cpu_moe", _switch),
    "VT_N_CPU_MOE": ("placement", "n_cpu_moe", _count),
    "VT_PLACEMENT_FIT": ("placement", "fit", _switch),
}
"""Each variable's place in the extension (section, key), and how its text is read (None: not set)."""
