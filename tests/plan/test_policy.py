from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from emulated_runs import CONTEXT, gib, mapped, prefetch, settings_for
from overspill.config import format_bytes
from overspill.errors import ConfigError
from overspill.model.map import map_live
from overspill.model.trace import Trace
from overspill.model.weights import ModelMap, Role
from overspill.plan import Access
from overspill.plan.policy import Choice, choose
from tiny_models import MakeTiny

MapTiny = Callable[[str], ModelMap]


@pytest.fixture(scope="module")
def tiny_map(tiny: MakeTiny) -> MapTiny:
    return cache(lambda name: mapped(tiny(name)))


@cache
def llama_of(layers: int) -> ModelMap:
    """A llama of so many layers, each of 24 bytes and more."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=layers, num_attention_heads=1
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False)
    return map_live(model, tokens=4)


def uva(nbytes: float, params: list[str] | None = None, order: str = "traffic") -> dict[str, Any]:
    return {
        "uva": {"cpu_offload_gb": gib(nbytes), "cpu_offload_params": params or []},
        "overspill": {"order": order},
    }


def chosen(model: ModelMap, document: dict[str, Any] | None, *, zero_copy: bool = True) -> Choice:
    return choose(model, settings_for(document).offload, zero_copy=zero_copy)


EVERYTHING = 1 << 30


# -- uva, by traffic ---------------------------------------------------------------------------------------------------


def test_rows_go_first_then_experts_then_dense_weights_by_size(tiny_map: MapTiny) -> None:
    model = tiny_map("qwen3_moe")
    by_name = {weight.full: weight for weight in model}
    moved = [by_name[name] for name in chosen(model, uva(EVERYTHING)).moved]
    assert moved[0].role is Role.EMBEDDING
    experts = moved[1:13]
    assert {weight.role for weight in experts} == {Role.ROUTED_EXPERT}
    assert [w.nbytes for w in experts] == sorted((w.nbytes for w in experts), reverse=True)
    dense = moved[13:]
    assert Role.ROUTED_EXPERT not in {weight.role for weight in dense}
    assert [w.nbytes for w in dense] == sorted((w.nbytes for w in dense), reverse=True)
    assert len(moved) == len(model.weights)


def test_a_tied_embedding_is_read_whole_and_goes_last(tiny_map: MapTiny) -> None:
    """As the head it is read whole each step, and its rows besides: the dearest bytes of all."""
    moved = list(chosen(tiny_map("llama_tied"), uva(EVERYTHING)).moved)
    assert moved[-1] == "model.embed_tokens.weight"


@given(budget=st.integers(1, 400_000))
def test_a_budget_is_filled_and_overshot_by_the_last_weight_only(budget: int) -> None:
    model = llama_of(8)
    nbytes = {weight.full: weight.nbytes for weight in model}
    choice = chosen(model, uva(budget))
    sizes = [nbytes[name] for name in choice.moved]
    assert sum(sizes) >= min(budget, model.nbytes)
    assert sum(sizes[:-1]) < budget
    assert {access for access, _ in choice.moved.values()} == {Access.ZERO_COPY}


def test_a_budget_of_one_byte_moves_one_weight_and_says_by_how_much_it_overshoots(tiny_map: MapTiny) -> None:
    choice = chosen(tiny_map("llama"), uva(1))
    assert list(choice.moved) == ["model.embed_tokens.weight"]
    assert f"overshoots it by {format_bytes(128 * 35 * 4 - 1)}" in choice.notes[0]


def test_a_budget_above_everything_says_what_there_is(tiny_map: MapTiny) -> None:
    model = tiny_map("llama")
    choice = chosen(model, uva(EVERYTHING))
    assert format_bytes(model.nbytes) in choice.warnings[0]
    assert format_bytes(EVERYTHING) in choice.warnings[0]
    assert not chosen(model, uva(1)).warnings


# -- uva, by declaration -----------------------------------------------------------------------------------------------


@given(budget=st.integers(1, 400_000))
def test_declaration_order_is_vllms_loop(budget: int) -> None:
    """Layers from the first, parameters as declared, the budget tested before each (anchors: vllm-offload 6)."""
    model = llama_of(8)
    stack: Any = model.skeleton.get_submodule("model.layers")
    taken: list[str] = []
    total = 0
    for number, layer in enumerate(stack):
        for name, parameter in layer.named_parameters():
            if total >= budget:
                break
            taken.append(f"model.layers.{number}.{name}")
            total += parameter.numel() * parameter.element_size()
    assert list(chosen(model, uva(budget, order="declaration")).moved) == taken


def test_declaration_order_moves_one_whole_weight_for_one_byte(tiny_map: MapTiny) -> None:
    choice = chosen(tiny_map("llama"), uva(1, order="declaration"))
    assert list(choice.moved) == ["model.layers.0.self_attn.q_proj.weight"]


# -- selectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "selector", "expected"),
    [
        ("qwen3_moe", "experts", lambda n: ".mlp.experts." in n),
        ("qwen3_moe", "experts.w2_weight", lambda n: n.endswith("experts.down_proj")),
        ("qwen3_moe", "routed_experts.w13_weight", lambda n: n.endswith("experts.gate_up_proj")),
        ("gpt_oss", "experts.w2_bias", lambda n: n.endswith("experts.down_proj_bias")),
        ("llama", "qkv_proj", lambda n: any(f"{p}_proj" in n for p in "qkv")),
        ("llama", "layers.2-3", lambda n: ".layers.2." in n or ".layers.3." in n),
        ("llama", "layers.4.mlp.down_proj", lambda n: n == "model.layers.4.mlp.down_proj.weight"),
        ("llama", "lm_head", lambda n: n == "lm_head.weight"),
        ("llama_tied", "lm_head", lambda n: n == "model.embed_tokens.weight"),
        ("deepseek_v2", "shared_experts", lambda n: ".shared_experts." in n),
    ],
)
def test_a_selector_takes_just_what_it_names(
    name: str, selector: str, expected: Callable[[str], bool], tiny_map: MapTiny
) -> None:
    model = tiny_map(name)
    wanted = {weight.full for weight in model if expected(weight.full)}
    assert wanted
    assert set(chosen(model, uva(EVERYTHING, [selector])).moved) == wanted


def test_several_selectors_add_up(tiny_map: MapTiny) -> None:
    moved = chosen(tiny_map("llama"), uva(EVERYTHING, ["down_proj", "layers.0"])).moved
    assert {n for n in moved if ".layers.0." not in n} == {
        f"model.layers.{i}.mlp.down_proj.weight" for i in range(1, 6)
    }


def test_a_selector_that_matches_nothing_is_refused_with_the_closest_names(tiny_map: MapTiny) -> None:
    with pytest.raises(ConfigError, match=r"cpu_offload_params: 'mlp\.donw_proj' matches no weight") as refused:
        chosen(tiny_map("llama"), uva(EVERYTHING, ["mlp.down_proj", "mlp.donw_proj"]))
    assert "mlp.down_proj" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="offload_params: 'exprets' matches no weight") as refused:
        chosen(tiny_map("mixtral"), prefetch(2, params=["exprets"]))
    assert "experts" in (refused.value.hint or "")


def test_what_declaration_order_never_reaches_cannot_be_selected_in_it(tiny_map: MapTiny) -> None:
    with pytest.raises(ConfigError, match="'lm_head'"):
        chosen(tiny_map("llama"), uva(EVERYTHING, ["lm_head"], order="declaration"))


# -- without zero-copy -------------------------------------------------------------------------------------------------


def test_without_zero_copy_each_layer_is_copied_when_it_runs(tiny_map: MapTiny) -> None:
    model = tiny_map("qwen3_moe")
    choice = chosen(model, uva(EVERYTHING), zero_copy=False)
    assert choice.ring is not None
    assert (choice.ring.step, choice.ring.look_ahead) == (1, False)
    assert [layer.number for layer in choice.ring.layers] == list(range(6))
    assert {access for access, _ in choice.moved.values()} == {Access.PREFETCH}
    assert set(choice.moved) == {weight.full for weight in model if weight.name.layer is not None}
    assert choice.ring.pass_bytes == choice.ring.nbytes
    assert any("when the layer runs" in note for note in choice.notes)


def test_without_zero_copy_a_single_layer_would_save_nothing(tiny_map: MapTiny) -> None:
    with pytest.raises(ConfigError, match=r"nothing is saved") as refused:
        chosen(tiny_map("llama"), uva(1), zero_copy=False)
    assert "more than one layer" in (refused.value.hint or "")


# -- prefetch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "size", "number", "expected"),
    [
        (32, 8, 2, [6, 7, 14, 15, 22, 23, 30, 31]),
        (10, 4, 1, [3, 7]),
        (10, 4, 4, list(range(10))),
        (32, 1, 1, list(range(32))),
    ],
)
def test_the_group_rule_is_vllms(layers: int, size: int, number: int, expected: list[int]) -> None:
    choice = chosen(llama_of(layers), prefetch(size, number))
    assert choice.ring is not None
    assert [layer.number for layer in choice.ring.layers] == expected
    assert {int(name.split(".")[2]) for name in choice.moved} == set(expected)


def test_a_group_that_reaches_no_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"offload_group_size 8 .* none of the 3 layers of model\.layers") as refused:
        chosen(llama_of(3), prefetch(8, 2))
    assert "at most 3" in (refused.value.hint or "")


@pytest.mark.parametrize("step", [3, 4, 100])
def test_a_step_not_below_the_offloaded_layers_is_refused(step: int) -> None:
    with pytest.raises(ConfigError, match=rf"offload_prefetch_step \({step}\) .* 3 offloaded layers") as refused:
        chosen(llama_of(10), prefetch(3, 1, step))
    assert "at most 2" in (refused.value.hint or "")
    chosen(llama_of(10), prefetch(3, 1, 2))


def test_one_offloaded_layer_is_refused_with_a_smaller_group() -> None:
    with pytest.raises(ConfigError, match=r"offload_prefetch_step \(1\) .* 1 offloaded layers") as refused:
        chosen(llama_of(10), prefetch(6))
    assert "offload_group_size" in (refused.value.hint or "")


def test_a_step_below_the_layers_of_a_group_is_warned_of() -> None:
    (warning,) = chosen(llama_of(32), prefetch(8, 2, 1)).warnings
    assert "offload_prefetch_step (1)" in warning
    assert "offload_num_in_group (2)" in warning
    assert not chosen(llama_of(32), prefetch(8, 2, 2)).warnings


def test_layers_without_a_selected_weight_take_no_place_in_the_ring(tiny_map: MapTiny) -> None:
    choice = chosen(tiny_map("nemotron_h"), prefetch(1, params=["experts"]))
    assert choice.ring is not None
    assert [layer.number for layer in choice.ring.layers] == [1, 5]
    assert all(".experts." in name for name in choice.moved)


def test_selected_weights_outside_the_groups_layers_are_refused(tiny_map: MapTiny) -> None:
    with pytest.raises(ConfigError, match=r"no weight of the layers that the group rule names .*\[3, 7\]"):
        chosen(tiny_map("nemotron_h"), prefetch(4, params=["experts"]))


def test_unequal_layers_that_fill_the_buffers_are_refused_with_both_sizes(tiny_map: MapTiny) -> None:
    """A buffer is as large as the largest layer: here two layers have experts, and all of them a norm."""
    model = tiny_map("nemotron_h")
    ring = chosen(model, prefetch(1, 1, 1, ["experts", "norm"])).ring
    assert ring is not None
    assert len(ring.layers) == 8
    with pytest.raises(ConfigError, match="nothing is saved") as refused:
        chosen(model, prefetch(1, 1, 3, ["experts", "norm"]))
    assert format_bytes(ring.nbytes) in refused.value.message
    assert format_bytes(3 * ring.buffer_bytes) in refused.value.message


def test_a_layer_with_a_buffer_to_itself_is_copied_once() -> None:
    choice = chosen(llama_of(10), prefetch(3, 1, 2))  # layers 2, 5, 8 share two buffers: 5 has the second for itself
    ring = choice.ring
    assert ring is not None
    assert [layer.number for layer in ring.copied] == [2, 8]
    assert ring.pass_bytes == 2 * ring.layers[0].nbytes < ring.nbytes
    assert any("[5]" in note and "copied once" in note for note in choice.notes)


def test_without_offload_nothing_moves(tiny_map: MapTiny) -> None:
    assert chosen(tiny_map("llama"), None) == Choice({})


def test_buffers_stay(tiny_map: MapTiny) -> None:
    """What is no parameter is never offloaded, even with a budget for all."""
    model = tiny_map("nemotron_h")
    buffers = {weight.full for weight in model if weight.role is Role.BUFFER}
    assert buffers
    assert buffers.isdisjoint(chosen(model, uva(EVERYTHING)).moved)


def test_what_could_not_be_traced_is_warned_of_where_buffers_are_shared(tiny_map: MapTiny) -> None:
    model = tiny_map("llama")
    untraced = replace(model, trace=Trace(CONTEXT, 1, failure="RuntimeError: it looks at values"))
    for choice in (chosen(untraced, prefetch(2)), chosen(untraced, uva(EVERYTHING), zero_copy=False)):
        assert any("it looks at values" in warning for warning in choice.warnings)
    assert not chosen(untraced, uva(1)).warnings
