"""What a checkpoint holds, without its data: tensors as named runs of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a tensor's elements are written: a dense dtype or packed blocks.

    `name` is torch's dtype name ("bfloat16") for a dense encoding, ggml's type name ("Q4_1") for a packed one.
    `block_elements` elements take `block_bytes` bytes; a dense encoding has blocks of one element.
    """

    name: str
    block_elements: int
    block_bytes: int

    @property
    def packed(self) -> bool:
        return self.block_elements > 1

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` elements, which must be whole blocks."""
        blocks, rest = divmod(elements, self.block_elements)
        assert rest == 0, f"{elements} elements are no whole blocks of {self.name} ({self.block_elements})"
        return blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a checkpoint file, and where in the parameter's bytes it lands.

    `offset` and `length` are bytes in `file` (absolute from its start); `at` is a byte offset in the parameter.
    """

    file: Path
    offset: int
    length: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a checkpoint: `shape` is row-major with the outermost dimension first, for GGUF too."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    extent: Extent

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.extent.length


@dataclass(frozen=True, slots=True)
class HubRevision:
    """One commit of a Hugging Face model `org/name`."""

    model: str
    commit: str


@dataclass(frozen=True)
class Checkpoint:
    """All headers of one model. No tensor data has been read.

    `metadata` is the GGUF key-value store (arrays as Python lists) or, for safetensors, the merged `__metadata__`.
    `folder` is where config.json and the tokenizer lie (safetensors), or the GGUF file's folder. `absent`: where files
    are that have not been downloaded; their paths are those that they will have.
    """

    format: Literal["safetensors", "gguf"]
    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorRecord]
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    absent: HubRevision | None = None

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.tensors.values())
