"""What stands at a path itself: no symbolic link is followed."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import Literal


def kind_of(path: Path) -> Literal["folder", "file", "symbolic link", "special file"] | None:
    """What stands at `path` itself; None for nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "symbolic link" if stat.S_ISLNK(mode) else "special file"


def bytes_in(path: Path) -> int:
    """Of the files in a folder, or of what else stands at `path`; links are not followed."""
    try:
        files = path.iterdir() if kind_of(path) == "folder" else [path]
        return sum(file.lstat().st_size for file in files)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def take_away(path: Path) -> None:
    """Remove a folder with what is in it, or what else stands at `path`; links are not followed."""
    if kind_of(path) == "folder":
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
