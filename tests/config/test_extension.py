from __future__ import annotations

from typing import Any

import pytest

from overspill.config import (
    ExtensionConfig,
    OffloadConfig,
    PlacementOverride,
    parse_offload_config,
    placement_warnings,
    resolve,
)
from overspill.config.experts import MAX_N_CPU_MOE
from overspill.config.extension import stream_warnings
from overspill.errors import ConfigError

EVERYTHING: dict[str, Any] = {
    "mmap": {"enabled": True, "prefault": False},
    "expert_stream": {
        "enabled": True,
        "slots": 4000,
        "slot_bytes": 1 << 20,
        "cache_bytes": None,
        "policy": "fetch",
        "tier": "disk",
    },
    "device_fit": {"weight_budget_bytes": 0},
    "placement": {
        "overrides": [{"pattern": r"\.ffn_(up|down)_exps", "device": "cpu"}],
        "cpu_moe": True,
        "n_cpu_moe": 40,
        "fit": False,
    },
    "order": "declaration",
}


def parsed(extension: Any, root: str = "overspill") -> ExtensionConfig:
    config = parse_offload_config({"uva": {"cpu_offload_gb": 1}, root: extension})
    assert config.overspill is not None
    return config.overspill


@pytest.mark.parametrize("root", ["overspill", "vllm_cpp"])
def test_the_whole_schema_under_both_names(root: str) -> None:
    extension = parsed(EVERYTHING, root)
    assert extension.model_dump(mode="json") == EVERYTHING
    assert extension.placement.overrides == (PlacementOverride(pattern=r"\.ffn_(up|down)_exps", device="cpu"),)


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match='"overspill" and "vllm_cpp" are two names of one object'):
        parse_offload_config({"overspill": {}, "vllm_cpp": {}})


def test_absent_is_none_and_an_empty_list_is_not_absent() -> None:
    extension = parsed({"mmap": {"enabled": None}, "placement": {"overrides": []}})
    assert (extension.mmap.enabled, extension.expert_stream.slots) == (None, None)
    assert extension.device_fit.weight_budget_bytes is None
    assert extension.placement.overrides == ()
    assert parsed({}).placement.overrides is None


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        ({"mmap": {"enabled": 1}}, '"overspill.mmap.enabled" must be a boolean'),
        ({"mmap": {"prefault": "true"}}, '"overspill.mmap.prefault" must be a boolean'),
        ({"mmap": True}, '"overspill.mmap" must be a JSON object'),
        ([], '"overspill" must be a JSON object'),
        ({"expert_stream": {"slots": 1.0}}, '"overspill.expert_stream.slots" must be an integer'),
        ({"expert_stream": {"slots": True}}, '"overspill.expert_stream.slots" must be an integer'),
        ({"expert_stream": {"slots": 0}}, '"overspill.expert_stream.slots" must be positive (got 0)'),
        (
            {"expert_stream": {"slot_bytes": -5}},
            '"overspill.expert_stream.slot_bytes" must be positive (got -5)',
        ),
        ({"expert_stream": {"cache_bytes": 0}}, '"overspill.expert_stream.cache_bytes" must be positive (got 0)'),
        ({"expert_stream": {"cache_bytes": "0"}}, '"overspill.expert_stream.cache_bytes" must be positive (got 0)'),
        ({"expert_stream": {"cache_bytes": 0.5}}, '"overspill.expert_stream.cache_bytes" must be an integer'),
        (
            {"expert_stream": {"cache_bytes": "2Gb"}},
            '"overspill.expert_stream.cache_bytes" is "2Gb": "Gb" is not a unit of bytes',
        ),
        (
            {"expert_stream": {"cache_bytes": "1KiB", "slots": 4}},
            '"overspill.expert_stream.cache_bytes" (1024) cannot be combined with "slots" (4): both say how much it '
            "holds",
        ),
        (
            {"expert_stream": {"policy": "gpu"}},
            "\"overspill.expert_stream.policy\" is \"gpu\": Input should be 'fetch', 'cpu' or 'auto'",
        ),
        (
            {"expert_stream": {"tier": "device"}},
            "\"overspill.expert_stream.tier\" is \"device\": Input should be 'host' or 'disk'",
        ),
        (
            {"device_fit": {"weight_budget_bytes": -1}},
            '"overspill.device_fit.weight_budget_bytes" must not be negative (got -1); 0 means "suppress the '
            'device-fit refusal"',
        ),
        ({"placement": {"overrides": {}}}, '"overspill.placement.overrides" must be an array of objects'),
        (
            {"placement": {"overrides": ["x=cpu"]}},
            '"overspill.placement.overrides[0]" must be an object with "pattern" and "device"',
        ),
        (
            {"placement": {"overrides": [None]}},
            '"overspill.placement.overrides[0]" must be an object with "pattern" and "device"',
        ),
        (
            {"placement": {"overrides": [{"device": "cpu"}]}},
            '"overspill.placement.overrides[0].pattern" must be a non-empty string',
        ),
        (
            {"placement": {"overrides": [{"pattern": "x", "device": ""}]}},
            '"overspill.placement.overrides[0].device" must be a non-empty string',
        ),
        (
            {"placement": {"overrides": [{"pattern": "x", "device": "cpu"}, {"pattern": "(", "device": "cpu"}]}},
            '"overspill.placement.overrides[1].pattern" is not a valid regex: missing ), unterminated subpattern',
        ),
        (
            {"placement": {"overrides": [{"pattern": "{x}", "device": "gpu"}]}},
            '"overspill.placement.overrides[0].device" is "gpu", which is not a device (expected one of: '
            "cpu cuda emulated)",
        ),
        ({"placement": {"n_cpu_moe": -1}}, '"overspill.placement.n_cpu_moe" must not be negative (got -1)'),
        (
            {"placement": {"n_cpu_moe": MAX_N_CPU_MOE + 1}},
            '"overspill.placement.n_cpu_moe" is 4097, above the bound of 4096; each layer costs one '
            "override, so a mistyped value would build the list until the process died",
        ),
        (
            {"placement": {"fit": True, "n_cpu_moe": 3}},
            '"overspill.placement.fit" cannot be combined with a manual placement ("overrides", "cpu_moe" or '
            '"n_cpu_moe"); the resolver would have to override what the operator asked for',
        ),
        ({"order": "size"}, "\"overspill.order\" is \"size\": Input should be 'traffic' or 'declaration'"),
    ],
)
def test_messages(extension: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(extension)
    assert caught.value.message.startswith(f"offload config: {message}")
    with pytest.raises(ConfigError) as caught:
        parsed(extension, root="vllm_cpp")
    assert caught.value.message.startswith(f"offload config: {message}".replace('"overspill', '"vllm_cpp'))


def test_fit_beside_a_placement_that_asks_for_nothing() -> None:
    assert parsed({"placement": {"fit": True, "overrides": [], "cpu_moe": False, "n_cpu_moe": 0}}).placement.fit


# -- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [{"cpu_moe": True}, {"overrides": [{"pattern": "exps", "device": "cpu"}]}])
def test_a_placement_beside_mapped_weights_is_warned_of(placement: dict[str, Any]) -> None:
    extension = parsed({"mmap": {"enabled": True}, "placement": placement})
    assert placement_warnings(extension, root="vllm_cpp") == (
        "a CPU placement is active while the weights are mmap-resident. The mapping is faulted in file order and a "
        'placed expert is read in router order, so this pairing works and reads slowly: set "vllm_cpp": {"mmap": '
        '{"enabled": false}} or VT_GGUF_MMAP=0 if the checkpoint fits without borrowing',
    )


@pytest.mark.parametrize(
    "extension",
    [
        {},
        {"mmap": {"enabled": True}},
        {"placement": {"cpu_moe": True}},
        {"mmap": {"enabled": False}, "placement": {"cpu_moe": True}},
        {"mmap": {"enabled": True}, "placement": {"cpu_moe": False, "n_cpu_moe": 0, "overrides": []}},
    ],
)
def test_one_without_the_other_is_not(extension: dict[str, Any]) -> None:
    assert placement_warnings(parsed(extension)) == ()


@pytest.mark.parametrize(
    ("mmap", "warned"),
    [
        ({"prefault": True}, True),
        ({"enabled": False, "prefault": False}, True),
        ({"enabled": True, "prefault": False}, False),
        ({"enabled": False}, False),
        ({}, False),
    ],
)
def test_prefault_without_a_mapping_is_warned_of(mmap: dict[str, bool], warned: bool) -> None:
    told = '"overspill.mmap.prefault" without "enabled": true changes nothing: no file is mapped'
    assert resolve({"overspill": {"mmap": mmap}}, environ={}).warnings == ((told,) if warned else ())


@pytest.mark.parametrize(
    ("stream", "warning"),
    [
        (
            {"enabled": False, "slots": 64, "policy": "cpu"},
            '"overspill.expert_stream.enabled" is false: "slots", "policy" beside it changes nothing',
        ),
        ({"enabled": False}, None),
        ({"slots": 64, "slot_bytes": 64}, None),
        ({"cache_bytes": 64, "policy": "auto", "tier": "host"}, None),
        ({}, None),
    ],
)
def test_what_stands_beside_a_stream_that_is_off_is_warned_of(stream: dict[str, Any], warning: str | None) -> None:
    assert stream_warnings(parsed({"expert_stream": stream})) == (() if warning is None else (warning,))


def test_defaults_are_spelled_by_a_config_without_extension() -> None:
    assert OffloadConfig().extension == ExtensionConfig()
