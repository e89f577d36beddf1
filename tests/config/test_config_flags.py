"""The flags of the extension, and where they meet the document and the environment."""

from __future__ import annotations

from typing import Any

import pytest

from overspill.config import ExtensionConfig, OffloadConfig, PlacementConfig, Settings, resolve
from overspill.errors import ConfigError


def resolved(document: Any = None, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    return resolve(document, flags, environ=environ or {})


def refused(document: Any = None, environ: dict[str, str] | None = None, **flags: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(document, environ, **flags)
    assert caught.value.hint
    return caught.value


# A flag, a value, where it goes, what it means there, and another value.
FLAGGED: list[tuple[str, Any, tuple[str, str], Any, Any]] = [
    ("cpu_moe", True, ("placement", "cpu_moe"), True, False),
    ("n_cpu_moe", 3, ("placement", "n_cpu_moe"), 3, 4),
    (
        "override_tensor",
        ["b,c=CPU", "a=cpu"],
        ("placement", "overrides"),
        [{"pattern": "b,c", "device": "cpu"}, {"pattern": "a", "device": "cpu"}],
        [{"pattern": "a", "device": "cpu"}, {"pattern": "b,c", "device": "cpu"}],
    ),
    ("expert_cache", "2", ("expert_stream", "cache_bytes"), 2 << 30, 1),
    ("expert_cache", "512MiB", ("expert_stream", "cache_bytes"), "0.5GiB", "2GiB"),
    ("expert_cache", 0.5, ("expert_stream", "cache_bytes"), 1 << 29, 5),
    ("expert_policy", "cpu", ("expert_stream", "policy"), "cpu", "fetch"),
]


@pytest.mark.parametrize("root", ["overspill", "vllm_cpp"])
@pytest.mark.parametrize(("flag", "value", "place", "meaning", "other"), FLAGGED)
def test_a_flag_is_the_extensions_field(
    root: str, flag: str, value: Any, place: tuple[str, str], meaning: Any, other: Any
) -> None:
    section, key = place
    stated = resolved({root: {section: {key: meaning}}})
    assert stated.offload.offloads
    assert resolved(**{flag: value}) == stated
    assert resolved({root: {section: {key: meaning}}}, **{flag: value}) == stated
    assert resolved({root: {section: None}}, **{flag: value}) == stated
    assert resolved(OffloadConfig.model_validate({root: {section: {key: meaning}}}), **{flag: value}) == stated

    error = refused({root: {section: {key: other}}}, **{flag: value})
    assert error.message.startswith(f'"{root}.{section}.{key}" is ')
    assert f" in the offload document, but the flag --{flag.replace('_', '-')} says " in error.message


def test_a_flag_joins_the_root_that_the_document_uses() -> None:
    document = {"vllm_cpp": {"order": "declaration", "placement": {"n_cpu_moe": 2}}, "uva": {"cpu_offload_gb": 1}}
    extension = resolved(document, cpu_moe=True, expert_cache=1).offload.extension
    assert (extension.order, extension.placement.n_cpu_moe, extension.placement.cpu_moe) == ("declaration", 2, True)
    assert extension.expert_stream.cache_bytes == 1 << 30
    assert refused({"vllm_cpp": {}}, n_cpu_moe=-1).message == (
        'offload config: "vllm_cpp.placement.n_cpu_moe" must not be negative (got -1)'
    )
    assert "two names of one object" in refused({"vllm_cpp": {}, "overspill": {}}, cpu_moe=True).message


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"overspill": 4}, '"overspill" must be a JSON object'),
        ({"vllm_cpp": [1]}, '"vllm_cpp" must be a JSON object'),
        ({"overspill": {"placement": True}}, '"overspill.placement" must be a JSON object'),
    ],
)
def test_a_flag_hides_no_mistake_of_the_document(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(document, cpu_moe=True)
    assert caught.value.message == f"offload config: {message}"


def test_a_config_whose_extension_is_absent_takes_flags() -> None:
    """Absent is absent, also where a caller wrote None."""
    for config in (
        OffloadConfig(overspill=None),
        OffloadConfig(overspill=ExtensionConfig(placement=PlacementConfig(cpu_moe=None))),
    ):
        assert resolved(config, cpu_moe=True).offload.extension.placement.cpu_moe is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"expert_cache": "3Gb"}, '"expert_cache" is "3Gb": "Gb" is not a unit of bytes'),
        ({"expert_cache": True}, '"expert_cache" is True, which is not a size'),
        ({"expert_cache": "0"}, 'offload config: "overspill.expert_stream.cache_bytes" must be positive (got 0)'),
        ({"expert_cache": [1]}, 'offload config: "overspill.expert_stream.cache_bytes" must be an integer'),
        ({"cpu_moe": "yes"}, 'offload config: "overspill.placement.cpu_moe" must be a boolean'),
        (
            {"expert_policy": "gpu"},
            "offload config: \"overspill.expert_stream.policy\" is \"gpu\": Input should be 'fetch', 'cpu' or 'auto'",
        ),
    ],
)
def test_flags_are_judged_like_the_document(flags: dict[str, Any], message: str) -> None:
    assert refused(**flags).message == message


def test_a_size_and_slots_in_two_places_meet() -> None:
    clash = '(1024) cannot be combined with "slots" (4): both say how much it holds'
    by_flag = refused({"vllm_cpp": {"expert_stream": {"slots": 4}}}, expert_cache="1KiB")
    assert by_flag.message == f'offload config: "vllm_cpp.expert_stream.cache_bytes" {clash}'
    by_variable = refused(environ={"VT_MOE_EXPERT_STREAM_SLOTS": "4"}, expert_cache="1KiB")
    assert by_variable.message == (
        f'offload config under VT_MOE_EXPERT_STREAM_SLOTS=4: "overspill.expert_stream.cache_bytes" {clash}'
    )


# -- environment and warnings ----------------------------------------------------------------------------------------


def test_the_environment_wins_over_document_and_flag_in_both_directions() -> None:
    for document, flags in (({"overspill": {"placement": {"cpu_moe": True}}}, {}), (None, {"cpu_moe": True})):
        off = resolved(document, {"VT_CPU_MOE": "0"}, **flags)
        assert (off.offload.extension.placement.cpu_moe, off.offload.offloads) == (False, False)
        assert off.notes == ('environment: VT_CPU_MOE=0 wins over "overspill.placement.cpu_moe" = True',)
    environ = {"VT_CPU_MOE": "1", "VT_N_CPU_MOE": "1", "VT_PLACEMENT_OVERRIDES": "b=CPU,a=cpu"}
    on = resolved({"overspill": {"placement": {"cpu_moe": False}}}, environ)
    assert [rule.origin for rule in on.offload.extension.placement.rules] == [
        "overrides[0]",
        "overrides[1]",
        "cpu_moe",
        "n_cpu_moe",
    ]
    assert resolved(environ={"VT_MOE_EXPERT_STREAM_SLOTS": "4"}).offload.extension.expert_stream.on
    off = resolved(environ={"VT_MOE_EXPERT_STREAM": "0"}, expert_cache=1)
    assert not off.offload.extension.expert_stream.on
    assert off.warnings == ('"overspill.expert_stream.enabled" is false: "cache_bytes" beside it changes nothing',)


def test_what_a_variable_only_repeats_is_no_note() -> None:
    assert resolved(environ={"VT_PLACEMENT_OVERRIDES": "a=CPU"}, override_tensor=["a=cpu"]).notes == ()


def test_nothing_asked_for_warns_of_nothing() -> None:
    assert resolved().warnings == ()
    assert resolved({"vllm_cpp": {"placement": {"cpu_moe": True}, "expert_stream": {"slots": 4}}}).warnings == ()
    (warning,) = resolved({"vllm_cpp": {"expert_stream": {"enabled": False, "slot_bytes": 64}}}).warnings
    assert warning == '"vllm_cpp.expert_stream.enabled" is false: "slot_bytes" beside it changes nothing'
