"""Layers copied ahead of their turn into a ring of static device buffers.

The copies run beside the computing; a layer's own hook waits for its copy, and when the layer has run its buffer is
given to a later one. What a buffer holds is tracked, so a layer that is skipped, or run out of turn, costs time and
never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overspill.machine.arena import aligned_bytes, cut
from overspill.machine.device import Device, Transfer
from overspill.plan import Ring, RingLayer
from overspill.plan.ring import buffer_of, next_index

POISON_BYTE = 0xFF  # NaN in every float dtype


@dataclass
class RingBuffer:
    """One device buffer. `holds` is the ring layer whose bytes are there, or on their way by `transfer`."""

    data: torch.Tensor
    holds: int | None = None
    transfer: Transfer | None = None


class Prefetcher:
    """Runs a ring over `model`'s layers; `pool` and `host` are the ring's device and host bytes, and owned by blocks.

    `layer_host[i]` is uint8 [layers[i].nbytes], laid out as the buffer is. With `poison` a released buffer is filled
    with NaN before its next copy starts, so that a late reader cannot go unnoticed.
    """

    def __init__(
        self, ring: Ring, pool: torch.Tensor, layer_host: list[torch.Tensor], device: Device, *, poison: bool
    ) -> None:
        size = ring.buffer_bytes
        self.ring = ring
        self.device = device
        self.poison = poison
        self.layer_host = layer_host
        self.buffers = [RingBuffer(pool[i * size : (i + 1) * size]) for i in range(ring.step)]
        self.out_of_turn = 0
        self._hooks: list[Any] = []

    def view(self, index: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The weight that lies `offset` bytes into ring layer `index`, as the model sees it: fixed for ever."""
        return cut(self._buffer(index).data, offset, shape, dtype)

    def install(self, model: nn.Module) -> None:
        """Hook the layers, and start the first copies."""
        for index, layer in enumerate(self.ring.layers):
            module = model.get_submodule(layer.path)
            self._hooks.append(module.register_forward_pre_hook(self._before(index)))
            self._hooks.append(module.register_forward_hook(self._after(index), always_call=True))
        if self.ring.look_ahead:
            for index in range(min(self.ring.step, len(self.ring.layers))):
                self._start(index)

    def remove(self) -> None:
        """Unhook the layers; what is on its way is waited for."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.device.synchronize()

    def _buffer(self, index: int) -> RingBuffer:
        return self.buffers[buffer_of(index, self.ring.step)]

    def _start(self, index: int) -> None:
        buffer = self._buffer(index)
        if buffer.holds == index:
            return
        if buffer.transfer is not None:
            buffer.transfer.wait()  # a copy that nobody came for
        layer = self.ring.layers[index]
        if self.poison:
            buffer.data.fill_(POISON_BYTE)
        buffer.holds = index
        buffer.transfer = self.device.transfer(buffer.data[: layer.nbytes], self.layer_host[index])

    def _before(self, index: int) -> Any:
        def wait(module: nn.Module, args: Any) -> None:
            buffer = self._buffer(index)
            if buffer.holds != index:
                self.out_of_turn += self.ring.look_ahead
                self._start(index)
            if buffer.transfer is not None:
                buffer.transfer.wait()
                buffer.transfer = None

        return wait

    def _after(self, index: int) -> Any:
        def release(module: nn.Module, args: Any, output: Any) -> None:
            if self.ring.look_ahead:
                self._start(next_index(index, self.ring.step, len(self.ring.layers)))
            elif self.poison:
                self._buffer(index).data.fill_(POISON_BYTE)
                self._buffer(index).holds = None
            else:
                self._buffer(index).holds = None

        return release


def offsets(layer: RingLayer) -> list[int]:
    """Where each of the layer's weights starts, in bytes from the layer's own start."""
    starts, at = [], 0
    for weight in layer.weights:
        starts.append(at)
        at += aligned_bytes(weight.nbytes)
    return starts
