"""An entry of converted weights in the making: by one process, where there is room, and seen when it is whole."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from overspill.checkpoint.converted import (
    DIR_VARIABLE,
    FILE_NAME,
    LIMIT_VARIABLE,
    USED_NAME,
    ConvertedFolder,
    Entry,
    is_key,
)
from overspill.checkpoint.file_locks import lock_file
from overspill.checkpoint.own_files import bytes_in, kind_of, take_away
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
            with folder.writing():
                _wait_for_writer(_part(folder, key), waiting)
            yield
        finally:
            if lock.is_at(path):
                path.unlink(missing_ok=True)


@contextmanager
def new_entry(folder: ConvertedFolder, key: str, nbytes: int) -> Iterator[Path]:
    """Inside `making`: a file of `nbytes` zeros, to be filled and synced; the entry, unless something is raised.

    Raises CapacityError where the limit or the disk does not allow it, ConfigError where the folder cannot be written.
    """
    part = _part(folder, key)
    with folder.writing(), folder.locked():
        take_away(part)
        _sweep(folder)
        _make_room(folder, nbytes)
        part.mkdir()
        writer = lock_file(part / USED_NAME, shared=True)
        assert writer is not None
        with (part / FILE_NAME).open("wb") as file:
            file.truncate(nbytes)  # counted by others from now on
    with writer:
        try:
            yield part / FILE_NAME
            with folder.writing(), folder.locked():
                take_away(folder.path / key)
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
    entries = sorted((e for e in folder.entries() if not e.foreign), key=lambda entry: entry.used_at)
    taken = sum(entry.nbytes for entry in entries) + sum(map(bytes_in, _leftovers(folder, _PART)))
    free = _free_bytes(folder.path)
    with ExitStack() as claims:
        going: list[Entry] = []
        gained = 0
        for entry in entries:
            if gained >= max(taken + nbytes - folder.limit_bytes, nbytes - free):
                break
            if (claim := folder.claim(entry.key)) is not None:
                claims.enter_context(claim)
                going.append(entry)
                gained += entry.nbytes
        if taken - gained + nbytes > folder.limit_bytes:
            raise _over_limit(folder, nbytes, taken - gained)
        if nbytes > free + gained:
            raise _disk_too_small(folder, nbytes, free + gained)
        for entry in going:
            logger.info("conversion cache: %s (%s) goes, to make room", entry.key[:12], format_bytes(entry.nbytes))
            take_away(folder.path / entry.key)


def _sweep(folder: ConvertedFolder) -> None:
    """While `locked`: remove what processes left that ended in the middle. Their locks are free."""
    for part in _leftovers(folder, _PART):
        with suppress(OSError):
            if kind_of(part) != "folder":
                take_away(part)
            elif (writer := lock_file(part / USED_NAME, wait=False)) is not None:
                with writer:
                    take_away(part)
    for path in _leftovers(folder, _LOCK):
        with suppress(OSError):
            if (lock := lock_file(path, create=False, wait=False)) is not None:
                with lock:
                    path.unlink()


def _leftovers(folder: ConvertedFolder, suffix: str) -> list[Path]:
    return [path for path in folder.path.glob(f"*{suffix}") if is_key(path.stem)]


def _part(folder: ConvertedFolder, key: str) -> Path:
    return folder.path / f"{key}{_PART}"


def _wait_for_writer(part: Path, waiting: Callable[[], None]) -> None:
    """One may be at it still, whose lock file someone removed."""
    if kind_of(part) == "folder" and kind_of(part / USED_NAME) == "file":
        writer = lock_file(part / USED_NAME, create=False, waiting=waiting)
        if writer is not None:
            writer.release()


def _over_limit(folder: ConvertedFolder, nbytes: int, used_bytes: int) -> CapacityError:
    needless = "a checkpoint in safetensors and in the dtype that is computed in, which needs no conversion"
    if not folder.limit_bytes:
        return CapacityError(
            f"disk: {format_bytes(nbytes)} of weights must be converted to stay on disk, and {LIMIT_VARIABLE}=0 allows "
            f"no conversion into the cache {folder.path}",
            hint=f"a limit ({LIMIT_VARIABLE}), {needless}, or more memory, so that they need not stay on disk",
        )
    beside = f" beside {format_bytes(used_bytes)} that are in use" if used_bytes else ""
    return CapacityError(
        f"disk: {format_bytes(nbytes)} of converted weights do not fit the cache {folder.path}, whose limit is "
        f"{format_bytes(folder.limit_bytes)}{beside}",
        hint=f"a higher limit ({LIMIT_VARIABLE}), or {needless}",
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
