"""The header of one GGUF file, version 2 or 3, little-endian: key-value pairs and tensor descriptions.

The format is docs/gguf.md of ggml: magic, version, two counts, the pairs, the tensors' names, sizes, types
and offsets, padding to `general.alignment`, the data. Every count and length is held against the file's size
before anything of that size is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overspill.checkpoint.files import DOWNLOAD_AGAIN, HeaderFile, opened
from overspill.checkpoint.sniff import wrong_kind
from overspill.errors import CheckpointError

FIRST_READ_BYTES = 256 << 10
# Far above any known header (a vocabulary of 262 000 tokens takes some 16 MB), far below any memory.
MAX_HEADER_BYTES = 128 << 20
MAX_ARRAY_ELEMENTS = 1 << 24
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
MIN_PAIR_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {
    code: np.dtype(name)
    for code, name in (
        (0, "<u1"),
        (1, "<i1"),
        (2, "<u2"),
        (3, "<i2"),
        (4, "<u4"),
        (5, "<i4"),
        (6, "<f4"),
        (_BOOL, "<u1"),
        (10, "<u8"),
        (11, "<i8"),
        (12, "<f8"),
    )
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header tells it: `dims` innermost first, `offset` in bytes from the data's start."""

    name: str
    dims: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All that a GGUF file says before its data; `end` is the first byte after the tensor descriptions."""

    path: Path
    file_bytes: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    end: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Parses the header of the GGUF file `path`. Raises CheckpointError for any departure from the format."""
    with opened(path) as file:
        return _Parser(file).parse()


class _Parser:
    """Walks once over the header's bytes, which are fetched in growing chunks as far as it gets."""

    def __init__(self, file: HeaderFile) -> None:
        self.file = file
        self.data = bytearray()
        self.at = 0

    def parse(self) -> GgufHeader:
        tensor_count, pair_count = self.preamble()
        metadata: dict[str, Any] = {}
        for index in range(pair_count):
            key = self.string(f"the name of key {index}")
            if not key or key in metadata:
                raise self.error(f"key {key!r} is empty" if not key else f"key {key!r} stands twice")
            metadata[key] = self.value(self.u32(f"the type of {key!r}"), f"the value of {key!r}")
        tensors: dict[str, TensorInfo] = {}
        for index in range(tensor_count):
            tensor = self.tensor(index)
            if tensor.name in tensors:
                raise self.error(f"tensor {tensor.name!r} stands twice")
            tensors[tensor.name] = tensor
        return GgufHeader(self.file.path, self.file.size, metadata, list(tensors.values()), self.at)

    def preamble(self) -> tuple[int, int]:
        """Magic and version, judged; returns the numbers of tensors and of key-value pairs."""
        path = self.file.path
        head = self.file.read(0, 64)
        if head[:4] != b"GGUF":
            raise wrong_kind(path, "a GGUF file", head)
        self.take(4, "the magic")
        version = self.u32("the version")
        if version and version & 0xFFFF == 0:
            raise CheckpointError(
                f"{path} is a big-endian GGUF file", hint="get the little-endian file of the same model"
            )
        if version not in (2, 3):
            raise CheckpointError(
                f"{path} has GGUF version {version}; 2 and 3 are read",
                hint="convert the model again with a current llama.cpp",
            )
        tensor_count = self.count("the number of tensors", MIN_TENSOR_BYTES)
        return tensor_count, self.count("the number of keys", MIN_PAIR_BYTES)

    def tensor(self, index: int) -> TensorInfo:
        name = self.string(f"the name of tensor {index}")
        dimensions = self.u32(f"the number of dimensions of tensor {name!r}")
        if dimensions > MAX_DIMENSIONS:
            raise self.error(f"tensor {name!r} has {dimensions} dimensions; ggml knows {MAX_DIMENSIONS}")
        what = f"the description of tensor {name!r}"
        start = self.take(8 * dimensions + 12, what)
        *dims, ggml_type, offset = struct.unpack_from(f"<{dimensions}QIQ", self.data, start)
        return TensorInfo(name, tuple(dims), ggml_type, offset)

    def value(self, code: int, what: str, depth: int = 0) -> Any:
        if code == _STRING:
            return self.string(what)
        if code == _ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise self.error(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
            return self.array(what, depth + 1)
        if code not in _NUMBERS:
            raise self.error(f"{what} has the unknown type {code}")
        return self.numbers(code, 1, what)[0]

    def array(self, what: str, depth: int) -> list[Any]:
        code = self.u32(f"the element type of {what}")
        least_bytes = {_STRING: 8, _ARRAY: 12}.get(code) or (_NUMBERS[code].itemsize if code in _NUMBERS else 1)
        count = self.count(f"the length of {what}", least_bytes)
        if count > MAX_ARRAY_ELEMENTS:
            raise self.error(f"{what} has {count} elements; {MAX_ARRAY_ELEMENTS} are the limit")
        if code == _STRING:
            return self.strings(count, what)
        if code in _NUMBERS:
            return self.numbers(code, count, what)
        return [self.value(code, f"{what}[{index}]", depth) for index in range(count)]

    def numbers(self, code: int, count: int, what: str) -> list[Any]:
        dtype = _NUMBERS[code]
        start = self.take(count * dtype.itemsize, what)
        array = np.frombuffer(self.data, dtype, count, start)
        if code == _BOOL:
            if count and array.max() > 1:
                raise self.error(f"{what} is a boolean that is neither 0 nor 1")
            array = array.astype(bool)
        values: list[Any] = array.tolist()
        return values

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings. Inlined, because a vocabulary has some 100 000 of them."""
        data, at, limit, unpack = self.data, self.at, len(self.data), _U64.unpack_from
        strings = []
        for index in range(count):
            begin = at + 8
            if begin > limit:
                limit = self.fetch(begin, f"{what}[{index}]")
            at = begin + unpack(data, at)[0]
            if at > limit:
                limit = self.fetch(at, f"{what}[{index}]")
            try:
                strings.append(data[begin:at].decode())
            except UnicodeDecodeError as error:
                raise self.error(f"{what}[{index}] is not UTF-8") from error
        self.at = at
        return strings

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def count(self, what: str, least_bytes: int) -> int:
        """A count of things of at least `least_bytes` each: refused if the file cannot hold as many."""
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        if value * least_bytes > self.file.size - self.at:
            raise self.error(f"{what} is {value}, more than the file can hold")
        return value

    def take(self, length: int, what: str) -> int:
        """Makes the next `length` bytes available and steps over them; returns where they start in `data`."""
        start = self.at
        if start + length > len(self.data):
            self.fetch(start + length, what)
        self.at = start + length
        return start

    def fetch(self, end: int, what: str) -> int:
        """Reads on, in doubling steps, until `data` reaches to byte `end` of the file; returns its length."""
        have, size = len(self.data), self.file.size
        if end > size:
            raise self.error(f"{what} ends at byte {end}, the file at byte {size}")
        if end > MAX_HEADER_BYTES:
            raise self.error(f"{what} lies beyond the first {MAX_HEADER_BYTES} bytes, where no header reaches")
        goal = min(max(end, 2 * have, FIRST_READ_BYTES), size)
        self.data += self.file.read(have, goal - have)
        if len(self.data) < end:
            raise self.error(f"the file shrank from {size} to {len(self.data)} bytes while it was read")
        return len(self.data)

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {reason} (near byte {self.at})", hint=DOWNLOAD_AGAIN)
