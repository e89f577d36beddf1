"""Host memory that a GPU reads: exact mappings, registered with the driver in chunks.

torch's own pinned allocator rounds every block up to a power of two and keeps it when it is freed, so weights
are mapped here and registered where they lie. One registration of 512 GiB or more fails, hence the chunks.
Two rules follow: no copy may reach across a chunk boundary (the driver refuses it as an invalid value), and
neighbouring chunks of host memory are neighbours for the device too only where it uses the host's own
addresses, which it does not everywhere (WSL2).
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from overspill.config.sizes import format_bytes
from overspill.errors import CapacityError
from overspill.machine.arena import map_memory, page_bytes
from overspill.machine.memory import host_available_bytes

CHUNK_BYTES = 32 << 30
OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801
UNPINNED_HINT = (
    "set VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1: host memory stays pageable, and copies then do not run "
    "beside the computing"
)
_PORTABLE, _MAPPED = 1, 2


class CudaDriver:
    """libcuda, the same under CUDA 12 and 13. Calls return its error code, 0 for success.

    The runtime library would do as well, but it remembers an error and lets a later, innocent call report it.
    """

    def __init__(self) -> None:
        try:
            library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CapacityError(
                f"the NVIDIA driver's library cannot be loaded: {error}",
                hint="install the driver's user-space libraries, or use --device emulated",
            ) from error
        pointer = ctypes.c_void_p
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes = [pointer, ctypes.c_size_t, ctypes.c_uint]
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes = [pointer]
        self._device_pointer = library.cuMemHostGetDevicePointer_v2
        self._device_pointer.argtypes = [ctypes.POINTER(ctypes.c_uint64), pointer, ctypes.c_uint]
        self._message = library.cuGetErrorString
        self._message.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock host memory and map it for every device."""
        return int(self._register(address, nbytes, _PORTABLE | _MAPPED))

    def unregister(self, address: int) -> int:
        return int(self._unregister(address))

    def device_address(self, address: int) -> tuple[int, int]:
        """(error code, where the device reads what was registered at `address`)."""
        device = ctypes.c_uint64()
        return int(self._device_pointer(ctypes.byref(device), address, 0)), device.value

    def message(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._message(code, ctypes.byref(text))
        return text.value.decode() if text.value else "unknown"


@dataclass(frozen=True)
class Chunk:
    """One registration: `nbytes` at `host` in host memory, at `device` for the device."""

    host: int
    device: int
    nbytes: int


class PinnedMemory:
    """All memory that was registered with `driver` here and is not freed yet.

    Within `idle` the device has done all its work, and its context is current on the calling thread, as the
    driver wants it.
    """

    def __init__(self, driver: CudaDriver, idle: Callable[[], AbstractContextManager[None]]) -> None:
        self._driver = driver
        self._idle = idle
        self._blocks: dict[int, tuple[Chunk, ...]] = {}

    def allocate(self, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> torch.Tensor:
        """Registered host memory, uint8 [nbytes], zero; unregistered and unmapped when its storage is freed.

        Raises CapacityError where the host has not that much, or the driver refuses it; nothing is kept then.
        """
        assert nbytes > 0
        assert chunk_bytes % mmap.PAGESIZE == 0, "chunks are whole pages"
        mapping = map_host(nbytes)
        mapping[:: mmap.PAGESIZE].zero_()  # page faults on all threads; registering takes them on one
        start, end = mapping.data_ptr(), mapping.data_ptr() + page_bytes(nbytes)
        chunks: list[Chunk] = []
        with self._idle():
            try:
                for address in range(start, end, chunk_bytes):
                    size = min(chunk_bytes, end - address)
                    chunks.append(self._register(address, size, done_bytes=address - start))
            except CapacityError:
                _unregister(self._driver, chunks)
                raise
        # The array stands between torch and the mapping, so that unregistering comes before unmapping.
        owner = (ctypes.c_uint8 * nbytes).from_address(start)
        self._blocks[start] = tuple(chunks)
        release = weakref.finalize(owner, _release, self._blocks, start, self._driver, self._idle, mapping)
        release.atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def pieces(self, host: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Cuts contiguous `host` at the chunk boundaries within it: (offset, length), in bytes.

        Memory that was not registered here is one piece.
        """
        start, end = host.data_ptr(), host.data_ptr() + host.nbytes
        chunks = self._blocks.get(host.untyped_storage().data_ptr(), (Chunk(start, start, host.nbytes),))
        for chunk in chunks:
            first, last = max(start, chunk.host), min(end, chunk.host + chunk.nbytes)
            if first < last:
                yield first - start, last - first

    def device_address(self, host: torch.Tensor) -> int | None:
        """Where the device reads contiguous `host`; None where that is not one run of device addresses."""
        chunks = self._blocks.get(host.untyped_storage().data_ptr())
        assert chunks is not None, "only memory from `allocate` is registered"
        start, end = host.data_ptr(), host.data_ptr() + host.nbytes
        shifts = {c.device - c.host for c in chunks if c.host < end and start < c.host + c.nbytes}
        return start + shifts.pop() if len(shifts) == 1 else None

    def host_address(self, device: int) -> int | None:
        """Where in host memory device address `device` lies; None where it is not registered memory."""
        for chunks in tuple(self._blocks.values()):
            for chunk in chunks:
                if chunk.device <= device < chunk.device + chunk.nbytes:
                    return chunk.host + device - chunk.device
        return None

    def _register(self, address: int, nbytes: int, done_bytes: int) -> Chunk:
        if code := self._driver.register(address, nbytes):
            raise self._refusal(code, nbytes, done_bytes)
        code, device = self._driver.device_address(address)
        if code:
            self._driver.unregister(address)
            raise self._refusal(code, nbytes, done_bytes)
        return Chunk(address, device, nbytes)

    def _refusal(self, code: int, nbytes: int, done_bytes: int) -> CapacityError:
        why = ""
        if code == NOT_SUPPORTED:
            why = "; a GPU in confidential-computing mode cannot read host memory in place"
        elif code == OUT_OF_MEMORY:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            locked = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
            available = format_bytes(host_available_bytes())
            why = f"; {available} of host memory are available, ulimit -l is {locked}"
        return CapacityError(
            f"host memory could not be pinned: the driver refused {format_bytes(nbytes)} after "
            f"{format_bytes(done_bytes)} of this block: error {code} ({self._driver.message(code)}){why}",
            hint=UNPINNED_HINT,
        )


def map_host(nbytes: int) -> torch.Tensor:
    """`map_memory`, or CapacityError where the host, or its control group, has not that much left."""
    available_bytes = host_available_bytes()
    hint = "offload less, or raise the limit"
    if nbytes > available_bytes:
        raise CapacityError(
            f"host memory: {format_bytes(nbytes)} are needed, {format_bytes(available_bytes)} are available",
            hint=hint,
        )
    try:
        return map_memory(nbytes)
    except OSError as error:
        raise CapacityError(f"host memory: {format_bytes(nbytes)} could not be mapped: {error}", hint=hint) from error


def _release(
    blocks: dict[int, tuple[Chunk, ...]],
    start: int,
    driver: CudaDriver,
    idle: Callable[[], AbstractContextManager[None]],
    mapping: torch.Tensor,
) -> None:
    """Unregister what starts at `start`; `mapping` is unmapped when the caller lets go of it, after that."""
    with idle():  # a kernel or a copy may still have been reading
        _unregister(driver, blocks.pop(start))


def _unregister(driver: CudaDriver, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        code = driver.unregister(chunk.host)
        assert code == 0, f"unregistering {chunk}: {driver.message(code)}"
