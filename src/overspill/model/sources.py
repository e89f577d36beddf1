"""Where a parameter's bytes come from: extents of checkpoint files, a conversion of some tensors, or live memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from overspill.checkpoint.records import Extent, TensorRecord
from overspill.errors import CheckpointError
from overspill.model.hf_names import ConversionGroup


@dataclass(frozen=True)
class Extents:
    """The parameter's bytes as they lie in the files, in `dtype`; together the extents fill it without a gap."""

    extents: tuple[Extent, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Conversion:
    """Parameters made from whole checkpoint tensors: read `records`, then `run` gives each of `targets`.

    `run` takes raw uint8 tensors, one for each record in order; the results are new memory in any float dtype.
    """

    records: tuple[TensorRecord, ...]
    targets: tuple[str, ...]
    run: Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]
    why: str


@dataclass(eq=False)
class Live:
    """A tensor that is already in memory (`overspill.offload` of a model that the caller built)."""

    tensor: torch.Tensor | None

    def release(self) -> torch.Tensor:
        """Hand the tensor over, so that it is freed when it has been placed."""
        assert self.tensor is not None, "a live weight is placed once"
        tensor, self.tensor = self.tensor, None
        return tensor


Source = Extents | Conversion | Live


def torch_dtype(record: TensorRecord) -> torch.dtype:
    dtype = getattr(torch, record.encoding.name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{record.extent.file}: tensor {record.name} is stored as {record.encoding.name}, "
            "which torch has no dtype for"
        )
    return dtype


def decode(record: TensorRecord, raw: torch.Tensor) -> torch.Tensor:
    """A dense record's tensor over its raw bytes (uint8 [nbytes]); a view."""
    return raw.view(torch_dtype(record)).view(record.shape)


def single(record: TensorRecord) -> Extents:
    """The source of a parameter that is one checkpoint tensor as it lies."""
    return Extents((record.extent,), torch_dtype(record))


class ConvertedShapes:
    """What conversion groups make, as meta tensors by full name. Layers that are alike are converted once."""

    def __init__(self, model: nn.Module, records: Mapping[str, TensorRecord]) -> None:
        self._model = model
        self._records = records
        self._own = model.state_dict()
        self._known: dict[object, torch.Tensor] = {}
        self._of: dict[str, dict[str, torch.Tensor]] = {}

    def of(self, group: ConversionGroup) -> dict[str, torch.Tensor]:
        """Raises what transformers' operations raise over tensors that do not match."""
        if group.target not in self._of:
            self._of[group.target] = self._made(group)
        return self._of[group.target]

    def _made(self, group: ConversionGroup) -> dict[str, torch.Tensor]:
        own = self._own.get(group.target)
        columns = tuple(
            (pattern, tuple((self._records[name].shape, self._records[name].encoding.name) for name in names))
            for pattern, names in group.sources.items()
        )
        key = (tuple(group.converter.source_patterns), columns, None if own is None else own.shape)
        if key in self._known:
            return {group.target: self._known[key]}
        made = group.convert(self._model, lambda name: meta_of(self._records[name]))
        if made.keys() == {group.target}:
            self._known[key] = made[group.target]
        return made


def converted(
    group: ConversionGroup,
    records: Mapping[str, TensorRecord],
    model: nn.Module,
    shapes: Mapping[str, torch.Tensor],
) -> dict[str, Source]:
    """The sources of a conversion group's parameters, by full name; `shapes` are what it makes.

    Stacked and concatenated tensors become extents, so that a fused parameter, or one expert of it, can be read from
    the original files straight into place. What a conversion really transforms stays a `Conversion`.
    """
    members = [records[name] for name in group.names]
    if len(shapes) == 1:
        (name, shape) = next(iter(shapes.items()))
        extents = _stacked_extents(group, records)
        if extents is not None and len({record.encoding for record in members}) == 1:
            assert sum(e.length for e in extents) == math.prod(shape.shape) * shape.element_size()
            return {name: Extents(extents, torch_dtype(members[0]))}

    def run(raw: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        tensors = {record.name: decode(record, data) for record, data in zip(members, raw, strict=True)}
        return group.convert(model, tensors.__getitem__)

    operations = ", ".join(f"{name}({'' if dim is None else dim})" for name, dim in group.operations)
    conversion = Conversion(tuple(members), tuple(shapes), run, operations)
    return dict.fromkeys(shapes, conversion)


def meta_of(record: TensorRecord) -> torch.Tensor:
    """A tensor of the record's shape and dtype, without data."""
    return torch.empty(record.shape, dtype=torch_dtype(record), device="meta")


def runs_of(source: Extents, begin: int, end: int, at: int = 0) -> list[Extent]:
    """The runs of the files that hold bytes `begin` to `end` of a parameter, for memory where they start at `at`."""
    runs: list[Extent] = []
    for extent in source.extents:
        first, last = max(begin, extent.at), min(end, extent.at + extent.length)
        if first < last:
            _join(runs, extent, first, last, at + first - begin)
    return runs


def runs_by(source: Extents, piece_bytes: int) -> list[list[Extent]]:
    """`runs_of` each `piece_bytes` of a parameter, one piece after the other."""
    pieces: list[list[Extent]] = []
    for extent in sorted(source.extents, key=lambda e: e.at):
        first, end = extent.at, extent.at + extent.length
        while first < end:
            number, into = divmod(first, piece_bytes)
            if number == len(pieces):
                pieces.append([])
            last = min(end, (number + 1) * piece_bytes)
            _join(pieces[number], extent, first, last, into)
            first = last
    return pieces


def _join(runs: list[Extent], extent: Extent, first: int, last: int, at: int) -> None:
    """Add bytes `first` to `last` of a parameter, which `extent` holds, to the last of `runs` or as a new one."""
    offset = extent.offset + first - extent.at
    if runs and runs[-1].file == extent.file and runs[-1].offset + runs[-1].length == offset:
        before = runs.pop()
        runs.append(Extent(before.file, before.offset, before.length + last - first, before.at))
    else:
        runs.append(Extent(extent.file, offset, last - first, at))


def _stacked_extents(group: ConversionGroup, records: Mapping[str, TensorRecord]) -> tuple[Extent, ...] | None:
    """Extents in the fused parameter where the operations only lay whole tensors one after the other.

    [MergeModulelist(0)] stacks E tensors: [E, *]. [MergeModulelist(0), Concatenate(1)] joins several such stacks
    expert by expert: [E, a+b, *]. [Concatenate(0)] joins tensors end to end.
    """
    columns = [[records[name] for name in names] for names in group.sources.values()]
    if group.operations == [("MergeModulelist", 0)] and len(columns) == 1:
        order = columns[0]
    elif group.operations == [("MergeModulelist", 0), ("Concatenate", 1)]:
        if len({len(column) for column in columns}) != 1:
            return None
        order = [record for row in zip(*columns, strict=True) for record in row]
    elif group.operations == [("Concatenate", 0)] and all(len(column) == 1 for column in columns):
        order = [column[0] for column in columns]
    else:
        return None
    extents, at = [], 0
    for record in order:
        extent = record.extent
        extents.append(Extent(extent.file, extent.offset, extent.length, at))
        at += extent.length
    return tuple(extents)
