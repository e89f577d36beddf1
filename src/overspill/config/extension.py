"""The extension object beside vLLM's fields: `overspill`, with vllm.cpp's schema and what is ours.

An absent field is None and leaves things as they are. Texts are vllm.cpp's where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from overspill.config.experts import ExpertStreamConfig, PlacementConfig
from overspill.config.refusals import Boolean, Frozen, WholeNumber, named, refusal
from overspill.errors import ConfigError


def _budget(value: int) -> int:
    if value < 0:
        raise refusal(f'must not be negative (got {value}); 0 means "suppress the device-fit refusal"')
    return value


class MmapConfig(Frozen):
    """Weights left in the mapped checkpoint file."""

    enabled: Boolean | None = Field(default=None, description="use weights where they lie, in the mapped checkpoint")
    prefault: Boolean | None = Field(
        default=None, description="read mapped weights into the page cache while loading; default: where it holds them"
    )


class DeviceFitConfig(Frozen):
    """What the weights on the device may take."""

    weight_budget_bytes: Annotated[WholeNumber, AfterValidator(_budget)] | None = Field(
        default=None,
        description="bytes that weights may take on the device, instead of its memory; 0 judges nothing",
    )


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
    unbuilt = [
        (path, consequence, way_out)
        for path, asked, consequence, way_out in (("placement.fit", extension.placement.fit, _UNFITTED, _PLACE),)
        if asked
    ]
    if not unbuilt:
        return
    lines = []
    for path, consequence, _ in unbuilt:
        key = named(f"{root}.{path}", (origins or {}).get(path))
        lines.append(f"{key} is understood but not built in this version: {consequence}")
    hints = dict.fromkeys(way_out for _, _, way_out in unbuilt)
    raise ConfigError("\n".join(lines), hint="; ".join(hints))


def placement_warnings(extension: ExtensionConfig, *, root: str = "overspill") -> tuple[str, ...]:
    """What to tell of a placement beside mapped weights; the text is vllm.cpp's."""
    if not (extension.mmap.enabled and extension.placement.on):
        return ()
    return (
        "a CPU placement is active while the weights are mmap-resident. The mapping is faulted in file order and a "
        f'placed expert is read in router order, so this pairing works and reads slowly: set "{root}": '
        '{"mmap": {"enabled": false}} or VT_GGUF_MMAP=0 if the checkpoint fits without borrowing',
    )


def idle_mmap(extension: ExtensionConfig, *, root: str = "overspill") -> tuple[str, ...]:
    """What to tell of "prefault" where nothing is mapped."""
    if extension.mmap.enabled or extension.mmap.prefault is None:
        return ()
    return (f'"{root}.mmap.prefault" without "enabled": true changes nothing: no file is mapped',)


def stream_warnings(extension: ExtensionConfig, *, root: str = "overspill") -> tuple[str, ...]:
    """What to tell of fields of `expert_stream` beside its being switched off."""
    stream = extension.expert_stream
    if stream.on or not stream.given:
        return ()
    names = ", ".join(f'"{name}"' for name in stream.given)
    return (f'"{root}.expert_stream.enabled" is false: {names} beside it changes nothing',)


_UNFITTED = "no placement would be chosen"
_PLACE = 'remove it, or state the placement with "cpu_moe", "n_cpu_moe" or "overrides"'
