"""Fills memory that a plan has laid out: extents read straight into place, conversions made one at a time.

Peak memory is what the plan places, plus the largest conversion and its result, plus the readers' buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overspill.checkpoint import Extent, verify_unchanged
from overspill.errors import UnsupportedModelError
from overspill.machine.device import Device
from overspill.machine.reads import FileReader
from overspill.model.sources import Conversion, Extents, Live
from overspill.model.weights import ModelMap, Role, Weight
from overspill.plan.loading import conversion_bytes

_BATCH_BYTES = 64 << 20
_COMPARED_BYTES = 16 << 20

Progress = Callable[[int], None]


@dataclass
class _Job:
    """Bytes to read into `scratch` pieces, and what to do with them then."""

    pieces: list[tuple[Extent, memoryview]]
    place: Callable[[], None]
    scratch_bytes: int


def fill(
    targets: Mapping[str, torch.Tensor],
    model: ModelMap,
    device: Device,
    *,
    progress: Progress | None = None,
) -> int:
    """Fill `targets[weight.full]` for every weight of `model` that has one; returns the bytes read from files.

    Targets may lie in host or device memory. A live model lets go of each tensor once it is copied, so peak memory is
    what is placed plus the model's largest weight. Raises CheckpointError where a file is short, unreadable, or has
    changed since its header was read.
    """
    weights = tuple(weight for weight in model.weights if weight.full in targets)
    for weight in weights:
        if isinstance(weight.source, Live):
            device.upload(targets[weight.full], weight.source.release())
            assign(model.skeleton, weight, torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
    if model.checkpoint is None:
        return 0
    verify_unchanged(model.stamps)
    with FileReader() as reader, ThreadPoolExecutor(1, thread_name_prefix="overspill-load") as ahead:
        straight = [piece for weight in weights for piece in _straight(weight, targets[weight.full])]
        reader.read(straight, progress)
        for weight in model.weights:  # wherever they will be
            for twin in weight.twins:
                _refuse_other_values(reader, weight, twin)
        waiting: tuple[_Job, Future[None]] | None = None
        for job in _jobs(weights, targets, device):
            if waiting is not None and waiting[0].scratch_bytes + job.scratch_bytes > 2 * _BATCH_BYTES:
                _finish(waiting)
                waiting = None
            following = (job, ahead.submit(reader.read, job.pieces, progress))
            if waiting is not None:
                _finish(waiting)
            waiting = following
        if waiting is not None:
            _finish(waiting)
        return reader.bytes_read


def assign(model: nn.Module, weight: Weight, tensor: torch.Tensor) -> None:
    """Make `tensor` the parameter (or buffer) under all of the weight's names: one object, as tying wants it."""
    parameter = nn.Parameter(tensor, requires_grad=False) if weight.role is not Role.BUFFER else None
    for name in (weight.full, *weight.aliases):
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if parameter is None:
            module._buffers[attribute] = tensor
        else:
            module._parameters[attribute] = parameter


def _refuse_other_values(reader: FileReader, weight: Weight, twin: Extents) -> None:
    """UnsupportedModelError where the checkpoint holds other bytes under a tied name than under the first."""
    source = weight.source
    assert isinstance(source, Extents)
    ours, theirs = (list(_chunks(side.extents)) for side in (source, twin))
    same = source.dtype == twin.dtype and [e.length for e in ours] == [e.length for e in theirs]
    for pair in zip(ours, theirs, strict=False) if same else ():
        read = [bytearray(extent.length) for extent in pair]
        reader.read([(extent, memoryview(data)) for extent, data in zip(pair, read, strict=True)])
        same = same and read[0] == read[1]
    if not same:
        raise UnsupportedModelError(
            f"{weight.full} and {', '.join(weight.aliases)} are tied by the configuration, and the checkpoint holds "
            "different values for them",
            hint='"tie_word_embeddings": false in config.json, if the checkpoint is right',
        )


def _chunks(extents: Sequence[Extent]) -> Iterator[Extent]:
    for extent in extents:
        for start in range(0, extent.length, _COMPARED_BYTES):
            yield Extent(extent.file, extent.offset + start, min(_COMPARED_BYTES, extent.length - start))


def _finish(waiting: tuple[_Job, Future[None]]) -> None:
    job, read = waiting
    read.result()
    job.place()


def _straight(weight: Weight, target: torch.Tensor) -> Iterator[tuple[Extent, memoryview]]:
    """Pieces that go from the file to where they stay: same dtype, and memory that the CPU can write."""
    if not (isinstance(weight.source, Extents) and _fits(weight, target)):
        return
    into = byte_view(target)
    for extent in weight.source.extents:
        yield extent, into[extent.at : extent.at + extent.length]


def _fits(weight: Weight, target: torch.Tensor) -> bool:
    return isinstance(weight.source, Extents) and weight.source.dtype == target.dtype and target.device.type == "cpu"


def _jobs(weights: Sequence[Weight], targets: Mapping[str, torch.Tensor], device: Device) -> Iterator[_Job]:
    """What must pass through scratch memory: casts and uploads in batches, conversions one by one."""
    seen: set[int] = set()
    batch: list[Weight] = []
    for weight in sorted(weights, key=_conversion_bytes, reverse=True):
        source = weight.source
        if isinstance(source, Conversion):
            if id(source) not in seen:
                seen.add(id(source))
                yield _conversion(source, targets, device)
        elif isinstance(source, Extents) and not _fits(weight, targets[weight.full]):
            if batch and sum(map(_file_bytes, batch)) + _file_bytes(weight) > _BATCH_BYTES:
                yield _batch(batch, targets, device)
                batch = []
            batch.append(weight)
    if batch:
        yield _batch(batch, targets, device)


def _conversion_bytes(weight: Weight) -> int:
    """The largest conversion comes first, while little else is in its place."""
    return conversion_bytes(weight.source) if isinstance(weight.source, Conversion) else 0


def _file_bytes(weight: Weight) -> int:
    assert isinstance(weight.source, Extents)
    return sum(extent.length for extent in weight.source.extents)


def _batch(weights: list[Weight], targets: Mapping[str, torch.Tensor], device: Device) -> _Job:
    pieces: list[tuple[Extent, memoryview]] = []
    scratch: list[tuple[Weight, torch.Tensor]] = []
    for weight in weights:
        assert isinstance(weight.source, Extents)
        raw = torch.empty(_file_bytes(weight), dtype=torch.uint8)
        into = byte_view(raw)
        pieces += [(e, into[e.at : e.at + e.length]) for e in weight.source.extents]
        scratch.append((weight, raw.view(weight.source.dtype).view(weight.shape)))

    def place() -> None:
        for weight, tensor in scratch:
            target = targets[weight.full]
            device.upload(target, tensor.to(target.dtype))

    return _Job(pieces, place, sum(len(into) for _, into in pieces))


def _conversion(source: Conversion, targets: Mapping[str, torch.Tensor], device: Device) -> _Job:
    raw = [torch.empty(record.nbytes, dtype=torch.uint8) for record in source.records]
    pieces = [(r.extent, byte_view(data)) for r, data in zip(source.records, raw, strict=True)]

    def place() -> None:
        results = source.run(raw)
        raw.clear()
        for name, tensor in results.items():
            if (target := targets.get(name)) is not None:
                assert tensor.shape == target.shape, f"{name}: converted to {tuple(tensor.shape)}"
                device.upload(target, tensor.to(target.dtype))

    return _Job(pieces, place, sum(record.nbytes for record in source.records))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The writable bytes of a contiguous CPU tensor."""
    array: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(array)
