"""The layout of a safetensors file that is about to be written, piece by piece.

The format allows no bytes that belong to no tensor, so what keeps tensors at multiples of ALIGNMENT is tensors too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overspill.checkpoint.safetensors import ENCODINGS, LENGTH_BYTES

ALIGNMENT = 4096
"""A tensor can be read straight into memory that is aligned as a disk wants it."""
PADDING = "__padding_{}__"
_DTYPES = {encoding.name: (dtype, encoding.block_bytes) for dtype, encoding in ENCODINGS.items()}


@dataclass(frozen=True)
class Layout:
    """`head` stands at the file's start, each tensor at its byte of `offsets`; the file has `nbytes`."""

    head: bytes
    offsets: Mapping[str, int]
    nbytes: int


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """Where `tensors`, each (name, torch's dtype name, shape), lie in a file, in their order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begins: dict[str, int] = {}
    at = 0
    for number, (name, dtype, shape) in enumerate(tensors):
        if gap := -at % ALIGNMENT:
            header[PADDING.format(number)] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
            at += gap
        written, itemsize = _DTYPES[dtype]
        begins[name] = at
        end = at + math.prod(shape) * itemsize
        header[name] = {"dtype": written, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return Layout(head, {name: len(head) + begin for name, begin in begins.items()}, len(head) + at)
