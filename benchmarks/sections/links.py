"""Copy and zero-copy bandwidth over sizes: what a transfer of our own reaches, beside torch's pinned and pageable."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.report import Bar
from benchmarks.sections import Run
from overspill.machine.device import Device

TITLE = "Bandwidth from host memory by size"
COLUMNS = (
    "size_bytes",
    "copy_gbps",
    "copy_pageable_gbps",
    "torch_pinned_copy_gbps",
    "zero_copy_sum_gbps",
    "zero_copy_one_token_product_gbps",
    "copy_over_link_ratio",
)
_KIB, _MIB = 1 << 10, 1 << 20
SIZES = {
    "full": (64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB, 1 << 30),
    "quick": (64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
    "toy": (64 * _KIB, _MIB),
}
_BURST_BYTES = 128 << 20
_ROUNDS = 5


def measure(run: Run) -> None:
    device = run.make_device()
    link = device.link
    assert link is not None
    run.report.limits["link as the plan knows it_gbps"] = link.bandwidth / 1e9
    for size in SIZES[run.size]:
        if run.short_of_time(f"{size} bytes", 2 + size / 2e8):
            continue
        run.row(size_bytes=size, **_row(run, device, size, link.bandwidth))
    best = max((row["copy_gbps"] for row in run.report.rows), default=0.0)
    run.report.bars.append(
        Bar("fastest copy over the link that the plan reckons with", best * 1e9 / link.bandwidth, 0.95, at_least=True)
    )
    run.report.notes.append(
        "back to back, at least 128 MiB a round where the size allows, median of 5 rounds; zero-copy reads run on the "
        "device's cores: a sum, and a bfloat16 product of one token with a weight"
    )


def _row(run: Run, device: Device, size: int, bandwidth: float) -> dict[str, float]:
    target = device.allocate(size, "buffer_pool").data
    pinned = device.allocate_host(size, pinned=True).data.fill_(1)
    pageable = device.allocate_host(size, pinned=False).data.fill_(1)
    view = device.zero_copy(pinned)
    width = 1024
    x = device.to_device(torch.ones(1, width, dtype=torch.bfloat16))

    def total() -> None:
        with torch.no_grad(), device.execution():
            view.view(torch.float32).sum()

    def product() -> None:
        with torch.no_grad(), device.execution():
            torch.nn.functional.linear(x, view.view(torch.bfloat16).view(-1, width))

    ways: dict[str, Callable[[], object]] = {
        "copy_gbps": lambda: device.transfer(target, pinned).wait(),
        "copy_pageable_gbps": lambda: device.transfer(target, pageable).wait(),
        "zero_copy_sum_gbps": total,
        "zero_copy_one_token_product_gbps": product,
    }
    if run.on_gpu:
        theirs = torch.ones(size, dtype=torch.uint8).pin_memory()
        ways["torch_pinned_copy_gbps"] = lambda: target.copy_(theirs, non_blocking=True)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + _ROUNDS):
        for way, go in ways.items():
            seconds = _seconds(device, go, min(max(1, _BURST_BYTES // size), 64 if run.on_gpu else 8))
            if number:
                times[way].append(seconds)
    found = {way: size / sorted(seconds)[_ROUNDS // 2] / 1e9 for way, seconds in times.items()}
    return {**found, "copy_over_link_ratio": found["copy_gbps"] * 1e9 / bandwidth}


def _seconds(device: Device, go: Callable[[], object], times: int) -> float:
    device.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        go()
    return (device.timed() - begun) / times
