"""A GPU that is planned for and is not here: its memory and its link, by name. Nothing can be placed on it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from overspill.machine.arena import Block
from overspill.machine.device import Device, Link, LinkTraffic, Transfer
from overspill.machine.specs import Gpu

DRIVER_BYTES = 640 << 20
"""What nvidia-smi counts and CUDA does not have: by messages that torch's users quote 0.6 GiB of an L40S and an H200,
0.35 to 0.85 GiB of others."""
CONTEXT_BYTES = 640 << 20
"""What a CUDA context and the libraries' workspaces take of a GPU before anything is asked of it; assumed."""


class NamedDevice(Device):
    """`host_memory_bytes` is what the host beside it has for weights and buffers."""

    kind = "cuda"
    torch_device = torch.device("meta")
    unified = False

    def __init__(self, gpu: Gpu, link: Link, host_memory_bytes: int | None) -> None:
        self.gpu = gpu
        self.link = link
        self.host_memory_bytes = host_memory_bytes if host_memory_bytes is not None else sys.maxsize
        self.traffic = LinkTraffic()

    @property
    def name(self) -> str:
        return f"{self.gpu.name} (named, not here)"

    @property
    def memory_bytes(self) -> int:
        return self.gpu.memory_bytes - DRIVER_BYTES - CONTEXT_BYTES

    def _not_here(self) -> AssertionError:
        return AssertionError(f"{self.name} can be planned for, and nothing else")

    def allocate(self, nbytes: int, purpose: str) -> Block:
        raise self._not_here()

    def allocate_host(self, nbytes: int, *, pinned: bool) -> Block:
        raise self._not_here()

    def reserve(self, purpose: str, nbytes: int) -> None:
        raise self._not_here()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        raise self._not_here()

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        raise self._not_here()

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        raise self._not_here()

    def zero_copy(self, host: torch.Tensor) -> torch.Tensor:
        raise self._not_here()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        raise self._not_here()

    def synchronize(self) -> None:
        raise self._not_here()

    def held_bytes(self, purpose: str) -> int:
        raise self._not_here()

    def peak_bytes(self) -> int:
        raise self._not_here()

    def reset_peak(self) -> None:
        raise self._not_here()

    def label(self, tensors: Iterable[torch.Tensor], purpose: str) -> int:
        raise self._not_here()

    def owns(self, tensor: torch.Tensor) -> bool:
        raise self._not_here()
