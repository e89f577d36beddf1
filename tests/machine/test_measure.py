"""What measuring makes of its clocks, and what it takes of the machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig

from overspill import bench
from overspill.bench import measure_machine
from overspill.errors import CapacityError
from overspill.machine import measure
from overspill.machine.arena import map_memory
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice

_MIB = 1 << 20
_EXPERT_BYTES = 3 * 2048 * 768 * 2


class Ticking(CpuDevice):
    """Whatever it does takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = itertools.count()

    def timed(self) -> float:
        return float(next(self._clock))


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def left(nbytes: int) -> None:
        monkeypatch.setattr(measure, "host_available_bytes", lambda: nbytes)

    return left


def test_rates_are_all_that_was_read_or_computed_in_a_second(
    leave: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(measure, "map_memory", lambda nbytes: (taken.append(nbytes), map_memory(nbytes))[1])
    leave(384 * _MIB)  # a quarter: six matrices of float32, twelve of sixteen bits, ten experts
    monkeypatch.setattr(measure, "ROUNDS", 1)
    clock = itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    reading, computing = measure.products(Ticking())
    assert reading == dict.fromkeys(("float32", "bfloat16", "float16"), 96 * _MIB)
    assert computing == dict.fromkeys(reading, 2 * 256 * 2048 * 2048)
    assert measure.experts_on_cpu() == (8 * _EXPERT_BYTES, 256 * 2 * _EXPERT_BYTES)
    assert measure.disk(tmp_path, sizes=(4 * _MIB,)) == {4 * _MIB: 96 * _MIB}
    assert taken == [10 * _EXPERT_BYTES, 96 * _MIB]


def test_overheads_are_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_seconds(device: object, config: PretrainedConfig, document: object) -> float:
        experts = 5.0 if hasattr(config, "num_experts") else 0.0
        return 7.0 + config.num_hidden_layers * (2.0 + experts)

    monkeypatch.setattr(bench, "_step_seconds", step_seconds)
    device = EmulatedDevice(_MIB, Link(5e9, 1e-5, measured=False))
    assert bench._overhead_seconds(device) == (2.0, 7.0)
    assert bench._expert_layer_seconds(device, 2.0, 7.0) == {"device": 7.0, "cpu": 7.0, "slots": 7.0}


def test_each_product_leaves_cold_caches_and_what_that_takes_is_counted_by_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, read = itertools.count(), list[int]()

    def zeros(nbytes: int, dtype: object) -> SimpleNamespace:
        return SimpleNamespace(view=lambda _: SimpleNamespace(sum=lambda: read.append(nbytes)))

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(bench, "np", SimpleNamespace(zeros=zeros, uint8=None, float64=None))
    norm, first, second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(norm, first, second)
    passes = bench._evicting(model)
    assert [len(module._forward_hooks) for module in (norm, first, second)] == [0, 1, 1]
    for _ in range(3):
        model(torch.ones(1, 8))
    assert passes == [2.0, 2.0, 2.0], "two products, and each is read after for a second"
    assert read == 6 * [16 << 20]


def test_a_step_is_taken_without_what_cools_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    cooled: list[nn.Module] = []

    def evicting(model: nn.Module) -> list[float]:
        cooled.append(model)
        return [1000.0] * (bench._STEPS + 3)

    monkeypatch.setattr(bench, "_evicting", evicting)
    config = LlamaConfig(**bench._NEXT_TO_NOTHING, num_hidden_layers=1)
    assert -1000 < bench._step_seconds(CpuDevice(), config, {}) < -900
    assert len(cooled) == 1


def test_no_more_is_taken_than_a_share_of_what_is_left(leave: Callable[[int], None], tmp_path: Path) -> None:
    leave(1 << 50)
    assert measure.host_room_bytes() == measure.BEYOND_CACHES_BYTES
    leave(600 * _MIB)
    assert measure.host_room_bytes() == 150 * _MIB
    for device in (CpuDevice(), EmulatedDevice(1 << 40, Link(5e9, 1e-5, measured=False))):
        assert measure._device_room_bytes(device) == 150 * _MIB
    leave(measure.LEAST_HOST_BYTES - 1)
    told: list[str] = []
    with pytest.raises(CapacityError, match="measuring takes 512"):
        measure_machine(CpuDevice(), tmp_path, told.append)
    assert not told


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured() -> None:
    told: list[str] = []
    with pytest.raises(OSError, match="/proc"):
        measure_machine(CpuDevice(), Path("/proc"), told.append)
    assert not told
