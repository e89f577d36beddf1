"""Where streamed experts come from: host memory, or the checkpoint's own files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from overspill.checkpoint import Extent
from overspill.machine.device import Device
from overspill.model.experts import ExpertBlock
from overspill.model.sources import Extents, runs_of
from overspill.offload.fetches import DiskReads, Fetch, HostFetch, Region, extents_of
from overspill.plan.slots import Slots


class ExpertSource(ABC):
    """Brings experts into `slots`. One thread asks."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    @abstractmethod
    def start(self, block: ExpertBlock, expert: int, slot: torch.Tensor) -> Fetch:
        """Begin to fill `slot`, uint8 device memory, with `expert` of `block`, each weight at its span."""


class HostSource(ExpertSource):
    """From stacks of experts in host memory, by weight name."""

    def __init__(self, slots: Slots, device: Device, hosts: Mapping[str, torch.Tensor]) -> None:
        super().__init__(slots)
        self._device = device
        self._bytes = {name: tensor.flatten().view(torch.uint8) for name, tensor in hosts.items()}

    def start(self, block: ExpertBlock, expert: int, slot: torch.Tensor) -> Fetch:
        transfers = []
        for weight in block.weights.values():
            nbytes = weight.nbytes // block.experts
            with torch._C._DisableTorchDispatch():  # slices of memory are no work of the device
                source = self._bytes[weight.full][expert * nbytes : (expert + 1) * nbytes]
                target = slot[self._slots.span(weight, expert)]
            transfers.append(self._device.transfer(target, source))
        return HostFetch(transfers)


class DiskSource(ExpertSource):
    """From the checkpoint's files, or those of `converted` weights by name, one read per run of bytes."""

    def __init__(self, slots: Slots, reads: DiskReads, converted: Mapping[str, Extents]) -> None:
        super().__init__(slots)
        self.reads = reads
        self._converted = converted

    def start(self, block: ExpertBlock, expert: int, slot: torch.Tensor) -> Fetch:
        regions = []
        for attribute, runs in self.runs(block, expert).items():
            weight = block.weights[attribute]
            with torch._C._DisableTorchDispatch():
                regions.append(Region(runs, slot[self._slots.span(weight, expert)], [f"{weight.full}[{expert}]"]))
        return self.reads.start(regions)

    def runs(self, block: ExpertBlock, expert: int) -> dict[str, list[Extent]]:
        """Where the weights of `expert` are read, by attribute."""
        found = {}
        for attribute, weight in block.weights.items():
            nbytes = weight.nbytes // block.experts
            source = extents_of(weight, self._converted)
            found[attribute] = runs_of(source, expert * nbytes, (expert + 1) * nbytes)
        return found
