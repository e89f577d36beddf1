"""Locks between processes: `flock` on files that may be removed while someone waits for them.

A lock ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class FileLock:
    """A lock that is held until `release`, or until nobody has this object any more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closing = weakref.finalize(self, os.close, fd)

    def release(self) -> None:
        self._closing()

    def touch(self) -> None:
        """Set the file's time of change to now."""
        os.utime(self._fd)

    def is_at(self, path: Path) -> bool:
        """Whether what is locked is the file that stands at `path` now."""
        try:
            there = path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._fd), there)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_file(
    path: Path,
    *,
    shared: bool = False,
    create: bool = True,
    wait: bool = True,
    waiting: Callable[[], None] | None = None,
) -> FileLock | None:
    """The lock on the file at `path`; None where it is not there (and not to be created), or held and not waited for.

    `waiting` is called once before it is waited for. What is locked is the file that stands at `path` then, not one
    that was removed meanwhile. Raises OSError.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        try:
            lock = FileLock(os.open(path, flags, 0o666))
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            fcntl.flock(lock._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                lock.release()
                return None
            if waiting is not None:
                waiting()
                waiting = None
            fcntl.flock(lock._fd, kind)
        except OSError:
            lock.release()
            raise
        if lock.is_at(path):
            return lock
        lock.release()
