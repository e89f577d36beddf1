from __future__ import annotations

import pytest
import torch

from overspill.errors import CapacityError
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.machine.probe import prove_zero_copy


def synchronize() -> None:
    return


def test_a_view_of_the_same_memory_is_proved() -> None:
    host = torch.zeros(1000, dtype=torch.uint8)
    prove_zero_copy(host, host.view(1000), synchronize)


def test_the_emulated_device_s_view_is_proved() -> None:
    device = EmulatedDevice(1 << 20, Link(1e12, 0.0, measured=False))
    host = device.allocate_host(8192, pinned=True).data
    prove_zero_copy(host, device.zero_copy(host), device.synchronize)


def test_a_detached_copy_fails() -> None:
    host = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(CapacityError, match="written on the host did not reach") as refusal:
        prove_zero_copy(host, host.clone(), synchronize)
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1" in str(refusal.value.hint)


def test_a_copy_made_when_it_is_first_read_fails() -> None:
    host = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(CapacityError, match="changed on the host after"):
        prove_zero_copy(host, CopiedOnRead(host), synchronize)


def test_a_view_whose_writes_are_lost_fails() -> None:
    device = EmulatedDevice(1 << 20, Link(1e12, 0.0, measured=False))
    host = torch.zeros(1000, dtype=torch.uint8)
    view = torch.Tensor._make_subclass(WritesLost, host)
    with pytest.raises(CapacityError, match="written on the device did not reach the host"):
        prove_zero_copy(host, view, device.synchronize)


def test_one_byte_that_is_not_seen_fails() -> None:
    memory = torch.zeros(2001, dtype=torch.uint8)
    with pytest.raises(CapacityError, match="written on the host"):
        prove_zero_copy(memory[:2000], memory[1:], synchronize)


class CopiedOnRead(torch.Tensor):
    """What the first operation reads is what all later ones read."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> CopiedOnRead:
        return torch.Tensor._make_subclass(cls, host)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            if not hasattr(args[0], "copied"):
                args[0].copied = args[0].as_subclass(torch.Tensor).clone()
            return func(args[0].copied, *args[1:], **(kwargs or {}))


class WritesLost(torch.Tensor):
    """Operations in place go to a copy."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            plain = args[0].as_subclass(torch.Tensor)
            return func(plain.clone(), *args[1:], **(kwargs or {}))
