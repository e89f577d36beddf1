from __future__ import annotations

import gc
import mmap
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.checkpoint import Extent
from overspill.errors import CheckpointError
from overspill.machine import read_requests, reads
from overspill.machine.read_requests import ALIGNMENT, most_bytes, plan_requests
from overspill.machine.reads import FileReader

SIZE = (1 << 20) + 1234
MODES = pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "weights.bin"
    path.write_bytes(os.urandom(SIZE))
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return path


def destination(length: int, phase: int) -> memoryview:
    """Writable memory whose address leaves the remainder `phase` by the alignment."""
    return memoryview(mmap.mmap(-1, length + ALIGNMENT))[phase : phase + length]


def extents() -> st.SearchStrategy[list[tuple[int, int, bool]]]:
    """Offset, length, and whether the destination lies as the file does (then it is read in place)."""

    def at(offset: int) -> st.SearchStrategy[tuple[int, int, bool]]:
        lengths = st.one_of(st.integers(0, 20_000), st.integers(0, SIZE), st.just(SIZE))
        return st.tuples(st.just(offset), lengths.map(lambda n: min(n, SIZE - offset)), st.booleans())

    offsets = st.one_of(
        st.integers(0, SIZE), st.integers(0, SIZE // ALIGNMENT).map(lambda n: n * ALIGNMENT), st.just(SIZE)
    )
    return st.lists(offsets.flatmap(at), max_size=12)


@MODES
@settings(max_examples=60, deadline=None)
@given(pieces=extents(), threads=st.integers(1, 5), chunk=st.sampled_from([4096, 12_288, 1 << 20]))
def test_every_byte_arrives_and_no_other_is_touched(
    direct: bool, file: Path, pieces: list[tuple[int, int, bool]], threads: int, chunk: int
) -> None:
    expected = file.read_bytes()
    guarded = []
    for offset, length, alike in pieces:
        phase = offset % ALIGNMENT if alike else (offset + 17) % ALIGNMENT
        memory = memoryview(mmap.mmap(-1, length + 2 * ALIGNMENT))
        guarded.append((Extent(file, offset, length), memory, ALIGNMENT + phase))
    arrived: list[int] = []
    with FileReader(threads, chunk, direct) as reader:
        reader.read(
            [(extent, memory[start : start + extent.length]) for extent, memory, start in guarded],
            arrived.append,
        )
    for extent, memory, start in guarded:
        end = start + extent.length
        assert memory[start:end] == expected[extent.offset : extent.offset + extent.length]
        assert not any(memory[:start])
        assert not any(memory[end:])
    wanted = sum(length for _, length, _ in pieces)
    assert sum(arrived) == wanted
    assert reader.requests >= (wanted > 0)
    ends = sorted((offset, offset + length) for offset, length, _ in pieces if length)
    if all(end <= begin for (_, end), (begin, _) in pairwise(ends)):
        assert reader.bytes_read <= most_bytes(extent for extent, _, _ in guarded if extent.length)


def test_a_view_of_another_format_is_filled(file: Path) -> None:
    memory = memoryview(bytearray(4096)).cast("f", (32, 32))
    with FileReader() as reader:
        reader.read([(Extent(file, 100, 4096), memory)])
    assert memory.cast("B") == file.read_bytes()[100:4196]


def test_neighbours_become_one_request_and_small_gaps_are_read_through(file: Path) -> None:
    pieces = [(Extent(file, 1500 * index, 1000), destination(1000, 8)) for index in range(100)]
    with FileReader() as reader:
        reader.read(pieces)
    assert reader.requests == 1
    assert 150_000 - 500 <= reader.bytes_read <= 150_000 + ALIGNMENT
    assert most_bytes(extent for extent, _ in pieces) == reader.bytes_read


def test_a_wide_gap_is_skipped(file: Path) -> None:
    pieces = [(Extent(file, offset, 10), destination(10, 8)) for offset in (0, 900_000)]
    with FileReader() as reader:
        reader.read(pieces)
    assert (reader.requests, reader.bytes_read) == (2, 2 * ALIGNMENT)
    assert most_bytes(extent for extent, _ in pieces) == reader.bytes_read


def test_memory_that_lies_like_the_file_is_read_in_place(file: Path) -> None:
    extent = Extent(file, 5000, 300_000)
    in_place = list(plan_requests(file, [(extent, destination(300_000, 5000 % ALIGNMENT))], 65_536))
    staged = list(plan_requests(file, [(extent, destination(300_000, 5001 % ALIGNMENT))], 65_536))
    inside = [request for request in in_place if request.target is not None]
    assert sum(request.length for request in inside) == 303_104 - 8192
    assert all(read_requests.address_of(request.target) % ALIGNMENT == 0 for request in inside)
    assert all(request.target is None for request in staged)
    for request in in_place + staged:
        assert request.offset % ALIGNMENT == request.length % ALIGNMENT == 0
        assert request.length <= 65_536


@MODES
def test_a_file_that_shrank_is_named_with_what_was_wanted(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "shrunk.bin"
    path.write_bytes(bytes(500_000))
    pieces = [(Extent(path, offset, 50_000), destination(50_000, 8)) for offset in range(0, 500_000, 50_000)]
    os.truncate(path, 123_456)
    with FileReader(chunk_bytes=8192, direct=direct) as reader:
        with pytest.raises(CheckpointError, match=rf"{path} ends at byte 123456; wanted are 50000 bytes at"):
            reader.read(pieces)
        reader.read(pieces[:2])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("overspill-read")]


def test_an_error_of_the_system_reaches_the_caller(tmp_path: Path, file: Path) -> None:
    with FileReader() as reader:
        with pytest.raises(CheckpointError, match=r"missing.bin cannot be opened: No such file"):
            reader.read([(Extent(tmp_path / "missing.bin", 0, 10), destination(10, 8))])
        with pytest.raises(CheckpointError, match=r"reading 4096 bytes at 0 failed: Is a directory"):
            reader.read([(Extent(tmp_path, 0, 10), destination(10, 8))])
        view = destination(10, 8)
        reader.read([(Extent(file, 0, 10), view)])
    assert view == file.read_bytes()[:10]


def test_an_error_of_the_progress_reaches_the_caller(file: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    view = destination(SIZE, 8)
    with FileReader(chunk_bytes=4096) as reader:
        with pytest.raises(KeyboardInterrupt):
            reader.read([(Extent(file, 0, SIZE), view)], stop)
        reader.read([(Extent(file, 0, SIZE), view)])
    assert view == file.read_bytes()


def test_a_file_system_that_does_not_open_with_o_direct_is_read_buffered(file: Path) -> None:
    version = Path("/proc/version")
    expected = version.read_bytes()
    first, second = destination(len(expected), 8), destination(SIZE, 8)
    with FileReader() as reader:
        reader.read([(Extent(version, 0, len(expected)), first), (Extent(file, 0, SIZE), second)])
    assert first == expected
    assert second == file.read_bytes()
    assert not reader.direct


def test_a_file_system_that_refuses_a_direct_read_is_read_buffered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Off the grid, the kernel itself refuses (EINVAL) what it otherwise allows.
    for module in (reads, read_requests):
        monkeypatch.setattr(module, "ALIGNMENT", 1)
    view = destination(300_000, 8)
    with FileReader() as reader:
        reader.read([(Extent(file, 777, 300_000), view)])
    assert view == file.read_bytes()[777:300_777]
    if reader.direct:
        pytest.skip("this file system takes any read with O_DIRECT")


def test_buffered_reads_leave_nothing_in_the_page_cache(file: Path) -> None:
    def cached(offset: int) -> bool:
        with file.open("rb") as opened:
            try:
                return os.preadv(opened.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                return False

    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(SIZE // 2):
        pytest.skip("this file system is its own page cache")
    with FileReader(direct=False) as reader:
        reader.read([(Extent(file, 1, SIZE - 1), destination(SIZE - 1, 8))])
    assert not any(cached(offset) for offset in range(0, SIZE, 65_536))


def test_one_reader_serves_several_threads(file: Path) -> None:
    expected = file.read_bytes()
    views = [destination(SIZE, 8) for _ in range(6)]
    with FileReader(threads=2, chunk_bytes=8192) as reader:
        callers = [threading.Thread(target=reader.read, args=([(Extent(file, 0, SIZE), view)],)) for view in views]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert all(view == expected for view in views)


def test_a_reader_that_is_let_go_closes_its_files_wherever_that_happens(tmp_path: Path) -> None:
    """Also in one of its own threads, and while another pool takes work: a finalizer must start and join nothing."""
    file = tmp_path / "data"
    file.write_bytes(bytes(1 << 16))
    held = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        reader = FileReader()
        view = memoryview(bytearray(1 << 16))
        reader.read([(Extent(file, 0, 1 << 16), view)])
        thread = threading.Thread(target=lambda last: None, args=(reader,))
        del reader
        thread.start()
        thread.join()
        del thread
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= held + 1
