"""How fast the disk gives bytes at this moment, to a reader that does nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

THREADS = 4
REQUEST_BYTES = 4 << 20
HUGE_PAGE_BYTES = 2 << 20


class Region(NamedTuple):
    path: Path
    offset: int
    length: int


def regions(paths: Sequence[Path], nbytes: int, size: int, seed: int) -> list[Region]:
    """About `nbytes` of `paths` in runs of `size`, less where a file ends: one after the other from a random one on."""
    sizes = {path: path.stat().st_size for path in paths}
    every = [Region(path, at, min(size, end - at)) for path, end in sizes.items() for at in range(0, end, size)]
    first = random.Random(seed).randrange(len(every))
    return [every[(first + number) % len(every)] for number in range(max(1, min(len(every), nbytes // size)))]


def direct_gbps(paths: Sequence[Path], nbytes: int, seed: int) -> float:
    """GB/s of O_DIRECT reads of some `nbytes` of `paths`, four requests of 4 MiB in flight.

    Raises OSError where the file system refuses O_DIRECT.
    """
    wanted = regions(paths, nbytes, REQUEST_BYTES, seed)
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {region.path for region in wanted}}
    buffers = _buffers()
    numbers = count()

    def work(buffer: memoryview) -> int:
        done = 0
        while (number := next(numbers)) < len(wanted):
            region = wanted[number]
            done += os.preadv(files[region.path], [buffer], region.offset)
        return done

    try:
        begun = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            done = sum(pool.map(work, buffers))
        return done / (time.perf_counter() - begun) / 1e9
    finally:
        for fd in files.values():
            os.close(fd)


def _buffers() -> list[memoryview]:
    """One for each thread, in huge pages where there are any: a request into scattered pages is many to the disk."""
    memory = mmap.mmap(-1, THREADS * REQUEST_BYTES + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(b"\1" * len(memory))  # the pages are there before any clock starts
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    view = memoryview(memory)[skip:]
    return [view[number * REQUEST_BYTES : (number + 1) * REQUEST_BYTES] for number in range(THREADS)]


def reader_gbps(paths: Sequence[Path], nbytes: int, seed: int) -> float:
    """GB/s of overspill's own reader over some `nbytes` of `paths`, as it fills a ring: two regions at once."""
    import torch

    from overspill.checkpoint.records import Extent
    from overspill.machine.arena import map_memory
    from overspill.machine.reads import FileReader
    from overspill.offload.loader import byte_view

    wanted = regions(paths, nbytes, 8 * REQUEST_BYTES, seed)
    rooms: list[torch.Tensor] = [map_memory(8 * REQUEST_BYTES).fill_(1) for _ in range(2)]
    numbers = count()
    with FileReader() as reader, ThreadPoolExecutor(len(rooms)) as pool:

        def work(room: torch.Tensor) -> None:
            while (number := next(numbers)) < len(wanted):
                path, offset, length = wanted[number]
                reader.read([(Extent(path, offset, length, 0), byte_view(room[:length]))])

        begun = time.perf_counter()
        for done in [pool.submit(work, room) for room in rooms]:
            done.result()
        return sum(region.length for region in wanted) / (time.perf_counter() - begun) / 1e9
