"""Rules for routed experts against real models: llama.cpp's semantics, and what is refused by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from emulated_runs import CONTEXT, emulated, mapped, settings_for
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.model.experts import expert_blocks
from overspill.model.weights import ModelMap
from overspill.plan import Access, Plan, Tier, make_plan
from tiny_models import MakeTiny


@cache
def model_of(folder: Path, dtype: str = "auto") -> ModelMap:
    """Mapped once: planning changes nothing in it."""
    return mapped(folder, dtype)


def planned(folder: Path, document: dict[str, Any] | None = None) -> Plan:
    return make_plan(model_of(folder), settings_for(document), emulated(), context_tokens=CONTEXT)


def rules(*overrides: tuple[str, str], **placement: Any) -> dict[str, Any]:
    stated = [{"pattern": pattern, "device": device} for pattern, device in overrides]
    return {"overspill": {"placement": {**({"overrides": stated} if stated else {}), **placement}}}


def placed_layers(plan: Plan) -> list[int]:
    return [block.layer for block in plan.placed]


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        (r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", [0, 1, 2, 3, 4, 5]),
        (r"ffn_.*_exps", [0, 1, 2, 3, 4, 5]),
        (r"exps", [0, 1, 2, 3, 4, 5]),
        (r"blk\.(1|4)\.ffn_.*_exps\.weight$", [1, 4]),
        (r"blk\.[2-5]\..*_exps", [2, 3, 4, 5]),
        (r"blk\.1\.ffn_(gate_up|down)_exps", [1]),
        (r"layers\.3\.mlp\.experts", [3]),
        (r"^model\.layers\.[01]\.mlp\.experts\.(gate_up|down)_proj$", [0, 1]),
        (r"experts\..{8,12}$", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_patterns_are_searched_in_gguf_names_and_in_ours(pattern: str, layers: list[int], tiny: MakeTiny) -> None:
    plan = planned(tiny("qwen3_moe"), rules((pattern, "cpu")))
    assert placed_layers(plan) == layers
    moved = [p for p in plan.placements if p.access is Access.IN_PLACE]
    assert len(moved) == 2 * len(layers)
    assert {p.tier for p in moved} == {Tier.HOST}
    assert {p.reason for p in moved} == {f"override {pattern}"}
    assert plan.offloaded_bytes == sum(block.nbytes for block in plan.placed)


def test_cpu_moe_and_n_cpu_moe_place_what_they_say(tiny: MakeTiny) -> None:
    for name in ("qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v2"):
        every = [block.layer for block in expert_blocks(planned(tiny(name)).model)]
        assert placed_layers(planned(tiny(name), rules(cpu_moe=True))) == every
        assert placed_layers(planned(tiny(name), rules(n_cpu_moe=2))) == [layer for layer in every if layer < 2]
        assert not planned(tiny(name), rules(n_cpu_moe=0)).placed
        assert not planned(tiny(name), rules(cpu_moe=False)).placed


def test_biases_follow_their_block(tiny: MakeTiny) -> None:
    plan = planned(tiny("gpt_oss"), rules(n_cpu_moe=1))
    assert {p.weight.name.relative for p in plan.placements if p.access is Access.IN_PLACE} == {
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj",
        "mlp.experts.down_proj_bias",
    }


def test_the_first_rule_that_finds_a_weight_is_its_reason(tiny: MakeTiny) -> None:
    plan = planned(tiny("qwen3_moe"), rules((r"blk\.[0-2]\..*exps", "cpu"), ("exps", "cpu"), n_cpu_moe=6))
    reasons = [
        next(p.reason for p in plan.placements if p.weight is w) for b in plan.placed for w in b.weights.values()
    ]
    assert reasons[:6] == [r"override blk\.[0-2]\..*exps"] * 6
    assert reasons[6:] == ["override exps"] * 6


@pytest.mark.parametrize(
    ("name", "pattern", "told"),
    [
        (
            "qwen3_moe",
            r"blk\.2\.ffn_gate_exps",
            r'layer 2 splits .*"blk\.2\.ffn_gate_exps\.weight" -> cpu.*-> the device',
        ),
        ("qwen3_moe", r"blk\.2\.ffn_down_exps", r'layer 2 splits .*"blk\.2\.ffn_down_exps\.weight" -> cpu'),
        ("qwen3_moe", r"blk\.0\.ffn_(gate|up)_exps", r"layer 0 splits"),
        ("nemotron_h", r"ffn_up_exps", r"layer 1 splits"),
        ("qwen3_moe", r"gate_up_proj", r"layer 0 splits"),
    ],
)
def test_a_layer_whose_parts_would_be_apart_is_refused(name: str, pattern: str, told: str, tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        planned(tiny(name), rules((pattern, "cpu")))
    assert "widen the pattern" in (refused.value.hint or "")


def test_rules_together_may_cover_a_layer(tiny: MakeTiny) -> None:
    document = rules((r"blk\.2\.ffn_(gate|up)_exps", "cpu"), (r"blk\.2\.ffn_down_exps", "cpu"))
    assert placed_layers(planned(tiny("qwen3_moe"), document)) == [2]


@pytest.mark.parametrize("pattern", [r"ffn_gate_expz", r"blk\.77\.ffn_.*_exps", r"^exps"])
def test_a_pattern_that_matches_nothing_is_refused_with_names_near_it(pattern: str, tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match="matches no weight of Qwen3MoeForCausalLM") as refused:
        planned(tiny("qwen3_moe"), rules((pattern, "cpu")))
    assert pattern in refused.value.message
    assert "exps" in (refused.value.hint or "")


def test_a_pattern_for_other_weights_is_refused_and_one_that_also_finds_them_warns(tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match=r"matches model\.layers\.0\.self_attn\.q_proj\.weight.*no routed expert"):
        planned(tiny("qwen3_moe"), rules((r"self_attn", "cpu")))
    plan = planned(tiny("qwen3_moe"), rules((r"layers\.1\.", "cpu")))
    assert placed_layers(plan) == [1]
    assert any("also matches" in warning and "stay on the device" in warning for warning in plan.warnings)
    assert not planned(tiny("qwen3_moe"), rules(("exps", "cpu"))).warnings


@pytest.mark.parametrize("placement", [{"cpu_moe": True}, {"n_cpu_moe": 1}])
def test_a_dense_model_is_refused(placement: dict[str, Any], tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM is a dense model"):
        planned(tiny("llama"), rules(**placement))
    with pytest.raises(ConfigError, match="LlamaForCausalLM is a dense model"):
        planned(tiny("llama"), {"overspill": {"expert_stream": {"enabled": True}}})


def test_counts_beyond_the_layers_and_before_the_first_experts_are_refused(tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match="n_cpu_moe is 7, above the 6 layers"):
        planned(tiny("qwen3_moe"), rules(n_cpu_moe=7))
    with pytest.raises(ConfigError, match="n_cpu_moe is 1, and the first layer holds no routed experts") as refused:
        planned(tiny("deepseek_v2"), rules(n_cpu_moe=1))
    assert "at least 2" in (refused.value.hint or "")


def test_an_expert_stream_that_has_none_left_is_refused(tiny: MakeTiny) -> None:
    document = rules(cpu_moe=True)
    document["overspill"]["expert_stream"] = {"slots": 4}
    with pytest.raises(ConfigError, match="the placement takes the experts of every layer"):
        planned(tiny("qwen3_moe"), document)


def stream(**fields: Any) -> dict[str, Any]:
    return {"overspill": {"expert_stream": fields}}


def test_slots_by_their_number_their_bytes_and_their_budget(tiny: MakeTiny) -> None:
    folder = tiny("qwen3_moe")
    counted = planned(folder, stream(slots=7)).slots
    assert counted is not None
    assert counted.count == 7
    assert counted.pool_bytes == 9 * counted.slot_bytes
    one = counted.slot_bytes
    for document, count in (
        (stream(cache_bytes=3 * one + 5), 3),
        (stream(slots=10, slot_bytes=one // 2), 5),
        (stream(slots=3, slot_bytes=2 * one), 6),
        (stream(slots=4000), 36),
    ):
        slots = planned(folder, document).slots
        assert slots is not None
        assert slots.count == count
    plan = planned(folder, stream(slots=10, slot_bytes=one // 2))
    assert any("are a cache of 5 experts" in note for note in plan.notes)
    for document in (stream(cache_bytes=one - 1), stream(slots=1, slot_bytes=one - 1)):
        with pytest.raises(ConfigError, match=r"hold.* no expert, which takes") as refused:
            planned(folder, document)
        assert str(one) in f"{refused.value.message} {refused.value.hint}"


def test_experts_on_disk_are_fetched_and_converted_where_they_are_there_in_another_dtype(tiny: MakeTiny) -> None:
    plan = planned(tiny("qwen3_moe"), stream(slots=7, tier="disk"))
    assert plan.on(Tier.DISK)
    assert not plan.converted
    with pytest.raises(ConfigError, match='"policy" is "cpu" and "tier" is "disk"'):
        planned(tiny("qwen3_moe"), stream(slots=7, tier="disk", policy="cpu"))
    model = model_of(tiny("qwen3_moe"), "bfloat16")
    plan = make_plan(model, settings_for(stream(slots=7, tier="disk")), emulated(), context_tokens=CONTEXT)
    assert plan.converted == tuple(p.weight for p in plan.on(Tier.DISK))
    assert any("converted once (12 cast from float32) into the cache" in note for note in plan.notes)


def test_experts_that_end_in_a_norm_are_not_placed() -> None:
    from expert_modules import block_of, make_experts
    from overspill.plan.experts import _refuse_norm

    class Model:
        architecture = "MuseSparkForCausalLM"

        class skeleton:
            get_submodule = staticmethod(lambda path: experts)

    experts = make_experts("muse_spark.MuseSparkExperts")
    with pytest.raises(UnsupportedModelError, match="MuseSparkForCausalLM end in a norm of their own"):
        _refuse_norm(Model(), block_of(experts))  # type: ignore[arg-type]


def test_the_step_counts_what_placed_and_streamed_experts_bring(tiny: MakeTiny) -> None:
    plan = planned(tiny("qwen3_moe"), rules(n_cpu_moe=2))
    assert plan.step.in_place_bytes == 2 * 35 * 4 == plan.step.link_bytes
    assert plan.step.transfers == 2
    streamed = planned(tiny("qwen3_moe"), stream(slots=9))
    assert streamed.slots is not None
    assert streamed.step.link_bytes == 0
    touched = 6 * 2 * streamed.slots.blocks[0].expert_bytes
    assert streamed.step.stream_bytes == pytest.approx(touched * (1 - 9 / 36))


def test_a_budget_takes_of_what_experts_leave(tiny: MakeTiny) -> None:
    document = {**rules(n_cpu_moe=3), "uva": {"cpu_offload_gb": 1}}
    plan = planned(tiny("qwen3_moe"), document)
    accesses = {p.access for p in plan.placements}
    assert accesses == {Access.IN_PLACE, Access.ZERO_COPY}
    assert plan.ways == ("uva", "experts on the CPU")
    assert {p.weight.name.layer for p in plan.placements if p.access is Access.IN_PLACE} == {0, 1, 2}


def test_slots_that_save_nothing_are_told(tiny: MakeTiny) -> None:
    assert any("nothing is saved" in warning for warning in planned(tiny("qwen3_moe"), stream(slots=10**30)).warnings)
    assert any("nothing is saved" in warning for warning in planned(tiny("qwen3_moe"), stream(enabled=True)).warnings)
    assert not any("nothing is saved" in warning for warning in planned(tiny("qwen3_moe"), stream(slots=20)).warnings)


def test_slots_are_told_as_whole_experts(tiny: MakeTiny) -> None:
    assert any("7 slots of a whole expert each" in note for note in planned(tiny("qwen3_moe"), stream(slots=7)).notes)


def test_a_rule_that_an_earlier_one_leaves_nothing_warns(tiny: MakeTiny) -> None:
    plan = planned(tiny("qwen3_moe"), rules(("exps", "cpu"), (r"blk\.3\..*_exps", "cpu")))
    assert any("changes nothing: earlier ones take all" in warning for warning in plan.warnings)


def test_biases_alone_are_refused_in_words_of_their_own(tiny: MakeTiny) -> None:
    for pattern in (r"gate_up_proj_bias", r"ffn_gate_exps\.bias"):
        with pytest.raises(ConfigError, match="matches only biases of routed experts"):
            planned(tiny("gpt_oss"), rules((pattern, "cpu")))


@pytest.mark.parametrize(
    "backend",
    [
        {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]}},
        {"prefetch": {"offload_group_size": 1, "offload_params": ["experts"]}},
    ],
)
def test_a_selector_of_what_is_placed_already_is_refused(backend: dict[str, Any], tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match="'experts' selects only routed experts that the placement"):
        planned(tiny("qwen3_moe"), {**backend, **rules(cpu_moe=True)})
