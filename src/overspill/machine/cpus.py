"""How many CPUs this process may really use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def usable_cpus(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> int:
    """The least of the CPUs this process may run on and the CPU quotas of its control groups, at least 1.

    A quota of two and a half CPUs counts as two: a third thread would be stopped half of the time, and the others wait
    for it. Control groups v2 (`cpu.max`) and v1 (`cpu.cfs_quota_us`) are read, up to `root`.
    """
    quotas = (max(1, int(quota)) for quota in _quotas(membership, root))
    return min([len(os.sched_getaffinity(0)), *quotas])


def _quotas(membership: Path, root: Path) -> Iterator[float]:
    """In CPUs, of every control group above this process that has one."""
    with contextlib.suppress(OSError):  # no control groups here
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                for group in _upwards(root, path):
                    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no quota
                        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
                        yield int(quota) / int(period)
            elif "cpu" in controllers.split(","):
                top = next((root / name for name in (controllers, "cpu") if (root / name).is_dir()), root)
                for group in _upwards(top, path):
                    with contextlib.suppress(OSError):
                        quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
                        period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
                        if int(quota) > 0:  # -1: none
                            yield int(quota) / int(period)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group of `path` and those above it, `root` last. In a container `path` may not exist below `root`."""
    group = root / path.lstrip("/")
    while group != root and group.is_relative_to(root):
        yield group
        group = group.parent
    yield root
