"""An entry of converted weights in the making: by one process, where there is room, and seen when it is whole."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from overspill.checkpoint.converted import (
    DIR_VARIABLE,
    FILE_NAME,
    LIMIT_VARIABLE,
    USED_NAME,
    ConvertedFolder,
    Entry,
    bytes_in,
)
from overspill.checkpoint.file_locks import lock_file
from overspill.config.sizes import format_bytes
from overspill.errors import CapacityError

_LOCK, _PART = ".lock", ".part"

logger = logging.getLogger("overspill")


@contextmanager
def making(folder: ConvertedFolder, key: str) -> Iterator[None]:
    """Only one process is in here for `key`; others wait, and say so. Raises ConfigError."""
    path = folder.path / f"{key}{_LOCK}"

    def waiting() -> None:
        logger.info("another process converts the same weights: waiting for it (%s)", path)

    with folder.writing():
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = lock_file(path, waiting=waiting)
    assert lock is not None
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def new_entry(folder: ConvertedFolder, key: str, nbytes: int) -> Iterator[Path]:
    """Inside `making`: a file of `nbytes` zeros, to be filled and synced; the entry, unless something is raised.

    Raises CapacityError where the limit or the disk does not allow it, ConfigError where the folder cannot be written.
    """
    part = folder.path / f"{key}{_PART}"
    with folder.writing(), folder.locked():
        shutil.rmtree(part, ignore_errors=True)
        _sweep(folder)
        _make_room(folder, nbytes)
        part.mkdir()
        (part / USED_NAME).touch()
        with (part / FILE_NAME).open("wb") as file:
            file.truncate(nbytes)  # counted by others from now on
    try:
        yield part / FILE_NAME
        with folder.writing(), folder.locked():
            shutil.rmtree(folder.path / key, ignore_errors=True)
            _sync(part)
            part.rename(folder.path / key)
            _sync(folder.path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def refuse_excess(folder: ConvertedFolder, nbytes: int) -> None:
    """CapacityError where `nbytes` more do not fit, whatever is removed for them."""
    if nbytes > folder.limit_bytes:
        raise _over_limit(folder, nbytes, 0)
    free = _free_bytes(folder.path)
    removable = sum(bytes_in(folder.path / key) for key in folder.entry_keys())
    if nbytes > free + removable:
        raise _disk_too_small(folder, nbytes, free + removable)


def _make_room(folder: ConvertedFolder, nbytes: int) -> None:
    """Remove entries not in use, the least recently used first. CapacityError, and none goes, if that does not help."""
    entries = sorted(folder.entries(), key=lambda entry: entry.used_at)
    taken = sum(entry.nbytes for entry in entries) + sum(map(bytes_in, folder.path.glob(f"*{_PART}")))
    free = _free_bytes(folder.path)
    with ExitStack() as locks:
        going: list[Entry] = []
        gained = 0
        for entry in entries:
            if gained >= max(taken + nbytes - folder.limit_bytes, nbytes - free):
                break
            lock = lock_file(folder.path / entry.key / USED_NAME, create=False, wait=False)
            if lock is not None:
                locks.enter_context(lock)
                going.append(entry)
                gained += entry.nbytes
        if taken - gained + nbytes > folder.limit_bytes:
            raise _over_limit(folder, nbytes, taken - gained)
        if nbytes > free + gained:
            raise _disk_too_small(folder, nbytes, free + gained)
        for entry in going:
            logger.info("conversion cache: %s (%s) goes, to make room", entry.key[:12], format_bytes(entry.nbytes))
            shutil.rmtree(folder.path / entry.key)


def _sweep(folder: ConvertedFolder) -> None:
    """Remove what processes left that ended in the middle: their locks are free."""
    for lock_path in folder.path.glob(f"*{_LOCK}"):
        if (lock := lock_file(lock_path, create=False, wait=False)) is not None:
            with lock:
                shutil.rmtree(lock_path.with_suffix(_PART), ignore_errors=True)
                lock_path.unlink()


def _over_limit(folder: ConvertedFolder, nbytes: int, used_bytes: int) -> CapacityError:
    beside = f" beside {format_bytes(used_bytes)} that are in use" if used_bytes else ""
    return CapacityError(
        f"disk: {format_bytes(nbytes)} of converted weights do not fit the cache {folder.path}, whose limit is "
        f"{format_bytes(folder.limit_bytes)}{beside}",
        hint=f"a higher limit ({LIMIT_VARIABLE}), or a checkpoint in safetensors and in the dtype that is computed in, "
        "which needs no conversion",
    )


def _disk_too_small(folder: ConvertedFolder, nbytes: int, free: int) -> CapacityError:
    return CapacityError(
        f"disk: {format_bytes(nbytes)} of converted weights do not fit the disk of the cache {folder.path}, which has "
        f"room for {format_bytes(free)}",
        hint=f"free some, or name a folder on another disk ({DIR_VARIABLE})",
    )


def _free_bytes(path: Path) -> int:
    """Of the disk on which `path` is, or will be."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(there).free


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
