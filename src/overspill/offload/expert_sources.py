"""Where streamed experts come from: host memory, or the checkpoint's own files."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from overspill.checkpoint import Extent
from overspill.machine.device import Device, Transfer
from overspill.machine.reads import FileReader
from overspill.model.experts import ExpertBlock
from overspill.model.sources import Extents
from overspill.offload.loader import byte_view

Parts = Mapping[str, torch.Tensor]
"""One expert's bytes by attribute, each uint8 [n]."""

_READERS = 2


class Fetch(ABC):
    """An expert on its way into its slot."""

    @abstractmethod
    def wait(self) -> None:
        """Hold back what the device computes next until the expert is there. Raises what reading raised."""

    @abstractmethod
    def settle(self) -> bool:
        """Return when nothing is written any more: whether the expert came."""


class ExpertSource(ABC):
    """Brings experts into slots. One thread asks."""

    @abstractmethod
    def start(self, block: ExpertBlock, expert: int, slot: Parts) -> Fetch:
        """Begin to fill `slot`, device memory, with `expert` of `block`."""


class HostSource(ExpertSource):
    """From stacks of experts in host memory, by weight name."""

    def __init__(self, device: Device, hosts: Mapping[str, torch.Tensor]) -> None:
        self._device = device
        self._bytes = {name: tensor.flatten().view(torch.uint8) for name, tensor in hosts.items()}

    def start(self, block: ExpertBlock, expert: int, slot: Parts) -> Fetch:
        transfers = []
        for attribute, weight in block.weights.items():
            nbytes = weight.nbytes // block.experts
            with torch._C._DisableTorchDispatch():  # a slice of host memory is no work of the device
                source = self._bytes[weight.full][expert * nbytes : (expert + 1) * nbytes]
            transfers.append(self._device.transfer(slot[attribute], source))
        return _Transfers(transfers)


class _Transfers(Fetch):
    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def settle(self) -> bool:
        for transfer in self._transfers:
            transfer.join()
        return True


class DiskSource(ExpertSource):
    """From the checkpoint's files, one read per run of bytes: into `staging` and over the link, or straight into slots.

    `staging` is host memory of READ_BUFFERS x `slot_bytes`; None where the device's memory is the host's own.
    """

    def __init__(self, device: Device, staging: torch.Tensor | None, slot_bytes: int) -> None:
        self._device = device
        self._reader = FileReader()
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="overspill-expert-read")
        weakref.finalize(self, _end, self._threads, self._reader)
        buffers = [] if staging is None else list(staging.split(slot_bytes))
        self._buffers = buffers
        self._busy: list[_Read | None] = [None] * len(buffers)
        self._next = 0

    @property
    def bytes_read(self) -> int:
        """From the files, alignment included."""
        return self._reader.bytes_read

    def start(self, block: ExpertBlock, expert: int, slot: Parts) -> Fetch:
        if not self._buffers:
            return _Read(self._threads.submit(self._into, block, expert, slot))
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        earlier = self._busy[number]
        read = _Read(self._threads.submit(self._through, block, expert, slot, self._buffers[number], earlier))
        self._busy[number] = read
        return read

    def _into(self, block: ExpertBlock, expert: int, slot: Parts) -> list[Transfer]:
        pieces: list[tuple[Extent, memoryview]] = []
        for attribute, weight in block.weights.items():
            assert isinstance(weight.source, Extents)
            target = byte_view(slot[attribute])
            extents = extents_of(weight.source, expert, weight.nbytes // block.experts)
            pieces += [(extent, target[extent.at : extent.at + extent.length]) for extent in extents]
        self._reader.read(pieces)
        return []

    def _through(
        self, block: ExpertBlock, expert: int, slot: Parts, buffer: torch.Tensor, earlier: _Read | None
    ) -> list[Transfer]:
        if earlier is not None:
            earlier.settle()
        staged, at = {}, 0
        for attribute, part in slot.items():
            staged[attribute] = buffer[at : at + part.numel()]
            at += part.numel()
        self._into(block, expert, staged)
        return [self._device.transfer(part, staged[attribute]) for attribute, part in slot.items()]


class _Read(Fetch):
    """A read, and the transfers that it starts when it is done."""

    def __init__(self, read: Future[list[Transfer]]) -> None:
        self._read = read

    def wait(self) -> None:
        for transfer in self._read.result():
            transfer.wait()

    def settle(self) -> bool:
        if self._read.exception() is not None:
            return False
        for transfer in self._read.result():
            transfer.join()
        return True


def _end(threads: ThreadPoolExecutor, reader: FileReader) -> None:
    """No read is under way: each one holds what ends here. The last to let go may be one of the threads."""
    threads.submit(reader.close)
    threads.shutdown(wait=False)


def extents_of(source: Extents, expert: int, nbytes: int) -> list[Extent]:
    """The runs of the files that hold `expert` of a stack with `nbytes` each; `at` counts from the expert's start."""
    begin, end = expert * nbytes, (expert + 1) * nbytes
    runs: list[Extent] = []
    for extent in source.extents:
        first, last = max(begin, extent.at), min(end, extent.at + extent.length)
        if first >= last:
            continue
        offset = extent.offset + first - extent.at
        if runs and runs[-1].file == extent.file and runs[-1].offset + runs[-1].length == offset:
            before = runs.pop()
            runs.append(Extent(before.file, before.offset, before.length + last - first, before.at))
        else:
            runs.append(Extent(extent.file, offset, last - first, first - begin))
    return runs
