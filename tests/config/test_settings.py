from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from overspill.config import (
    FLAGS,
    GIB,
    EngineSettings,
    Environment,
    OffloadConfig,
    Settings,
    UVAOffloadConfig,
    read_document,
    resolve,
)
from overspill.errors import ConfigError


def resolved(document: Any = None, environ: dict[str, str] | None = None, **kinds: Any) -> Settings:
    return resolve(document, environ=environ or {}, **kinds)


def test_nothing_asked_for() -> None:
    settings = resolved()
    assert settings == Settings(OffloadConfig(), EngineSettings(), Environment(), ())
    assert (settings.engine.device, settings.engine.max_num_seqs, settings.engine.dtype) == (
        "auto",
        1,
        "auto",
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.notes = ("x",)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flag", "value", "document"),
    [
        ("cpu_offload_gb", 4, {"uva": {"cpu_offload_gb": 4}}),
        ("cpu_offload_gb", "512MiB", {"uva": {"cpu_offload_gb": 0.5}}),
        ("cpu_offload_gb", "4", {"uva": {"cpu_offload_gb": 4}}),
        ("offload_group_size", 8, {"prefetch": {"offload_group_size": 8}}),
    ],
)
def test_a_flag_is_the_documents_field(flag: str, value: object, document: dict[str, Any]) -> None:
    assert resolved(flags={flag: value}).offload == resolved(document).offload


def test_all_flags_meet_in_one_document() -> None:
    flags: dict[str, Any] = {
        "offload_backend": "prefetch",
        "cpu_offload_gb": None,
        "cpu_offload_params": None,
        "offload_group_size": 8,
        "offload_num_in_group": 2,
        "offload_prefetch_step": 3,
        "offload_params": ["mlp"],
        "cpu_moe": True,
        "n_cpu_moe": 2,
        "override_tensor": ["norm=cpu"],
        "fit": False,
        "expert_cache": 1,
        "expert_policy": "fetch",
    }
    assert flags.keys() == FLAGS.keys()
    offload = resolved(flags=flags).offload
    assert len(offload.extension.placement.rules) == 4
    assert (offload.extension.expert_stream.cache_bytes, offload.extension.expert_stream.policy) == (GIB, "fetch")
    prefetch = offload.prefetch
    assert (prefetch.offload_group_size, prefetch.offload_num_in_group, prefetch.offload_prefetch_step) == (
        8,
        2,
        3,
    )
    assert prefetch.offload_params == {"mlp"}
    split = resolved({"prefetch": {"offload_group_size": 8}}, flags={"offload_num_in_group": 2})
    assert split.offload.prefetch.offload_num_in_group == 2


@pytest.mark.parametrize(
    ("document", "flags", "message"),
    [
        (
            {"uva": {"cpu_offload_gb": 4}},
            {"cpu_offload_gb": 2.0},
            "in the offload document, but the flag --cpu-offload-gb says 2.0",
        ),
        ({"uva": {"cpu_offload_gb": 0}}, {"cpu_offload_gb": 2}, "--cpu-offload-gb says 2"),
        ({"offload_backend": "uva"}, {"offload_backend": "prefetch"}, '"offload_backend" is "uva"'),
        (
            {"prefetch": {"offload_params": ["mlp"]}},
            {"offload_group_size": 2, "offload_params": ["mlp", "self_attn"]},
            "\"prefetch.offload_params\" is ['mlp'] in the offload document",
        ),
    ],
)
def test_a_flag_and_a_document_that_disagree(document: Any, flags: dict[str, object], message: str) -> None:
    for form in (document, OffloadConfig.model_validate(document)):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            resolved(form, flags=flags)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("document", "flags"),
    [
        ({"uva": {"cpu_offload_gb": 4}}, {"cpu_offload_gb": 4.0}),
        ({"uva": {"cpu_offload_gb": "4"}}, {"cpu_offload_gb": "4GiB"}),
        (
            {"uva": {"cpu_offload_gb": 4, "cpu_offload_params": ["a", "b"]}},
            {"cpu_offload_params": ["b", "a", "a"]},
        ),
        ({"uva": {"cpu_offload_gb": None}}, {"cpu_offload_gb": 4}),
        (OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=4)), {"cpu_offload_gb": 4}),
    ],
)
def test_a_flag_and_a_document_that_agree(document: Any, flags: dict[str, object]) -> None:
    assert resolved(document, flags=flags).offload.uva.budget_bytes == 4 * GIB


def test_flags_are_judged_like_the_document() -> None:
    with pytest.raises(ConfigError, match=re.escape("offload_num_in_group (3) must be <= offload_group_size (2)")):
        resolved(flags={"offload_group_size": 2, "offload_num_in_group": 3})
    with pytest.raises(ConfigError, match=r'"uva\.cpu_offload_gb" is -1'):
        resolved({"uva": {"cpu_offload_gb": 1}}, flags={"cpu_offload_gb": -1})
    with pytest.raises(ConfigError, match='unknown offload flag "cpu_offload_GB"') as caught:
        resolved(flags={"cpu_offload_GB": 4})
    assert caught.value.hint == 'did you mean "cpu_offload_gb"?'
    with pytest.raises(ConfigError, match='"uva" must be a JSON object'):
        resolved({"uva": 4}, flags={"cpu_offload_gb": 4})


def test_the_callers_document_is_left_alone() -> None:
    document: dict[str, Any] = {"uva": {"cpu_offload_params": ["mlp"]}}
    resolved(document, flags={"cpu_offload_gb": 4})
    assert document == {"uva": {"cpu_offload_params": ["mlp"]}}


def test_a_document_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    file.write_text('{"uva": {"cpu_offload_gb": 4}}', encoding="utf-8")
    assert resolved(f"@{file}").offload.uva.cpu_offload_gb == 4
    assert read_document('{"a": 1}') == '{"a": 1}'
    file.write_bytes(b"\xff\xfe\xff")
    for unreadable in (file, tmp_path / "absent.json", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(unreadable))):
            read_document(f"@{unreadable}")


def test_environment_overrides_the_document_and_is_noted() -> None:
    settings = resolved(
        {"overspill": {"device_fit": {"weight_budget_bytes": 5}, "placement": {"cpu_moe": True}}},
        environ={
            "VT_CPU_MOE": "0",
            "VT_DEVICE_WEIGHT_BUDGET_BYTES": "7",
            "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1",
        },
    )
    assert settings.offload.extension.device_fit.weight_budget_bytes == 7
    assert settings.offload.extension.placement.cpu_moe is False
    assert settings.environment == Environment(disable_uva=True)
    assert len(settings.notes) == 3


@pytest.mark.parametrize(
    ("document", "environ", "fit"),
    [
        (None, {}, None),
        ({"overspill": {"placement": {"fit": True}}}, {}, True),
        ('{"vllm_cpp": {"placement": {"fit": false}}}', {}, False),
        ('{"vllm_cpp": {"placement": {"fit": true}}}', {"VT_PLACEMENT_FIT": "0"}, False),
    ],
)
def test_fit_is_asked_for_or_not(document: Any, environ: dict[str, str], fit: bool | None) -> None:
    assert resolved(document, environ).offload.extension.placement.fit is fit


def test_fit_beside_what_was_stated_is_told_to_change_nothing() -> None:
    (warning,) = resolved({"uva": {"cpu_offload_gb": 1}, "overspill": {"placement": {"fit": True}}}).warnings
    assert "placement.fit" in warning
    assert "what was stated stands" in warning
    assert not resolved({"overspill": {"placement": {"fit": True}}}).warnings
    assert not resolved({"uva": {"cpu_offload_gb": 1}, "overspill": {"placement": {"fit": False}}}).warnings


def test_engine_settings_read_their_units() -> None:
    engine = resolved(
        engine={
            "device": "emulated",
            "device_memory_bytes": "2GiB",
            "link_bandwidth": "16GB/s",
            "link_latency_s": "10us",
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "revision": None,
            "seed": None,
        }
    ).engine
    assert (engine.device_memory_bytes, engine.link_bandwidth, engine.link_latency_s) == (2 * GIB, 16e9, 1e-5)
    assert (engine.max_model_len, engine.max_num_seqs, engine.revision, engine.seed) == (4096, 8, None, 0)
    assert resolved(engine={"device": "cuda", "device_memory_bytes": GIB}).engine.device_memory_bytes == GIB


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"device": "tpu"}, "\"device\" is \"tpu\": Input should be 'auto', 'cuda', 'cpu' or 'emulated'"),
        (
            {"device": "cpu", "device_memory_bytes": 5},
            '"device_memory_bytes" is 5, but the cpu has no memory',
        ),
        ({"device": "cuda", "link_bandwidth": 1e9}, '"link_bandwidth" is 1000000000.0, but device is "cuda"'),
        ({"device": "cpu", "link_latency_s": "1ms"}, '"link_latency_s" is 0.001, but device is "cpu"'),
        ({"link_bandwidth": "1GB/s"}, 'but device is "auto": only the emulated link can be set'),
        ({"device_memory_bytes": 0}, '"device_memory_bytes" is 0: Input should be greater than 0'),
        ({"device_memory_bytes": True}, '"device_memory_bytes" is True'),
        ({"device_memory_bytes": "2 Gb"}, '"device_memory_bytes" is "2 Gb": "Gb" is not a unit of bytes'),
        ({"device": "emulated", "link_bandwidth": 0}, '"link_bandwidth" is 0'),
        ({"device": "emulated", "link_bandwidth": float("inf")}, '"link_bandwidth" is inf'),
        ({"device": "emulated", "link_latency_s": float("nan")}, '"link_latency_s" is nan'),
        ({"max_num_seqs": 0}, '"max_num_seqs" is 0'),
        ({"max_model_len": True}, '"max_model_len" is True'),
        ({"seed": -1}, '"seed" is -1'),
        ({"dtype": "float8"}, '"dtype" is "float8"'),
        ({"debug": 1}, '"debug" is 1'),
        ({"devise": "cpu"}, 'unknown key "devise" (expected one of: device device_memory_bytes '),
    ],
)
def test_engine_settings_refuse(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        resolved(engine=engine)
    assert caught.value.message.startswith("engine settings: ")
    assert caught.value.hint


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_DEVICE_WEIGHT_BUDGET_BYTES", "9")
    assert resolve().offload.extension.device_fit.weight_budget_bytes == 9


def test_a_flag_for_a_stream_that_the_document_switches_off_is_refused() -> None:
    document = {"overspill": {"expert_stream": {"enabled": False}}}
    with pytest.raises(ConfigError, match=r'"overspill\.expert_stream\.enabled" is false .* --expert-cache'):
        resolve(document, {"expert_cache": "1MiB"}, environ={})
