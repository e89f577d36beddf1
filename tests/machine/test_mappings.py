"""Mapped files: what they give, what is left when a file shrinks, and who else gets the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overspill.checkpoint import Extent
from overspill.errors import CheckpointError
from overspill.machine.mappings import MappedFile

PAGE = os.sysconf("SC_PAGE_SIZE")
LENGTH = 64 * PAGE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(content())
    return path


def content() -> bytes:
    return bytes(range(1, 201)) * (LENGTH // 200) + bytes([7]) * (LENGTH % 200)


def whole(mapped: MappedFile) -> torch.Tensor:
    return mapped.tensor(Extent(mapped.path, 0, LENGTH), (LENGTH,), torch.uint8)


def test_a_tensor_over_an_extent_has_its_bytes_and_outlives_the_mapping_s_object(file: Path) -> None:
    mapped = MappedFile(file)
    tensor = mapped.tensor(Extent(file, 6, 240), (3, 40), torch.bfloat16)
    expected = torch.frombuffer(bytearray(content()[6:246]), dtype=torch.bfloat16).view(3, 40)
    assert torch.equal(tensor, expected)
    assert tensor.data_ptr() % PAGE == 6, "in place, not a copy"
    del mapped
    file.unlink()
    assert torch.equal(tensor, expected)


def test_a_file_that_shrinks_gives_zeros_and_says_from_where_and_can_be_had_back(file: Path) -> None:
    mapped = MappedFile(file)
    tensor = whole(mapped)
    before = tensor.clone()
    assert mapped.lost_at is None
    os.truncate(file, LENGTH // 2)
    after = tensor.clone()
    assert torch.equal(after[: LENGTH // 2], before[: LENGTH // 2])
    assert not after[LENGTH // 2 :].any()
    assert mapped.lost_at == LENGTH // 2
    file.write_bytes(content())
    assert not tensor[LENGTH // 2 :].any(), "until it is asked for"
    mapped.restore()
    assert mapped.lost_at is None
    assert torch.equal(tensor, before)


def test_the_first_loss_is_told_not_the_last(file: Path) -> None:
    mapped = MappedFile(file)
    tensor = whole(mapped)
    os.truncate(file, 10 * PAGE)
    assert int(tensor[50 * PAGE]) == 0
    assert mapped.lost_at == 50 * PAGE
    assert int(tensor[20 * PAGE]) == 0
    assert mapped.lost_at == 20 * PAGE


def test_populating_brings_pages_in_and_survives_those_that_are_gone(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = MappedFile(file)
    heard: list[int] = []
    faults = resident(mapped)
    mapped.populate(Extent(file, 3, LENGTH - 3), heard.append)
    assert sum(heard) == LENGTH - 3
    assert resident(mapped) >= max(faults, LENGTH), "every page is in memory"
    os.truncate(file, PAGE)
    mapped.populate(Extent(file, 0, LENGTH))
    assert int(whole(mapped)[0]) == 1


def resident(mapped: MappedFile) -> int:
    """Bytes of the mapping that this process has in its page table."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(mapped.path)):
            found = 0
        elif found == 0 and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("not mapped")


def test_what_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere cannot be opened"):
        MappedFile(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match=r"empty cannot be mapped: Invalid argument"):
        MappedFile(tmp_path / "empty")


LOST = """
import faulthandler, mmap, os, signal, sys
from pathlib import Path
import torch
from overspill.checkpoint import Extent
from overspill.machine.mappings import MappedFile

path, case = Path(sys.argv[1]), sys.argv[2]
if "handler before" in case:
    faulthandler.enable()
if "ignored" in case:
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
ours = MappedFile(path)
if "handler between" in case:
    faulthandler.enable()
    second = MappedFile(path)
if "handler after" in case:
    faulthandler.enable()
    MappedFile.guard()
if "python's after" in case:
    signal.signal(signal.SIGBUS, lambda *told: print("told", flush=True))
    MappedFile.guard()
with path.open("r+b") as file:
    others = mmap.mmap(file.fileno(), 0)
os.truncate(path, 0)
assert int(ours.tensor(Extent(path, 0, 100), (100,), torch.uint8).sum()) == 0
print("survived", flush=True)
if "sent" in case:
    os.kill(os.getpid(), signal.SIGBUS)
elif "others" in case:
    others[0]
ours.restore()
print("alive", flush=True)
"""


@pytest.mark.parametrize(
    ("case", "ends"),
    [
        ("others", True),
        ("sent", True),
        ("others, handler before", True),
        ("sent, handler before", True),
        ("others, handler between", True),
        ("sent, handler between", True),
        ("others, handler after", True),
        ("handler after", False),
        ("sent, python's after", False),
        ("sent, ignored", False),
        ("others, ignored", True),
    ],
)
def test_bus_errors_of_others_do_what_they_did_without_us(case: str, ends: bool, file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(file), case], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("survived\n"), done.stderr
    assert done.returncode == (-signal.SIGBUS if ends else 0), done.stderr
    assert ("alive" in done.stdout) is not ends
    assert ("told" in done.stdout) is ("python's" in case)
    assert ("Fatal Python error: Bus error" in done.stderr) is (ends and "handler" in case)
