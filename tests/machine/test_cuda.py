from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from overspill.errors import ConfigError, DeviceOutOfMemoryError
from overspill.machine.cuda import CudaDevice, CudaTransfer

MIB = 1 << 20
LIMIT = 1 << 30
A_WHILE = 500_000_000  # GPU cycles: a good part of a second

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    gc.collect()
    torch.cuda.empty_cache()
    device = CudaDevice(LIMIT)
    yield device
    device.synchronize()


def random_host(device: CudaDevice, nbytes: int, *, pinned: bool = True, seed: int = 0) -> torch.Tensor:
    data = device.allocate_host(nbytes, pinned=pinned).data
    return data.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def test_the_interface_is_whole() -> None:
    assert CudaDevice.__abstractmethods__ == frozenset()
    assert CudaTransfer.__abstractmethods__ == frozenset()


# -- memory ------------------------------------------------------------------------------------------------


@needs_gpu
def test_blocks_are_counted_until_they_are_freed(device: CudaDevice) -> None:
    block = device.allocate(100 * MIB + 3, "weights")
    assert block.requested_bytes == 100 * MIB + 3
    assert 0 <= block.allocated_bytes - block.requested_bytes <= MIB + 512
    assert device.owns(block.data)
    assert device.held_bytes("weights") == 100 * MIB + 3
    view = block.data[:64]
    del block
    assert device.held_bytes("weights") == 100 * MIB + 3
    del view
    assert device.held_bytes("weights") == 0


@needs_gpu
def test_more_than_the_limit_is_refused(device: CudaDevice) -> None:
    assert device.memory_bytes == LIMIT
    block = device.allocate(LIMIT // 2, "weights")
    with pytest.raises(DeviceOutOfMemoryError, match="buffer pool needs"):
        device.allocate(LIMIT // 2 + MIB, "buffer_pool")
    device.reserve("kv_cache", LIMIT // 4)
    with pytest.raises(DeviceOutOfMemoryError, match="buffer pool needs"):
        device.allocate(LIMIT // 2 - MIB, "buffer_pool")
    assert device.held_bytes("weights") == block.requested_bytes


@needs_gpu
def test_running_out_while_computing_is_told_as_ours(device: CudaDevice) -> None:
    with pytest.raises(DeviceOutOfMemoryError, match=r"running the model needs 2\.00 GiB"), device.execution():
        torch.empty(2 * LIMIT, dtype=torch.uint8, device=device.torch_device)


@needs_gpu
def test_the_limit_holds_until_another_device_is_made() -> None:
    torch.cuda.empty_cache()
    target = CudaDevice(64 * MIB).torch_device
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(128 * MIB, dtype=torch.uint8, device=target)
    CudaDevice()
    assert torch.empty(128 * MIB, dtype=torch.uint8, device=target).is_cuda


@needs_gpu
def test_more_than_the_gpu_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="the GPU has"):
        CudaDevice(1 << 50)


@needs_gpu
def test_caches_are_labelled_and_the_rest_is_working_memory(device: CudaDevice) -> None:
    before = device.held_bytes("working")
    with device.execution():
        cache = torch.zeros(MIB, dtype=torch.uint8, device=device.torch_device)
        other = torch.zeros(2 * MIB, dtype=torch.uint8, device=device.torch_device)
    assert device.label([cache, cache[:8]], "kv_cache") == MIB
    assert device.held_bytes("kv_cache") == MIB
    assert other.nbytes <= device.held_bytes("working") - before <= other.nbytes + MIB
    device.reset_peak()
    del cache
    assert device.held_bytes("kv_cache") == 0
    assert device.peak_bytes() >= 3 * MIB


@needs_gpu
def test_pinned_memory_is_exact_and_pageable_memory_is_not_pinned(device: CudaDevice) -> None:
    block = device.allocate_host(3 * MIB + 1, pinned=True)
    assert block.pinned
    assert block.data.is_pinned()
    assert 0 <= block.allocated_bytes - block.requested_bytes < mmap.PAGESIZE
    assert not device.owns(block.data)
    pageable = device.allocate_host(3 * MIB, pinned=False)
    assert not pageable.pinned
    assert not pageable.data.is_pinned()


# -- zero copy ---------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_has_the_bits_of_host_memory(device: CudaDevice, dtype: torch.dtype) -> None:
    host = random_host(device, 4 * MIB)[64 : 64 + MIB].view(dtype).view(16, -1)
    view = device.zero_copy(host)
    assert (view.shape, view.dtype, view.device) == (host.shape, dtype, device.torch_device)
    assert device.host_address(view) == host.data_ptr()
    assert device.host_address(view[3]) == host[3].data_ptr()
    assert not device.owns(view)
    read = view.view(torch.uint8).bitwise_xor(0).cpu()
    assert torch.equal(read, host.view(torch.uint8))


@needs_gpu
def test_writes_are_seen_on_the_other_side(device: CudaDevice) -> None:
    host = device.allocate_host(MIB, pinned=True).data
    view = device.zero_copy(host)
    for value in (1, 2, 3):
        host.fill_(value)
        assert int(view.sum()) == value * MIB
        view.add_(10)
        device.synchronize()
        assert int(host.sum()) == (value + 10) * MIB


@needs_gpu
def test_a_product_has_the_same_bits_as_with_resident_weights(device: CudaDevice) -> None:
    host = random_host(device, 1024 * 512).view(torch.int8).to(torch.bfloat16)
    pinned = device.allocate_host(host.nbytes, pinned=True).data.view(torch.bfloat16).view(1024, 512)
    pinned.copy_(host.view(1024, 512))
    resident = device.allocate(host.nbytes, "weights").data.view(torch.bfloat16).view(1024, 512)
    device.upload(resident, pinned)
    x = device.to_device(torch.randn(3, 512, dtype=torch.bfloat16))
    assert torch.equal(F.linear(x, device.zero_copy(pinned)), F.linear(x, resident))


@needs_gpu
def test_a_view_keeps_host_memory_and_lets_it_go(device: CudaDevice) -> None:
    host = device.allocate_host(MIB, pinned=True).data.fill_(5)
    storage, start = weakref.ref(host.untyped_storage()), host.data_ptr()
    view = device.zero_copy(host)
    del host
    gc.collect()
    assert int(view.sum()) == 5 * MIB
    del view
    gc.collect()
    assert storage() is None
    assert device._pinned.host_address(start) is None


@needs_gpu
def test_scalars_and_empty_tensors_have_views_too(device: CudaDevice) -> None:
    host = device.allocate_host(64, pinned=True).data.view(torch.float32)
    host[0] = 2.5
    assert float(device.zero_copy(host[0]) + 1) == 3.5
    assert device.zero_copy(host[:0].view(0, 4)).shape == (0, 4)


@needs_gpu
def test_a_tensor_may_lie_across_two_registrations(device: CudaDevice) -> None:
    host = device._pinned.allocate(4 * MIB, MIB)
    host.random_(0, 256, generator=torch.Generator().manual_seed(1))
    across = host[MIB // 2 : 7 * MIB // 2]
    target = device.allocate(across.numel(), "buffer_pool").data
    device.transfer(target, across).wait()
    assert torch.equal(target.cpu(), across)
    if device._pinned.device_address(across) is None:
        pytest.skip("this system does not map neighbouring registrations side by side")
    assert torch.equal(device.zero_copy(across).bitwise_xor(0).cpu(), across)


# -- transfers ---------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_each_transfer_waits_for_the_last_reader_and_holds_back_the_next(device: CudaDevice, pinned: bool) -> None:
    sources = [random_host(device, 8 * MIB, pinned=pinned, seed=seed) for seed in range(3)]
    target = device.allocate(8 * MIB, "buffer_pool").data
    read = []
    for turn in range(12):
        device.transfer(target, sources[turn % 3]).wait()
        read.append(target.clone())  # on the compute stream, while the next transfer is told to begin
    for turn, copy in enumerate(read):
        assert torch.equal(copy.cpu(), sources[turn % 3]), f"turn {turn}"
    assert (device.traffic.bytes, device.traffic.transfers) == (12 * 8 * MIB, 12)


@needs_gpu
def test_a_transfer_starts_after_what_was_told_and_runs_beside_what_is_told_next(device: CudaDevice) -> None:
    source = random_host(device, 8 * MIB)
    target = device.allocate(8 * MIB, "buffer_pool").data
    device.transfer(target, source).wait()
    device.synchronize()
    torch.cuda._sleep(A_WHILE)
    after = device.transfer(target, source)
    assert isinstance(after, CudaTransfer)
    assert not after._done.query()
    device.synchronize()
    beside = device.transfer(target, source)
    assert isinstance(beside, CudaTransfer)
    torch.cuda._sleep(A_WHILE)
    beside._done.synchronize()
    assert not torch.cuda.current_stream(device.torch_device).query()


@needs_gpu
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a_download_brings_what_was_computed_before_it(device: CudaDevice, pinned: bool) -> None:
    source = device.allocate(8 * MIB, "weights").data
    host = device.allocate_host(8 * MIB, pinned=pinned).data
    for value in range(1, 6):
        torch.cuda._sleep(A_WHILE // 10)
        source.fill_(value)
        device.download(host, source).join()
        assert int(host.min()) == int(host.max()) == value
    assert device.traffic.returned_bytes == 5 * 8 * MIB
    assert device.traffic.bytes == 0


@needs_gpu
def test_a_joined_transfer_has_read_its_source(device: CudaDevice) -> None:
    source = random_host(device, 64 * MIB)
    expected = source.clone()
    target = device.allocate(64 * MIB, "buffer_pool").data
    device.transfer(target, source).join()
    source.zero_()
    assert torch.equal(target.cpu(), expected)


@needs_gpu
def test_memory_dropped_in_mid_copy_is_not_given_to_others(device: CudaDevice) -> None:
    source = random_host(device, 64 * MIB).fill_(0xFF)
    block = device.allocate(64 * MIB, "buffer_pool")
    device.transfer(block.data, source)
    del block
    fresh = [torch.zeros(64 * MIB, dtype=torch.uint8, device=device.torch_device) for _ in range(3)]
    device.synchronize()
    assert [int(tensor.max()) for tensor in fresh] == [0, 0, 0]


@needs_gpu
def test_the_link_is_measured_once_and_leaves_nothing_behind(device: CudaDevice) -> None:
    link = device.link
    assert link.measured
    assert link.bandwidth > 1e9
    assert 0 < link.latency_s < 1e-2
    assert device.link is link
    assert device.traffic.transfers == 0
    assert device.held_bytes("buffer_pool") == 0
