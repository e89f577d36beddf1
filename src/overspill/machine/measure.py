"""What a machine does, measured: products on the device, the link, experts on the CPU, the disk.

Medians of several rounds over memory that no cache holds. A busy neighbour shows in them; repeat on a quiet machine.
"""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overspill.checkpoint.records import Extent
from overspill.config.sizes import format_bytes
from overspill.errors import CapacityError
from overspill.machine.arena import map_memory
from overspill.machine.cpu_experts import Activation, CpuExperts
from overspill.machine.device import Device, Transfer
from overspill.machine.memory import host_available_bytes
from overspill.machine.reads import FileReader

ROUNDS = 7
BEYOND_CACHES_BYTES = 1 << 30
"""Several times what a large processor's last cache holds."""
MANY_TOKENS = 256
LEAST_HOST_BYTES = 512 << 20
DISK_BYTES = 256 << 20
_COPIED_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
_WIDTH = 2048
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def refuse_memory() -> None:
    """CapacityError where machine or control group leave this process too little to measure in."""
    if (available := host_available_bytes()) < LEAST_HOST_BYTES:
        raise CapacityError(
            f"measuring takes {format_bytes(LEAST_HOST_BYTES)} of host memory, {format_bytes(available)} are free",
            hint="measure while less is running, or with a larger memory limit",
        )


def refuse_folder(folder: Path) -> None:
    """OSError where `folder` cannot be written, or has no room for the file that the disk is measured with."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".overspill-bench-") as file:
        file.write(bytes(1))
        if shutil.disk_usage(folder).free < DISK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def host_room_bytes() -> int:
    """What is measured in: BEYOND_CACHES_BYTES, or a quarter of what the host leaves this process."""
    return min(BEYOND_CACHES_BYTES, host_available_bytes() // 4)


def _device_room_bytes(device: Device) -> int:
    """The same of a device; all but a GPU's memory is the host's."""
    host_bytes = BEYOND_CACHES_BYTES if device.kind == "cuda" else host_room_bytes()
    return max(32 << 20, min(host_bytes, device.memory_bytes // 4))


def products(device: Device) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes a second of weights in products of one token, operations a second of many tokens), by dtype.

    Takes up to BEYOND_CACHES_BYTES of the device's memory, for matrices of 2048 by 2048, used one after the other.
    """
    reading, computing = {}, {}
    room_bytes = _device_room_bytes(device)
    block = device.allocate(room_bytes, "weights")
    for name, dtype in _DTYPES.items():
        nbytes = _WIDTH * _WIDTH * dtype.itemsize
        matrices = [
            block.data[i * nbytes : (i + 1) * nbytes].view(dtype).view(_WIDTH, _WIDTH)
            for i in range(room_bytes // nbytes)
        ]
        for matrix in matrices:
            device.upload(matrix, torch.zeros(_WIDTH, _WIDTH, dtype=dtype))
        one, many = (device.to_device(torch.zeros(tokens, _WIDTH, dtype=dtype)) for tokens in (1, MANY_TOKENS))
        few = matrices[: max(1, len(matrices) // 8)]
        reading[name] = len(matrices) * nbytes / _seconds(device, partial(_all, one, matrices))
        work = 2 * MANY_TOKENS * _WIDTH * _WIDTH * len(few)
        computing[name] = work / _seconds(device, partial(_all, many, few), rounds=3)
    return reading, computing


def link(device: Device, sizes: Sequence[int] = (1 << 20, 16 << 20, 64 << 20)) -> dict[str, dict[int, float]]:
    """Bytes a second over the device's link by direction and kind of host memory, by size. Empty without a link."""
    if device.link is None:
        return {}
    found: dict[str, dict[int, float]] = {}
    target = device.allocate(max(sizes), "weights").data
    for kind, pinned in (("pinned", True), ("pageable", False)):
        source = device.allocate_host(max(sizes), pinned=pinned).data
        for nbytes in sizes:
            there, here = target[:nbytes], source[:nbytes]
            up = _seconds(device, partial(_joined, device.transfer, there, here), rounds=3)
            down = _seconds(device, partial(_joined, device.download, here, there), rounds=3)
            found.setdefault(f"to the device, {kind}", {})[nbytes] = nbytes / up
            found.setdefault(f"from the device, {kind}", {})[nbytes] = nbytes / down
    return found


def beside_copies(device: Device) -> tuple[float, float, float]:
    """Products of one token beside copies to the device, each going on all the time.

    (how many times as long the products take, bytes a second of copies alone, how many times as long the copies take).
    To a GPU copies cross the link; elsewhere a thread copies memory, which is what an emulated link is made of.
    """
    copy: Callable[[], object]
    if device.kind == "cuda":
        target = device.allocate(_COPIED_BYTES, "weights").data
        source = device.allocate_host(_COPIED_BYTES, pinned=True).data
        copy = partial(_joined, device.transfer, target, source)
    else:
        there, here = (_array_of(map_memory(_COPIED_BYTES)) for _ in range(2))
        copy = partial(np.copyto, there, here)  # by one thread
    alone_s = _seconds(device, copy)
    slowed, beside_s = _beside(device, copy)
    return slowed, _COPIED_BYTES / alone_s, max(1.0, beside_s / alone_s)


def beside_reads(device: Device, folder: Path) -> float:
    """How many times as long products of one token take while a file in `folder` is read without a pause."""
    with _written_file(folder, _COPIED_BYTES) as path, FileReader() as reader:
        into = memoryview(_array_of(map_memory(_COPIED_BYTES)))
        return _beside(device, partial(reader.read, [(Extent(path, 0, _COPIED_BYTES), into)]))[0]


def _beside(device: Device, other: Callable[[], object]) -> tuple[float, float]:
    """(how many times as long products take beside `other`, done again and again; the seconds of each `other`)."""
    nbytes = _WIDTH * _WIDTH * 2
    block = device.allocate(max(nbytes, _device_room_bytes(device) // 2), "weights")
    matrices = [
        block.data[at : at + nbytes].view(torch.bfloat16).view(_WIDTH, _WIDTH)
        for at in range(0, len(block.data) - nbytes + 1, nbytes)
    ]
    for matrix in matrices:
        device.upload(matrix, torch.zeros(_WIDTH, _WIDTH, dtype=torch.bfloat16))
    products = partial(_all, device.to_device(torch.zeros(1, _WIDTH, dtype=torch.bfloat16)), matrices)
    alone_s = _seconds(device, products)
    done, rounds = threading.Event(), 0

    def again() -> None:
        nonlocal rounds
        while not done.is_set():
            other()
            rounds += 1

    other()
    thread = threading.Thread(target=again)
    begun = time.perf_counter()
    thread.start()
    try:
        beside_s = _seconds(device, products)
    finally:
        done.set()
        thread.join()
    return max(1.0, beside_s / alone_s), (time.perf_counter() - begun) / max(1, rounds)


def experts_on_cpu() -> tuple[float, float]:
    """(bytes a second for one token, operations a second for many) of bfloat16 experts by the CPU's kernels."""
    hidden, intermediate = 2048, 768
    count = max(8, host_room_bytes() // (3 * hidden * intermediate * 2))
    nbytes = count * 3 * hidden * intermediate * 2
    memory = map_memory(nbytes).view(torch.bfloat16)
    memory.fill_(0.01)
    cut = count * 2 * intermediate * hidden
    kernel = CpuExperts(
        memory[:cut].view(count, 2 * intermediate, hidden),
        memory[cut:].view(count, hidden, intermediate),
        gated=True,
        transposed=False,
        activation=Activation.silu,
    )
    host_seconds: list[float] = []

    def run(tokens: int, each: int, first: int) -> None:
        index = ((first + torch.arange(each)) % count).expand(tokens, each)
        states = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        begun = time.perf_counter()
        kernel(states, index, torch.ones(tokens, each), torch.empty_like(states))
        host_seconds.append(time.perf_counter() - begun)

    for number in range(ROUNDS + 1):
        run(1, 8, 8 * number)
    one = 8 * nbytes / count / statistics.median(host_seconds[1:])
    host_seconds.clear()
    for number in range(3):
        run(MANY_TOKENS, 2, 2 * number)
    many = MANY_TOKENS * 2 * 2 * 3 * hidden * intermediate / statistics.median(host_seconds)
    return one, many


def disk(folder: Path, sizes: Sequence[int] = (512 << 10, 4 << 20)) -> dict[int, float]:
    """Bytes a second that reading past the page cache reaches in `folder`, four requests in flight, by request size.

    Writes a file of up to DISK_BYTES there for the while, and takes as much memory. Raises OSError.
    """
    found = {}
    nbytes = max(1, min(DISK_BYTES, host_room_bytes()) // _PIECE_BYTES) * _PIECE_BYTES
    with _written_file(folder, nbytes) as path:
        into = memoryview(_array_of(map_memory(nbytes)))
        for size in sizes:
            with FileReader(chunk_bytes=size) as reader:
                times = []
                for _ in range(3):
                    begun = time.perf_counter()
                    reader.read([(Extent(path, 0, nbytes), into)])
                    times.append(time.perf_counter() - begun)
            found[size] = nbytes / statistics.median(times)
    return found


@contextmanager
def _written_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file of `nbytes` that is on the disk and not in the page cache, for the while."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".overspill-bench-") as file:
        piece = os.urandom(_PIECE_BYTES)
        for _ in range(nbytes // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(file.name)


def _array_of(memory: torch.Tensor) -> Any:
    return memory.numpy()


def numa_nodes() -> list[dict[str, object]]:
    """The machine's memory nodes: number, processors, and bytes."""
    nodes: list[dict[str, object]] = []
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        total = next(line for line in (path / "meminfo").read_text().splitlines() if "MemTotal" in line)
        nodes.append(
            {
                "node": int(path.name.removeprefix("node")),
                "cpus": (path / "cpulist").read_text().strip(),
                "bytes": int(total.split()[-2]) << 10,
            }
        )
    return nodes


def _joined(copy: Callable[[torch.Tensor, torch.Tensor], Transfer], target: torch.Tensor, source: torch.Tensor) -> None:
    copy(target, source).join()


def _all(tokens: torch.Tensor, matrices: Sequence[torch.Tensor]) -> None:
    for matrix in matrices:
        torch.nn.functional.linear(tokens, matrix)


def _seconds(device: Device, work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    with torch.no_grad(), device.execution():
        for _ in range(rounds + 1):
            begun = device.timed()
            work()
            times.append(device.timed() - begun)
    return statistics.median(times[1:])
