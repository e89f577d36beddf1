"""The header of one safetensors file, read without touching its data.

The format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON object of
`name: {dtype, shape, data_offsets}` with an optional `__metadata__` of strings, then the data. Offsets count
from the data's first byte; the data is indexed entirely, without holes or overlap.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.checkpoint.files import DOWNLOAD_AGAIN, HeaderFile, opened
from overspill.checkpoint.records import Encoding, Extent, TensorRecord
from overspill.checkpoint.sniff import HEAD_BYTES, MAX_SAFETENSORS_HEADER_BYTES, wrong_kind
from overspill.errors import CheckpointError

LENGTH_BYTES = 8
MAX_DIMENSIONS = 64

ENCODINGS = {
    dtype: Encoding(name, block_elements=1, block_bytes=size)
    for dtype, name, size in (
        ("BOOL", "bool", 1),
        ("U8", "uint8", 1),
        ("I8", "int8", 1),
        ("F8_E5M2", "float8_e5m2", 1),
        ("F8_E4M3", "float8_e4m3fn", 1),
        ("F8_E8M0", "float8_e8m0fnu", 1),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
        ("I16", "int16", 2),
        ("U16", "uint16", 2),
        ("F16", "float16", 2),
        ("BF16", "bfloat16", 2),
        ("I32", "int32", 4),
        ("U32", "uint32", 4),
        ("F32", "float32", 4),
        ("I64", "int64", 8),
        ("U64", "uint64", 8),
        ("F64", "float64", 8),
        ("C64", "complex64", 8),
    )
}


@dataclass(frozen=True, slots=True)
class Shard:
    """What one safetensors file holds: its tensors in the order of their bytes."""

    path: Path
    tensors: dict[str, TensorRecord]
    metadata: dict[str, str]


def read_shard(path: Path) -> Shard:
    """The header of the safetensors file `path`. Raises CheckpointError for any departure from the format."""
    with opened(path) as file:
        return shard_of(file)


def shard_of(file: HeaderFile) -> Shard:
    """As `read_shard`, of a file that is open."""
    path = file.path
    header, data_start = _read_header(file)
    metadata = _metadata(path, header.pop("__metadata__", None))
    data_bytes = file.size - data_start
    records = [_record(path, name, info, data_start, data_bytes) for name, info in header.items()]
    records.sort(key=lambda record: (record.extent.offset, record.extent.length))
    _check_layout(path, records, data_start, data_bytes)
    return Shard(path, {record.name: record for record in records}, metadata)


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`json.loads`'s object_pairs_hook that raises ValueError for a repeated key."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{key!r} stands {count} times")
    return mapping


def _read_header(file: HeaderFile) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and the offset of the data in the file."""
    path = file.path
    head = file.read(0, HEAD_BYTES)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    data_start = LENGTH_BYTES + length
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        raise wrong_kind(path, "a safetensors file", head)
    if length > MAX_SAFETENSORS_HEADER_BYTES:
        raise CheckpointError(
            f"{path} claims a header of {length} bytes; the format allows {MAX_SAFETENSORS_HEADER_BYTES}",
            hint=DOWNLOAD_AGAIN,
        )
    if data_start > file.size:
        raise CheckpointError(
            f"{path} is cut short: its header ends at byte {data_start}, the file at byte {file.size}",
            hint=DOWNLOAD_AGAIN,
        )
    text = file.read(LENGTH_BYTES, length)
    try:
        # Decoded here because json.loads would accept UTF-16 and UTF-32 too.
        header = json.loads(text.decode(), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that is not valid JSON: {error}") from error
    assert isinstance(header, dict)
    return header, data_start


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise CheckpointError(f"{path} has a __metadata__ that is not a mapping of strings to strings")
    return value


def _record(path: Path, name: str, info: Any, data_start: int, data_bytes: int) -> TensorRecord:
    if type(info) is not dict:
        raise _fault(path, name, f"its entry is not an object but {info!r:.80}")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    encoding = ENCODINGS.get(dtype) if type(dtype) is str else None
    if encoding is None:
        raise _fault(path, name, f"dtype {dtype!r:.80} is unknown", hint=f"known: {', '.join(ENCODINGS)}")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise _fault(path, name, f"shape {shape!r:.80} is not a list of at most {MAX_DIMENSIONS} sizes")
    for size in shape:
        if type(size) is not int or size < 0:
            raise _fault(path, name, f"shape {shape!r:.200} has a size that is not a non-negative integer")
    if type(offsets) is not list or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        raise _fault(path, name, f"data_offsets {offsets!r:.80} are not two integers")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise _fault(path, name, f"data_offsets {offsets!r:.200} are reversed or negative")
    nbytes = math.prod(shape) * encoding.block_bytes
    if nbytes != end - begin:
        raise _fault(
            path, name, f"{dtype} of shape {shape!r:.200} takes {nbytes} bytes, its data_offsets span {end - begin}"
        )
    if end > data_bytes:
        raise _fault(
            path,
            name,
            f"its data ends at byte {data_start + end}, the file at {data_start + data_bytes}",
            hint=DOWNLOAD_AGAIN,
        )
    return TensorRecord(name, encoding, tuple(shape), Extent(path, data_start + begin, nbytes))


def _fault(path: Path, name: str, reason: str, *, hint: str | None = None) -> CheckpointError:
    return CheckpointError(f"{path}, tensor {name!r}: {reason}", hint=hint)


def _check_layout(path: Path, records: list[TensorRecord], data_start: int, data_bytes: int) -> None:
    """Holds `records`, ordered by offset, against the rule that they cover the data exactly once."""
    at, previous = data_start, "__metadata__"
    for record in records:
        begin = record.extent.offset
        if begin < at:
            raise CheckpointError(
                f"{path}, tensor {record.name!r}: its data starts at byte {begin}, inside that of {previous!r}"
            )
        if begin > at:
            raise CheckpointError(
                f"{path}, tensor {record.name!r}: bytes {at} to {begin} before its data belong to no tensor"
            )
        at, previous = begin + record.extent.length, record.name
    if at != data_start + data_bytes:
        raise CheckpointError(f"{path}: {data_start + data_bytes - at} bytes at the end belong to no tensor")
