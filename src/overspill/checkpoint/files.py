"""Opening a checkpoint file to look at its header, and saying by name what went wrong."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from overspill.errors import CheckpointError

DOWNLOAD_AGAIN = "the file is damaged or its download was cut short: download it again"


class HeaderFile(Protocol):
    """A file whose header is read, wherever it is. `size` is in bytes; `path` is where it lies, or will."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`; fewer only where the file ends."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that is open while its header is read; `size` is as of opening."""

    path: Path
    fd: int
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`; fewer only where the file ends."""
        parts = []
        while length > 0 and (part := os.pread(self.fd, length, offset)):
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """`path` open for reading. Raises CheckpointError for whatever cannot be opened or read."""
    # Without O_NONBLOCK a named pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        yield OpenFile(path, fd, status.st_size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
