"""What benchmarks/cuda.py measures, a section a file; each runs in a process of its own.

A section is a function of the device's kind, a scale and a clock. It fills the report that it is given row by row and
says `keep` after each, so that what it had measured is there when it is cut short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report import Report
from overspill.machine.device import Device, Link
from overspill.machine.emulated import EmulatedDevice


class Clock:
    """`left` says what remains of a section's seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


@dataclass(frozen=True)
class Run:
    """`size` is "full" (a GPU), "quick" or "toy"; `keep` writes what the report holds so far."""

    device: str
    size: str
    clock: Clock
    report: Report
    keep: Callable[[], None]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def row(self, **values: object) -> None:
        self.report.rows.append(values)
        self.keep()

    def short_of_time(self, what: str, seconds: float) -> bool:
        """Whether `what`, which takes about `seconds`, is left out; the report then says so."""
        if self.clock.left > seconds:
            return False
        self.report.notes.append(f"left out for lack of time: {what}")
        self.keep()
        return True

    def make_device(self, *, check: bool = False, link: Link | None = None) -> Device:
        if self.on_gpu:
            from overspill.machine.cuda import CudaDevice

            return CudaDevice()
        return EmulatedDevice(16 << 30, link or Link(2e9, 10e-6, measured=False), check=check)
