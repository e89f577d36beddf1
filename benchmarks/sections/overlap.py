"""How much of a copy is hidden behind computing that runs beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.report import Bar
from benchmarks.sections import Run
from overspill.machine.device import Device

TITLE = "Copies beside computing"
COLUMNS = (
    "copied_bytes",
    "copy_ms",
    "computing_ms",
    "together_ms",
    "hidden_ratio",
    "together_over_larger_ratio",
)
SIZES = {"full": (16 << 20, 128 << 20, 512 << 20), "quick": (16 << 20, 64 << 20), "toy": (1 << 20,)}
_ROUNDS = 7
_WIDTH = {"cuda": 4096, "emulated": 384}
_Go = Callable[[], None]


def measure(run: Run) -> None:
    device = run.make_device()
    if not run.on_gpu:
        torch.set_num_threads(1)  # the other core is the copy thread's
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    matrix = device.to_device(torch.randn(_WIDTH[run.device], _WIDTH[run.device]).to(dtype))
    for size in SIZES[run.size]:
        if run.short_of_time(f"{size} bytes", 5):
            continue
        run.row(copied_bytes=size, **_row(device, matrix, size))
    if run.report.rows:
        last = run.report.rows[-1]
        run.report.bars.append(
            Bar("the largest copy beside computing, over the larger", last["together_over_larger_ratio"], 1.10)
        )
    run.report.notes.append(
        "as many products of square matrices as take the copy's time; hidden is (copy + computing - together) over "
        "the smaller of the two, 1 where it costs nothing; medians of 7 rounds by turns"
    )


def _row(device: Device, matrix: torch.Tensor, size: int) -> dict[str, float]:
    source = device.allocate_host(size, pinned=True).data.fill_(1)
    target = device.allocate(size, "buffer_pool").data

    def compute(times: int) -> None:
        with torch.no_grad(), device.execution():
            for _ in range(times):
                matrix @ matrix

    def copy() -> None:
        device.transfer(target, source).wait()

    def both(times: int) -> None:
        transfer = device.transfer(target, source)
        compute(times)
        transfer.wait()

    for go in (copy, lambda: compute(4)):
        _seconds(device, go)
    one = min(_seconds(device, lambda: compute(8)) for _ in range(3)) / 8
    products = max(1, round(min(_seconds(device, copy) for _ in range(3)) / one))
    ways: dict[str, _Go] = {
        "copy": copy,
        "computing": lambda: compute(products),
        "together": lambda: both(products),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, go in ways.items():
            times[way].append(_seconds(device, go))
    copy_s, computing_s, together_s = (sorted(times[way])[_ROUNDS // 2] for way in ways)
    return {
        "copy_ms": copy_s * 1e3,
        "computing_ms": computing_s * 1e3,
        "together_ms": together_s * 1e3,
        "hidden_ratio": (copy_s + computing_s - together_s) / min(copy_s, computing_s),
        "together_over_larger_ratio": together_s / max(copy_s, computing_s),
    }


def _seconds(device: Device, go: _Go) -> float:
    device.synchronize()
    begun = time.perf_counter()
    go()
    return device.timed() - begun
