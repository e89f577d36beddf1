"""accelerate's disk offload over the checkpoint itself: hooks open the file and map a layer's weights each time.

As many layers as the limit holds are in memory for good, copied out of the mapping so that nothing evicts them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import disk_mapped
from benchmarks.disk_worker import Generate, tell


def imports() -> None:
    import accelerate  # noqa: F401

    disk_mapped.imports()


def start(job: dict[str, Any]) -> Generate:
    import torch

    from benchmarks.disk_decode import decode

    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as copies:
        map_, held_bytes = _device_map(job)
        model = disk_mapped.load(job, device_map=map_, offload_folder=copies)
        if left := list(Path(copies).iterdir()):
            raise RuntimeError(f"{len(left)} weights were written once more, {left[0].name} the first")
    for name, parameter in model.named_parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
        else:
            assert parameter.device.type == "meta", name
    tell("plan", offloaded_bytes=job["weights_bytes"] - held_bytes, device_bytes=held_bytes, notes=[])

    def generate(prompt: Sequence[int], arrived: Callable[[], bool]) -> None:
        decode(model, prompt, arrived)

    return generate


def _device_map(job: dict[str, Any]) -> tuple[dict[str, str], int]:
    """Where each module is, and the bytes in memory: what is no layer, then layers while they fit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["fused"]), dtype=torch.bfloat16)
    layers = {f"model.layers.{number}": _nbytes(layer) for number, layer in enumerate(skeleton.model.layers)}
    held = _nbytes(skeleton) - sum(layers.values())
    where = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    for path, nbytes in layers.items():
        fits = held + nbytes <= job["share_bytes"]
        held += nbytes if fits else 0
        where[path] = "cpu" if fits else "disk"
    return where, held


def _nbytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
