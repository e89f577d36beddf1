from __future__ import annotations

import re
from typing import Any

import pytest

from overspill.config import Environment, ExtensionConfig, apply_environment
from overspill.config.environment import OVERRIDES
from overspill.errors import ConfigError

# For each variable: a text, what it means, and a document that says the opposite.
CASES: dict[str, tuple[str, Any, Any]] = {
    "VT_GGUF_MMAP": ("0", False, True),
    "VT_GGUF_PREFAULT": ("off", False, True),
    "VT_MOE_EXPERT_STREAM": ("false", False, True),
    "VT_MOE_EXPERT_STREAM_SLOTS": ("128", 128, 64),
    "VT_MOE_EXPERT_STREAM_SLOT_BYTES": ("4096", 4096, 64),
    "VT_DEVICE_WEIGHT_BUDGET_BYTES": ("0", 0, 5),
    "VT_PLACEMENT_OVERRIDES": ("", [], [{"pattern": "x", "device": "cpu"}]),
    "VT_CPU_MOE": ("1", True, False),
    "VT_N_CPU_MOE": ("0", 0, 5),
    "VT_PLACEMENT_FIT": ("true", True, False),
}


def read(extension: ExtensionConfig | None, section: str, key: str) -> Any:
    assert extension is not None
    return extension.model_dump(mode="json")[section][key]


def test_every_variable_has_a_case() -> None:
    assert CASES.keys() == OVERRIDES.keys()


@pytest.mark.parametrize("variable", OVERRIDES)
def test_environment_beats_document_beats_default(variable: str) -> None:
    section, key, _ = OVERRIDES[variable]
    text, meaning, opposite = CASES[variable]
    document = ExtensionConfig.model_validate({section: {key: opposite}, "order": "declaration"})

    over_default = apply_environment(None, {variable: text})
    assert read(over_default.extension, section, key) == meaning
    assert over_default.origins == {f"{section}.{key}": f"{variable}={text}"}
    assert over_default.notes == (f'environment: {variable}={text} sets "overspill.{section}.{key}"',)

    over_document = apply_environment(document, {variable: text})
    assert read(over_document.extension, section, key) == meaning
    assert over_document.extension is not None
    assert over_document.extension.order == "declaration"
    (note,) = over_document.notes
    assert note.startswith(f'environment: {variable}={text} wins over "overspill.{section}.{key}" = ')

    agreeing = ExtensionConfig.model_validate({section: {key: meaning}})
    assert apply_environment(agreeing, {variable: text}).notes == ()

    assert apply_environment(document, {}).extension is document
    assert apply_environment(None, {"PATH": "x"}).extension is None


def test_fields_of_one_section_merge() -> None:
    document = ExtensionConfig.model_validate({"expert_stream": {"slots": 3, "slot_bytes": 5}})
    merged = apply_environment(document, {"VT_MOE_EXPERT_STREAM_SLOTS": "7"}).extension
    assert merged is not None
    assert (merged.expert_stream.slots, merged.expert_stream.slot_bytes) == (7, 5)


@pytest.mark.parametrize(
    ("texts", "value"),
    [(("", "0", "false", "off", "OFF", "no", " 0 "), False), (("1", "true", "on", "Yes"), True)],
)
def test_switches(texts: tuple[str, ...], value: bool) -> None:
    for variable in ("VT_CPU_MOE", "VT_MOE_EXPERT_STREAM"):
        section, key, _ = OVERRIDES[variable]
        for text in texts:
            assert read(apply_environment(None, {variable: text}).extension, section, key) is value


def test_overrides_are_split_at_commas_and_the_first_equals_sign() -> None:
    merged = apply_environment(None, {"VT_PLACEMENT_OVERRIDES": r"blk\.1\.=cpu, exps=cuda,"})
    assert read(merged.extension, "placement", "overrides") == [
        {"pattern": r"blk\.1\.", "device": "cpu"},
        {"pattern": "exps", "device": "cuda"},
    ]
    with pytest.raises(ConfigError, match='"b=cpu", which is not a device'):
        apply_environment(None, {"VT_PLACEMENT_OVERRIDES": "a=b=cpu"})


@pytest.mark.parametrize("variable", ["VT_MOE_EXPERT_STREAM_SLOTS", "VT_MOE_EXPERT_STREAM_SLOT_BYTES", "VT_N_CPU_MOE"])
def test_an_empty_count_is_one_that_is_not_set(variable: str) -> None:
    assert apply_environment(None, {variable: " "}).extension is None


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("VT_CPU_MOE", "flase", 'VT_CPU_MOE is "flase", which is no switch'),
        ("VT_N_CPU_MOE", "many", 'VT_N_CPU_MOE is "many", which is no whole number'),
        ("VT_N_CPU_MOE", "-1", 'VT_N_CPU_MOE is "-1", which is no whole number'),
        ("VT_DEVICE_WEIGHT_BUDGET_BYTES", "2GiB", "which is no whole number"),
        ("VT_DEVICE_WEIGHT_BUDGET_BYTES", "٣", "which is no whole number"),
        ("VT_DEVICE_WEIGHT_BUDGET_BYTES", "9" * 5000, "which is no whole number"),
        ("VT_MOE_EXPERT_STREAM_SLOTS", "0", "VT_MOE_EXPERT_STREAM_SLOTS=0"),
        ("VT_MOE_EXPERT_STREAM_SLOTS", "0", '"overspill.expert_stream.slots" must be positive (got 0)'),
        ("VT_N_CPU_MOE", "5000", "above the bound of 4096"),
        ("VT_PLACEMENT_OVERRIDES", "exps", 'VT_PLACEMENT_OVERRIDES has the entry "exps" without a "="'),
        ("VT_PLACEMENT_OVERRIDES", "(=cpu", "VT_PLACEMENT_OVERRIDES=(=cpu"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        apply_environment(None, {variable: text})


def test_a_conflict_with_the_document_names_the_variable() -> None:
    document = ExtensionConfig.model_validate({"placement": {"cpu_moe": True}})
    with pytest.raises(ConfigError) as caught:
        apply_environment(document, {"VT_PLACEMENT_FIT": "1"})
    assert caught.value.message.startswith(
        'offload config under VT_PLACEMENT_FIT=1: "overspill.placement.fit" cannot be combined'
    )


@pytest.mark.parametrize("text", ["0", "1", "2", " 1 ", "-1"])
def test_vllms_switches_are_bool_of_int(text: str) -> None:
    pin = Environment.read({"VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": text})
    assert pin == Environment(disable_pin_memory=bool(int(text)))
    uva = Environment.read({"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": text})
    assert uva == Environment(disable_uva=bool(int(text)))
    assert len(uva.notes) == bool(int(text))


@pytest.mark.parametrize("text", ["true", "", "1.0"])
@pytest.mark.parametrize(
    "variable", ["VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"]
)
def test_vllms_switches_refuse_what_is_no_integer(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f'{variable} is "{text}", which is no integer'):
        Environment.read({variable: text})


def test_nothing_set_is_nothing_said() -> None:
    assert Environment.read({}) == Environment()
    assert Environment().notes == ()
