"""Exact accounts of memory, and what the host has left."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from overspill.config.sizes import format_bytes
from overspill.errors import DeviceOutOfMemoryError


@dataclass
class MemoryAccount:
    """Bytes held on a device, by purpose, against a budget; exact, and never over it.

    Purposes: "weights", "buffer_pool", "kv_cache", "working". A reservation counts in full from the moment it is
    made; what is then held for the same purpose fills it before it adds to the total.
    """

    budget_bytes: int
    held: Counter[str] = field(default_factory=Counter)
    reserved: dict[str, int] = field(default_factory=dict)
    peak: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def total_bytes(self) -> int:
        purposes = self.held.keys() | self.reserved.keys()
        return sum(max(self.held[purpose], self.reserved.get(purpose, 0)) for purpose in purposes)

    def take(self, purpose: str, nbytes: int) -> None:
        """Hold `nbytes` more; DeviceOutOfMemoryError, with nothing changed, where the budget does not allow it."""
        with self._lock:
            grown = max(self.held[purpose] + nbytes, self.reserved.get(purpose, 0))
            total = self.total_bytes - max(self.held[purpose], self.reserved.get(purpose, 0)) + grown
            if total > self.budget_bytes:
                raise self._out_of_memory(purpose, nbytes)
            self.held[purpose] += nbytes
            self.peak[purpose] = max(self.peak[purpose], self.held[purpose])
            self.peak_bytes = max(self.peak_bytes, total)

    def give(self, purpose: str, nbytes: int) -> None:
        with self._lock:
            assert self.held[purpose] >= nbytes, f"{purpose}: {nbytes} bytes given back, {self.held[purpose]} held"
            self.held[purpose] -= nbytes

    def reserve(self, purpose: str, nbytes: int) -> None:
        """Set `nbytes` aside for `purpose`, whether or not they are held yet."""
        with self._lock:
            before = self.reserved.get(purpose, 0)
            self.reserved[purpose] = nbytes
            if self.total_bytes > self.budget_bytes:
                self.reserved[purpose] = before
                raise self._out_of_memory(purpose, nbytes - max(before, self.held[purpose]))
            self.peak_bytes = max(self.peak_bytes, self.total_bytes)

    def move(self, nbytes: int, source: str, target: str) -> None:
        """Relabel `nbytes` held."""
        with self._lock:
            self.give(source, nbytes)
            try:
                self.take(target, nbytes)
            except DeviceOutOfMemoryError:
                self.held[source] += nbytes
                raise

    def _out_of_memory(self, purpose: str, nbytes: int) -> DeviceOutOfMemoryError:
        purposes = dict.fromkeys((*self.held, *self.reserved))
        counted = {name: max(self.held[name], self.reserved.get(name, 0)) for name in purposes}
        parts = ", ".join(f"{_words(name)} {format_bytes(count)}" for name, count in counted.items() if count)
        return DeviceOutOfMemoryError(
            f"out of device memory: {_words(purpose)} needs {format_bytes(nbytes)} more, "
            f"{format_bytes(self.budget_bytes - self.total_bytes)} of "
            f"{format_bytes(self.budget_bytes)} are free (held or reserved: {parts or 'nothing'})",
            hint="offload more weights (--cpu-offload-gb), or allow fewer or shorter sequences "
            "(--max-num-seqs, --max-model-len)",
        )

    def reset_peak(self) -> None:
        with self._lock:
            self.peak = Counter(self.held)
            self.peak_bytes = self.total_bytes


def _words(purpose: str) -> str:
    return {"working": "working memory", "kv_cache": "KV cache", "buffer_pool": "buffer pool"}.get(purpose, purpose)


def host_available_bytes() -> int:
    """Bytes of host memory this process may still take: the machine's, or its control group's where that is less.

    Page cache that can be dropped counts as available on both sides. Control groups v1 and v2 are read.
    """
    available = int(psutil.virtual_memory().available)
    for limit, used in group_limits():
        available = min(available, max(0, limit - used))
    return available


def host_limit_bytes() -> int | None:
    """The limit of the control group that leaves this process least; None where the machine leaves it less."""
    left, limit = min(((limit - used, limit) for limit, used in group_limits()), default=(0, None))
    return limit if limit is not None and left < int(psutil.virtual_memory().available) else None


def group_limits(pid: int | str = "self") -> list[tuple[int, int]]:
    """(limit, used less droppable file pages), in bytes, of every memory control group above a process."""
    limits: list[tuple[int, int]] = []
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return limits
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, limit_name, used_name, cache = (
                Path("/sys/fs/cgroup/memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )
        elif controllers == "":
            root, limit_name, used_name, cache = (
                Path("/sys/fs/cgroup"),
                "memory.max",
                "memory.current",
                ("inactive_file", "active_file"),
            )
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit here
                limit = int((group / limit_name).read_text())
                used = int((group / used_name).read_text())
                stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                limits.append((limit, used - sum(int(stat.get(name, 0)) for name in cache)))
            if group == root:
                break
            group = group.parent
    return limits
