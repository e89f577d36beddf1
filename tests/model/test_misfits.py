from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from emulated_runs import emulated, mapped, planned
from overspill.errors import UnsupportedModelError
from overspill.machine.arena import Arena
from overspill.model.map import conversions
from overspill.offload.loader import fill
from tiny_models import TINY, MakeTiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def changed(tiny: MakeTiny, tmp_path: Path) -> Callable[[str, Callable[[Tensors], object]], Path]:
    """A checkpoint with its tensors edited, and nothing else."""

    def change(name: str, edit: Callable[[Tensors], object]) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny(name), folder)
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return change


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


EXPERT = "model.layers.2.mlp.experts.3"


@pytest.mark.parametrize(
    ("name", "edit", "told"),
    [
        (
            "llama",
            without("model.layers.3.mlp.down_proj.weight", "lm_head.weight"),
            ["2 parameters have no source", "model.layers.3.mlp.down_proj.weight", "lm_head.weight"],
        ),
        ("llama_tied", without("model.embed_tokens.weight"), ["no source", "model.embed_tokens.weight"]),
        (
            "llama",
            replaced("model.layers.3.mlp.down_proj.weight", lambda t: t[:-1]),
            ["model.layers.3.mlp.down_proj.weight [34, 45] (model: [35, 45])"],
        ),
        (
            "qwen3_moe",
            without(f"{EXPERT}.down_proj.weight"),
            ["mlp.experts.down_proj [5, 35, 11] (model: [6, 35, 11]", f"missing: {EXPERT}.down_proj.weight"],
        ),
        (
            "qwen3_moe",
            without(f"{EXPERT}.up_proj.weight"),
            ["model.layers.2.mlp.experts.gate_up_proj", f"missing: {EXPERT}.up_proj.weight"],
        ),
        (
            "qwen3_moe",
            without(f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"),
            [f"missing: {EXPERT}.gate_proj.weight, {EXPERT}.up_proj.weight"],
        ),
        (
            "qwen3_moe",
            without(*(f"model.layers.2.mlp.experts.{e}.up_proj.weight" for e in range(6))),
            ["model.layers.2.mlp.experts.gate_up_proj", "missing: mlp.experts.*.up_proj.weight"],
        ),
        (
            "qwen3_moe",
            without(*(f"{EXPERT[:-1]}{e}.{p}_proj.weight" for e in range(6) for p in ("gate", "up", "down"))),
            ["2 parameters have no source", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
        (
            "qwen3_moe",
            replaced(f"{EXPERT}.gate_proj.weight", lambda t: t[:-1]),
            ["model.layers.2.mlp.experts.gate_up_proj ("],
        ),
        (
            "llama",
            replaced("model.layers.0.self_attn.q_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
            ["quantised", "model.layers.0.self_attn.q_proj.weight (float8_e4m3fn)"],
        ),
        (
            "qwen3_moe",
            replaced(f"{EXPERT}.gate_proj.weight", lambda t: t.to(torch.int8)),
            ["quantised", f"{EXPERT}.gate_proj.weight (int8)"],
        ),
    ],
)
def test_a_checkpoint_that_does_not_make_the_model_is_refused_before_anything_is_read(
    name: str,
    edit: Callable[[Tensors], object],
    told: list[str],
    changed: Callable[[str, Callable[[Tensors], object]], Path],
) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        planned(changed(name, edit))
    for part in told:
        assert part in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == 3


def test_tensors_that_nobody_wants_are_told(changed: Callable[[str, Callable[[Tensors], object]], Path]) -> None:
    extra = {
        "model.layers.9.mlp.down_proj.weight": torch.ones(3),
        "vision.x": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),  # of old files, rebuilt here
    }
    plan = planned(changed("llama", lambda tensors: tensors.update(extra)))
    assert sorted(plan.model.unused) == ["model.layers.9.mlp.down_proj.weight", "vision.x"]
    assert any("2 checkpoint tensors" in note and "vision.x" in note for note in plan.notes)


def test_an_expert_of_another_dtype_is_still_stacked_right(
    changed: Callable[[str, Callable[[Tensors], object]], Path], tiny: MakeTiny
) -> None:
    """Then the parts are no run of bytes, and the stack is made while loading."""
    folder = changed("mixtral", replaced("model.layers.1.block_sparse_moe.experts.2.w2.weight", torch.Tensor.double))
    model = mapped(folder)
    ((weight, why),) = conversions(model.weights)
    assert (weight.full, why) == ("model.layers.1.mlp.experts.down_proj", "MergeModulelist(0)")
    device = emulated()
    arena = Arena(device.allocate(sum(w.nbytes + 64 for w in model), "weights"))
    targets = {w.full: arena.take(w.shape, w.dtype) for w in model}
    fill(targets, model, device)
    assert torch.equal(targets[weight.full], TINY["mixtral"].model().state_dict()[weight.full])
    assert tiny("mixtral") != folder
