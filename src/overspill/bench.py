"""`overspill bench`: what this machine does, measured once and kept for planning."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import overspill
from overspill.config import resolve
from overspill.machine import measure
from overspill.machine.cpu_experts import instruction_set
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes, host_limit_bytes
from overspill.machine.rates import MachineReport, Rates, fingerprint
from overspill.model.hf import cache_argument, cache_of
from overspill.model.map import map_live
from overspill.offload.placed import place
from overspill.plan import make_plan

_LAYERS = 16
_STEPS = 8


def measure_machine(device: Device, folder: Path, progress: Callable[[str], None] | None = None) -> MachineReport:
    """Measure `device`, its link, the CPU beside it and the disk under `folder`; takes some fifteen seconds.

    Raises OSError where nothing can be written into `folder`.
    """
    tell = progress or (lambda _: None)
    tell("products on the device")
    reading, computing = measure.products(device)
    tell("what a layer takes besides")
    layer_s = _layer_seconds(device)
    tell("link")
    link = measure.link(device)
    tell("experts on the CPU")
    expert_bytes_s, expert_flops = measure.experts_on_cpu()
    tell(f"disk under {folder}")
    disk = measure.disk(folder)
    name, facts = fingerprint(device)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rates = Rates(
        origin=f"measured on this machine, {now[:10]}",
        read_bytes_s=reading,
        flops=computing,
        layer_s=layer_s,
        expert_bytes_s=expert_bytes_s,
        expert_flops=expert_flops,
        disk_bytes_s=max(disk.values()),
        asynchronous=device.kind == "cuda",
    )
    return MachineReport(
        fingerprint=name,
        device_kind=device.kind,
        device_name=device.name,
        measured_at=now,
        versions={
            "overspill": overspill.__version__,
            **{package: metadata.version(package) for package in ("torch", "transformers")},
        },
        machine={
            **facts,
            "kernels": instruction_set(),
            "memory_free_bytes": int(psutil.virtual_memory().available),
            "memory_left_bytes": host_available_bytes(),
            "control_group_limit_bytes": host_limit_bytes(),
            "numa_nodes": measure.numa_nodes(),
        },
        figures={
            "weights read, one token": reading,
            f"products of {measure.MANY_TOKENS} tokens": computing,
            "a layer besides": layer_s,
            "link": {way: {str(size): rate for size, rate in sizes.items()} for way, sizes in link.items()},
            "experts on the CPU, one token": expert_bytes_s,
            "experts on the CPU, many tokens": expert_flops,
            "disk by request size": {str(size): rate for size, rate in disk.items()},
        },
        rates=rates,
    )


def _layer_seconds(device: Device) -> float:
    """Of a decode step a layer's share that is no arithmetic: a llama of many layers that are next to nothing."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=_LAYERS, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    settings = resolve(None, engine={"device": device.kind}, environ={})
    plan = make_plan(map_live(model, tokens=32), settings, device, context_tokens=32)
    logger = logging.getLogger("overspill")
    logger.disabled = True  # what a load tells is of no interest here
    try:
        placed: Any = place(plan, device)
    finally:
        logger.disabled = False
    times = []
    with placed.running():
        output = placed.model(device.to_device(torch.zeros(1, 8, dtype=torch.long)), use_cache=True)
        for _ in range(_STEPS + 2):
            begun = device.timed()
            output = placed.model(
                device.to_device(torch.zeros(1, 1, dtype=torch.long)),
                **{cache_argument(placed.model): cache_of(output)},
                use_cache=True,
            )
            times.append(device.timed() - begun)
    return statistics.median(times[2:]) / _LAYERS


def as_json(report: MachineReport) -> dict[str, object]:
    return asdict(report)
