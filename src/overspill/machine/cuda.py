"""An NVIDIA GPU: exact blocks of its memory, host memory that it reads in place, one stream for copies.

The only file that touches a GPU, but for the driver calls of `pinned`; imported only when one is chosen.
"""

from __future__ import annotations

import re
import statistics
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from overspill.config.sizes import format_bytes
from overspill.errors import CapacityError, ConfigError, DeviceOutOfMemoryError
from overspill.machine.arena import Block, page_bytes
from overspill.machine.device import Device, Link, LinkTraffic, Transfer
from overspill.machine.memory import MemoryAccount
from overspill.machine.pinned import CudaDriver, PinnedMemory, map_host
from overspill.machine.probe import NO_VIEW_HINT, prove_zero_copy

_TORCH_BLOCK_BYTES = 512  # torch's allocator hands out multiples of this
_PROBE_CHUNK_BYTES = 64 << 10
_LINK_PROBE_BYTES = 64 << 20
_LINK_PROBE_ROUNDS = 7


class CudaTransfer(Transfer):
    """A copy on one of the device's copy streams. Holds both its ends."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, done: torch.cuda.Event) -> None:
        self.target, self.source = target, source
        self._done = done

    def wait(self) -> None:
        device = self.target.device if self.target.is_cuda else self.source.device
        torch.cuda.current_stream(device).wait_event(self._done)

    def join(self) -> None:
        self._done.synchronize()


class _HostView:
    """Registered host memory, described as CUDA's array interface wants it; torch keeps this object alive."""

    def __init__(self, host: torch.Tensor, address: int) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "strides": None,
            "data": (address, False),
        }


@contextmanager
def _idle(device: torch.device) -> Iterator[None]:
    """`device` has done all its work, and its context is current."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield


@dataclass(frozen=True)
class _Held:
    """A storage in device memory, counted under `purpose` as long as it lives."""

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    allocated_bytes: int
    purpose: str


class CudaDevice(Device):
    """GPU `index` (torch's current one by default), of whose memory at most `memory_bytes` are used.

    The limit holds for all that torch allocates on that GPU in this process, until another device is made for
    it; without one, what is free now is the limit. `unified` GPUs share the host's memory. `traffic` counts
    transfers, as zero-copy reads are made by the GPU alone; its `stall_s` stays 0, as asking would make it wait.
    """

    kind = "cuda"
    sees_the_link = False

    def __init__(self, memory_bytes: int | None = None, index: int | None = None) -> None:
        index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        if memory_bytes is not None and memory_bytes > total_bytes:
            total = format_bytes(total_bytes)
            asked = f"{memory_bytes} ({format_bytes(memory_bytes)})"
            raise ConfigError(
                f'"device_memory_bytes" is {asked}, the GPU has {total}',
                hint=f"allow at most {total}, or take the setting away to use all that is free",
            )
        properties = torch.cuda.get_device_properties(index)
        self.unified = bool(properties.is_integrated)
        self._name = properties.name + (" (shares the host's memory)" if self.unified else "")
        usable_bytes = free_bytes + torch.cuda.memory_reserved(index)
        self._memory_bytes = usable_bytes if memory_bytes is None else min(usable_bytes, memory_bytes)
        share = 1.0 if memory_bytes is None else min(1.0, memory_bytes / properties.total_memory)
        torch.cuda.set_per_process_memory_fraction(share, index)
        self.traffic = LinkTraffic()
        self._copies = torch.cuda.Stream(self.torch_device)
        self._returns = torch.cuda.Stream(self.torch_device)  # what goes back waits for no weight on its way here
        self._pinned = PinnedMemory(CudaDriver(), partial(_idle, self.torch_device))
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()  # others than the computing thread ask what is held
        self._reserved: dict[str, int] = {}
        self._zero_copy_proved = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    # -- memory -------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, purpose: str) -> Block:
        self._account().take(purpose, nbytes)
        before_bytes = torch.cuda.memory_allocated(self.torch_device)
        with self._out_of_memory_translated(f"{purpose} ({format_bytes(nbytes)})"):
            data = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        allocated_bytes = max(nbytes, torch.cuda.memory_allocated(self.torch_device) - before_bytes)
        self._hold(data.untyped_storage(), allocated_bytes, purpose)
        return Block(data, allocated_bytes)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> Block:
        """Raises CapacityError where the host has not that much, or the driver does not pin it."""
        data = self._pinned.allocate(nbytes) if pinned else map_host(nbytes)
        return Block(data, page_bytes(nbytes), pinned)

    def reserve(self, purpose: str, nbytes: int) -> None:
        account = self._account()
        account.reserve(purpose, nbytes)
        self._reserved = account.reserved

    def held_bytes(self, purpose: str) -> int:
        return self._by_purpose()[purpose]

    def peak_bytes(self) -> int:
        held = self._by_purpose()
        unfilled_bytes = sum(max(0, nbytes - held[purpose]) for purpose, nbytes in self._reserved.items())
        return torch.cuda.max_memory_allocated(self.torch_device) + unfilled_bytes

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def label(self, tensors: Iterable[torch.Tensor], purpose: str) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        for address, storage in storages.items():
            assert storage.device == self.torch_device, f"{purpose}: a storage on {storage.device}"
            known = self._held.get(address)
            if known is not None and known.storage() is storage:
                self._hold(storage, known.allocated_bytes, purpose)
            else:
                blocks = -(-storage.nbytes() // _TORCH_BLOCK_BYTES)
                self._hold(storage, blocks * _TORCH_BLOCK_BYTES, purpose)
        return sum(storage.nbytes() for storage in storages.values())

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device and self._pinned.host_address(tensor.data_ptr()) is None

    def _hold(self, storage: torch.UntypedStorage, allocated_bytes: int, purpose: str) -> None:
        if storage.nbytes():
            held = _Held(weakref.ref(storage), storage.nbytes(), allocated_bytes, purpose)
            with self._lock:
                self._held[storage.data_ptr()] = held

    def _by_purpose(self) -> Counter[str]:
        """Bytes held now; "working" is what torch holds beyond what is known."""
        with self._lock:
            self._held = {a: held for a, held in self._held.items() if held.storage() is not None}
            alive = list(self._held.values())
        bytes_held: Counter[str] = Counter()
        for held in alive:
            bytes_held[held.purpose] += held.nbytes
        known_bytes = sum(held.allocated_bytes for held in alive)
        bytes_held["working"] += max(0, torch.cuda.memory_allocated(self.torch_device) - known_bytes)
        return bytes_held

    def _account(self) -> MemoryAccount:
        """What is held and reserved now, against the limit."""
        return MemoryAccount(self._memory_bytes, held=self._by_purpose(), reserved=dict(self._reserved))

    @contextmanager
    def _out_of_memory_translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            wanted = re.search(r"Tried to allocate ([0-9.]+ \w+)", str(error))
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
            held = ", ".join(f"{name} {format_bytes(n)}" for name, n in self._by_purpose().items() if n)
            raise DeviceOutOfMemoryError(
                f"out of device memory: {what} needs {wanted[1] if wanted else 'memory'} more; of "
                f"{format_bytes(total_bytes)} on the GPU {format_bytes(free_bytes)} are free and "
                f"{format_bytes(self._memory_bytes)} may be used (held: {held or 'nothing'})",
                hint="offload more weights (--cpu-offload-gb), or allow fewer or shorter sequences "
                "(--max-num-seqs, --max-model-len)",
            ) from error

    # -- the link -----------------------------------------------------------------------------------------

    @cached_property
    def link(self) -> Link:  # type: ignore[override]  # the other devices state theirs
        """Host to device, measured once, from pinned memory where that can be had."""
        try:
            source = self.allocate_host(_LINK_PROBE_BYTES, pinned=True).data
        except CapacityError:
            source = self.allocate_host(_LINK_PROBE_BYTES, pinned=False).data
        with self._out_of_memory_translated("measuring the link"):
            target = torch.empty(_LINK_PROBE_BYTES, dtype=torch.uint8, device=self.torch_device)
        latency_s = self._copy_seconds(target[:1], source[:1])
        seconds = self._copy_seconds(target, source)
        del target
        torch.cuda.empty_cache()
        return Link(_LINK_PROBE_BYTES / max(seconds - latency_s, 1e-9), latency_s, measured=True)

    def _copy_seconds(self, target: torch.Tensor, source: torch.Tensor) -> float:
        """The median time of a copy, by the GPU's own clock; the first copy is not counted."""
        event: Any = torch.cuda.Event
        times = []
        self._copies.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._copies):
            for _ in range(1 + _LINK_PROBE_ROUNDS):
                begun = self._copies.record_event(event(enable_timing=True))
                target.copy_(source, non_blocking=True)
                done = self._copies.record_event(event(enable_timing=True))
                done.synchronize()
                times.append(float(begun.elapsed_time(done)) / 1e3)
        return statistics.median(times[1:])

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """From pageable memory the driver copies by way of its own staging buffer: the bytes are right, and
        the caller is held until the device reaches the copy and most of it is done."""
        assert target.nbytes == source.nbytes, "a transfer fills its target"
        self._copies.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._copies):
            for offset, nbytes in self._pinned.pieces(source):
                piece = slice(offset, offset + nbytes)
                target[piece].copy_(source[piece], non_blocking=True)
            done = self._copies.record_event()
        target.record_stream(self._copies)  # freed early, its memory is reused only when the copy is done
        self.traffic.bytes += source.nbytes
        self.traffic.transfers += 1
        return CudaTransfer(target, source, done)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        assert target.nbytes == source.nbytes, "a transfer fills its target"
        self._returns.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._returns):
            for offset, nbytes in self._pinned.pieces(target):
                piece = slice(offset, offset + nbytes)
                target[piece].copy_(source[piece], non_blocking=True)
            done = self._returns.record_event()
        source.record_stream(self._returns)
        self.traffic.returned_bytes += source.nbytes
        return CudaTransfer(target, source, done)

    def zero_copy(self, host: torch.Tensor) -> torch.Tensor:
        """`host` is contiguous and pinned, or empty (the result is then an ordinary tensor).

        Raises CapacityError where the device does not see host memory as it is; tried once, at first use.
        """
        if host.numel() == 0:
            return torch.empty(host.shape, dtype=host.dtype, device=self.torch_device)
        if not self._zero_copy_proved:
            probe = self._pinned.allocate(2 * _PROBE_CHUNK_BYTES, _PROBE_CHUNK_BYTES)
            one_run = self._pinned.device_address(probe) is not None  # then across the boundary as well
            for part in (probe,) if one_run else probe.chunk(2):
                prove_zero_copy(part, self._view(part), self.synchronize)
            self._zero_copy_proved = True
        return self._view(host)

    def _view(self, host: torch.Tensor) -> torch.Tensor:
        assert host.is_contiguous(), "a view of host memory is one run of bytes"
        address = self._pinned.device_address(host)
        if address is None:
            raise CapacityError(
                f"zero-copy: {format_bytes(host.nbytes)} lie across two chunks of pinned memory, which this "
                "system (WSL2, for one) does not map side by side for the device",
                hint=NO_VIEW_HINT,
            )
        view = torch.as_tensor(_HostView(host, address), device=self.torch_device)
        assert view.data_ptr() == address, "torch copied what should be a view"
        return view.view(host.dtype).view(host.shape)

    def host_address(self, view: torch.Tensor) -> int:
        address = self._pinned.host_address(view.data_ptr())
        assert address is not None, "not a view of pinned host memory"
        return address

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device, copy=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    @contextmanager
    def execution(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), self._out_of_memory_translated("running the model"):
            yield
