"""Noticing that a checkpoint's files changed between their headers being read and their data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from overspill.checkpoint.files import opened
from overspill.checkpoint.records import Checkpoint
from overspill.errors import CheckpointError

HASHED_BYTES = 64 << 10
_HINT = "wait until nothing writes to the model's files, then start again"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size in bytes, time of last change, and SHA-256 of the first HASHED_BYTES: the header or its start."""

    size: int
    mtime_ns: int
    header_hash: str


def file_stamp(path: Path) -> FileStamp:
    """The stamp of `path` as it is now. Raises CheckpointError if it cannot be read."""
    with opened(path) as file:
        header_hash = hashlib.sha256(file.read(0, HASHED_BYTES)).hexdigest()
        return FileStamp(file.size, os.fstat(file.fd).st_mtime_ns, header_hash)


def stamps(checkpoint: Checkpoint) -> dict[Path, FileStamp]:
    """The stamps of all files of `checkpoint`."""
    return {path: file_stamp(path) for path in checkpoint.files}


def verify_untouched(expected: Mapping[Path, FileStamp]) -> None:
    """As `verify_unchanged`, from size and time alone: what may be asked before every step."""
    for path, before in expected.items():
        try:
            now = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read any more: {error.strerror}", hint=_HINT) from error
        if now.st_size != before.size:
            raise _changed(path, f"size, from {before.size} to {now.st_size} bytes")
        if now.st_mtime_ns != before.mtime_ns:
            raise _changed(path, "mtime_ns")


def _changed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} changed since its header was read ({what})", hint=_HINT)


def verify_unchanged(expected: Mapping[Path, FileStamp]) -> None:
    """Raises CheckpointError naming the first file that is no longer as `stamps` found it."""
    for path, before in expected.items():
        now = file_stamp(path)
        if now != before:
            changed = [name for name in FileStamp.__slots__ if getattr(now, name) != getattr(before, name)]
            raise _changed(path, ", ".join(changed))
