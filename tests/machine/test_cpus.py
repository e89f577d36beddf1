from __future__ import annotations

import os
from pathlib import Path

import pytest

from overspill.machine.cpus import usable_cpus

ALLOWED = 8


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALLOWED)))


def groups(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A file like /proc/self/cgroup and a tree like /sys/fs/cgroup."""
    (folder / "cgroup").write_text(membership)
    for name, content in files.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "cgroup", folder / "tree"


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"a/b/cpu.max": "max 100000\n"}, ALLOWED),
        ({"a/b/cpu.max": "300000 100000\n"}, 3),
        ({"a/b/cpu.max": "250000 100000\n"}, 2),
        ({"a/b/cpu.max": "20000 100000\n"}, 1),
        ({"a/b/cpu.max": "1600000 100000\n"}, ALLOWED),
        ({"a/b/cpu.max": "500000 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ({"a/b/cpu.max": "max 100000\n", "cpu.max": "400000 100000\n"}, 4),
        ({}, ALLOWED),
    ],
)
def test_v2(tmp_path: Path, quotas: dict[str, str], expected: int) -> None:
    assert usable_cpus(*groups(tmp_path, "0::/a/b\n", quotas)) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", ALLOWED), ("300000", 3), ("50000", 1)])
@pytest.mark.parametrize("mounted", ["cpu,cpuacct", "cpu"])
def test_v1(tmp_path: Path, mounted: str, quota: str, expected: int) -> None:
    files = {f"{mounted}/a/cpu.cfs_quota_us": quota, f"{mounted}/a/cpu.cfs_period_us": "100000"}
    membership = "5:cpuset:/\n4:cpu,cpuacct:/a\n1:name=systemd:/a\n"
    assert usable_cpus(*groups(tmp_path, membership, files)) == expected


def test_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    assert usable_cpus(*groups(tmp_path, "0::/docker/abc\n", {"cpu.max": "200000 100000\n"})) == 2


def test_without_control_groups(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "none", tmp_path) == ALLOWED


def test_here() -> None:
    assert 1 <= usable_cpus() <= ALLOWED
