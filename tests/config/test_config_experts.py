from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.config import (
    ExpertStreamConfig,
    ExtensionConfig,
    OffloadConfig,
    PlacementConfig,
    PlacementRule,
    Settings,
    parse_offload_config,
    resolve,
)
from overspill.config.experts import EXPERTS_PATTERN, read_override
from overspill.errors import ConfigError


def placement(**fields: Any) -> PlacementConfig:
    return PlacementConfig.model_validate(fields)


def stream(**fields: Any) -> ExpertStreamConfig:
    return ExpertStreamConfig.model_validate(fields)


def resolved(document: Any = None, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    return resolve(document, flags, environ=environ or {})


def refused(document: Any = None, environ: dict[str, str] | None = None, **flags: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(document, environ, **flags)
    assert caught.value.hint
    return caught.value


# -- rules -----------------------------------------------------------------------------------------------------------


def test_rules_stand_in_the_order_in_which_they_are_tried() -> None:
    rules = placement(
        n_cpu_moe=2,
        cpu_moe=True,
        overrides=[{"pattern": "z", "device": "CPU"}, {"pattern": "a", "device": "CUDA1"}],
    ).rules
    assert rules == (
        PlacementRule("z", "cpu", "overrides[0]"),
        PlacementRule("a", "cuda", "overrides[1]"),
        PlacementRule(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", "cpu", "cpu_moe"),
        PlacementRule(r"blk\.0\.ffn_(up|down|gate|gate_up)_(ch|)exps", "cpu", "n_cpu_moe"),
        PlacementRule(r"blk\.1\.ffn_(up|down|gate|gate_up)_(ch|)exps", "cpu", "n_cpu_moe"),
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("blk.3.ffn_gate_exps.weight", True),
        ("blk.3.ffn_gate_up_exps.weight", True),
        ("blk.3.ffn_down_chexps.weight", True),
        ("blk.3.ffn_down_shexp.weight", False),
        ("blk.3.ffn_gate.weight", False),
        ("blk.3.ffn_gate_inp.weight", False),
    ],
)
def test_the_experts_pattern(name: str, found: bool) -> None:
    assert bool(re.search(EXPERTS_PATTERN, name)) is found


@given(st.integers(0, 64), st.integers(0, 99))
def test_the_first_layers_and_no_others(count: int, layer: int) -> None:
    rules = placement(n_cpu_moe=count).rules
    assert len(rules) == count
    hits = [rule for rule in rules if re.search(rule.pattern, f"blk.{layer}.ffn_up_exps.weight")]
    assert len(hits) == (layer < count)


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, False),
        ({"overrides": [], "cpu_moe": False, "n_cpu_moe": 0, "fit": True}, False),
        ({"overrides": [{"pattern": "x", "device": "cpu"}]}, True),
        ({"cpu_moe": True}, True),
        ({"n_cpu_moe": 1}, True),
    ],
)
def test_a_placement_is_on_where_it_has_a_rule(fields: dict[str, Any], on: bool) -> None:
    config = placement(**fields)
    assert (config.on, bool(config.rules)) == (on, on)
    assert OffloadConfig(overspill=ExtensionConfig(placement=config)).offloads is on


# -- streaming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, False),
        ({"enabled": False}, False),
        ({"enabled": True}, True),
        ({"enabled": False, "slots": 4, "policy": "cpu"}, False),
        ({"slots": 4}, True),
        ({"slot_bytes": 4}, True),
        ({"cache_bytes": 4}, True),
        ({"policy": "auto"}, True),
        ({"tier": "disk"}, True),
        ({"slots": None, "tier": None}, False),
    ],
)
def test_a_stream_is_on_as_it_says_or_where_anything_is_given(fields: dict[str, Any], on: bool) -> None:
    config = stream(**fields)
    assert config.on is on
    assert OffloadConfig(overspill=ExtensionConfig(expert_stream=config)).offloads is on


@pytest.mark.parametrize(("said", "nbytes"), [(7, 7), ("512MiB", 512 << 20), ("512", 512), (None, None)])
def test_the_size_of_the_cache_may_have_a_unit(said: Any, nbytes: int | None) -> None:
    assert stream(cache_bytes=said).cache_bytes == nbytes


@pytest.mark.parametrize("more", [{}, {"cache_bytes": "1GiB"}, {"enabled": True}])
def test_a_size_of_slots_without_their_number_is_refused(more: dict[str, Any]) -> None:
    error = refused({"vllm_cpp": {"expert_stream": {"slot_bytes": 64, **more}}})
    assert error.message == '"vllm_cpp.expert_stream.slot_bytes" is 64 without "slots": that is no size of a cache'
    error = refused({"overspill": {"expert_stream": more}}, {"VT_MOE_EXPERT_STREAM_SLOT_BYTES": "64"})
    assert error.message.startswith('VT_MOE_EXPERT_STREAM_SLOT_BYTES=64 ("overspill.expert_stream.slot_bytes") is 64 ')


def test_the_number_of_slots_may_come_from_the_environment() -> None:
    document = {"overspill": {"expert_stream": {"slot_bytes": 64}}}
    config = resolved(document, {"VT_MOE_EXPERT_STREAM_SLOTS": "4"}).offload.extension.expert_stream
    assert (config.slots, config.slot_bytes) == (4, 64)


def test_a_backend_that_moves_nothing_and_a_placement_are_told_apart() -> None:
    config = parse_offload_config({"overspill": {"placement": {"cpu_moe": True}}})
    assert (config.resolved_backend, config.backend_offloads, config.offloads) == (None, False, True)
    config = parse_offload_config({"uva": {"cpu_offload_gb": 1}})
    assert (config.resolved_backend, config.backend_offloads, config.offloads) == ("uva", True, True)


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["cpu", "CPU", "Cpu"])
def test_a_device_is_spelled_in_any_case(word: str) -> None:
    rules = resolved(override_tensor=f"exps={word}").offload.extension.placement.rules
    assert rules == (PlacementRule("exps", "cpu", "overrides[0]"),)


@pytest.mark.parametrize(
    ("word", "device"),
    [("cuda", "cuda"), ("CUDA0", "cuda"), ("Cuda12", "cuda"), ("emulated", "emulated"), ("EMULATED", "emulated")],
)
def test_only_the_cpu_takes_weights(word: str, device: str) -> None:
    for error in (
        refused({"overspill": {"placement": {"overrides": [{"pattern": "a", "device": "cpu"}, _to(word)]}}}),
        refused(override_tensor=["a=cpu", f"exps={word}"]),
    ):
        assert error.message == (
            f'device placement: cannot host a placed group on "{device}": only "cpu" is supported as a placement '
            "target; the engine may run on any device, it is the destination that is limited"
        )
        assert (error.hint or "").startswith('"overspill.placement.overrides[1]" sends "exps" there: ')


def _to(word: str) -> dict[str, str]:
    return {"pattern": "exps", "device": word}


def test_a_target_is_refused_by_what_set_it() -> None:
    error = refused({"vllm_cpp": {"placement": {"overrides": [_to("cpu")]}}}, {"VT_PLACEMENT_OVERRIDES": "exps=CUDA0"})
    assert (error.hint or "").startswith(
        'VT_PLACEMENT_OVERRIDES=exps=CUDA0 ("vllm_cpp.placement.overrides[0]") sends "exps" there: '
    )


@pytest.mark.parametrize("word", ["npu", "CUDA_Host", "cuda-0", "CPU0", "cpu "])
def test_a_word_that_is_no_device(word: str) -> None:
    assert refused(override_tensor=[f"exps={word}"]).message == (
        f'offload config: "overspill.placement.overrides[0].device" is "{word}", which is not a device (expected one '
        "of: cpu cuda emulated)"
    )


# -- PATTERN=DEVICE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pattern", "device"),
    [
        (r"blk\.(1|2)\.=CPU", r"blk\.(1|2)\.", "CPU"),
        ("a{1,2},b=cpu", "a{1,2},b", "cpu"),
        ("x(?=y)=cpu", "x(?=y)", "cpu"),
        ("a=b=c=cpu", "a=b=c", "cpu"),
        ("a=b,c=cpu", "a=b,c", "cpu"),
        ("=cpu", "", "cpu"),
        ("a=", "a", ""),
    ],
)
def test_an_override_is_cut_at_the_last_equals_sign(text: str, pattern: str, device: str) -> None:
    assert read_override(text, field="x") == {"pattern": pattern, "device": device}


@given(st.text().filter(lambda text: "," not in text), st.text().filter(lambda text: "=" not in text))
def test_any_pattern_and_device_are_told_apart(pattern: str, device: str) -> None:
    assert read_override(f"{pattern}={device}", field="x") == {"pattern": pattern, "device": device}


def test_an_override_without_a_device_is_refused_with_its_text() -> None:
    assert refused(override_tensor=["a=cpu", "exps"]).message == '"override_tensor" has the entry "exps" without a "="'


@pytest.mark.parametrize("text", ["a=CPU,b=CPU", "a=cuda0,b=cpu", "a=x,b=Emulated,c=cpu"])
def test_llama_cpps_several_in_one_are_refused(text: str) -> None:
    error = refused(override_tensor=text)
    assert error.message == (
        f'"override_tensor" has the entry "{text}", which is several: a comma is part of a pattern here'
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["=cpu"], '"overspill.placement.overrides[0].pattern" must be a non-empty string'),
        (["a="], '"overspill.placement.overrides[0].device" must be a non-empty string'),
        (["(=cpu"], '"overspill.placement.overrides[0].pattern" is not a valid regex'),
        (["a=cpu", 5], '"overspill.placement.overrides[1]" must be an object with "pattern" and "device"'),
        (5, '"overspill.placement.overrides" must be an array of objects'),
    ],
)
def test_an_override_is_judged_like_the_documents(value: Any, message: str) -> None:
    assert refused(override_tensor=value).message.startswith(f"offload config: {message}")
