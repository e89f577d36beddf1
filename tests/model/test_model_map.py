from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
)

from emulated_runs import CONTEXT, emulated, mapped
from overspill.checkpoint import open_checkpoint
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.machine.arena import Arena
from overspill.model import hf
from overspill.model.map import context_tokens, conversions, map_live, read_config, resolve_dtype
from overspill.model.sources import Extents, Live
from overspill.model.weights import Role
from overspill.offload.loader import fill
from tiny_models import ARCHITECTURES, TINY, MakeTiny


def from_pretrained(folder: Path, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


# -- every parameter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mixtral_sharded"])
def test_every_parameter_is_from_pretraineds_bit_for_bit(name: str, tiny: MakeTiny) -> None:
    """Read by extents from the original tensors, per-expert ones too, without transformers touching the data."""
    model = mapped(tiny(name))
    assert all(isinstance(weight.source, Extents) for weight in model)
    assert conversions(model.weights) == []
    assert model.unused == ()
    device = emulated()
    arena = Arena(device.allocate(sum(weight.nbytes + 64 for weight in model), "weights"))
    targets = {weight.full: arena.take(weight.shape, weight.dtype) for weight in model}
    fill(targets, model, device)
    expected = from_pretrained(tiny(name), TINY[name].dtype).state_dict()
    assert {n for w in model for n in (w.full, *w.aliases)} == expected.keys()
    for full, target in targets.items():
        assert target.dtype == expected[full].dtype
        assert torch.equal(target, expected[full]), full


def test_fused_and_per_expert_checkpoints_differ_on_disk_and_give_the_same_map(tiny: MakeTiny) -> None:
    apart, fused = (open_checkpoint(tiny(name)).tensors for name in ("mixtral", "mixtral_fused"))
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in apart
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    assert len(apart) == len(fused) + 6 * (6 * 3 - 2)
    one, other = mapped(tiny("mixtral")), mapped(tiny("mixtral_fused"))
    assert [(w.full, w.shape, w.dtype, w.role) for w in one] == [(w.full, w.shape, w.dtype, w.role) for w in other]
    source = next(w.source for w in one if w.full.endswith("layers.2.mlp.experts.gate_up_proj"))
    assert isinstance(source, Extents)
    assert len(source.extents) == 12
    assert [e.at for e in source.extents] == [n * 11 * 35 * 4 for n in range(12)]  # gate, up of each expert in turn


def test_declaration_order_and_bytes_are_the_models_own(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"))
    parameters = dict(model.skeleton.named_parameters())
    assert [weight.full for weight in model] == list(parameters)
    assert model.nbytes == sum(p.numel() * p.element_size() for p in parameters.values())
    assert [model.position(weight) for weight in model] == list(range(len(parameters)))


def test_tied_weights_count_once(tiny: MakeTiny) -> None:
    model = mapped(tiny("llama_tied"))
    (tied,) = [weight for weight in model if weight.aliases]
    assert (tied.full, tied.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))
    assert tied.role is Role.HEAD
    assert tied.step_bytes(1) == tied.nbytes + tied.nbytes / 128
    untied = mapped(tiny("llama"))
    assert untied.nbytes - model.nbytes == tied.nbytes
    assert untied.weights[0].step_bytes(1) == untied.weights[0].nbytes / 128


# -- live models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "nemotron_h"])
def test_a_live_model_maps_like_its_checkpoint_and_stays_as_it_was(name: str, tiny: MakeTiny) -> None:
    model = TINY[name].model()
    before = {n: (t, t.data_ptr()) for n, t in model.state_dict(keep_vars=True).items()}
    live, stored = map_live(model, tokens=CONTEXT), mapped(tiny(name))
    assert live.skeleton is model
    assert [(w.full, w.role, w.shape, w.aliases, w.routing) for w in live] == [
        (w.full, w.role, w.shape, w.aliases, w.routing) for w in stored
    ]
    assert live.trace == stored.trace
    assert all(isinstance(w.source, Live) for w in live)
    assert {n: (t, t.data_ptr()) for n, t in model.state_dict(keep_vars=True).items()} == before


def test_a_live_model_without_values_is_refused() -> None:
    skeleton = hf.build_skeleton(TINY["llama"].config(), torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"model\.embed_tokens\.weight is on the meta device") as refused:
        map_live(skeleton, tokens=4)
    assert "overspill.load" in (refused.value.hint or "")


# -- configuration -----------------------------------------------------------------------------------------------------


def test_a_quantised_checkpoint_is_refused_by_its_configuration(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"quantised \(.*fp8") as refused:
        mapped(folder)
    assert "GGUF" in (refused.value.hint or "")


def test_the_context_is_what_was_asked_or_the_models_own_up_to_a_limit() -> None:
    assert context_tokens(LlamaConfig(max_position_embeddings=777), None) == 777
    assert context_tokens(LlamaConfig(max_position_embeddings=131072), None) == 4096
    assert context_tokens(LlamaConfig(max_position_embeddings=131072), 9000) == 9000
    assert context_tokens(PretrainedConfig(), None) == 4096
    with pytest.raises(ConfigError, match=r"max_model_len is 778, .* made for 777 tokens"):
        context_tokens(LlamaConfig(max_position_embeddings=777), 778)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("llama", "auto", torch.float32),
        ("llama_bf16", "auto", torch.bfloat16),
        ("llama_bf16", "float32", torch.float32),
        ("llama", "float16", torch.float16),
    ],
)
def test_the_dtype_is_what_was_asked_or_the_checkpoints_own(
    name: str, asked: str, expected: torch.dtype, tiny: MakeTiny
) -> None:
    checkpoint = open_checkpoint(tiny(name))
    assert resolve_dtype(asked, checkpoint, read_config(checkpoint), "emulated") is expected


def test_without_a_stated_dtype_the_tensors_tell(tiny: MakeTiny) -> None:
    checkpoint = open_checkpoint(tiny("llama_bf16"))
    config: Any = read_config(checkpoint)
    config.dtype = None
    assert resolve_dtype("auto", checkpoint, config, "emulated") is torch.bfloat16
