"""Tiny models planned, placed and run on the emulated accelerator, as the tests of several rooms do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overspill.checkpoint import open_checkpoint
from overspill.config import Settings, resolve
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.model.hf import cache_argument, cache_of
from overspill.model.map import map_model, read_config, resolve_dtype
from overspill.model.weights import ModelMap
from overspill.offload.placed import PlacedModel, place
from overspill.plan import Plan, make_plan

CONTEXT = 32
FAST = Link(bandwidth=1e12, latency_s=0.0, measured=False)
DISABLE_UVA = {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}
PROMPT = (5, 17, 99, 3, 64, 21, 120, 7, 40)
DECODED = (11, 77, 50)

Document = Mapping[str, Any] | None


def emulated(memory_bytes: int = 64 << 20) -> EmulatedDevice:
    """With every access checked by address, and a link that takes no time."""
    return EmulatedDevice(memory_bytes, FAST, check=True)


def settings_for(document: Document = None, environ: Mapping[str, str] | None = None, **engine: Any) -> Settings:
    return resolve(document, engine={"device": "emulated", "debug": True, **engine}, environ=environ or {})


def mapped(folder: Path, dtype: str = "auto", *, tokens: int = CONTEXT, sequences: int = 1) -> ModelMap:
    checkpoint = open_checkpoint(folder)
    config = read_config(checkpoint)
    chosen = resolve_dtype(dtype, checkpoint, config, "emulated")
    return map_model(checkpoint, config, chosen, tokens=tokens, sequences=sequences)


def planned(
    folder: Path,
    document: Document = None,
    environ: Mapping[str, str] | None = None,
    device: EmulatedDevice | None = None,
) -> Plan:
    device = device or emulated()
    return make_plan(mapped(folder), settings_for(document, environ), device, context_tokens=CONTEXT)


def placed(
    folder: Path,
    document: Document = None,
    environ: Mapping[str, str] | None = None,
    device: EmulatedDevice | None = None,
) -> PlacedModel:
    """Loaded and proved, with released buffers poisoned."""
    device = device or emulated()
    return place(planned(folder, document, environ, device), device, debug=True)


def prefetch(size: int, number: int = 1, step: int = 1, params: Sequence[str] = ()) -> dict[str, Any]:
    """A document: layers in groups of `size`, the last `number` of each copied ahead through `step` buffers."""
    return {
        "prefetch": {
            "offload_group_size": size,
            "offload_num_in_group": number,
            "offload_prefetch_step": step,
            "offload_params": list(params),
        }
    }


def gib(nbytes: float) -> float:
    """A budget as the document states it."""
    return nbytes / (1 << 30)


def forward(model: PlacedModel, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any, int]:
    """One pass: (logits [1, len(ids), vocabulary], the cache, bytes that crossed the link)."""
    device = model.device
    device.synchronize()
    before = device.traffic.copy()
    given = {} if cache is None else {cache_argument(model.model): cache}
    with model.running():
        output: Any = model.model(device.to_device(torch.tensor([list(ids)])), use_cache=True, **given)
    device.synchronize()
    return output.logits.clone(), cache_of(output), (device.traffic - before).bytes


def passes(model: PlacedModel, decoded: Sequence[int] = DECODED) -> tuple[list[torch.Tensor], list[int]]:
    """A prompt and some decode steps over its cache: logits of each pass, and bytes over the link in each."""
    logits, cache, moved = forward(model, PROMPT)
    results = [(logits, moved)]
    for token in decoded:
        logits, cache, moved = forward(model, [token], cache)
        results.append((logits, moved))
    return [logits for logits, _ in results], [moved for _, moved in results]
