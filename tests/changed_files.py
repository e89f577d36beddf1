"""Files that a test harms, and puts back as they were."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def restored(file: Path) -> Callable[[], None]:
    """What writes `file` again as it is now, times included."""
    content, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)

    def restore() -> None:
        file.write_bytes(content)
        os.utime(file, ns=times)

    return restore
