"""What a device can do for us: hold exact bytes, and fetch over its link."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from overspill.machine.arena import Block


@dataclass(frozen=True)
class Link:
    """The path between host and device memory, one way. `measured` is False for a figure that was stated."""

    bandwidth: float  # bytes per second
    latency_s: float
    measured: bool

    def seconds(self, nbytes: int, transfers: int = 1) -> float:
        """The least time that `nbytes` in `transfers` transfers take."""
        return nbytes / self.bandwidth + transfers * self.latency_s


@dataclass
class LinkTraffic:
    """What crossed the link so far. `stall_s` is the time that the computing side waited for it, where it is known.

    `bytes` and `transfers` went to the device, `returned_bytes` came from it.
    """

    bytes: int = 0
    transfers: int = 0
    stall_s: float = 0.0
    returned_bytes: int = 0

    def __sub__(self, earlier: LinkTraffic) -> LinkTraffic:
        return LinkTraffic(
            self.bytes - earlier.bytes,
            self.transfers - earlier.transfers,
            self.stall_s - earlier.stall_s,
            self.returned_bytes - earlier.returned_bytes,
        )

    def copy(self) -> LinkTraffic:
        return replace(self)


class Transfer(ABC):
    """A copy under way between host and device memory."""

    @abstractmethod
    def wait(self) -> None:
        """Hold back what the device computes next until the copy is done. May return before it is (CUDA)."""

    @abstractmethod
    def join(self) -> None:
        """Return when the copy is done: the host may read what came, or write over what went."""


class Device(ABC):
    """What computes a layer. One instance per process and device; it owns no tensors, its blocks do.

    `unified` means that the host tier is the device's own memory, so that a weight moved there frees nothing.
    """

    kind: str
    torch_device: torch.device
    unified: bool
    link: Link | None
    traffic: LinkTraffic
    host_memory_bytes: int | None = None
    """Of the host beside it, where that is not this machine."""
    sees_the_link = True
    """Whether `traffic` counts zero-copy reads too, and knows how long computing waited; a GPU makes both alone."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For people: the hardware, or that it is emulated."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that may be used on the device, in all."""

    @abstractmethod
    def allocate(self, nbytes: int, purpose: str) -> Block:
        """Device memory for `purpose` ("weights", "buffer_pool"), counted until the block's storage is freed.

        Raises DeviceOutOfMemoryError where the device has less left.
        """

    @abstractmethod
    def allocate_host(self, nbytes: int, *, pinned: bool) -> Block:
        """Host memory that the device can read, exact to the page; `pinned` where the link needs it so."""

    @abstractmethod
    def reserve(self, purpose: str, nbytes: int) -> None:
        """Set device memory aside for `purpose` ("kv_cache") from the budget."""

    @abstractmethod
    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Fill device tensor `target` from CPU tensor `source` (same shape and dtype) while loading; done on return.

        Not counted as traffic: it happens once.
        """

    @abstractmethod
    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Begin a copy of host bytes (uint8 [n]) into device bytes (uint8 [n]).

        It starts after what the device has been told to compute so far, and runs beside what it is told next.
        """

    @abstractmethod
    def download(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Begin a copy of device bytes (uint8 [n]) into host bytes (uint8 [n]), after what computes them."""

    @abstractmethod
    def zero_copy(self, host: torch.Tensor) -> torch.Tensor:
        """A device tensor over `host`'s memory: each use reads across the link. Keeps `host` alive."""

    def host_address(self, view: torch.Tensor) -> int:
        """Where in host memory a `zero_copy` view reads."""
        return view.data_ptr()

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device copy of a small CPU tensor (inputs)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all that was asked of the device is done."""

    @abstractmethod
    def held_bytes(self, purpose: str) -> int:
        """Device bytes held now for `purpose`: "weights", "buffer_pool", "kv_cache", "working"."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most device bytes held at once since `reset_peak`, all purposes and reservations."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def label(self, tensors: Iterable[torch.Tensor], purpose: str) -> int:
        """Count these device tensors' storages under `purpose` from now on; returns their bytes."""

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`'s bytes lie in this device's memory."""

    @contextmanager
    def execution(self) -> Iterator[None]:
        """Run the model inside this."""
        yield

    @contextmanager
    def host_execution(self) -> Iterator[None]:
        """Within `execution()`: what runs inside this is the host's own work on its own memory."""
        yield

    def timed(self) -> float:
        """Seconds on a clock, after all work so far is done."""
        self.synchronize()
        return time.perf_counter()
