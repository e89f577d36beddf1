"""Weights that a conversion transforms, made once into a file of the cache, and read from there as from a checkpoint.

Memory holds one conversion at a time, and the readers' buffers.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

import torch

from overspill.checkpoint import Extent, FileStamp, file_stamp, verify_unchanged, verify_untouched
from overspill.checkpoint.contents import span_of
from overspill.checkpoint.converted import NO_DIGEST, ConvertedFolder, Held, entry_key, entry_metadata
from overspill.checkpoint.converted_making import making, new_entry
from overspill.checkpoint.safetensors import read_shard
from overspill.checkpoint.safetensors_layout import Layout, lay_out
from overspill.config import format_bytes
from overspill.errors import CapacityError, CheckpointError
from overspill.machine.reads import FileReader
from overspill.model.converted import origins, weight_keys
from overspill.model.sources import Conversion, Extents, runs_of
from overspill.model.weights import ModelMap, Weight
from overspill.offload.loader import Progress, byte_view

_CHUNK_BYTES = 32 << 20
_FULL = (ENOSPC, EDQUOT, EFBIG)

logger = logging.getLogger("overspill")


@dataclass(frozen=True)
class Converted:
    """Where converted weights lie in files, by name, and the stamps of these. The files stay as long as this does."""

    sources: Mapping[str, Extents]
    stamps: Mapping[Path, FileStamp]
    held: tuple[Held, ...]


def convert(weights: Sequence[Weight], model: ModelMap, *, progress: Progress | None = None) -> Converted:
    """The files that hold `weights`, which need a conversion; what the cache does not have is made.

    Another process that makes the same is waited for. `progress` hears the bytes that conversions read. Raises
    CheckpointError where the checkpoint cannot be read or changed, CapacityError where limit or disk do not hold the
    result, ConfigError where the folder cannot be written.
    """
    if not weights:
        return Converted({}, {}, ())
    folder = ConvertedFolder.of_environment(os.environ)
    verify_unchanged(model.stamps)
    keys = weight_keys(weights, model, _contents(weights, model, folder))
    held = folder.find(keys.values())
    while missing := _without(weights, keys, held):
        key = entry_key(keys[weight.full] for weight in missing)
        with making(folder, key):
            held += folder.find(keys[weight.full] for weight in missing)
            if _without(weights, keys, held) == missing:  # no one else made any of them meanwhile
                _make(key, missing, keys, model, folder, progress)
    return _converted(weights, keys, held)


def verify(folder: ConvertedFolder, key: str) -> list[str]:
    """The names of those weights of entry `key` whose bytes are others than were written. All of it is read.

    Raises CheckpointError where nothing can be known: the header is damaged, or the file cannot be read.
    """
    with folder.reading(key) as contents:
        found = _hashed([record.extent for record in contents.records.values()])
        weights = contents.records.items()
        return sorted(record.name for weight, record in weights if found[record.extent] != contents.sha256[weight])


def _without(weights: Sequence[Weight], keys: Mapping[str, str], held: Iterable[Held]) -> list[Weight]:
    there = {key for entry in held for key in entry.records}
    return [weight for weight in weights if keys[weight.full] not in there]


def _converted(weights: Sequence[Weight], keys: Mapping[str, str], held: Sequence[Held]) -> Converted:
    records = {key: record for entry in held for key, record in entry.records.items()}
    sources = {w.full: Extents((records[keys[w.full]].extent,), w.dtype) for w in weights}
    return Converted(sources, {entry.file: file_stamp(entry.file) for entry in held}, tuple(held))


# -- what the checkpoint holds -----------------------------------------------------------------------------------------


def _contents(weights: Sequence[Weight], model: ModelMap, folder: ConvertedFolder) -> dict[Path, dict[str, str]]:
    """SHA-256 of what `weights` are made from, by file and span: as the index knows it, or from the bytes."""
    by_file: dict[Path, dict[str, Extent]] = {}
    for weight in weights:
        for extent in origins(weight):
            by_file.setdefault(extent.file, {})[span_of(extent)] = extent
    known = {file: folder.index.known(file, model.stamps[file]) for file in by_file}
    unknown = [e for file, spans in by_file.items() for span, e in spans.items() if span not in known[file]]
    if not unknown:
        return known
    logger.info(
        "conversion cache: reading %s of the checkpoint, to know its content",
        format_bytes(sum(e.length for e in unknown)),
    )
    found = _hashed(unknown)
    verify_untouched(model.stamps)
    for file in {extent.file for extent in unknown}:
        spans = {span_of(extent): digest for extent, digest in found.items() if extent.file == file}
        known[file] |= spans
        with folder.writing():
            folder.index.learn(file, model.stamps[file], spans)
    return known


def _hashed(extents: Sequence[Extent]) -> dict[Extent, str]:
    """SHA-256 of each; one batch is read while the one before is hashed."""
    hashes = {extent: hashlib.sha256() for extent in extents}
    with FileReader() as reader, ThreadPoolExecutor(1, thread_name_prefix="overspill-hash") as beside:
        hashing = beside.submit(int)
        for batch in _batches(extents):
            read = [(extent, chunk, bytearray(chunk.length)) for extent, chunk in batch]
            reader.read([(chunk, memoryview(data)) for _, chunk, data in read])
            hashing.result()

            def hash_batch(read: list[tuple[Extent, Extent, bytearray]] = read) -> int:
                for extent, _, data in read:
                    hashes[extent].update(data)
                return len(read)

            hashing = beside.submit(hash_batch)
        hashing.result()
    return {extent: found.hexdigest() for extent, found in hashes.items()}


def _batches(extents: Sequence[Extent]) -> Iterator[list[tuple[Extent, Extent]]]:
    """Parts of `extents` in order, each with the one it is of, of up to _CHUNK_BYTES together."""
    batch: list[tuple[Extent, Extent]] = []
    room = _CHUNK_BYTES
    for extent in extents:
        at = 0
        while at < extent.length:
            length = min(room, extent.length - at)
            batch.append((extent, Extent(extent.file, extent.offset + at, length)))
            at, room = at + length, room - length
            if room == 0:
                yield batch
                batch, room = [], _CHUNK_BYTES
    if batch:
        yield batch


# -- making -----------------------------------------------------------------------------------------------------------


def _make(
    key: str,
    weights: Sequence[Weight],
    keys: Mapping[str, str],
    model: ModelMap,
    folder: ConvertedFolder,
    progress: Progress | None,
) -> None:
    tensors = [(w.full, str(w.dtype).removeprefix("torch."), w.shape) for w in weights]
    files = {extent.file for weight in weights for extent in origins(weight)}
    named = {w.full: keys[w.full] for w in weights}

    def laid_out(sha256: Mapping[str, str]) -> Layout:
        return lay_out(tensors, entry_metadata(named, sha256, sorted(files)))

    layout = laid_out(dict.fromkeys(named, NO_DIGEST))
    with new_entry(folder, key, layout.nbytes) as path:
        logger.info(
            "converting %d weights (%s), once: %s", len(weights), format_bytes(layout.nbytes), folder.path / key
        )
        with _File(path, layout) as file, FileReader() as reader:
            for weight in weights:
                if isinstance(weight.source, Extents):
                    _cast(weight, reader, file, progress)
            for source, targets in _conversions(weights).items():
                _run(source, targets, reader, file, progress)
            file.finish(laid_out(file.sha256()).head)
        read_shard(path)
        verify_untouched(model.stamps)


def _conversions(weights: Sequence[Weight]) -> dict[Conversion, dict[str, Weight]]:
    """Each conversion with those of its results that are wanted."""
    found: dict[Conversion, dict[str, Weight]] = {}
    for weight in weights:
        if isinstance(weight.source, Conversion):
            found.setdefault(weight.source, {})[weight.full] = weight
    return found


def _run(
    source: Conversion, targets: Mapping[str, Weight], reader: FileReader, file: _File, progress: Progress | None
) -> None:
    raw = [torch.empty(record.nbytes, dtype=torch.uint8) for record in source.records]
    reader.read([(r.extent, byte_view(data)) for r, data in zip(source.records, raw, strict=True)], progress)
    results = source.run(raw)
    raw.clear()
    for name, weight in targets.items():
        assert results[name].shape == weight.shape, f"{name}: converted to {tuple(results[name].shape)}"
        file.write(name, 0, results[name].to(weight.dtype))


def _cast(weight: Weight, reader: FileReader, file: _File, progress: Progress | None) -> None:
    """In parts: a cast looks at each element alone."""
    source = weight.source
    assert isinstance(source, Extents)
    nbytes = sum(extent.length for extent in source.extents)
    for begin in range(0, nbytes, _CHUNK_BYTES):
        raw = torch.empty(min(_CHUNK_BYTES, nbytes - begin), dtype=torch.uint8)
        into = byte_view(raw)
        runs = runs_of(source, begin, begin + raw.numel())
        reader.read([(run, into[run.at : run.at + run.length]) for run in runs], progress)
        cast = raw.view(source.dtype).to(weight.dtype)
        file.write(weight.full, begin // source.dtype.itemsize * weight.dtype.itemsize, cast)


class _File:
    """A safetensors file that is filled tensor by tensor. What was written leaves the page cache as it goes."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self._layout = layout
        self._unsynced_bytes = 0
        self._hashes = {name: hashlib.sha256() for name in layout.offsets}
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        """`values`, from byte `begin` of the tensor on. A tensor's parts come in their order."""
        data = byte_view(values.contiguous())
        self._hashes[name].update(data)
        with self._naming(name):
            self._write(data, self._layout.offsets[name] + begin)

    def sha256(self) -> dict[str, str]:
        """Of what was written, by tensor."""
        return {name: found.hexdigest() for name, found in self._hashes.items()}

    def finish(self, head: bytes) -> None:
        """With the header, which is as long as the layout's."""
        assert len(head) == len(self._layout.head)
        with self._naming("the header"):
            self._write(memoryview(head), 0)
            self._sync()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._fd, data[:_CHUNK_BYTES], offset)
            data, offset = data[written:], offset + written
            self._unsynced_bytes += written
            if self._unsynced_bytes >= _CHUNK_BYTES:
                self._sync()

    def _sync(self) -> None:
        """Dirty pages count in a control group's limit, and are not given up before they are written."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced_bytes = 0

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            told = f"{self._path}: writing {name} failed: {error.strerror}"
            if error.errno in _FULL:
                raise CapacityError(
                    f"{told} ({format_bytes(self._layout.nbytes)} of converted weights were to be written)",
                    hint="free some of that disk, or name a folder on another with OVERSPILL_CACHE_DIR",
                ) from error
            raise CheckpointError(told, hint="the disk reports an error: see the kernel's log") from error
