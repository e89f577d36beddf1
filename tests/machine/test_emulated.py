from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from overspill.errors import DeviceOutOfMemoryError, LinkDefect
from overspill.machine.arena import map_memory
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice, LinkView

FAST = Link(bandwidth=1e12, latency_s=0.0, measured=False)
MIB = 1 << 20


def make_device(memory_bytes: int = 64 * MIB, link: Link = FAST, *, check: bool = True) -> EmulatedDevice:
    return EmulatedDevice(memory_bytes, link, check=check)


def host_matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Host memory with numbers in it, at an address that is a multiple of 64."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    host = map_memory(numbers.nbytes).view(torch.float32).view(shape)
    return host.copy_(numbers)


# -- memory ------------------------------------------------------------------------------------------------


def test_blocks_are_counted_by_purpose_until_their_storage_is_freed() -> None:
    device = make_device(4 * MIB)
    block = device.allocate(3 * MIB, "weights")
    assert (block.requested_bytes, block.allocated_bytes) == (3 * MIB, 3 * MIB)
    view = block.data[:64].view(torch.float32)
    del block
    assert device.held_bytes("weights") == 3 * MIB
    del view
    assert device.held_bytes("weights") == 0
    assert device.peak_bytes() == 3 * MIB
    device.reset_peak()
    assert device.peak_bytes() == 0


def test_more_than_the_budget_is_refused_and_leaves_the_device_as_it_was() -> None:
    device = make_device(2 * MIB)
    block = device.allocate(MIB, "weights")
    with pytest.raises(DeviceOutOfMemoryError, match=r"buffer pool needs 1\.50 MiB"):
        device.allocate(3 * MIB // 2, "buffer_pool")
    assert device.held_bytes("buffer_pool") == 0
    assert device.owns(block.data)
    assert device.allocate(MIB, "buffer_pool").requested_bytes == MIB


def test_host_memory_is_not_the_device_s() -> None:
    device = make_device(MIB)
    block = device.allocate_host(8 * MIB + 1, pinned=True)
    assert block.requested_bytes == 8 * MIB + 1
    assert block.allocated_bytes - block.requested_bytes < 4096
    assert block.pinned
    assert not device.owns(block.data)
    assert device.peak_bytes() == 0


def test_results_of_operations_are_working_memory_and_are_given_back() -> None:
    device = make_device(4 * MIB)
    x = device.to_device(torch.ones(MIB // 4))
    with device.execution():
        y = x + 1
        assert device.held_bytes("working") == 2 * MIB
        same = y.view(2, -1)
        assert device.held_bytes("working") == 2 * MIB
        del y, same
    assert device.held_bytes("working") == MIB
    assert device.peak_bytes() == 2 * MIB


def test_an_operation_runs_out_of_memory_and_the_device_stays_usable() -> None:
    device = make_device(3 * MIB)
    x = device.to_device(torch.ones(MIB // 2))
    with device.execution():
        with pytest.raises(DeviceOutOfMemoryError, match=r"working memory needs 2\.00 MiB"):
            x + 1
        assert device.held_bytes("working") == 2 * MIB
        assert float(x[:4].sum()) == 4.0


def test_a_reservation_narrows_what_operations_may_take() -> None:
    device = make_device(4 * MIB)
    device.reserve("kv_cache", 3 * MIB)
    x = device.to_device(torch.ones(MIB // 8))
    with device.execution(), pytest.raises(DeviceOutOfMemoryError):
        x.repeat(2)
    assert device.peak_bytes() >= 3 * MIB + MIB // 2


def test_label_moves_a_storage_once_however_many_tensors_share_it() -> None:
    device = make_device()
    with device.execution():
        cache = torch.zeros(MIB // 4)
        assert device.label([cache, cache[:8], torch.empty(0)], "kv_cache") == MIB
    assert device.held_bytes("kv_cache") == MIB
    assert device.held_bytes("working") == 0
    del cache
    assert device.held_bytes("kv_cache") == 0


# -- transfers ---------------------------------------------------------------------------------------------


def test_a_transfer_brings_the_bytes_and_is_counted() -> None:
    device = make_device()
    source = device.allocate_host(3 * MIB + 5, pinned=True).data.random_(0, 255)
    target = device.allocate(source.numel(), "buffer_pool").data
    device.transfer(target, source).wait()
    assert torch.equal(target, source)
    assert (device.traffic.bytes, device.traffic.transfers) == (source.nbytes, 1)


def test_the_caller_computes_while_a_transfer_is_under_way() -> None:
    device = make_device()
    source = device.allocate_host(MIB, pinned=True).data.fill_(7)
    target = device.allocate(MIB, "buffer_pool").data
    with device._timeline._lock:  # the link is held up: no transfer can end
        transfer = device.transfer(target, source)
        x = device.to_device(torch.ones(8, 8))
        with device.execution():
            assert float((x @ x).sum()) == 512.0
        assert not transfer.done.is_set()
    transfer.wait()
    assert torch.equal(target, source)


def test_transfers_end_in_the_order_in_which_they_began() -> None:
    device = make_device()
    sources = [device.allocate_host(MIB, pinned=True).data.fill_(i) for i in range(4)]
    target = device.allocate(MIB, "buffer_pool").data
    transfers = [device.transfer(target, source) for source in sources]
    transfers[2].wait()
    assert transfers[0].done.is_set()
    assert transfers[1].done.is_set()
    transfers[3].wait()
    assert torch.equal(target, sources[3])


def test_synchronize_returns_when_all_transfers_are_done() -> None:
    device = make_device()
    source = device.allocate_host(MIB, pinned=True).data
    target = device.allocate(MIB, "buffer_pool").data
    transfers = [device.transfer(target, source) for _ in range(5)]
    device.synchronize()
    assert all(transfer.done.is_set() for transfer in transfers)
    assert device.traffic.transfers == 5


def test_the_link_takes_the_time_that_its_bandwidth_and_latency_say() -> None:
    link = Link(bandwidth=50e6, latency_s=2e-3, measured=False)
    device = make_device(link=link)
    source = device.allocate_host(MIB, pinned=True).data
    target = device.allocate(MIB, "buffer_pool").data
    begun = device.timed()
    for _ in range(3):
        device.transfer(target, source)
    ended = device.timed()
    assert ended - begun >= 0.99 * link.seconds(3 * MIB, transfers=3)


def test_waiting_for_the_link_is_counted_as_stall() -> None:
    link = Link(bandwidth=20e6, latency_s=0.0, measured=False)
    device = make_device(link=link)
    view = device.zero_copy(host_matrix(256, 256))
    with device.execution():
        view.sum()
    assert device.traffic.stall_s >= 0.95 * link.seconds(256 * 256 * 4)


def test_upload_is_not_traffic() -> None:
    device = make_device()
    target = device.allocate(64, "weights").data
    device.upload(target, torch.arange(64, dtype=torch.uint8))
    assert target[63] == 63
    assert device.traffic.bytes == 0


def test_the_copy_thread_ends_with_the_device() -> None:
    device = make_device()
    source = device.allocate_host(64, pinned=True).data
    block = device.allocate(64, "buffer_pool")
    device.transfer(block.data, source).wait()
    thread, gone = device._copier, weakref.ref(device)
    assert thread is not None
    assert thread.is_alive()
    del device, block
    gc.collect()
    assert gone() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_python_ends_cleanly_with_a_transfer_under_way() -> None:
    program = """
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
device = EmulatedDevice(1 << 22, Link(50e6, 0.0, measured=False))
source = device.allocate_host(1 << 20, pinned=True)
target = device.allocate(1 << 20, "buffer_pool")
transfers = [device.transfer(target.data, source.data) for _ in range(4)]
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


# -- zero copy: what crosses the link ----------------------------------------------------------------------

ROW = 16 * 4
READS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], int]] = {
    "linear": (lambda w, x: F.linear(x, w), 32 * ROW),
    "matmul with the transpose": (lambda w, x: x @ w.t(), 32 * ROW),
    "arithmetic": (lambda w, x: w * 2, 32 * ROW),
    "one read however often it is named": (lambda w, x: w * w, 32 * ROW),
    "a row": (lambda w, x: w[3] + 1, ROW),
    "a slice of rows": (lambda w, x: w[4:8] + 1, 4 * ROW),
    "a slice of columns": (lambda w, x: w[:, 2:4] + 1, 32 * 2 * 4),
    "a view of a view": (lambda w, x: w.view(4, 8, 16)[1].transpose(0, 1)[5] + 1, 8 * 4),
    "part of a split": (lambda w, x: w.chunk(4)[1] + 1, 8 * ROW),
    "an expanded row": (lambda w, x: w[0].expand(64, 16) + 1, ROW),
    "an expanded column": (lambda w, x: w[:, :1].expand(32, 8) + 1, 32 * 4),
    "a cast": (lambda w, x: w.to(torch.float64), 32 * ROW),
    "embedding": (lambda w, x: F.embedding(torch.tensor([1, 5, 5]), w), 3 * ROW),
    "index_select": (lambda w, x: w.index_select(0, torch.tensor([0, 2])), 2 * ROW),
    "indexing by a tensor": (lambda w, x: w[torch.tensor([3, 1, 4, 1])], 4 * ROW),
    "indexing by a number in a tensor": (lambda w, x: w[torch.tensor(7)] + 1, ROW),
    "gather": (lambda w, x: w.gather(1, torch.tensor([[1], [2]])), 2 * 4),
    "copied into device memory": (lambda w, x: torch.empty(32, 16).copy_(w), 32 * ROW),
    "added in place to device memory": (lambda w, x: torch.zeros(32, 16).add_(w), 32 * ROW),
    "among others": (lambda w, x: torch.cat([x, w]), 32 * ROW),
}


@pytest.mark.parametrize("name", READS)
def test_an_operation_carries_exactly_the_bytes_it_reads(name: str) -> None:
    read, expected_bytes = READS[name]
    device = make_device()
    host = host_matrix(32, 16)
    x = device.to_device(host_matrix(4, 16, seed=1))
    plain = read(host, x)
    view = device.zero_copy(host)
    with device.execution():
        result = read(view, x)
        assert type(result) is torch.Tensor
        assert device.owns(result)
    assert torch.equal(result, plain)
    assert device.traffic.bytes == expected_bytes


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "select": lambda w: w[1],
    "slice": lambda w: w[1:3],
    "transpose": lambda w: w.t(),
    "mT": lambda w: w.mT,
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(4, 4, 16),
    "another dtype": lambda w: w.view(torch.uint8),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "squeeze": lambda w: w[:1].squeeze(),
    "expand": lambda w: w.expand(2, 16, 16),
    "split": lambda w: w.split(4)[2],
    "unbind": lambda w: w.unbind(0)[5],
    "narrow": lambda w: w.narrow(0, 2, 3),
    "unflatten": lambda w: w.unflatten(0, (4, 4)),
    "as_strided": lambda w: w.as_strided((3,), (16,), 2),
    "diagonal": lambda w: w.diagonal(),
    "detach": lambda w: w.detach(),
    "view_as": lambda w: w.view_as(w),
    "movedim": lambda w: w.movedim(0, 1),
    "contiguous": lambda w: w.contiguous(),
    "parameter": lambda w: nn.Parameter(w, requires_grad=False),
    "parameter's data": lambda w: nn.Parameter(w, requires_grad=False).data,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reads_nothing_and_stays_a_view(name: str) -> None:
    device = make_device()
    host = host_matrix(16, 16)
    plain = VIEWS[name](host)
    whole = device.zero_copy(host)
    with device.execution():
        view = VIEWS[name](whole)
    assert isinstance(view, LinkView)
    assert device.host_address(view) == plain.data_ptr()
    assert (view.shape, view.stride(), view.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert device.traffic.bytes == 0
    with device.execution():
        copy = view.clone()
    assert torch.equal(copy, plain)
    assert device.traffic.bytes > 0


@st.composite
def pieces_of_memory(draw: st.DrawFn) -> torch.Tensor:
    """A strided tensor somewhere in host memory, as selecting, transposing and expanding make them."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    skipped = draw(st.integers(0, 17))
    memory = map_memory((skipped + 2 * rows * columns) * dtype.itemsize)
    memory.copy_(torch.arange(memory.numel()).remainder(120))
    tensor = memory.view(dtype)[skipped:].view(2, rows, columns)
    tensor = tensor[:, :: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        tensor = tensor[draw(st.integers(0, 1))]
    if draw(st.booleans()):
        tensor = tensor.transpose(-1, -2)
    if draw(st.booleans()):
        tensor = tensor[..., :1].expand(*tensor.shape[:-1], draw(st.integers(1, 30)))
    return tensor


@given(pieces_of_memory())
@settings(max_examples=200, deadline=None)
def test_what_is_fetched_has_the_same_bits_strides_and_alignment(host: torch.Tensor) -> None:
    device = make_device(check=False)
    fetched = device.fetch(host)
    assert torch.equal(fetched, host)
    assert fetched.stride() == host.stride()
    assert fetched.data_ptr() % 64 == host.data_ptr() % 64
    repeated = [size for size, stride in zip(host.shape, host.stride(), strict=True) if stride == 0]
    distinct = host.numel()
    for size in repeated:
        distinct //= size
    assert device.traffic.bytes == distinct * host.itemsize


@pytest.mark.parametrize("skipped", [0, 1, 2, 5])
def test_one_expert_s_product_has_the_same_bits_as_with_resident_weights(skipped: int) -> None:
    """On a CPU the bits of a float32 product depend on the weight's address modulo 16."""
    device = make_device()
    host = host_matrix(skipped + 3 * 41 * 23)[skipped:].view(3, 41, 23)
    resident = device.allocate(host.nbytes + 4 * skipped, "weights").data.view(torch.float32)[skipped:].view(3, 41, 23)
    device.upload(resident, host)
    x = device.to_device(host_matrix(1, 23, seed=3))
    view = device.zero_copy(host)
    with device.execution():
        for expert in range(3):
            assert torch.equal(F.linear(x, view[expert]), F.linear(x, resident[expert]))
    assert device.traffic.bytes == host.nbytes


def test_a_module_runs_on_weights_in_host_memory_with_the_same_bits() -> None:
    device = make_device()
    weight, bias = host_matrix(32, 16), host_matrix(32, seed=1)
    module = nn.Linear(16, 32).requires_grad_(False)
    x = device.to_device(host_matrix(5, 16, seed=2))
    module.weight.copy_(weight)
    module.bias.copy_(bias)
    resident = module(x)
    module.weight = nn.Parameter(device.zero_copy(weight), requires_grad=False)
    module.bias = nn.Parameter(device.zero_copy(bias), requires_grad=False)
    with device.execution():
        result = module(x)
    assert torch.equal(result, resident)
    assert device.traffic.bytes == weight.nbytes + bias.nbytes


def test_a_view_keeps_host_memory_alive_and_takes_none_of_the_device() -> None:
    device = make_device()
    host = host_matrix(4, 4)
    expected, storage = host.clone(), weakref.ref(host.untyped_storage())
    view = device.zero_copy(host)
    del host
    with device.execution():
        copy = view.clone()
        assert device.held_bytes("working") == copy.untyped_storage().nbytes()
    assert torch.equal(copy, expected)
    assert device.peak_bytes() == copy.untyped_storage().nbytes()
    del view
    assert storage() is None


def test_empty_tensors_are_read_without_the_link() -> None:
    device = make_device()
    view = device.zero_copy(torch.empty(0, 4))
    with device.execution():
        assert (view + 1).shape == (0, 4)
    assert device.traffic.bytes == 0


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda w: w.add_(1),
    "through a view": lambda w: w[0].fill_(7),
    "copied into": lambda w: w.copy_(torch.arange(16.0).view(4, 4)),
    "as an output": lambda w: torch.add(torch.ones(4, 4), 2, out=w),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_view_reaches_host_memory(name: str) -> None:
    device = make_device()
    host = host_matrix(4, 4)
    expected = host.clone()
    WRITES[name](expected)
    view = device.zero_copy(host)
    with device.execution():
        WRITES[name](view)
    assert torch.equal(host, expected)


# -- the debug mode ----------------------------------------------------------------------------------------


def test_an_operation_that_reads_host_memory_is_our_defect() -> None:
    device = make_device()
    host = host_matrix(4, 4)
    x = device.to_device(torch.ones(2, 4))
    with device.execution():
        with pytest.raises(LinkDefect, match=rf"float32 \(4, 4\) at {host.data_ptr():#x}"):
            F.linear(x, host.t())
        with pytest.raises(LinkDefect):
            torch.cat([x, host])
    assert device.traffic.bytes == 0


def test_numbers_literals_and_results_may_be_read() -> None:
    device = make_device()
    number = torch.tensor(2.0)
    with device.execution():
        x = torch.arange(4.0) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert torch.equal(x * number, torch.tensor([2.0, 6.0, 10.0, 14.0]))
        assert torch.equal(x[torch.empty(0, dtype=torch.int64)], torch.empty(0))


def test_the_device_s_blocks_and_inputs_may_be_read() -> None:
    device = make_device()
    weight = device.allocate(64, "weights").data.zero_().view(torch.float32).view(4, 4)
    x = device.to_device(torch.ones(2, 4))
    with device.execution():
        y = device.to_device(torch.ones(2, 4))
        assert float(F.linear(x + y, weight).sum()) == 0.0


def test_without_the_debug_mode_nothing_is_checked() -> None:
    device = make_device(check=False)
    with device.execution():
        assert float(torch.ones(2) @ host_matrix(2).fill_(1)) == 2.0
