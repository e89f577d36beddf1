from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
    SiglipVisionConfig,
)

from emulated_runs import CONTEXT, emulated, mapped, planned
from overspill.checkpoint import open_checkpoint
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.machine.arena import Arena
from overspill.model import hf
from overspill.model.map import context_tokens, conversions, map_live, read_config, resolve_dtype
from overspill.model.sources import Extents, Live
from overspill.model.stacks import Stack, find_stacks
from overspill.model.weights import ModelMap, Role, Routing
from overspill.offload.loader import fill
from tiny_models import ARCHITECTURES, TINY, MakeTiny

Tensors = dict[str, torch.Tensor]


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


# -- roles -------------------------------------------------------------------------------------------------------------


def roles(model: ModelMap, layer: int) -> dict[str, Role]:
    return {w.name.relative: w.role for w in model if w.name.layer == layer and w.name.relative is not None}


def test_roles_of_a_mixture_of_experts(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"))
    assert roles(model, 3) == {
        "self_attn.q_proj.weight": Role.ATTENTION,
        "self_attn.k_proj.weight": Role.ATTENTION,
        "self_attn.v_proj.weight": Role.ATTENTION,
        "self_attn.o_proj.weight": Role.ATTENTION,
        "self_attn.q_norm.weight": Role.NORM,
        "self_attn.k_norm.weight": Role.NORM,
        "mlp.experts.gate_up_proj": Role.ROUTED_EXPERT,
        "mlp.experts.down_proj": Role.ROUTED_EXPERT,
        "mlp.gate.weight": Role.ROUTER,
        "input_layernorm.weight": Role.NORM,
        "post_attention_layernorm.weight": Role.NORM,
    }
    outside = {w.full: w.role for w in model if w.name.layer is None}
    assert outside == {
        "model.embed_tokens.weight": Role.EMBEDDING,
        "model.norm.weight": Role.NORM,
        "lm_head.weight": Role.HEAD,
    }


def test_roles_of_shared_experts_and_of_a_dense_first_layer(tiny: MakeTiny) -> None:
    model = mapped(tiny("deepseek_v2"))
    dense, sparse = roles(model, 0), roles(model, 1)
    projections = ("gate_proj", "up_proj", "down_proj")
    assert {n: r for n, r in dense.items() if n.startswith("mlp.")} == {
        f"mlp.{p}.weight": Role.DENSE_MLP for p in projections
    }
    assert {n: r for n, r in sparse.items() if n.startswith("mlp.")} == {
        "mlp.experts.gate_up_proj": Role.ROUTED_EXPERT,
        "mlp.experts.down_proj": Role.ROUTED_EXPERT,
        "mlp.gate.weight": Role.ROUTER,
        **{f"mlp.shared_experts.{p}.weight": Role.SHARED_EXPERT for p in projections},
    }
    assert dense["self_attn.kv_a_proj_with_mqa.weight"] is Role.ATTENTION
    assert dense["self_attn.kv_a_layernorm.weight"] is Role.NORM


def test_roles_where_every_block_is_called_a_mixer(tiny: MakeTiny) -> None:
    model = mapped(tiny("nemotron_h"))
    assert roles(model, 0)["mixer.in_proj.weight"] is Role.ATTENTION
    assert roles(model, 1)["mixer.experts.up_proj"] is Role.ROUTED_EXPERT
    assert roles(model, 1)["mixer.shared_experts.up_proj.weight"] is Role.SHARED_EXPERT
    assert roles(model, 1)["mixer.gate.e_score_correction_bias"] is Role.BUFFER
    assert roles(model, 2)["mixer.q_proj.weight"] is Role.ATTENTION
    assert roles(model, 3)["mixer.up_proj.weight"] is Role.DENSE_MLP


def test_a_step_reads_its_share_of_the_experts(tiny: MakeTiny) -> None:
    model = mapped(tiny("gpt_oss"))
    experts = [w for w in model if w.role is Role.ROUTED_EXPERT]
    assert len(experts) == 6 * 4  # weights and biases
    assert {w.routing for w in experts} == {Routing(experts=6, top_k=2)}
    assert experts[0].step_bytes(1) == pytest.approx(experts[0].nbytes / 3)
    assert experts[0].step_bytes(2) == pytest.approx(experts[0].nbytes * (1 - (2 / 3) ** 2))
    assert experts[0].step_bytes(1000) == pytest.approx(experts[0].nbytes)
    assert all(w.routing is None for w in model if w.role is not Role.ROUTED_EXPERT)


# -- stacks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_stack_of_every_tiny_model_is_found(name: str) -> None:
    skeleton = hf.build_skeleton(TINY[name].config(), torch.float32)
    assert find_stacks(skeleton) == (Stack("model.layers", 8 if name == "nemotron_h" else 6, tower=False),)


def test_a_vision_tower_is_no_decoder_though_it_has_more_layers() -> None:
    text = TINY["gemma3"].config()
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=9, num_attention_heads=1, image_size=16, patch_size=8
    )
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4)
    decoder, tower = find_stacks(hf.build_skeleton(config, torch.float32))
    assert (decoder.path, decoder.layers, decoder.tower) == ("model.language_model.layers", 6, False)
    assert (tower.layers, tower.tower) == (9, True)
    assert tower.path.startswith("model.vision_tower")


def test_an_architecture_without_marked_layers_has_its_largest_list() -> None:
    config = OpenAIGPTConfig(vocab_size=8, n_positions=8, n_embd=4, n_layer=3, n_head=1)
    assert find_stacks(hf.build_skeleton(config, torch.float32)) == (Stack("transformer.h", 3, tower=False),)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Sequential has no stack of layers"):
        find_stacks(nn.Sequential(nn.Linear(2, 2)))


# -- checkpoints that do not fit ---------------------------------------------------------------------------------------


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
