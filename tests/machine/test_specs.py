"""What is known of GPUs and links by name."""

from __future__ import annotations

import re

import pytest

from overspill.advice.engines import total_bytes_of
from overspill.api import rates_of
from overspill.errors import ConfigError
from overspill.machine.named import DRIVER_BYTES, NamedDevice
from overspill.machine.specs import GPUS, LINKS, gpu_named, gpu_of_device, link_named, named_rates

SHOWN_BY_CUDA_GIB = {"L40S": 44.39, "H200": 139.80, "T4": 14.56, "A10G": 22.06, "RTX-4090": 23.64, "H100-SXM": 79.19}
"""The total that torch names where memory runs out, as its users quote it."""


def test_named_gpus_and_links() -> None:
    gpu = gpu_named("l40s")
    assert (gpu.name, gpu.memory_mib, gpu.link) == ("L40S", 46068, "pcie4x16")
    assert all(spec.link in LINKS and spec.source for spec in GPUS.values())
    assert 20e9 < link_named("PCIe4x16").bandwidth < 31.5e9
    assert "not measured" in named_rates(gpu).origin
    with pytest.raises(ConfigError, match=re.escape('"gpu" is "L40X"')) as told:
        gpu_named("L40X")
    assert "L40S" in (told.value.hint or "")
    with pytest.raises(ConfigError, match="pcie9"):
        link_named("pcie9")


@pytest.mark.parametrize(
    ("device_name", "gpu"),
    [
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100X", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_a_gpu_here_is_known_by_its_whole_name(device_name: str, gpu: str | None) -> None:
    found = gpu_of_device(device_name)
    assert (found.name if found is not None else None) == gpu


def test_no_two_gpus_share_a_name() -> None:
    names = [name for gpu in GPUS.values() for name in gpu.device_names]
    assert len(names) == len(set(names))
    assert all(gpu.device_names for gpu in GPUS.values())


@pytest.mark.parametrize("name", SHOWN_BY_CUDA_GIB)
def test_a_named_gpu_has_the_memory_that_cuda_sees(name: str) -> None:
    gpu = gpu_named(name)
    seen = total_bytes_of(NamedDevice(gpu, link_named(gpu.link), None))
    assert seen == gpu.memory_bytes - DRIVER_BYTES
    assert seen / (1 << 30) == pytest.approx(SHOWN_BY_CUDA_GIB[name], abs=0.3)


def test_a_named_gpu_is_planned_for_and_not_run_on() -> None:
    device = NamedDevice(gpu_named("T4"), link_named("pcie3x16"), None)
    assert 13 << 30 < device.memory_bytes < 14.5 * (1 << 30)
    with pytest.raises(AssertionError, match="can be planned for"):
        device.allocate(1, "weights")
    assert rates_of(device) == named_rates(device.gpu)
