"""Which device computes."""

from __future__ import annotations

import os

import torch

from overspill.config.settings import EngineSettings
from overspill.config.sizes import format_bytes
from overspill.errors import ConfigError
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Device, Link
from overspill.machine.emulated import DEFAULT_LINK, DEFAULT_MEMORY_BYTES, EmulatedDevice


def select_device(settings: EngineSettings) -> Device:
    """The device that `settings` ask for; "auto" is a CUDA GPU where there is one, else the CPU.

    Raises ConfigError for "cuda" without a GPU, for a limit above the GPU's memory, and for a limit where
    "auto" comes out at the CPU, which has no memory of its own.
    """
    has_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    if settings.device == "emulated":
        cores = len(os.sched_getaffinity(0))  # the link's copy thread wants one of them; OpenMP would spin on it
        torch.set_num_threads(min(torch.get_num_threads(), max(1, cores - 1)))
        link = Link(
            DEFAULT_LINK.bandwidth if settings.link_bandwidth is None else settings.link_bandwidth,
            DEFAULT_LINK.latency_s if settings.link_latency_s is None else settings.link_latency_s,
            measured=False,
        )
        return EmulatedDevice(settings.device_memory_bytes or DEFAULT_MEMORY_BYTES, link, check=settings.debug)
    if settings.device == "cuda" or (settings.device == "auto" and has_cuda):
        if not has_cuda:
            built = "sees no GPU" if torch.version.cuda is not None else "is built without CUDA"
            raise ConfigError(
                f'device is "cuda", but torch {torch.__version__} {built}',
                hint="use --device emulated to try an accelerator on the CPU, or --device cpu",
            )
        from overspill.machine.cuda import CudaDevice

        return CudaDevice(settings.device_memory_bytes)
    if settings.device_memory_bytes is not None:
        limit = f"{settings.device_memory_bytes} ({format_bytes(settings.device_memory_bytes)})"
        raise ConfigError(
            f'"device_memory_bytes" is {limit}, but there is no GPU, and the CPU computes in host memory',
            hint="use --device emulated, or take the limit away",
        )
    return CpuDevice(settings.memory_limit_bytes)
