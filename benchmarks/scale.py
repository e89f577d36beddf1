"""Planning a checkpoint of 671 B parameters in 163 shards and 90 000 tensors, from headers: time, and memory.

The files are made of headers and holes. Each plan is made in a fresh process, whose peak is that of everything,
the libraries included; its clock starts when they are imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from benchmarks.report import Bar, Report

COLUMNS = ("asked", "parameters_b", "tensors", "shards", "plan_s", "cpu_s", "peak_bytes", "imported_bytes")
PLAN_S, PEAK_BYTES = 2.0, 500e6

WORKER = """
import json, sys, time
from pathlib import Path
import transformers.models.deepseek_v3.modeling_deepseek_v3
from overspill.api import prepare, settings_of
from overspill.machine.named import NamedDevice
from overspill.machine.specs import gpu_named, link_named

def peak_bytes():  # getrusage's would be the parent's, if that is larger
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

folder, document = json.loads(sys.argv[1])
device = NamedDevice(gpu_named("H200"), link_named("pcie5x16"), 2 << 40)
settings, imported = settings_of(document, {"max_model_len": 512}), peak_bytes()
begun, computing = time.perf_counter(), time.process_time()
plan = prepare(folder, settings, device).plan
print(json.dumps({
    "plan_s": time.perf_counter() - begun, "cpu_s": time.process_time() - computing, "peak_bytes": peak_bytes(),
    "imported_bytes": imported, "model_bytes": plan.model.nbytes,
}))
"""


@dataclass(frozen=True)
class Scale:
    """`config` is of DeepSeek-V3's; its experts are written one by one, as there."""

    shards: int
    repeats: int
    config: Mapping[str, int] = field(default_factory=dict)


# DeepSeek-V3 has 256 experts twice as wide, and a scale for each weight: with these it has as many tensors without.
_FULL = {"n_routed_experts": 512, "moe_intermediate_size": 1024, "max_position_embeddings": 4096}
SCALES = {
    "toy": Scale(
        3, 1, {**_FULL, "n_routed_experts": 32, "hidden_size": 512, "num_hidden_layers": 5, "vocab_size": 999}
    ),
    "quick": Scale(40, 1, {**_FULL, "num_hidden_layers": 16}),
    "full": Scale(163, 5, _FULL),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "nothing: fit chooses": {},
    "experts on the CPU": {"overspill": {"placement": {"cpu_moe": True}}},
}


def measure(scale: Scale, cache: Path, tell: Callable[[str], None]) -> Report:
    report = Report("scale", "Planning a large checkpoint from its headers", COLUMNS)
    tell(f"writing headers of {scale.shards} shards")
    folder, tensors, parameters = write_checkpoint(scale, cache)
    for asked, document in WAYS.items():
        tell(asked)
        runs = [_planned(folder, document) for _ in range(scale.repeats)]
        report.rows.append(
            {
                "asked": asked,
                "parameters_b": parameters / 1e9,
                "tensors": tensors,
                "shards": scale.shards,
                **{name: median(run[name] for run in runs) for name in COLUMNS[4:]},
                "samples": {"runs": runs},
            }
        )
    report.bars = [
        Bar("seconds to plan", max(row["plan_s"] for row in report.rows), PLAN_S),
        Bar("peak in MB", max(row["peak_bytes"] for row in report.rows) / 1e6, PEAK_BYTES / 1e6, timed=False),
    ]
    return report.finish()


def write_checkpoint(scale: Scale, cache: Path) -> tuple[Path, int, int]:
    """(its folder, tensors, parameters); the files take no more of the disk than their headers."""
    config = DeepseekV3Config(**scale.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = list(_tensors(model.state_dict()))
    folder = cache / f"headers-{scale.shards}-{len(tensors)}"
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    each, weight_map = -(-len(tensors) // scale.shards), {}
    for number in range(scale.shards):
        name = f"model-{number + 1:05d}-of-{scale.shards:05d}.safetensors"
        part = tensors[number * each : (number + 1) * each]
        weight_map.update(dict.fromkeys((tensor for tensor, _ in part), name))
        _write_shard(folder / name, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder, len(tensors), sum(parameter.numel() for parameter in model.parameters())


def _tensors(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As a checkpoint holds them: experts one by one, gate and up apart."""
    for name, tensor in state.items():
        block, _, which = name.rpartition(".")
        if not block.endswith(".experts"):
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
            for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{block}.{number}.{part}.weight", piece


def _write_shard(path: Path, tensors: list[tuple[str, torch.Tensor]]) -> None:
    header, at = {}, 0
    for name, tensor in tensors:
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def _planned(folder: Path, document: Mapping[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-c", WORKER, json.dumps([str(folder), document])]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(process.stdout.splitlines()[-1]))
