"""A checkpoint file mapped read-only: tensors over the page cache's own pages, shared with other processes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from overspill import _kernels
from overspill.checkpoint import Extent
from overspill.checkpoint.files import opened
from overspill.errors import CheckpointError

_POPULATED_BYTES = 8 << 20


class MappedFile:
    """`path` mapped as it is now. Raises CheckpointError where it cannot be.

    A file that shrinks under it, or a disk that fails, is no bus error here: who reads what is gone reads zeros, and
    `lost_at` then says so. A handler of bus errors that is set afterwards takes that away until `guard()`. Writing into
    its tensors ends the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            try:
                self._mapping = _kernels.Mapping(file.fd, file.size)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be mapped: {error.strerror}") from error
        memory: Any = (ctypes.c_uint8 * file.size).from_address(self._mapping.address)
        memory.mapping = self._mapping  # for as long as a tensor is over it
        self._data = torch.frombuffer(memory, dtype=torch.uint8)

    def tensor(self, extent: Extent, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """`extent`, of this file and at a multiple of the dtype's size in it, as a tensor; keeps the mapping alive."""
        assert extent.file == self.path, extent
        return self._data[extent.offset : extent.offset + extent.length].view(dtype).view(shape)

    @staticmethod
    def guard() -> None:
        """Meet bus errors first again, in all mappings; those of others go to the handler that was set meanwhile."""
        _kernels.guard_mappings()

    @property
    def lost_at(self) -> int | None:
        """The first byte from which on zeros were read for what the file did not give."""
        return self._mapping.lost

    def restore(self) -> None:
        """Map the file anew where it was, so that all its tensors read it again. Raises CheckpointError."""
        with opened(self.path) as file:
            self._mapping.restore(file.fd)

    def populate(self, extent: Extent, progress: Callable[[int], None] | None = None) -> None:
        """Read `extent` into the page cache; `progress` hears the bytes."""
        for start in range(0, extent.length, _POPULATED_BYTES):
            nbytes = min(_POPULATED_BYTES, extent.length - start)
            self._mapping.populate(extent.offset + start, nbytes)
            if progress is not None:
                progress(nbytes)
