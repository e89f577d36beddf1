"""Pinned memory: bytes asked for against bytes that were taken, beside torch's own pinned allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Bar
from benchmarks.sections import Run
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes

TITLE = "Pinned memory, asked for and taken"
COLUMNS = (
    "allocator",
    "asked_bytes",
    "told_bytes",
    "told_over_asked_ratio",
    "grown_bytes",
    "grown_over_asked_ratio",
    "locked_bytes",
    "pinned_bytes",
    "took_s",
    "left_after_bytes",
)
REACH = 1.01
_MIB = 1 << 20
SIZES = {
    "full": (1, 3 * _MIB + 1, 100 * _MIB + 4097, (4 << 30) + (512 << 20), (9 << 30) + 12345),
    "quick": (1, 3 * _MIB + 1, 100 * _MIB + 4097),
    "toy": (1, 3 * _MIB + 1),
}
Take = Callable[[], tuple[torch.Tensor, int]]
"""Memory, and what its allocator says that it took."""


def measure(run: Run) -> None:
    device = run.make_device()
    ours(device, 1)  # what the first use of the driver takes is no block's
    for size in SIZES[run.size]:
        if run.short_of_time(f"{size} bytes", 5 + size / 1e9):
            continue
        if 3 * size > host_available_bytes():  # torch may take twice as much
            run.report.notes.append(f"left out for lack of memory: {size} bytes")
            continue
        _row(run, "overspill", size, partial(ours, device, size))
        if run.on_gpu:
            _row(run, "torch", size, partial(torchs, size))
    told = [row["told_over_asked_ratio"] for row in run.report.rows if _counts(row, _MIB)]
    grown = [row["grown_over_asked_ratio"] for row in run.report.rows if _counts(row, 64 * _MIB)]
    run.report.bars.append(Bar("told over asked for, 1 MiB and more", max(told, default=1.0), REACH, timed=False))
    if grown:
        run.report.bars.append(Bar("grown over asked for, 64 MiB and more", max(grown), REACH, timed=False))
    run.report.notes.append(
        "told is what the allocator says it took; grown is RssAnon + RssShmem of /proc/self/status once every page has "
        "been written, locked VmLck, pinned VmPin (a driver need not count in any of them: torch's memory comes from "
        "it); left after is what remains of grown when the memory was freed"
    )
    if not run.on_gpu:
        run.report.notes.append("emulated: the same mappings, not registered with any driver")


def ours(device: Device, size: int) -> tuple[torch.Tensor, int]:
    block = device.allocate_host(size, pinned=True)
    return block.data.fill_(1), block.allocated_bytes


def torchs(size: int) -> tuple[torch.Tensor, int]:
    before = _torch_bytes()
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
    return tensor, _torch_bytes() - before


def _torch_bytes() -> int:
    stats: dict[str, Any] = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0))


def _row(run: Run, allocator: str, size: int, take: Take) -> None:
    gc.collect()
    before = _status()
    begun = time.perf_counter()
    held, told = take()
    seconds = time.perf_counter() - begun
    during = _status()
    del held
    gc.collect()
    after = _status()
    grown = {name: during[name] - before[name] for name in during}
    run.row(
        allocator=allocator,
        asked_bytes=size,
        told_bytes=told,
        told_over_asked_ratio=told / size,
        grown_bytes=grown["resident"],
        grown_over_asked_ratio=grown["resident"] / size,
        locked_bytes=grown["VmLck"],
        pinned_bytes=grown["VmPin"],
        took_s=seconds,
        left_after_bytes=after["resident"] - before["resident"],
    )


def _counts(row: dict[str, Any], least_bytes: int) -> bool:
    """Below a page, or beside what Python itself takes, a ratio says nothing."""
    return bool(row["allocator"] == "overspill" and row["asked_bytes"] >= least_bytes)


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    found = {name: int(fields[name]) * 1024 for name in ("VmLck", "VmPin", "RssAnon", "RssShmem")}
    return {
        "VmLck": found["VmLck"],
        "VmPin": found["VmPin"],
        "resident": found["RssAnon"] + found["RssShmem"],
    }
