"""Weights on their way into device memory: from host memory over the link, or from the checkpoint's own files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from overspill.checkpoint import Extent, FileStamp, verify_untouched
from overspill.errors import CheckpointError
from overspill.machine.device import Device, Transfer
from overspill.machine.reads import FileReader
from overspill.model.sources import Extents
from overspill.model.weights import Weight
from overspill.offload.loader import byte_view

_READERS = 2
"""Regions that are read at once; each read is several requests."""


class Fetch(ABC):
    """Bytes on their way to where the device computes."""

    @abstractmethod
    def wait(self) -> None:
        """Hold back what the device computes next until they are there. Raises what reading raised."""

    @abstractmethod
    def settle(self) -> bool:
        """Return when nothing is written any more: whether the bytes came."""


class HostFetch(Fetch):
    """Transfers from host memory."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def settle(self) -> bool:
        for transfer in self._transfers:
            transfer.join()
        return True


class Region(NamedTuple):
    """Runs of files and the memory they fill, uint8 [n]; `at` of each run is where in it the run lands.

    `names` are the weights that they are of.
    """

    runs: Sequence[Extent]
    memory: torch.Tensor
    names: Sequence[str]


class DiskReads:
    """Reads runs of files into device memory: through `buffers` of host memory, or straight where there are none.

    Each buffer holds the largest region; they are used in turn. Without them the device's memory is the host's own. The
    reading is past the page cache, by threads of its own. One thread asks. A file that is not as `stamps` say any more
    fails the read. What fails is a CheckpointError that names the file and the weights.
    """

    def __init__(self, device: Device, buffers: Sequence[torch.Tensor], stamps: Mapping[Path, FileStamp]) -> None:
        self._stamps = stamps
        self._device = device
        self._buffers = buffers
        self._reader = FileReader()
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="overspill-disk")
        self._last: list[DiskFetch | None] = [None] * len(buffers)
        self._next = 0

    @property
    def bytes_read(self) -> int:
        """From the files, alignment included."""
        return self._reader.bytes_read

    @property
    def staged_bytes(self) -> int:
        """Those of `bytes_read` that were copied once more, since their place has another alignment than the file's."""
        return self._reader.staged_bytes

    def start(self, regions: Sequence[Region]) -> DiskFetch:
        """Begin to fill device memory: all of `regions` in one read."""
        if not self._buffers:
            return DiskFetch(self._threads.submit(self._read, regions))
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        through = self._threads.submit(self._through, regions, self._buffers[number], self._last[number])
        self._last[number] = fetch = DiskFetch(through)
        return fetch

    def _read(self, regions: Sequence[Region]) -> list[Transfer]:
        try:
            self._fill(regions)
        except CheckpointError as error:
            names = [name for region in regions for name in region.names]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{error.message}; it was read for {names[0]}{more}", hint=error.hint) from error
        return []

    def _fill(self, regions: Sequence[Region]) -> None:
        files = {run.file for region in regions for run in region.runs}
        verify_untouched({file: self._stamps[file] for file in files if file in self._stamps})
        pieces: list[tuple[Extent, memoryview]] = []
        for region in regions:
            into = byte_view(region.memory)
            pieces += [(run, into[run.at : run.at + run.length]) for run in region.runs]
        self._reader.read(pieces)

    def _through(self, regions: Sequence[Region], buffer: torch.Tensor, earlier: DiskFetch | None) -> list[Transfer]:
        if earlier is not None:
            earlier.settle()
        staged = buffer[: sum(region.memory.numel() for region in regions)]
        parts = staged.split([region.memory.numel() for region in regions])
        self._read([region._replace(memory=part) for region, part in zip(regions, parts, strict=True)])
        return [self._device.transfer(region.memory, part) for region, part in zip(regions, parts, strict=True)]


class DiskFetch(Fetch):
    """A read, and the transfers that it starts when it is done (none where it read to where the bytes stay)."""

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


def extents_of(weight: Weight, converted: Mapping[str, Extents]) -> Extents:
    """Where a weight on disk is read: among the `converted`, by name, or in the checkpoint."""
    source = converted.get(weight.full, weight.source)
    assert isinstance(source, Extents), f"{weight.full} is on disk, and nothing holds it as it is computed with"
    assert source.dtype == weight.dtype, f"{weight.full} is on disk as {source.dtype}, not as {weight.dtype}"
    return source
