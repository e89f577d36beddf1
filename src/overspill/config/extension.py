"""The extension object beside vLLM's fields: `overspill`, with vllm.cpp's schema and what is ours.

An absent field is None and leaves things as they are. Texts are vllm.cpp's where it has one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from overspill.config.experts import ExpertStreamConfig, PlacementConfig
from overspill.config.refusals import Boolean, Frozen, WholeNumber, refusal


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
        description="bytes that weights may take on the device, beside its memory as a limit; 0 judges nothing",
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


def idle_fit(fit: bool | None, *, stated: bool, root: str = "overspill") -> tuple[str, ...]:
    """What to tell of "fit" beside an offload that was `stated`."""
    if not fit or not stated:
        return ()
    return (f'"{root}.placement.fit" changes nothing beside a backend or expert_stream: what was stated stands',)


def stream_warnings(extension: ExtensionConfig, *, root: str = "overspill") -> tuple[str, ...]:
    """What to tell of fields of `expert_stream` beside its being switched off."""
    stream = extension.expert_stream
    if stream.on or not stream.given:
        return ()
    names = ", ".join(f'"{name}"' for name in stream.given)
    return (f'"{root}.expert_stream.enabled" is false: {names} beside it changes nothing',)
