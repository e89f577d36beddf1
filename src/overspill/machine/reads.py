"""Reading extents of checkpoint files into memory, past the page cache, several requests at a time.

Buffered reads cost a core of their own and fill the page cache with what is read once; a mapped file is
charged to whoever touches it and thrashes once it exceeds memory. So files are opened with O_DIRECT and read
in large requests by a few threads (`os.preadv` releases the GIL), into the destination itself where alignment
allows, else into a staging buffer and on from there. Where a file system refuses O_DIRECT the same requests
are buffered, and what they leave in the page cache is dropped.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self

from overspill.checkpoint.records import Extent
from overspill.errors import CheckpointError
from overspill.machine.read_requests import (
    ALIGNMENT,
    Request,
    address_of,
    plan_requests,
    round_down,
    round_up,
)

# Requests are made smaller than a chunk to occupy all threads, but not smaller than this.
MIN_REQUEST_BYTES = 512 << 10
# A copy shorter than this is done sooner than the GIL is given up and had back.
GIL_FREE_BYTES = 64 << 10
HUGE_PAGE_BYTES = 2 << 20
_DIRECT_REFUSED = frozenset({errno.EINVAL, errno.ENOTSUP})


class FileReader:
    """Fills memory from extents of files, with `threads` requests of up to `chunk_bytes` in flight.

    Its own memory is `threads` staging buffers of `chunk_bytes`. Files stay open until `close`, or until it is freed.
    `read` may be called from several threads. `bytes_read` counts what came from the files, gaps and alignment
    included, in `requests` reads; `staged_bytes` are those of them that passed a staging buffer. `direct` is False
    once a file system refused O_DIRECT.
    """

    def __init__(self, threads: int = 4, chunk_bytes: int = 4 << 20, direct: bool = True) -> None:
        assert threads > 0, threads
        assert chunk_bytes >= ALIGNMENT, chunk_bytes
        assert chunk_bytes % ALIGNMENT == 0, chunk_bytes
        self.direct = direct
        self.bytes_read = 0
        self.staged_bytes = 0
        self.requests = 0
        self._try_direct = direct
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="overspill-read")
        self._lock = Lock()
        self._files: dict[Path, _OpenFile] = {}
        weakref.finalize(
            self, _close_files, self._files
        ).atexit = False  # idle threads end with their pool by themselves
        self._staging: SimpleQueue[_Staging] = SimpleQueue()
        for _ in range(threads):
            self._staging.put(_staging_buffer(chunk_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for reads in flight, closes the files and frees the staging buffers."""
        self._pool.shutdown()
        _close_files(self._files)
        self._staging = SimpleQueue()

    def read(
        self,
        pieces: Sequence[tuple[Extent, memoryview]],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Fills every view, as long as its extent, with the extent's bytes.

        The views are the caller's and must stay until this returns. `progress` is called on the caller's
        thread with the bytes that arrived since its last call. Raises CheckpointError, once all threads came
        to rest, for a file that cannot be read or ends too early; the views may be filled in part by then.
        """
        requests = _Shared(self._plan(pieces))
        arrived: SimpleQueue[int | None] = SimpleQueue()
        useful = sum(1 + extent.length // MIN_REQUEST_BYTES for extent, _ in pieces if extent.length)
        workers = [self._pool.submit(self._work, requests, arrived) for _ in range(min(self._threads, useful))]
        try:
            for _ in workers:
                for count in iter(arrived.get, None):
                    if progress:
                        progress(count)
        finally:
            requests.stop()
            wait(workers)
        for worker in workers:
            worker.result()

    def _plan(self, pieces: Sequence[tuple[Extent, memoryview]]) -> Iterator[Request]:
        total = 0
        by_file: dict[Path, list[tuple[Extent, memoryview]]] = {}
        for extent, view in pieces:
            assert view.nbytes == extent.length, f"{view.nbytes} bytes of memory for {extent}"
            if extent.length:
                by_file.setdefault(extent.file, []).append((extent, view))
                total += extent.length
        share = max(round_up(total // self._threads), MIN_REQUEST_BYTES)
        for path, of_file in by_file.items():
            yield from plan_requests(path, of_file, min(share, self._chunk_bytes))

    def _work(self, requests: _Shared, arrived: SimpleQueue[int | None]) -> None:
        """Serves requests until none is left, reporting each one's bytes and at last None."""
        staging = self._staging.get()
        try:
            while request := requests.take():
                self._serve(request, staging)
                arrived.put(sum(part.end - part.begin for part in request.parts))
        finally:
            # None is left anyway, unless this one failed: then the others are to stop too.
            requests.stop()
            self._staging.put(staging)
            arrived.put(None)

    def _serve(self, request: Request, staging: _Staging) -> None:
        if request.target is not None:
            self._fill(request, request.target)
            return
        self._fill(request, staging.view[: request.length])
        for begin, end, piece in request.parts:
            count, source, skip = end - begin, begin - request.offset, begin - piece.extent.offset
            if count < GIL_FREE_BYTES:
                piece.view[skip : skip + count] = staging.view[source : source + count]
            else:
                ctypes.memmove(piece.address + skip, staging.address + source, count)

    def _fill(self, request: Request, view: memoryview) -> None:
        """Reads into `view` at least until the request's wanted end."""
        file = self._file(request.path)
        wanted = request.wanted_end - request.offset
        got = 0
        while got < wanted:
            direct, offset = file.direct, request.offset + got
            try:
                count = os.preadv(file.fd, [view[got:]], offset)
                if not direct:
                    first = round_down(offset)
                    length = round_up(offset + count) - first
                    os.posix_fadvise(file.fd, first, length, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                if direct and error.errno in _DIRECT_REFUSED:
                    self._turn_buffered(file)
                    continue
                raise _failed(request, error) from error
            with self._lock:
                self.bytes_read += count
                self.staged_bytes += 0 if request.target is not None else count
                self.requests += 1
            got += count
            # Only the end of a file cuts a direct read off the grid, and none can go on from there.
            if got < wanted and (count == 0 or (direct and got % ALIGNMENT)):
                raise _cut_short(request, min(request.offset + got, os.fstat(file.fd).st_size))

    def _file(self, path: Path) -> _OpenFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = self._open(path)
            return self._files[path]

    def _open(self, path: Path) -> _OpenFile:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            if self._try_direct:
                try:
                    return _OpenFile(os.open(path, flags | os.O_DIRECT), direct=True)
                except OSError as error:
                    if error.errno not in _DIRECT_REFUSED:
                        raise
                    self.direct = False
            return _OpenFile(os.open(path, flags), direct=False)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error

    def _turn_buffered(self, file: _OpenFile) -> None:
        """For a file system that opens with O_DIRECT but refuses to read so."""
        fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        file.direct = False
        self.direct = False


@dataclass(slots=True)
class _OpenFile:
    fd: int
    direct: bool


def _close_files(files: dict[Path, _OpenFile]) -> None:
    for file in files.values():
        os.close(file.fd)
    files.clear()


class _Staging(NamedTuple):
    view: memoryview
    address: int


class _Shared:
    """Requests that several threads take from, planned as they are taken."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._lock = Lock()

    def take(self) -> Request | None:
        with self._lock:
            return next(self._requests, None)

    def stop(self) -> None:
        with self._lock:
            self._requests = iter(())


def _staging_buffer(length: int) -> _Staging:
    """Memory in huge pages where there are any: a request into scattered pages is many to the disk."""
    buffer = mmap.mmap(-1, length + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: none
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(buffer)
    address = address_of(view)
    skip = -address % HUGE_PAGE_BYTES
    return _Staging(view[skip : skip + length], address + skip)


def _failed(request: Request, error: OSError) -> CheckpointError:
    extent = request.parts[0].piece.extent
    return CheckpointError(
        f"{request.path}: reading {request.length} bytes at {request.offset} failed: {error.strerror} "
        f"(wanted: {extent.length} bytes at {extent.offset})",
        hint="the disk or the network file system reports an error: see the kernel's log",
    )


def _cut_short(request: Request, file_end: int) -> CheckpointError:
    extent = next(part.piece.extent for part in request.parts if part.end > file_end)
    return CheckpointError(
        f"{request.path} ends at byte {file_end}; wanted are {extent.length} bytes at {extent.offset}",
        hint="the file changed since its header was read, or its download was cut short: download it again",
    )
