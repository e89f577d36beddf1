"""Memory for what crosses the emulated link, kept between operations: taking fresh pages costs more than the copy."""

from __future__ import annotations

from bisect import insort

import torch

from overspill.machine.arena import map_memory


class Scratch:
    """Hands out memory and takes it back; holds at most what was in use at once, each piece for its largest use.

    It is no device's: a GPU that reads host memory in place takes none for it.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # by size

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [at least nbytes], whatever it holds."""
        for number, block in enumerate(self._free):
            if block.numel() >= nbytes:
                return self._free.pop(number)
        if self._free:
            self._free.pop()  # makes way for a larger one
        return map_memory(nbytes)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back the storage of `tensor`, of which nothing else is in use any more."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            insort(self._free, torch.empty(0, dtype=torch.uint8).set_(storage), key=torch.Tensor.numel)
