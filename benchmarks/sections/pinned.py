"""Pinned memory: bytes asked for against bytes that were taken, beside torch's own pinned allocator."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch

from benchmarks.report import Bar
from benchmarks.sections import Run
from overspill.machine.device import Device

TITLE = "Pinned memory, asked for and taken"
COLUMNS = (
    "allocator",
    "asked_bytes",
    "taken_bytes",
    "taken_over_asked_ratio",
    "locked_bytes",
    "pinned_bytes",
    "seconds_s",
    "left_after_bytes",
)
_MIB = 1 << 20
SIZES = {
    "full": (1, 3 * _MIB + 1, 100 * _MIB + 4097, (4 << 30) + (512 << 20), 9 * (1 << 30) + 12345),
    "quick": (1, 3 * _MIB + 1, 100 * _MIB + 4097),
    "toy": (1, 3 * _MIB + 1),
}


def measure(run: Run) -> None:
    device = run.make_device()
    run.report.notes.append(
        "taken is the growth of RssAnon + RssShmem of /proc/self/status when every page has been written, locked VmLck, "
        "pinned VmPin (not every driver counts there); left after is what remains when the memory is freed"
    )
    worst = 1.0
    _take_ours(device, 1)  # what the first use of the driver takes is no block's
    for size in SIZES[run.size]:
        if run.short_of_time(f"{size} bytes", 5 + size / 1e9):
            continue
        row = _measured(lambda size=size: _take_ours(device, size))  # type: ignore[misc]
        run.row(allocator="overspill", asked_bytes=size, taken_over_asked_ratio=row["taken_bytes"] / size, **row)
        if size >= _MIB:  # a page is the least that can be taken
            worst = max(worst, row["taken_bytes"] / size)
        if run.on_gpu:
            row = _measured(lambda size=size: torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1))  # type: ignore[misc]
            run.row(allocator="torch", asked_bytes=size, taken_over_asked_ratio=row["taken_bytes"] / size, **row)
    run.report.bars.append(Bar("pinned bytes taken over asked for, 1 MiB and more", worst, 1.01))
    if not run.on_gpu:
        run.report.notes.append("emulated: the same mappings, not registered with any driver")


def _take_ours(device: Device, size: int) -> torch.Tensor:
    return device.allocate_host(size, pinned=True).data.fill_(1)


def _measured(take: object) -> dict[str, float]:
    assert callable(take)
    gc.collect()
    before = _status()
    begun = time.perf_counter()
    held = take()
    seconds = time.perf_counter() - begun
    during = _status()
    del held
    gc.collect()
    after = _status()
    return {
        "taken_bytes": during["taken"] - before["taken"],
        "locked_bytes": during["VmLck"] - before["VmLck"],
        "pinned_bytes": during["VmPin"] - before["VmPin"],
        "seconds_s": seconds,
        "left_after_bytes": after["taken"] - before["taken"],
    }


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    found = {name: int(fields[name]) * 1024 for name in ("VmLck", "VmPin", "RssAnon", "RssShmem")}
    return {**found, "taken": found["RssAnon"] + found["RssShmem"]}
