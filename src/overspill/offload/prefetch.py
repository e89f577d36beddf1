"""Layers copied ahead of their turn into a ring of static device buffers.

The copies run beside the computing; a layer's own hook waits for its copy, and when the layer has run its buffer is
given to a later one. What a buffer holds is tracked, so a layer that is skipped, or run out of turn, costs time and
never an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill.checkpoint import Extent
from overspill.errors import CheckpointError, UnsupportedModelError
from overspill.machine.arena import cut
from overspill.machine.device import Device
from overspill.model.sources import Extents, runs_of
from overspill.offload.fetches import DiskReads, Fetch, HostFetch, Region, extents_of
from overspill.plan import Ring, RingLayer
from overspill.plan.ring import buffer_of, next_index

POISON_BYTE = 0xFF  # NaN in every float dtype


@dataclass
class RingBuffer:
    """One device buffer. `holds` is the ring layer whose bytes are there, or on their way by `fetch`.

    `used_by` is the layer that runs and reads it.
    """

    data: torch.Tensor
    holds: int | None = None
    used_by: int | None = None
    fetch: Fetch | None = None


class LayerSource:
    """Where a ring's layers come from. One thread asks.

    `layer_host[i]`, uint8 [layers[i].nbytes], is laid out as the buffer is; a layer without one is read from its files
    by `reads`, those of `converted` (by weight name) where the checkpoint's are not read as they are.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[RingLayer],
        layer_host: Mapping[int, torch.Tensor],
        reads: DiskReads | None,
        converted: Mapping[str, Extents],
    ) -> None:
        self.reads = reads
        self._device = device
        self._layer_host = layer_host
        self._runs = {
            index: layer_runs(layer, converted) for index, layer in enumerate(layers) if index not in layer_host
        }
        self._names = [[weight.full for weight in layer.weights] for layer in layers]

    def start(self, index: int, buffer: torch.Tensor) -> Fetch:
        """Begin to fill `buffer`, uint8 [layer's bytes] of device memory, with ring layer `index`."""
        if index in self._layer_host:
            return HostFetch([self._device.transfer(buffer, self._layer_host[index])])
        assert self.reads is not None
        return self.reads.start([Region(self._runs[index], buffer, self._names[index])])


def layer_runs(layer: RingLayer, converted: Mapping[str, Extents]) -> list[Extent]:
    """The runs that fill the layer; weights that follow each other in the file and in memory are one."""
    runs: list[Extent] = []
    for weight, offset in zip(layer.weights, layer.offsets, strict=True):
        for run in runs_of(extents_of(weight, converted), 0, weight.nbytes, offset):
            before = runs[-1] if runs else None
            if before is not None and _end(before) == (run.file, run.offset, run.at):
                runs[-1] = replace(before, length=before.length + run.length)
            else:
                runs.append(run)
    return runs


def _end(run: Extent) -> tuple[Path, int, int]:
    return run.file, run.offset + run.length, run.at + run.length


class Prefetcher:
    """Runs a ring over `model`'s layers; `pool` is the ring's device memory, and owned by its block.

    With `poison` a released buffer is filled with NaN before its next copy starts, so that a late reader cannot go
    unnoticed.
    """

    def __init__(self, ring: Ring, pool: torch.Tensor, source: LayerSource, device: Device, *, poison: bool) -> None:
        size = ring.buffer_bytes
        self.ring = ring
        self.device = device
        self.poison = poison
        self.source = source
        self.buffers = [RingBuffer(pool[i * size : (i + 1) * size]) for i in range(ring.step)]
        self.out_of_turn = 0
        self.stall_s = 0.0
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

    def settle(self) -> None:
        """Wait for what is on its way; it stays where it came."""
        for buffer in self.buffers:
            if buffer.fetch is not None:
                buffer.fetch.settle()

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
        if buffer.fetch is not None:
            buffer.fetch.settle()  # a copy that nobody came for
        layer = self.ring.layers[index]
        if self.poison:
            buffer.data.fill_(POISON_BYTE)
        buffer.holds = index
        with torch._C._DisableTorchDispatch():  # a slice of memory is no work of the device
            room = buffer.data[: layer.nbytes]
        buffer.fetch = self.source.start(index, room)

    def _before(self, index: int) -> Any:
        def wait(module: nn.Module, args: Any) -> None:
            buffer = self._buffer(index)
            if buffer.used_by not in (None, index):
                paths = [self.ring.layers[i].path for i in (index, buffer.used_by)]
                raise UnsupportedModelError(
                    f"{paths[0]} runs while {paths[1]} does, and both have one buffer",
                    hint="uva with zero-copy, which reads every weight where it lies",
                )
            if buffer.holds != index:
                self.out_of_turn += self.ring.look_ahead
                self._start(index)
            if buffer.fetch is not None:
                begun = time.perf_counter()
                try:
                    self._arrive(index)
                except CheckpointError:  # perhaps it was read ahead in a pass that failed: can it be read now?
                    self._start(index)
                    self._arrive(index)
                self.stall_s += time.perf_counter() - begun
            buffer.used_by = index

        return wait

    def _arrive(self, index: int) -> None:
        buffer = self._buffer(index)
        fetch, buffer.fetch, buffer.holds = buffer.fetch, None, None
        assert fetch is not None
        fetch.wait()
        buffer.holds = index

    def _after(self, index: int) -> Any:
        def release(module: nn.Module, args: Any, output: Any) -> None:
            self._buffer(index).used_by = None
            if self.ring.look_ahead:
                self._start(next_index(index, self.ring.step, len(self.ring.layers)))
            elif self.poison:
                self._buffer(index).data.fill_(POISON_BYTE)
                self._buffer(index).holds = None
            else:
                self._buffer(index).holds = None

        return release
