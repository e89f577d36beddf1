"""Safetensors files that make up one model: a single file, a folder, or shards named by an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from overspill.checkpoint.files import DOWNLOAD_AGAIN, opened
from overspill.checkpoint.records import Checkpoint, TensorRecord
from overspill.checkpoint.safetensors import Shard, read_shard, unique_pairs
from overspill.checkpoint.sniff import HEAD_BYTES, wrong_kind
from overspill.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class ShardFiles(Protocol):
    """Where the files of shards are."""

    def has(self, file: Path) -> bool: ...

    def listed(self, folder: Path) -> list[Path]:
        """The .safetensors files of `folder`, by name."""

    def read(self, files: Sequence[Path]) -> Iterable[Shard]:
        """Their headers, in this order."""


class OnDisk:
    """Shards that lie in their folder."""

    def has(self, file: Path) -> bool:
        return file.exists()

    def listed(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.safetensors"))

    def read(self, files: Sequence[Path]) -> Iterable[Shard]:
        return map(read_shard, files)


def open_safetensors(path: Path, shards: ShardFiles | None = None) -> Checkpoint:
    """All headers of the model at `path`: a .safetensors file, an index.json, or a folder of either.

    `shards`: where the files are, if not on disk; an index always is. Raises CheckpointError naming file and tensor
    for damage, missing shards, and names that stand twice.
    """
    shards = shards or OnDisk()
    if not path.is_dir():
        if path.name.endswith(".safetensors.index.json"):
            return _open_index(path, shards)
        return _checkpoint(path.parent, shards.read([path]))
    index, single = path / INDEX_NAME, path / SINGLE_NAME
    if index.exists():
        checkpoint = _open_index(index, shards)
        if shards.has(single) and single not in checkpoint.files:
            raise CheckpointError(
                f"{path} holds two models: {SINGLE_NAME}, and the shards that {INDEX_NAME} names",
                hint="give the path of the one that is meant",
            )
        return checkpoint
    if shards.has(single):
        return _checkpoint(path, shards.read([single]))
    files = shards.listed(path)
    _check_numbering(path, files)
    return _checkpoint(path, shards.read(files))


def _open_index(path: Path, shards: ShardFiles) -> Checkpoint:
    weight_map = _weight_map(path)
    files: dict[str, Path] = {}
    for shard in dict.fromkeys(weight_map.values()):
        parts = PurePosixPath(shard).parts
        if not parts or shard.startswith("/") or ".." in parts or "\0" in shard:
            raise CheckpointError(f"{path} names a shard outside its own folder: {shard!r}")
        file = path.parent / shard
        if not shards.has(file):
            first = next(name for name, where in weight_map.items() if where == shard)
            raise CheckpointError(
                f"{file} is missing; {path.name} says it holds {first!r}", hint="download the missing shard"
            )
        files[shard] = file
    checkpoint = _checkpoint(path.parent, shards.read(list(files.values())))
    _check_promises(path, weight_map, files, checkpoint.tensors)
    return checkpoint


def _weight_map(path: Path) -> dict[str, str]:
    with opened(path) as file:
        if file.size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} has {file.size} bytes; an index of {MAX_INDEX_BYTES} is the limit")
        text = file.read(0, file.size)
    if text.lstrip()[:1] != b"{":
        raise wrong_kind(path, "a safetensors index", text[:HEAD_BYTES])
    try:
        index = json.loads(text.decode(), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint=DOWNLOAD_AGAIN) from error
    weight_map = index.get("weight_map")
    if type(weight_map) is not dict or not all(type(shard) is str for shard in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor names to file names")
    return weight_map


def _check_promises(
    index: Path, weight_map: Mapping[str, str], files: Mapping[str, Path], tensors: Mapping[str, TensorRecord]
) -> None:
    """Every tensor that the index promises lies where it says."""
    for name, shard in weight_map.items():
        record = tensors.get(name)
        if record is None:
            raise CheckpointError(f"{files[shard]} lacks the tensor {name!r} that {index.name} says it holds")
        if record.extent.file is not files[shard]:
            raise CheckpointError(
                f"{index}, tensor {name!r}: promised in {shard}, it lies in {record.extent.file.name}"
            )


def _check_numbering(folder: Path, files: list[Path]) -> None:
    """Without an index the names alone tell of a missing shard: x-00001-of-00003.safetensors."""
    names = {file.name for file in files}
    matches = filter(None, map(_NUMBERED.fullmatch, sorted(names)))
    for stem, count in dict.fromkeys((match["stem"], match["count"]) for match in matches):
        for number in range(1, int(count) + 1):
            shard = f"{stem}-{number:05d}-of-{count}.safetensors"
            if shard not in names:
                raise CheckpointError(f"{folder / shard} is missing", hint="download the missing shard")


def _checkpoint(folder: Path, shards: Iterable[Shard]) -> Checkpoint:
    tensors: dict[str, TensorRecord] = {}
    metadata: dict[str, str] = {}
    files = []
    for shard in shards:
        for name in tensors.keys() & shard.tensors.keys():
            raise CheckpointError(f"tensor {name!r} stands in {tensors[name].extent.file} and in {shard.path}")
        tensors |= shard.tensors
        metadata |= shard.metadata
        files.append(shard.path)
    return Checkpoint("safetensors", folder, tuple(files), tensors, metadata)
