from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from emulated_runs import CONTEXT, emulated, forward, mapped, planned, settings_for
from overspill.errors import CheckpointError, DeviceOutOfMemoryError
from overspill.machine.arena import Arena
from overspill.model.sources import Conversion, decode
from overspill.model.weights import ModelMap
from overspill.offload import loader
from overspill.offload.loader import fill
from overspill.offload.placed import place
from overspill.plan import make_plan
from tiny_models import MakeTiny

PROMPT = (5, 17, 99)
EVERYTHING = {"uva": {"cpu_offload_gb": 1}}
PREFETCH = {"prefetch": {"offload_group_size": 2}}


def loaded(model: ModelMap, device: Any = None) -> tuple[dict[str, torch.Tensor], int, list[int]]:
    """Every weight in memory of its own, the bytes read, and what `progress` heard."""
    device = device or emulated()
    block = device.allocate(sum(weight.nbytes + 64 for weight in model), "weights")
    arena = Arena(block)
    targets = {weight.full: arena.take(weight.shape, weight.dtype) for weight in model}
    heard: list[int] = []
    return targets, fill(targets, model, device, progress=heard.append), heard


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                yield name, file.get_tensor(name)


@pytest.mark.parametrize("name", ["llama", "llama_sharded", "llama_bf16", "llama_tied"])
def test_every_weight_is_read_as_it_lies(name: str, tiny: MakeTiny) -> None:
    model = mapped(tiny(name))
    targets, read_bytes, heard = loaded(model)
    found = dict(stored(tiny(name)))
    assert found.keys() == targets.keys()
    for full, target in targets.items():
        assert target.dtype == found[full].dtype
        assert torch.equal(target, found[full])
    assert sum(heard) == model.nbytes
    assert read_bytes >= model.nbytes  # whole requests are read, so a little more


@pytest.mark.parametrize(
    ("name", "asked", "dtype"),
    [
        ("llama", "bfloat16", torch.bfloat16),
        ("llama_bf16", "float32", torch.float32),
        ("mixtral_sharded", "bfloat16", torch.bfloat16),
        ("deepseek_v2", "bfloat16", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("document", [None, EVERYTHING, PREFETCH], ids=["resident", "uva", "prefetch"])
def test_another_dtype_is_cast_once_while_loading(
    name: str, asked: str, dtype: torch.dtype, document: dict[str, Any] | None, tiny: MakeTiny
) -> None:
    device = emulated()
    plan = make_plan(mapped(tiny(name), asked), settings_for(document), device, context_tokens=CONTEXT)
    run = place(plan, device, debug=True)
    reference = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=dtype, experts_implementation="eager")
    for full, expected in reference.named_parameters():
        source = run.hosts.get(full, run.model.get_parameter(full))
        assert source.dtype == expected.dtype
        assert torch.equal(source, expected)
        expected.data = expected.data.clone()  # aligned, as ours is
    with torch.no_grad():
        assert torch.equal(forward(run, PROMPT)[0], reference(torch.tensor([PROMPT])).logits)


def test_what_is_cast_is_cast_in_batches_of_bounded_size(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two weights at a time, every weight arrives all the same."""
    monkeypatch.setattr(loader, "_BATCH_BYTES", 10_000)
    model = mapped(tiny("mixtral_sharded"), "bfloat16")
    targets, read_bytes, heard = loaded(model)
    reference = AutoModelForCausalLM.from_pretrained(tiny("mixtral_sharded"), dtype=torch.bfloat16)
    assert all(torch.equal(targets[name], parameter) for name, parameter in reference.named_parameters())
    assert sum(heard) == 2 * model.nbytes  # the file has float32
    assert read_bytes >= sum(heard)


def test_a_conversion_is_made_once_for_all_its_targets(tiny: MakeTiny) -> None:
    """Two parameters out of two tensors, in memory of other dtypes than the file's."""
    model = mapped(tiny("llama"))
    records = model.checkpoint.tensors if model.checkpoint is not None else {}
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    runs: list[int] = []

    def exchange(raw: Any) -> dict[str, torch.Tensor]:
        runs.append(len(raw))
        first, second = (decode(records[n], data) for n, data in zip((gate, up), raw, strict=True))
        return {gate: second * 2, up: first.to(torch.float64)}

    source = Conversion((records[gate], records[up]), (gate, up), exchange, "exchanged")
    weights = tuple(replace(w, source=source) if w.full in (gate, up) else w for w in model)
    targets, _, heard = loaded(replace(model, weights=weights))
    found = dict(stored(tiny("llama")))
    assert torch.equal(targets[gate], found[up] * 2)
    assert torch.equal(targets[up], found[gate])
    assert torch.equal(targets["lm_head.weight"], found["lm_head.weight"])
    assert runs == [2]
    assert sum(heard) == model.nbytes


# -- files that are not what they were ---------------------------------------------------------------------------------


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_a_file_that_changed_since_planning_is_refused_before_it_is_read(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = copied(tiny("llama"), tmp_path / "llama")
    device = emulated()
    plan = planned(folder, EVERYTHING, device=device)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    heard: list[int] = []
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed since its header was read"):
        place(plan, device, progress=heard.append)
    assert heard == []


def test_a_file_that_vanished_since_planning_is_refused(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = copied(tiny("llama_sharded"), tmp_path / "llama")
    device = emulated()
    plan = planned(folder, device=device)
    (folder / "model-00003-of-00009.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00003-of-00009"):
        place(plan, device)


def test_a_device_that_is_too_full_while_loading_gives_everything_back(tiny: MakeTiny) -> None:
    device = emulated(1 << 20)
    plan = planned(tiny("llama"), PREFETCH, device=device)
    taken = device.allocate((1 << 20) - 100_000, "weights")
    with pytest.raises(DeviceOutOfMemoryError):
        place(plan, device)
    assert device.held_bytes("weights") == taken.requested_bytes
    assert device.held_bytes("buffer_pool") == 0


# -- memory ------------------------------------------------------------------------------------------------------------

_CHILD = """
import gc, json, re, sys
sys.path[:0] = json.loads(sys.argv[3])
import torch
from emulated_runs import emulated, planned
from overspill.offload.placed import place

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(rf"^{name}:\\s+(\\d+) kB", file.read(), re.M)[1]) * 1024

figures = []
for document in json.loads(sys.argv[2]):
    device = emulated(2 << 30)
    plan = planned(sys.argv[1], document, device=device)
    torch.ones(8, 8) @ torch.ones(8, 8)
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts from here
    model = place(plan, device)
    figures.append({
        "grown": status("VmHWM") - before,
        "placed": plan.memory.weights_bytes + plan.memory.buffer_pool_bytes + plan.memory.host_bytes,
        "largest": max(weight.nbytes for weight in plan.model),
    })
    del model, plan, device
print(json.dumps(figures))
"""


@pytest.fixture(scope="module")
def bigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 300 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("bigger") / "llama"
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=9,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(folder)
    return folder


def test_loading_takes_what_is_placed_and_little_more(bigger: Path) -> None:
    """Peak memory ≤ what the plan places + the largest parameter + 300 MB (design.md)."""
    documents = [None, {"uva": {"cpu_offload_gb": 0.15}}, PREFETCH]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(bigger), json.dumps(documents), json.dumps(sys.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    for figures in json.loads(child.stdout):
        assert figures["placed"] > 280_000_000
        assert figures["grown"] <= figures["placed"] + figures["largest"] + 300_000_000, figures
        assert figures["grown"] >= 0.9 * figures["placed"]  # all was loaded, and while it was watched
