"""The memory of a process, looked at once a second."""

from __future__ import annotations

import math
import threading
import time

import psutil

SETTLED_S = 10.0


class Memory:
    """`samples` are (seconds since the start, resident bytes), taken while the `with` block runs."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._begun = time.monotonic()
        self.samples: list[tuple[float, int]] = [(0.0, self._process.memory_info().rss)]

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.samples.append((time.monotonic() - self._begun, self._process.memory_info().rss))

    def peak_bytes(self, start_s: float, end_s: float) -> int:
        return max((nbytes for at, nbytes in self.samples if start_s <= at < end_s), default=0)

    def growth_ratio(self, settled_s: float) -> float:
        """The most after `settled_s` seconds, over the most in the SETTLED_S before."""
        return self.peak_bytes(settled_s, math.inf) / self.peak_bytes(settled_s - SETTLED_S, settled_s)
