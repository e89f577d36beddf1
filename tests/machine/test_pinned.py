"""The bookkeeping of registered host memory. The driver, which takes a GPU, is stood in for by one that records."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.errors import CapacityError
from overspill.machine.memory import host_available_bytes
from overspill.machine.pinned import NOT_SUPPORTED, OUT_OF_MEMORY, CudaDriver, PinnedMemory, map_host

PAGE = mmap.PAGESIZE
SHIFT = 1 << 50


class RecordingDriver(CudaDriver):
    """Registers nothing. Fails the `fail_at`th registration with `code`; device addresses are `shifts` away."""

    def __init__(self, *, fail_at: int = -1, code: int = 0, shifts: tuple[int, ...] = (0,)) -> None:
        self.fail_at, self.code, self.shifts = fail_at, code, shifts
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.idle = False
        self.unmapped_too_soon = False

    def register(self, address: int, nbytes: int) -> int:
        assert self.idle
        self.calls += 1
        if self.calls - 1 == self.fail_at:
            return self.code
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        assert self.idle
        self.unmapped_too_soon |= not is_mapped(address)
        del self.registered[address]
        return 0

    def device_address(self, address: int) -> tuple[int, int]:
        return 0, address + self.shifts[(self.calls - 1) % len(self.shifts)]

    def message(self, code: int) -> str:
        return f"message {code}"

    @contextmanager
    def when_idle(self) -> Iterator[None]:
        self.idle = True
        yield
        self.idle = False


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def make_memory(driver: RecordingDriver) -> PinnedMemory:
    return PinnedMemory(driver, driver.when_idle)


def test_memory_is_exact_zero_page_aligned_and_registered_whole() -> None:
    driver = RecordingDriver()
    data = make_memory(driver).allocate(5 * PAGE + 1, 2 * PAGE)
    assert (data.dtype, data.shape) == (torch.uint8, (5 * PAGE + 1,))
    assert data.untyped_storage().nbytes() == 5 * PAGE + 1
    assert int(data.sum()) == 0
    start = data.data_ptr()
    assert start % PAGE == 0
    assert driver.registered == {start: 2 * PAGE, start + 2 * PAGE: 2 * PAGE, start + 4 * PAGE: 2 * PAGE}


def test_it_is_unregistered_while_mapped_and_unmapped_when_the_last_view_goes() -> None:
    driver = RecordingDriver()
    memory = make_memory(driver)
    data = memory.allocate(4 * PAGE, PAGE)
    start, view = data.data_ptr(), data[PAGE:].view(torch.float32)
    del data
    gc.collect()
    assert len(driver.registered) == 4
    view.fill_(1.5)
    del view
    gc.collect()
    assert driver.registered == {}
    assert not driver.unmapped_too_soon
    assert not is_mapped(start)
    assert memory.host_address(start) is None


def test_a_refused_chunk_gives_all_of_it_back() -> None:
    driver = RecordingDriver(fail_at=2, code=OUT_OF_MEMORY)
    with pytest.raises(CapacityError) as refusal:
        make_memory(driver).allocate(4 * PAGE, PAGE)
    assert driver.registered == {}
    assert "refused 4.00 KiB after 8.00 KiB" in refusal.value.message
    assert "error 2 (message 2)" in refusal.value.message
    assert "ulimit -l is" in refusal.value.message
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1" in str(refusal.value.hint)


def test_confidential_computing_is_named() -> None:
    driver = RecordingDriver(fail_at=0, code=NOT_SUPPORTED)
    with pytest.raises(CapacityError, match="confidential-computing"):
        make_memory(driver).allocate(PAGE)


def test_more_than_the_host_has_is_refused_before_it_is_mapped() -> None:
    driver = RecordingDriver()
    with pytest.raises(CapacityError, match=r"are needed, .* are available"):
        make_memory(driver).allocate(host_available_bytes() + (1 << 34))
    assert driver.calls == 0


def test_pageable_memory_is_mapped_or_refused() -> None:
    assert map_host(PAGE + 1).shape == (PAGE + 1,)
    with pytest.raises(CapacityError, match="are available"):
        map_host(1 << 60)


@given(
    pages=st.integers(1, 12),
    chunk=st.integers(1, 5),
    start=st.floats(0, 1),
    length=st.floats(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_pieces_cover_a_tensor_and_none_reaches_across_a_boundary(
    pages: int, chunk: int, start: float, length: float
) -> None:
    driver = RecordingDriver()
    memory = make_memory(driver)
    data = memory.allocate(pages * PAGE - 3, chunk * PAGE)
    first = int(start * (data.numel() - 1))
    part = data[first : first + 1 + int(length * (data.numel() - first - 1))]
    at = 0
    for offset, nbytes in memory.pieces(part):
        assert offset == at
        assert nbytes > 0
        begins, ends = first + offset, first + offset + nbytes - 1
        assert begins // (chunk * PAGE) == ends // (chunk * PAGE)
        at += nbytes
    assert at == part.numel()


def test_other_memory_is_one_piece() -> None:
    plain = torch.zeros(3 * PAGE, dtype=torch.uint8)
    assert list(make_memory(RecordingDriver()).pieces(plain[5:])) == [(0, 3 * PAGE - 5)]


def test_addresses_of_the_device_lead_back_to_the_host() -> None:
    memory = make_memory(RecordingDriver(shifts=(SHIFT,)))
    data = memory.allocate(6 * PAGE, 2 * PAGE)
    across = data[PAGE : 5 * PAGE].view(torch.float32)
    address = memory.device_address(across)
    assert address == across.data_ptr() + SHIFT
    assert memory.host_address(address) == across.data_ptr()
    assert memory.host_address(data.data_ptr() + 6 * PAGE - 1 + SHIFT) == data.data_ptr() + 6 * PAGE - 1
    assert memory.host_address(data.data_ptr() + 6 * PAGE + SHIFT) is None
    assert memory.host_address(data.data_ptr()) is None


def test_chunks_that_are_no_neighbours_for_the_device_give_no_address_across_them() -> None:
    memory = make_memory(RecordingDriver(shifts=(SHIFT, 2 * SHIFT)))
    data = memory.allocate(2 * PAGE, PAGE)
    assert memory.device_address(data) is None
    assert memory.device_address(data[PAGE - 1 : PAGE + 1]) is None
    assert memory.device_address(data[:PAGE]) == data.data_ptr() + SHIFT
    assert memory.device_address(data[PAGE:]) == data.data_ptr() + PAGE + 2 * SHIFT


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="is about machines without the NVIDIA driver")
def test_a_missing_driver_is_told_with_the_way_out() -> None:
    with pytest.raises(CapacityError, match=r"libcuda\.so\.1") as refusal:
        CudaDriver()
    assert "--device emulated" in str(refusal.value.hint)
