"""GGUF models, in one file or split into parts, as checkpoints. Only headers are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from gguf import GGML_QUANT_SIZES

from overspill.checkpoint.files import DOWNLOAD_AGAIN
from overspill.checkpoint.gguf_header import GgufHeader, TensorInfo, read_gguf_header
from overspill.checkpoint.records import Checkpoint, Encoding, Extent, TensorRecord
from overspill.errors import CheckpointError

DEFAULT_ALIGNMENT = 32
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

_DENSE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
ENCODINGS = {
    int(ggml_type): Encoding(_DENSE.get(ggml_type.name, ggml_type.name), block_elements, block_bytes)
    for ggml_type, (block_elements, block_bytes) in GGML_QUANT_SIZES.items()
}


def open_gguf(path: Path) -> Checkpoint:
    """The headers of the GGUF model of which `path` is the file, or any one part of a split one.

    `metadata` is the first part's. Raises CheckpointError, by file and tensor, for damage or a missing part.
    """
    header = read_gguf_header(path)
    count = header.metadata.get("split.count", 1)
    headers = [header] if count in (0, 1) else _read_parts(header, count)
    tensors: dict[str, TensorRecord] = {}
    for part in headers:
        for record in _records(part):
            if record.name in tensors:
                raise CheckpointError(
                    f"tensor {record.name!r} stands in {tensors[record.name].extent.file} and in {part.path}"
                )
            tensors[record.name] = record
    promised = headers[0].metadata.get("split.tensors.count", len(tensors))
    if len(headers) > 1 and promised != len(tensors):
        raise CheckpointError(f"{headers[0].path} promises {promised} tensors, its parts hold {len(tensors)}")
    files = tuple(part.path for part in headers)
    return Checkpoint("gguf", path.parent, files, tensors, headers[0].metadata)


def _read_parts(header: GgufHeader, count: object) -> list[GgufHeader]:
    """The headers of all parts in order, given that of any one."""
    path = header.path
    match = PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count!r:.40} parts, which its name does not tell",
            hint="give the parts their names back: model-00001-of-00003.gguf",
        )
    headers = []
    for number in range(1, int(match["count"]) + 1):
        name = f"{match['stem']}-{number:05d}-of-{match['count']}.gguf"
        part_path = path.with_name(name)
        if not part_path.exists():
            raise CheckpointError(f"{part_path} is missing", hint="download the missing part")
        part = header if part_path == path else read_gguf_header(part_path)
        said = part.metadata.get("split.no"), part.metadata.get("split.count")
        if said != (number - 1, count):
            raise CheckpointError(
                f"{part_path} says that it is part {said[0]!r:.40} (from 0) of {said[1]!r:.40}",
                hint="the parts of different models lie together, or one was renamed",
            )
        headers.append(part)
    return headers


def _records(header: GgufHeader) -> list[TensorRecord]:
    alignment = header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{header.path}: general.alignment {alignment!r:.40} is not a power of two")
    data_start = -(-header.end // alignment) * alignment
    records = [_record(header, tensor, alignment, data_start) for tensor in header.tensors]
    end, previous = data_start, ""
    for record in sorted(records, key=lambda record: record.extent.offset):
        if record.nbytes and record.extent.offset < end:
            raise CheckpointError(
                f"{header.path}, tensor {record.name!r}: its data starts at byte {record.extent.offset}, "
                f"inside that of {previous!r}"
            )
        if record.nbytes:
            end, previous = record.extent.offset + record.nbytes, record.name
    return records


def _record(header: GgufHeader, tensor: TensorInfo, alignment: int, data_start: int) -> TensorRecord:
    def refuse(reason: str, *, hint: str | None = None) -> NoReturn:
        raise CheckpointError(f"{header.path}, tensor {tensor.name!r}: {reason}", hint=hint)

    encoding = ENCODINGS.get(tensor.ggml_type)
    if encoding is None:
        refuse(
            f"ggml type {tensor.ggml_type} is unknown or was removed from the format",
            hint="quantize the model again to a type of today, or update the gguf package",
        )
    row_elements = tensor.dims[0] if tensor.dims else 1
    if row_elements % encoding.block_elements:
        refuse(
            f"rows of {row_elements} elements are not whole blocks of {encoding.name} "
            f"({encoding.block_elements} elements)"
        )
    if tensor.offset % alignment:
        refuse(f"its offset {tensor.offset} is not a multiple of the alignment {alignment}")
    elements = 1
    for size in tensor.dims:
        elements *= size
    nbytes = encoding.nbytes(elements)
    offset = data_start + tensor.offset
    if offset + nbytes > header.file_bytes:
        refuse(f"its data ends at byte {offset + nbytes}, the file at {header.file_bytes}", hint=DOWNLOAD_AGAIN)
    return TensorRecord(tensor.name, encoding, tensor.dims[::-1], Extent(header.path, offset, nbytes))
