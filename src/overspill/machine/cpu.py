"""The CPU as a device: its memory is the host's, so there is no link and nothing to offload to."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable

import torch

from overspill.errors import CapacityError
from overspill.machine.arena import Block, map_memory, page_bytes
from overspill.machine.device import Device, LinkTraffic, Transfer
from overspill.machine.memory import host_available_bytes


class CpuDevice(Device):
    """`unified`: the host tier is this device's own memory."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    unified = True
    link = None

    def __init__(self, limit_bytes: int | None = None) -> None:
        """At most `limit_bytes` are used, whatever the machine has."""
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self.traffic = LinkTraffic()
        self._held: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return f"CPU, {torch.get_num_threads()} threads"

    @property
    def memory_bytes(self) -> int:
        return min(self._limit_bytes, host_available_bytes() + sum(self._held.values()))

    def allocate(self, nbytes: int, purpose: str) -> Block:
        data = map_memory(nbytes)
        self._held[purpose] += nbytes
        weakref.finalize(data.untyped_storage(), self._held.subtract, {purpose: nbytes}).atexit = False
        return Block(data, page_bytes(nbytes))

    def allocate_host(self, nbytes: int, *, pinned: bool) -> Block:
        raise AssertionError("a plan for the CPU device has no host tier beside it")

    def reserve(self, purpose: str, nbytes: int) -> None:
        available = host_available_bytes()
        if nbytes > available:
            raise CapacityError(
                f"{purpose} needs {nbytes} bytes, {available} bytes of memory are free",
                hint="allow fewer or shorter sequences (--max-num-seqs, --max-model-len)",
            )
        self._held[purpose] = nbytes

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        raise AssertionError("the CPU device has no link")

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        raise AssertionError("the CPU device has no link")

    def zero_copy(self, host: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the CPU device has no link")

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def synchronize(self) -> None:
        return

    def held_bytes(self, purpose: str) -> int:
        return self._held[purpose]

    def peak_bytes(self) -> int:
        return sum(self._held.values())

    def reset_peak(self) -> None:
        return

    def label(self, tensors: Iterable[torch.Tensor], purpose: str) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self._held[purpose] = sum(storages.values())
        return self._held[purpose]

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"
