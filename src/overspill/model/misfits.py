"""Checkpoint tensors that do not make the parameters they belong to; told all at once, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from overspill.checkpoint.records import TensorRecord
from overspill.errors import UnsupportedModelError
from overspill.model.hf_names import ConversionGroup
from overspill.model.sources import ConvertedShapes

_LISTED = 8
_PLAIN_FLOATS = {"float64", "float32", "float16", "bfloat16"}


def refuse_misfits(
    skeleton: nn.Module,
    renamed: Mapping[str, str],
    groups: Sequence[ConversionGroup],
    records: Mapping[str, TensorRecord],
    shapes: ConvertedShapes,
) -> None:
    """UnsupportedModelError where a shape differs, a stack is incomplete, or elements are codes without a decoder.

    `renamed` gives each parameter's one tensor, `groups` are those made of several.
    """
    own = skeleton.state_dict()
    pairs = [(target, name) for target, name in renamed.items()]
    pairs += [(group.target, name) for group in groups for name in group.names]
    coded = [
        f"{name} ({records[name].encoding.name})"
        for target, name in pairs
        if own[target].is_floating_point() and records[name].encoding.name not in _PLAIN_FLOATS
    ]
    if coded:
        raise UnsupportedModelError(
            f"the checkpoint is quantised: {_few(coded)} have values only together with their scales",
            hint="give an unquantised checkpoint of the model, or a GGUF file of it",
        )
    wrong = [
        f"{target} {list(records[name].shape)} (model: {list(own[target].shape)})"
        for target, name in renamed.items()
        if records[name].shape != tuple(own[target].shape)
    ]
    wrong += [fault for group in groups for fault in _group_faults(group, own, shapes)]
    if wrong:
        raise UnsupportedModelError(
            f"{len(wrong)} parameters do not fit the checkpoint: {_few(wrong)}",
            hint="the checkpoint is incomplete, or its config.json belongs to other weights",
        )


def _group_faults(group: ConversionGroup, own: Mapping[str, torch.Tensor], shapes: ConvertedShapes) -> Iterator[str]:
    try:
        made = shapes.of(group)
    except (RuntimeError, ValueError, IndexError) as error:  # transformers' operations, on tensors that do not match
        yield f"{group.target} ({str(error).strip()}{_missing(group, own)})"
        return
    for name, tensor in made.items():
        if name in own and tensor.shape != own[name].shape:
            yield f"{name} {list(tensor.shape)} (model: {list(own[name].shape)}{_missing(group, own)})"


def _missing(group: ConversionGroup, own: Mapping[str, torch.Tensor]) -> str:
    """What the group lacks, to stand behind its fault."""
    stacked = own[group.target].shape[0] if own[group.target].dim() else 0
    missing = [pattern for pattern in group.converter.source_patterns if pattern not in group.sources]
    missing += [n for names in group.sources.values() if len(names) > 1 for n in _gaps(names, stacked)]
    return f"; missing: {_few(missing)}" if missing else ""


def _gaps(names: Sequence[str], count: int) -> list[str]:
    """Names that would complete a stack of `count` tensors, whose names differ in one number."""
    parts = [name.split(".") for name in names]
    varying = [at for at, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len(varying) != 1:
        return []
    (at,) = varying
    present = {part[at] for part in parts}
    return [
        ".".join([*parts[0][:at], str(number), *parts[0][at + 1 :]])
        for number in range(count)
        if str(number) not in present
    ]


def _few(items: Sequence[str]) -> str:
    return ", ".join(items[:_LISTED]) + (f" and {len(items) - _LISTED} more" if len(items) > _LISTED else "")
