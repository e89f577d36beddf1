from __future__ import annotations

import torch

from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.machine.scratch import Scratch

MIB = 1 << 20


def test_memory_given_back_is_handed_out_again() -> None:
    scratch = Scratch()
    block = scratch.take(MIB)
    assert block.dtype == torch.uint8
    assert block.numel() >= MIB
    scratch.give(block[64:128].view(torch.float32))  # any tensor of it gives back all of it
    assert scratch.take(MIB // 2).data_ptr() == block.data_ptr()
    assert scratch.take(MIB // 2).data_ptr() != block.data_ptr()


def test_the_smallest_that_is_large_enough_is_taken() -> None:
    scratch = Scratch()
    large, small = scratch.take(4 * MIB), scratch.take(MIB)
    scratch.give(large)
    scratch.give(small)
    assert scratch.take(MIB).data_ptr() == small.data_ptr()


def test_a_larger_piece_replaces_one_that_is_too_small() -> None:
    scratch = Scratch()
    scratch.give(scratch.take(MIB))
    scratch.give(scratch.take(2 * MIB))
    assert [block.numel() for block in scratch._free] == [2 * MIB]


def test_what_an_operation_returns_of_a_fetched_tensor_is_not_overwritten_by_the_next_fetch() -> None:
    device = EmulatedDevice(64 * MIB, Link(1e12, 0.0, measured=False))
    ones, twos = (device.zero_copy(torch.full((MIB,), number)) for number in (1.0, 2.0))
    with device.execution():
        windows = ones.unfold(0, 2, 2)  # a view by an operation that LinkView fetches for
        total = float((twos + 0).sum())
        assert total == 2.0 * MIB
        assert float(windows.sum()) == 1.0 * MIB


def test_fetches_one_after_the_other_use_the_same_memory() -> None:
    device = EmulatedDevice(64 * MIB, Link(1e12, 0.0, measured=False))
    views = [device.zero_copy(torch.full((MIB,), float(number))) for number in range(4)]
    with device.execution():
        assert [float(view.sum()) for view in views] == [float(MIB * number) for number in range(4)]
    assert len(device._scratch._free) == 1
