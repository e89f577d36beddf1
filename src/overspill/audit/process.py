"""What the kernel says of a server's memory: its process and those it started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from overspill.audit.records import Finding, Line
from overspill.config.sizes import format_bytes
from overspill.errors import ConfigError

_FIELDS = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin", "VmSwap")
NEAR_LIMIT = 0.95
OWN_BYTES = 2 * 1024**3
"""What a server's process takes beside weights, generously: libraries, the context of the device, buffers."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process and its descendants, field by field of /proc/<pid>/status, and the group's limit and use.

    Memory that CUDA pinned is counted as shared (RssShmem), and not as VmLck or VmPin.
    """

    pid: int
    processes: int
    fields: dict[str, int]
    limit_bytes: int | None
    used_bytes: int | None

    @property
    def unmapped_bytes(self) -> int:
        """Without pages of files, which are the page cache's."""
        return self.fields["VmRSS"] - self.fields["RssFile"]

    def line(self, *names: str) -> Line:
        told = ", ".join(f"{name} {format_bytes(self.fields[name])}" for name in names)
        others = f" and {self.processes - 1} of its processes" if self.processes > 1 else ""
        return Line(None, f"/proc/{self.pid}/status{others}: {told}")

    def limit_line(self) -> Line:
        used, limit = format_bytes(self.used_bytes or 0), format_bytes(self.limit_bytes or 0)
        return Line(None, f"control group of {self.pid}: {used} of {limit}")


def measure(pid: int) -> ProcessMemory:
    """ConfigError where there is no such process, or it is not ours to look at."""
    from overspill.machine.memory import group_limits  # torch comes with it, and a log alone needs none

    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        fields = dict.fromkeys(_FIELDS, 0)
        _add(fields, pid)
    except (psutil.Error, OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--pid {pid}: there is no such process, or it cannot be looked at",
            hint="give the server's process id, while it runs, on the machine that it runs on",
        ) from error
    for child in pids[1:]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _add(fields, child)
    limit, used = tightest(group_limits(pid), psutil.virtual_memory().total)
    return ProcessMemory(pid, len(pids), fields, limit, used)


def tightest(limits: Iterable[tuple[int, int]], total_bytes: int) -> tuple[int, int] | tuple[None, None]:
    """The limit and use of which least is left. One beyond the machine's memory limits nothing: 2^63 means none."""
    real = [pair for pair in limits if pair[0] < total_bytes]
    return min(real, key=lambda pair: pair[0] - pair[1], default=(None, None))


def findings(memory: ProcessMemory, offloaded_bytes: float, evidence: Sequence[Line]) -> Iterator[Finding]:
    """The process's memory against the bytes that the log says all ranks offloaded."""
    held = memory.unmapped_bytes
    rest = OWN_BYTES * memory.processes
    if offloaded_bytes > 0 and held > 1.1 * offloaded_bytes + rest:
        yield Finding(
            "host-memory-over-log",
            "warning",
            (*evidence, memory.line("VmRSS", "RssFile", "RssShmem", "VmLck")),
            f"the log counts {format_bytes(int(offloaded_bytes))} offloaded, and the process holds "
            f"{format_bytes(held)} "
            f"that is no file's, {held / offloaded_bytes:.2f} times as much: pinned blocks are rounded up to a "
            "power of two, "
            "and blocks that were freed stay with the allocator.",
            "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 (vLLM's uva backend); overspill pins exact sizes",
        )
    if offloaded_bytes > OWN_BYTES and memory.fields["VmRSS"] < 0.5 * offloaded_bytes:
        yield Finding(
            "weights-not-in-host-memory",
            "warning",
            (*evidence, memory.line("VmRSS", "VmSwap")),
            f"the log counts {format_bytes(int(offloaded_bytes))} on the host, and the process holds "
            f"{format_bytes(memory.fields['VmRSS'])}: the weights are elsewhere (back on the device, or in swap), "
            "or this is "
            "another process.",
            "check --pid (the server's parent process), and the finding on weights that came back",
        )
    if memory.fields["VmSwap"] > 0.01 * max(memory.fields["VmRSS"], 1):
        yield Finding(
            "swapped",
            "warning",
            (memory.line("VmRSS", "VmSwap"),),
            "a part of the process is in swap, and what is read from there is read at the disk's speed.",
            "a smaller budget, or less on the host; overspill keeps such weights in the checkpoint, and reads ahead",
        )
    limit, used = memory.limit_bytes, memory.used_bytes
    if limit is not None and used is not None and used > NEAR_LIMIT * limit:
        yield Finding(
            "near-memory-limit",
            "warning",
            (memory.limit_line(),),
            f"less than {1 - NEAR_LIMIT:.0%} of the control group's limit is left: the next allocation may end the "
            "process.",
            "a larger limit, or a smaller budget",
        )


def _add(fields: dict[str, int], pid: int) -> None:
    for row in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        name, _, rest = row.partition(":")
        if name in fields:
            fields[name] += int(rest.split()[0]) * 1024
