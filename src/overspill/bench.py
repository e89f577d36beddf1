"""`overspill bench`: what this machine does, measured once and kept for planning."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from overspill.config import format_bytes, resolve
from overspill.engine import Engine, SamplingParams
from overspill.machine import measure
from overspill.machine.cpu_experts import instruction_set
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes, host_limit_bytes
from overspill.machine.rates import MachineReport, Rates, fingerprint, versions
from overspill.model.map import map_live
from overspill.offload.placed import place
from overspill.plan import make_plan

_STEPS = 12
_EVICTING_BYTES = 16 << 20
"""About what a product of a large model reads; of more nothing gets slower."""
_FEW_LAYERS, _MANY_LAYERS = 4, 20
_NEXT_TO_NOTHING: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    **_NEXT_TO_NOTHING, "num_hidden_layers": _FEW_LAYERS, "moe_intermediate_size": 32, "num_experts": 16,
    "num_experts_per_tok": 8,
}  # fmt: skip
_EXPERT_WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"overspill": {"placement": {"cpu_moe": True}}},
    "slots": {"overspill": {"expert_stream": {"slots": 16 * _FEW_LAYERS}}},
}


def measure_machine(device: Device, folder: Path, progress: Callable[[str], None] | None = None) -> MachineReport:
    """Measure `device`, its link, the CPU beside it and the disk under `folder`; takes twenty to thirty seconds.

    Raises OSError where nothing can be written into `folder`, CapacityError where too little memory is left to measure
    in; both before anything is measured.
    """
    measure.refuse_memory()
    measure.refuse_folder(folder)
    tell = progress or (lambda _: None)
    if (room_bytes := measure.host_room_bytes()) < measure.BEYOND_CACHES_BYTES:
        tell(f"little memory is left: in {format_bytes(room_bytes)}, of which caches may hold a part")
    tell("products on the device")
    reading, computing = measure.products(device)
    tell("what layers and steps take besides")
    layer_s, step_s = _overhead_seconds(device)
    expert_layer_s = _expert_layer_seconds(device, layer_s, step_s)
    tell("link")
    link = measure.link(device)
    tell("products beside copies and reads")
    beside_copies, copy_bytes_s, copies_beside = measure.beside_copies(device)
    beside_reads = measure.beside_reads(device, folder)
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
        expert_layer_s=expert_layer_s,
        step_s=step_s,
        disk_bytes_s=max(disk.values()),
        asynchronous=device.kind == "cuda",
        copy_bytes_s=copy_bytes_s if device.kind != "cuda" else None,
        beside_copies=beside_copies,
        copies_beside=copies_beside,
        beside_reads=beside_reads,
    )
    return MachineReport(
        fingerprint=name,
        device_kind=device.kind,
        device_name=device.name,
        measured_at=now,
        versions=versions(),
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
            "a layer with experts besides": expert_layer_s,
            "a step besides": step_s,
            "products beside a copy, times as long": beside_copies,
            "products beside a read from disk, times as long": beside_reads,
            "copies to the device": copy_bytes_s,
            "copies beside products, times as long": copies_beside,
            "link": {way: {str(size): rate for size, rate in sizes.items()} for way, sizes in link.items()},
            "experts on the CPU, one token": expert_bytes_s,
            "experts on the CPU, many tokens": expert_flops,
            "disk by request size": {str(size): rate for size, rate in disk.items()},
        },
        rates=rates,
    )


def _overhead_seconds(device: Device) -> tuple[float, float]:
    """(a layer's share of a decode step that is no arithmetic, and what a step takes besides its layers)."""
    few, many = (
        _step_seconds(device, LlamaConfig(**_NEXT_TO_NOTHING, num_hidden_layers=layers), {})
        for layers in (_FEW_LAYERS, _MANY_LAYERS)
    )
    layer_s = max(0.0, (many - few) / (_MANY_LAYERS - _FEW_LAYERS))
    return layer_s, max(0.0, few - _FEW_LAYERS * layer_s)


def _expert_layer_seconds(device: Device, layer_s: float, step_s: float) -> dict[str, float]:
    """The same share of a layer with routed experts, eight for a token, by where they are computed."""
    ways = {where: way for where, way in _EXPERT_WAYS.items() if where == "device" or not device.unified}
    return {
        where: max(layer_s, (_step_seconds(device, Qwen3MoeConfig(**_EXPERTS), way) - step_s) / _FEW_LAYERS)
        for where, way in ways.items()
    }


def _step_seconds(device: Device, config: PretrainedConfig, document: Mapping[str, object]) -> float:
    """Of a decode step of a model whose weights are next to nothing, offloaded as `document` says; median.

    The caches of a CPU are kept as cold as real weights would leave them.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    settings = resolve(document, engine={"device": device.kind}, environ={})
    plan = make_plan(map_live(model, tokens=32), settings, device, context_tokens=32)
    logger = logging.getLogger("overspill")
    logger.disabled = True  # what a load tells is of no interest here
    try:
        engine = Engine(place(plan, device), None, None)
    finally:
        logger.disabled = False
    evicting_s = [] if device.kind == "cuda" else _evicting(model)
    steps = engine.generate([1] * 8, SamplingParams(max_tokens=_STEPS + 3), ignore_eos=True).steps
    taken_s = zip(steps, evicting_s or [0.0] * len(steps), strict=True)
    return statistics.median([step.seconds - less_s for step, less_s in taken_s][3:])


def _evicting(model: nn.Module) -> list[float]:
    """From now on each product of `model` leaves the caches of the CPU as one of real weights does.

    What Python and torch need for the next one is then not in them, and a layer takes up to twice as long. Returned are
    the seconds that this alone takes of each pass, one after the other, as they pass.
    """
    memory, passes = np.zeros(_EVICTING_BYTES, dtype=np.uint8).view(np.float64), list[float]()

    def read(*_: object) -> None:
        begun = time.perf_counter()
        memory.sum()
        passes[-1] += time.perf_counter() - begun

    for module in model.modules():
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            module.register_forward_hook(read)
    model.register_forward_pre_hook(lambda *_: passes.append(0.0))
    return passes


def as_json(report: MachineReport) -> dict[str, object]:
    return asdict(report)
