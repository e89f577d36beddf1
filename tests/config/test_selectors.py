from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.config import WeightName, check_selector, closest, matches
from overspill.config.selectors import spellings
from overspill.errors import ConfigError


def layer(relative: str, index: int = 3, stack: str = "model.layers", *, tower: bool = False) -> WeightName:
    return WeightName(f"{stack}.{index}.{relative}", relative, stack, index, tower)


def outside(full: str, *, tower: bool = False) -> WeightName:
    return WeightName(full, tower=tower)


def vllm_rule(selector: str, relative: str) -> bool:
    """vLLM's rule restated over segments: a contiguous run of whole segments."""
    wanted, segments = selector.split("."), relative.split(".")
    return any(segments[at : at + len(wanted)] == wanted for at in range(len(segments)))


plain = st.sampled_from(["input_layernorm", "mlp", "router", "o_proj", "o_proj_scale", "w", "weight", "weight_scale"])
any_segment = st.sampled_from(
    [
        "self_attn",
        "q_proj",
        "mlp",
        "experts",
        "gate",
        "gate_up_proj",
        "down_proj",
        "block_sparse_moe",
        "0",
        "7",
        "weight",
    ]
)


def dotted(segments: st.SearchStrategy[str], longest: int = 4) -> st.SearchStrategy[str]:
    return st.lists(segments, min_size=1, max_size=longest).map(".".join)


@given(dotted(plain), dotted(plain))
def test_on_names_both_spell_alike_the_rule_is_exactly_vllms(selector: str, relative: str) -> None:
    assert matches(selector, layer(relative)) == vllm_rule(selector, relative)


@given(dotted(any_segment), dotted(any_segment))
def test_vllms_rule_holds_on_every_spelling(selector: str, relative: str) -> None:
    name = layer(relative, index=5, stack="the.stack")
    assert relative in spellings(relative)
    assert matches(selector, name) == any(vllm_rule(selector, each) for each in spellings(relative))


@pytest.mark.parametrize(
    ("selector", "hit"),
    [
        ("experts", True),
        ("experts.w2_weight", True),
        ("routed_experts.w2_weight", True),
        ("routed_experts", True),
        ("expert", False),
        ("w2", False),
        ("w2_weight", True),
        ("w2_weight_scale", False),
        ("w13_weight", False),
        ("Experts", False),
        ("*.experts", False),
        (".experts", False),
        ("experts.", False),
        ("", False),
        ("layers", False),
        ("3", False),
    ],
)
def test_vllms_segment_table(selector: str, hit: bool) -> None:
    assert matches(selector, layer("mlp.experts.down_proj")) is hit


@pytest.mark.parametrize(
    ("relative", "selectors"),
    [
        ("self_attn.q_proj.weight", ["q_proj", "qkv_proj", "self_attn.qkv_proj.weight"]),
        ("self_attn.v_proj.bias", ["qkv_proj.bias"]),
        ("self_attn.q_a_proj.weight", ["fused_qkv_a_proj"]),
        ("mlp.gate_proj.weight", ["gate_up_proj", "mlp.gate_up_proj", "gate_proj"]),
        ("linear_attn.in_proj_qkv.weight", ["in_proj_qkvz", "in_proj_qkv"]),
        ("linear_attn.in_proj_z.weight", ["linear_attn.in_proj_qkvz"]),
        ("linear_attn.in_proj_a.weight", ["in_proj_ba"]),
        ("linear_attn.in_proj_b.weight", ["in_proj_ba.weight"]),
        ("mlp.shared_experts.up_proj.weight", ["gate_up_proj", "shared_experts.gate_up_proj"]),
        (
            "mlp.experts.gate_up_proj",
            ["gate_up_proj", "w13_weight", "experts.w13_weight", "routed_experts.w13_weight"],
        ),
        ("mlp.experts.gate_up_proj_bias", ["w13_bias", "experts.w13_bias", "routed_experts.w13_bias"]),
        ("mlp.experts.down_proj_bias", ["w2_bias"]),
        ("mlp.experts.17.up_proj.weight", ["w13_weight", "experts.17", "experts"]),
        ("mlp.experts.17.w2.weight", ["w2_weight"]),
        ("mixer.experts.up_proj", ["mixer.experts.w13_weight"]),
        ("mlp.experts.gate_up_proj", ["block_sparse_moe", "block_sparse_moe.experts.w13_weight"]),
        ("mlp.gate.weight", ["block_sparse_moe.gate"]),
        ("block_sparse_moe.experts.down_proj", ["mlp", "mlp.experts.w2_weight"]),
    ],
)
def test_vllms_spellings(relative: str, selectors: list[str]) -> None:
    for selector in selectors:
        assert matches(selector, layer(relative)), selector


@pytest.mark.parametrize(
    ("relative", "selector"),
    [
        ("mlp.experts.gate_up_proj", "qkv_proj"),
        ("mlp.experts.17.up_proj.weight", "gate_up_proj"),
        ("mlp.experts.gate_up_proj_bias", "w13_weight"),
        ("mlp.gate_proj.weight", "w13_weight"),
        ("mlp.down_proj.weight", "w2_weight"),
        ("mlp.gate_proj.weight", "block_sparse_moe"),
        ("mlp.shared_experts.up_proj.weight", "experts"),
        ("self_attn.o_proj.weight", "qkv_proj"),
    ],
)
def test_spellings_that_are_another_weights(relative: str, selector: str) -> None:
    assert not matches(selector, layer(relative))


@pytest.mark.parametrize(
    ("selector", "name", "hit"),
    [
        ("lm_head", outside("lm_head.weight"), True),
        ("model.embed_tokens", outside("model.embed_tokens.weight"), True),
        ("embed_tokens", outside("model.embed_tokens.weight"), True),
        ("model.embed", outside("model.embed_tokens.weight"), False),
        ("model.layers.3", layer("mlp.down_proj.weight"), True),
        ("model.layers.3", layer("mlp.down_proj.weight", 30), False),
        ("model.layers.3.mlp.down_proj.weight", layer("mlp.down_proj.weight"), True),
        ("model.layers.3.mlp.gate_up_proj", layer("mlp.gate_proj.weight"), True),
        ("model.layers", layer("mlp.down_proj.weight"), True),
        ("model", layer("mlp.down_proj.weight"), True),
        ("visual", outside("model.visual.patch_embed.proj.weight", tower=True), True),
        ("visual", layer("attn.qkv.weight", 1, "model.visual.blocks", tower=True), True),
        ("blocks.1.attn", layer("attn.qkv.weight", 1, "model.visual.blocks", tower=True), True),
        ("attn.qkv", layer("attn.qkv.weight", 1, "model.visual.blocks", tower=True), True),
        ("layers", layer("mlp.down_proj.weight"), False),
    ],
)
def test_full_names_and_towers(selector: str, name: WeightName, hit: bool) -> None:
    assert matches(selector, name) is hit


@pytest.mark.parametrize("selector", ["model.layers.8-15", "layers.8-15"])
def test_layer_ranges_are_inclusive(selector: str) -> None:
    hit = [index for index in range(32) if matches(selector, layer("mlp.down_proj.weight", index))]
    assert hit == list(range(8, 16))


@pytest.mark.parametrize(
    ("selector", "relative", "hit"),
    [
        ("layers.2-4.mlp.down_proj", "mlp.down_proj.weight", True),
        ("layers.2-4.down_proj", "mlp.down_proj.weight", True),
        ("layers.2-4.down", "mlp.down_proj.weight", False),
        ("layers.2-4.qkv_proj", "self_attn.k_proj.weight", True),
        ("layers.2-4.experts.w2_weight", "mlp.experts.down_proj", True),
        ("layers.3.mlp", "mlp.down_proj.weight", True),
        ("layers.4.mlp", "mlp.down_proj.weight", False),
        ("rs.2-4", "mlp.down_proj.weight", False),
        ("decoder.layers.2-4", "mlp.down_proj.weight", False),
    ],
)
def test_ranges_with_segments_behind(selector: str, relative: str, hit: bool) -> None:
    assert matches(selector, layer(relative)) is hit


def test_a_bare_stack_is_the_decoders_not_a_towers() -> None:
    tower = layer("mlp.fc1.weight", 3, "model.vision_tower.encoder.layers", tower=True)
    assert not matches("layers.0-7", tower)
    assert matches("encoder.layers.0-7", tower)
    assert matches("layers.0-7", layer("mlp.fc1.weight", 3, "model.language_model.layers"))


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_range_is_an_interval(first: int, last: int, index: int) -> None:
    assert matches(f"h.{first}-{last}", layer("attn.weight", index, "transformer.h")) == (first <= index <= last)


@pytest.mark.parametrize(
    ("selector", "message", "hint"),
    [
        ("", "it is empty", "leave the list empty"),
        ("  ", "it is empty", "leave the list empty"),
        (".experts", "a dot must stand between two segments", 'write "experts"'),
        ("mlp.", "a dot must stand between two segments", 'write "mlp"'),
        ("mlp..down", "a dot must stand between two segments", 'write "mlp.down"'),
        ("gate_up_proj,down_proj", "one selector cannot hold several names", "JSON write a list"),
        ("gate_up_proj down_proj", "one selector cannot hold several names", "separate names by spaces"),
        ("*.experts", "it is no pattern", "whole segments"),
        (r"\.ffn_(up|down)_exps", "it is no pattern", "whole segments"),
        ("layers.15-8", 'the range "15-8" is reversed', 'write "8-15"'),
        ("layers.8-", '"8-" is not a range', "layers.8-15"),
        ("layers.1-2.experts.3-4", "more than one range", "one selector for each"),
        ("8-15", "a range needs its stack in front", 'write "layers.8-15"'),
    ],
)
def test_selectors_that_could_never_match(selector: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_selector(selector, field="uva.cpu_offload_params")
    assert caught.value.message.startswith(f'"uva.cpu_offload_params" has the selector "{selector}": ')
    assert message in caught.value.message
    assert caught.value.hint is not None
    assert hint in caught.value.hint


@given(dotted(any_segment | plain))
def test_names_are_good_selectors(selector: str) -> None:
    check_selector(selector)


@given(st.text(max_size=20), dotted(any_segment))
def test_any_text_is_checked_and_matched_without_a_crash(selector: str, relative: str) -> None:
    matches(selector, layer(relative))
    with suppress(ConfigError):
        check_selector(selector)


MOE = [
    outside("model.embed_tokens.weight"),
    outside("lm_head.weight"),
    *(
        layer(relative, index)
        for index in range(4)
        for relative in (
            "self_attn.q_proj.weight",
            "self_attn.o_proj.weight",
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            "mlp.gate.weight",
            "input_layernorm.weight",
        )
    ),
    layer("attn.qkv.weight", 1, "model.visual.blocks", tower=True),
]


@pytest.mark.parametrize(
    ("selector", "near"),
    [
        ("expert", "experts"),
        ("w2", "w2_weight"),
        ("experts.w2", "experts.w2_weight"),
        ("Q_proj", "q_proj"),
        ("lm_heads", "lm_head"),
        ("layers.40-50", "model.layers.0-3"),
        ("layers.0-2.down_porj", "layers.0-2.down_proj"),
        ("visuals", "visual"),
    ],
)
def test_closest_names(selector: str, near: str) -> None:
    assert not any(matches(selector, name) for name in MOE)
    assert near in closest(selector, MOE)


@given(dotted(st.text("abcdeqprswxy_t", min_size=1, max_size=8) | any_segment, 3))
def test_what_is_closest_names_a_weight(selector: str) -> None:
    near = closest(selector, MOE)
    assert len(near) <= 3
    for candidate in near:
        check_selector(candidate)
        assert any(matches(candidate, name) for name in MOE)


def test_nothing_is_close_to_nonsense() -> None:
    assert closest("zzzz", MOE) == []
    assert closest("experts", []) == []
