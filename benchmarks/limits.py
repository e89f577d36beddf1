"""What the machine itself can do, measured in the same run as what is held against it."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch

from overspill import _kernels
from overspill.machine.arena import map_memory
from overspill.machine.cpu_experts import instruction_set
from overspill.machine.cpus import usable_cpus

READ_THREADS = 4
READ_BYTES = 4 << 20


def read_seconds(paths: Sequence[Path]) -> float:
    """Seconds for all bytes of `paths` by O_DIRECT, 4 requests of 4 MiB in flight, into memory that is there already.

    Raises OSError where the file system refuses O_DIRECT; there is then no such limit to hold a loader against.
    """
    buffers = [_touched(READ_BYTES) for _ in range(READ_THREADS)]
    files = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size) for path in paths]
    requests = [(fd, offset) for fd, size in files for offset in range(0, size, READ_BYTES)]
    numbers = count()

    def work(buffer: mmap.mmap) -> None:
        while (number := next(numbers)) < len(requests):
            fd, offset = requests[number]
            os.preadv(fd, [buffer], offset)

    try:
        begun = time.perf_counter()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for done in [pool.submit(work, buffer) for buffer in buffers]:
                done.result()
        return time.perf_counter() - begun
    finally:
        for fd, _ in files:
            os.close(fd)


def memmove_gbps(nbytes: int = 64 << 20, repeats: int = 9) -> float:
    """The median speed at which one thread copies `nbytes`, counted once, from memory that no cache holds."""
    pairs = [(torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)) for _ in range(3)]
    times = []
    for number in range(repeats):
        target, source = pairs[number % len(pairs)]
        begun = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
        times.append(time.perf_counter() - begun)
    return nbytes / sorted(times)[repeats // 2] / 1e9


def memory_read_gbps(memory: torch.Tensor) -> float:
    """The speed at which all usable threads together read `memory` once, with the kernels' own loads."""
    path = _kernels.path_named(instruction_set())
    assert path is not None
    nbytes = memory.numel() * memory.element_size() // 64 * 64
    begun = time.perf_counter()
    _kernels.read_memory(path, memory.data_ptr(), nbytes, usable_cpus())
    return nbytes / (time.perf_counter() - begun) / 1e9


def read_gbps(nbytes: int = 2 << 30) -> float:
    """The median of `memory_read_gbps` over eighths of memory in huge pages that no cache holds."""
    memory = map_memory(nbytes).fill_(1)
    return statistics.median(memory_read_gbps(part) for part in (*memory.chunk(8), *memory.chunk(8)))


def evict(paths: Sequence[Path]) -> float:
    """Drop `paths` from the page cache; gives the share of their pages that is still there."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if (left := cached_share(paths)) > 0.01 and os.geteuid() == 0:
        with suppress(OSError):  # a container may forbid it
            Path("/proc/sys/vm/drop_caches").write_text("1\n")
        left = cached_share(paths)
    return left


def cached_share(paths: Sequence[Path]) -> float:
    """The share of the files' pages that lie in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = resident = 0
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
            number = -(-size // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * number)()
            address = ctypes.c_char.from_buffer(mapping)
            code = libc.mincore(ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(size), flags)
            del address
            if code:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            pages += number
            resident += sum(flag & 1 for flag in bytes(flags))
    return resident / max(pages, 1)


def _touched(nbytes: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, nbytes)
    buffer.write(b"\1" * nbytes)
    return buffer
