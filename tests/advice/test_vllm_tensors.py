"""vLLM's names, order and rules, held against a second writing of the rules (anchors: vllm-offload 4 to 8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from advised import model_of
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.advice.vllm_tensors import (
    VllmTensor,
    pool_bytes,
    rounded_bytes,
    selectors_for,
    taken_by_prefetch,
    taken_by_uva,
    vllm_tensors,
)
from overspill.advice.vllm_ways import budget_gib
from overspill.model.weights import Role
from tiny_models import MakeTiny

TINY_MODELS = ("llama", "llama_tied", "qwen3_moe", "gpt_oss", "deepseek_v2", "nemotron_h", "gemma3")


def names(folder: Path, layer: int) -> list[str]:
    return [tensor.name for tensor in vllm_tensors(model_of(folder)) if tensor.layer == layer]


def test_a_dense_layer_has_vllms_fused_parameters_in_its_order(tiny: MakeTiny) -> None:
    assert names(tiny("llama"), 0) == [
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]


def test_router_and_shared_experts_come_before_the_routed_ones(tiny: MakeTiny) -> None:
    assert [name for name in names(tiny("deepseek_v2"), 1) if name.startswith("mlp.")] == [
        "mlp.gate.weight",
        "mlp.shared_experts.gate_up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
        "mlp.experts.routed_experts.w13_weight",
        "mlp.experts.routed_experts.w2_weight",
    ]
    assert "self_attn.fused_qkv_a_proj.weight" in names(tiny("deepseek_v2"), 0)


def test_experts_biases_are_parameters_of_their_own(tiny: MakeTiny) -> None:
    found = names(tiny("gpt_oss"), 2)
    assert {name.rpartition(".")[2] for name in found if ".routed_experts." in name} == {
        "w13_weight",
        "w13_bias",
        "w2_weight",
        "w2_bias",
    }
    assert "self_attn.qkv_proj.bias" in found


def test_gated_delta_nets_are_fused_by_two(tiny: MakeTiny) -> None:
    found = names(tiny("qwen3_5_moe"), 1)
    assert {name for name in found if "in_proj" in name} == {
        "linear_attn.in_proj_qkvz.weight",
        "linear_attn.in_proj_ba.weight",
    }


def test_what_has_nothing_to_be_fused_with_keeps_its_name(tiny: MakeTiny) -> None:
    """nemotron_h has no gate, so its up_proj stands alone."""
    assert names(tiny("nemotron_h"), 3) == ["norm.weight", "mixer.up_proj.weight", "mixer.down_proj.weight"]
    assert "mixer.qkv_proj.weight" in names(tiny("nemotron_h"), 2)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_parameter_of_a_layer_is_in_one_tensor(name: str, tiny: MakeTiny) -> None:
    model = model_of(tiny(name))
    held = [weight.full for tensor in vllm_tensors(model) for weight in tensor.weights]
    assert len(held) == len(set(held))
    assert set(held) == {w.full for w in model if w.name.layer is not None and w.role is not Role.BUFFER}


# -- the rules once more -----------------------------------------------------------------------------------------------


def segments_match(selectors: set[str], name: str) -> bool:
    parts = name.split(".")
    for selector in selectors:
        sought = selector.split(".")
        if any(parts[at : at + len(sought)] == sought for at in range(len(parts))):
            return True
    return False


def vllms_loop(tensors: tuple[VllmTensor, ...], budget: int, selectors: set[str]) -> list[tuple[int, str]]:
    """`_maybe_offload_to_cpu`, layer by layer: tested before each, break when spent, skip what no selector names."""
    offloaded, taken = 0, []
    for layer in sorted({tensor.layer for tensor in tensors}):
        if offloaded >= budget:
            continue
        for tensor in tensors:
            if tensor.layer != layer:
                continue
            if offloaded >= budget:
                break
            if selectors and not segments_match(selectors, tensor.name):
                continue
            taken.append((layer, tensor.name))
            offloaded += tensor.nbytes
    return taken


SELECTORS = ("experts", "mlp", "self_attn.o_proj", "w2_weight", "experts.w2_weight", "qkv_proj", "proj", "weight", "")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2", "nemotron_h"])
@settings(max_examples=40)
@given(budget=st.integers(0, 400_000), selectors=st.sets(st.sampled_from(SELECTORS[:-1]), max_size=2))
def test_a_budget_takes_what_vllms_loop_takes(name: str, budget: int, selectors: set[str], tiny: MakeTiny) -> None:
    tensors = vllm_tensors(model_of(tiny(name)))
    taken = taken_by_uva(tensors, budget, selectors)
    assert [(t.layer, t.name) for t in taken] == vllms_loop(tensors, budget, selectors)


@given(size=st.integers(1, 9), number=st.integers(1, 9))
def test_groups_are_vllms(size: int, number: int, tiny: MakeTiny) -> None:
    number = min(size, number)
    tensors = vllm_tensors(model_of(tiny("qwen3_moe")))
    layers = [layer for first in range(0, 6, size) for layer in range(first + size - number, first + size) if layer < 6]
    assert sorted({t.layer for t in taken_by_prefetch(tensors, size, number)}) == layers
    assert {t.name for t in taken_by_prefetch(tensors, size, number, ("o_proj",))} <= {"self_attn.o_proj.weight"}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v2", "nemotron_h", "gpt_oss"])
@settings(max_examples=30)
@given(data=st.data())
def test_selectors_match_what_is_wanted_and_nothing_else_where_vllm_can(
    name: str, data: st.DataObject, tiny: MakeTiny
) -> None:
    tensors = vllm_tensors(model_of(tiny(name)))
    every = sorted({tensor.name for tensor in tensors})
    routed = {tensor.name for tensor in tensors if tensor.routed}
    wanted = data.draw(st.sets(st.sampled_from(every), min_size=1))
    chosen = set(selectors_for(wanted, every, routed))
    matched = {each for each in every if not chosen or segments_match(chosen, each)}
    assert wanted <= matched
    if wanted <= routed:
        assert chosen in ({"experts"}, set())
    elif name != "nemotron_h":  # there `norm.weight` is also the end of another name
        assert matched == wanted


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (9 << 29, 8 << 30)])
def test_pinned_tensors_are_rounded_to_powers_of_two(nbytes: int, taken: int) -> None:
    assert rounded_bytes(nbytes) == taken


@settings(max_examples=60)
@given(budget=st.integers(1, 300_000))
def test_the_figure_of_gib_ends_with_the_same_tensor(budget: int, tiny: MakeTiny) -> None:
    """vLLM reads it as a float and cuts a fraction of a byte off."""
    tensors = vllm_tensors(model_of(tiny("qwen3_moe")))
    taken = taken_by_uva(tensors, budget)
    again = int(float(budget_gib(taken)) * 1024**3)
    assert taken_by_uva(tensors, again) == taken


def test_layers_of_one_shape_share_static_buffers(tiny: MakeTiny) -> None:
    tensors = vllm_tensors(model_of(tiny("llama")))
    one_layer = sum(tensor.nbytes for tensor in tensors if tensor.layer == 0)
    assert pool_bytes(tensors, 2, 1) == 2 * one_layer
    share = sum(tensor.rank_bytes(5) for tensor in tensors if tensor.layer == 0)
    assert pool_bytes(tensors, 2, 5) == 5 * 2 * share
    first = tensors[0]
    wider = replace(first, weights=tuple(replace(w, shape=(2, *w.shape)) for w in first.weights))
    assert pool_bytes((first, wider), 1, 1) == first.nbytes + wider.nbytes, "another shape has buffers of its own"
    mixed = vllm_tensors(model_of(tiny("deepseek_v2")))  # a dense layer first, then sparse ones
    unique = {(t.name, t.nbytes) for t in mixed}
    assert pool_bytes(mixed, 1, 1) == sum(nbytes for _, nbytes in unique)


def test_a_rank_holds_a_share_of_matrices_and_the_whole_of_the_rest(tiny: MakeTiny) -> None:
    tensors = {t.name: t for t in vllm_tensors(model_of(tiny("deepseek_v2"))) if t.layer == 1}
    whole = {
        "self_attn.fused_qkv_a_proj.weight",  # made with disable_tp
        "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
    }
    assert {name for name, t in tensors.items() if t.rank_bytes(5) == t.nbytes} == whole
    for name in tensors.keys() - whole:
        parts = tensors[name].weights
        assert tensors[name].rank_bytes(5) == sum(-(-weight.nbytes // 5) for weight in parts)
