from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from overspill.config.settings import EngineSettings
from overspill.errors import ConfigError
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Link
from overspill.machine.emulated import DEFAULT_LINK, DEFAULT_MEMORY_BYTES, EmulatedDevice
from overspill.machine.select import select_device

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_emulated_takes_every_setting() -> None:
    device = select_device(
        EngineSettings(
            device="emulated",
            device_memory_bytes=1 << 20,
            link_bandwidth=2e9,
            link_latency_s=0.0,
            debug=True,
        )
    )
    assert isinstance(device, EmulatedDevice)
    assert device.memory_bytes == 1 << 20
    assert device.link == Link(2e9, 0.0, measured=False)
    assert device.check


def test_emulated_has_defaults_for_each() -> None:
    device = select_device(EngineSettings(device="emulated", link_bandwidth=2e9))
    assert isinstance(device, EmulatedDevice)
    assert device.memory_bytes == DEFAULT_MEMORY_BYTES
    assert device.link == Link(2e9, DEFAULT_LINK.latency_s, measured=False)
    assert not device.check


def test_cpu_is_unified_and_has_no_link() -> None:
    device = select_device(EngineSettings(device="cpu"))
    assert isinstance(device, CpuDevice)
    assert device.unified
    assert device.link is None


@without_gpu
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert isinstance(select_device(EngineSettings()), CpuDevice)


@without_gpu
def test_cuda_without_a_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=f"torch {torch.__version__}".replace("+", r"\+")) as refusal:
        select_device(EngineSettings(device="cuda"))
    assert "--device emulated" in str(refusal.value.hint)


@without_gpu
def test_a_memory_limit_that_auto_cannot_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match="1048576"):
        select_device(EngineSettings(device_memory_bytes=1 << 20))


@with_gpu
def test_auto_is_the_gpu_where_there_is_one() -> None:
    device = select_device(EngineSettings(device_memory_bytes=1 << 28))
    assert device.kind == "cuda"
    assert device.memory_bytes == 1 << 28


def test_choosing_another_device_imports_nothing_of_the_gpu_s() -> None:
    program = (
        "import sys, overspill.machine as m; from overspill.config import EngineSettings; "
        "m.select_device(EngineSettings(device='emulated')); "
        "sys.exit(any(n in sys.modules for n in ('overspill.machine.cuda', 'overspill.machine.pinned')))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
