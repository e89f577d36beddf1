"""One model loaded one way in this fresh process: `python -m benchmarks.load_worker` reads a job (JSON) from stdin.

The clock starts when everything is imported; memory is counted above what the process held then. The last line of
stdout is the result.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def overspill(job: dict[str, Any]) -> dict[str, Any]:
    from overspill.api import prepare
    from overspill.config import resolve
    from overspill.model import gguf, hf
    from overspill.offload.placed import place

    def load() -> dict[str, Any]:
        begun = time.perf_counter()
        engine = {"device": job["device"], "max_model_len": 512} | (
            {"device_memory_bytes": job["device_memory_bytes"]} if job["device"] == "emulated" else {}
        )
        prepared = prepare(job["path"], resolve(job["document"], engine=engine, environ={}))
        planned = time.perf_counter()
        placed = place(prepared.plan, prepared.device)
        loaded = time.perf_counter()
        is_gguf = prepared.checkpoint.format == "gguf"
        tokenizer = (
            gguf.tokenizer_from_gguf(prepared.checkpoint) if is_gguf else hf.load_tokenizer(prepared.checkpoint.folder)
        )
        ended = time.perf_counter()
        ledger = placed.ledger
        return {
            "keep": (placed, tokenizer),
            "tensors": [getattr(p, "host", p) for p in placed.model.parameters()],
            "plan_s": planned - begun,
            "place_s": loaded - planned,
            "weights_s": loaded - begun,
            "tokenizer_s": ended - loaded,
            "placed_bytes": sum(block.allocated_bytes for block in ledger.blocks),
            "largest_bytes": max(p.weight.nbytes for p in placed.plan.placements),
        }

    return _measured(load)


def transformers(job: dict[str, Any]) -> dict[str, Any]:
    path = Path(job["path"])
    source: tuple[Path, dict[str, Any]] = (path, {"dtype": "auto"})
    if path.is_file():
        source = (path.parent, {"gguf_file": path.name})

    def load() -> dict[str, Any]:
        begun = time.perf_counter()
        model: Any = AutoModelForCausalLM.from_pretrained(source[0], **source[1])
        loaded = time.perf_counter()
        tokenizer = AutoTokenizer.from_pretrained(source[0], **source[1]) if path.is_file() else None
        ended = time.perf_counter()
        return {
            "keep": (model, tokenizer),
            "tensors": list(model.parameters()),
            "weights_s": loaded - begun,
            "tokenizer_s": ended - loaded,
        }

    return _measured(load)


def accelerate(job: dict[str, Any]) -> dict[str, Any]:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    def load() -> dict[str, Any]:
        begun = time.perf_counter()
        config = AutoConfig.from_pretrained(job["path"])
        with init_empty_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        model.tie_weights()
        model = load_checkpoint_and_dispatch(model, job["path"], device_map={"": "cpu"}, dtype=config.dtype)
        loaded = time.perf_counter()
        if missing := [name for name, p in model.named_parameters() if p.device.type == "meta"]:
            raise RuntimeError(f"{len(missing)} parameters are left without a value, {missing[0]} the first")
        return {"keep": model, "tensors": list(model.parameters()), "weights_s": loaded - begun, "tokenizer_s": 0.0}

    return _measured(load)


def _measured(load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`load`'s times and memory; `resident_s` is when every page of every weight has been seen."""
    gc.collect()
    base = _status()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    begun, cpu_begun = time.perf_counter(), time.process_time()
    result = load()
    _touch(result.pop("tensors"))
    result["cpu_s"] = time.process_time() - cpu_begun
    result["resident_s"] = time.perf_counter() - begun - result["tokenizer_s"]
    peak, now = _status()["VmHWM"], _status()
    del result["keep"]
    return {
        **result,
        "peak_bytes": peak - base["VmRSS"],
        "anon_bytes": now["RssAnon"] - base["RssAnon"],
        "mapped_bytes": now["RssFile"] - base["RssFile"],
    }


def _touch(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        flat[::4096].sum()


def _status() -> dict[str, int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}


def _import_architecture(job: dict[str, Any]) -> None:
    """What transformers imports when it first meets the architecture is no part of loading."""
    path = Path(job["path"])
    if path.is_file():
        import_module("transformers.integrations.gguf")
        import_module("transformers.modeling_gguf_pytorch_utils")
        from transformers import LlamaConfig

        config: Any = LlamaConfig(vocab_size=8)
    else:
        config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    assert sum(1 for _ in model.parameters())


WAYS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "overspill": overspill,
    "transformers": transformers,
    "accelerate": accelerate,
}


def main() -> None:
    job = json.load(sys.stdin)
    _import_architecture(job)
    print(json.dumps(WAYS[job["way"]](job)))


if __name__ == "__main__":
    main()
