from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.cli.options import SHARED, Shared
from overspill.config import resolve


def shared(**given: object) -> Shared:
    return Shared({**{name: default for name, (_, default) in SHARED.items()}, **given})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2", 2 << 30), ("0.5", 1 << 29), ("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000)],
)
def test_a_size_without_a_unit_is_gib(text: str, nbytes: int) -> None:
    settings = shared(device="emulated", device_memory=text, cpu_offload_gb=text).settings()
    assert settings.engine.device_memory_bytes == nbytes
    assert settings.offload.uva.budget_bytes == pytest.approx(nbytes, abs=1)


@given(st.integers(1, 1 << 20))
def test_whole_gib_are_exact(number: int) -> None:
    settings = shared(device="emulated", device_memory=str(number), cpu_offload_gb=str(number)).settings()
    assert settings.engine.device_memory_bytes == settings.offload.uva.budget_bytes == number << 30


def test_every_option_reaches_the_settings(tmp_path: Path) -> None:
    document = tmp_path / "offload.json"
    document.write_text('{"overspill": {"order": "declaration"}}')
    settings = shared(
        offload_config=f"@{document}",
        cpu_offload_gb="1",
        cpu_offload_params=["mlp"],
        device="emulated",
        link_bandwidth="16GB/s",
        link_latency="10us",
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        revision="main",
        seed=7,
        trust_remote_code=True,
        debug=True,
    ).settings()
    assert settings == resolve(
        '{"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp"]}, "overspill": {"order": "declaration"}}',
        engine={
            "device": "emulated",
            "link_bandwidth": 16e9,
            "link_latency_s": 1e-5,
            "dtype": "bfloat16",
            "max_model_len": 64,
            "max_num_seqs": 2,
            "revision": "main",
            "seed": 7,
            "trust_remote_code": True,
            "debug": True,
        },
    )
    prefetch = shared(
        offload_backend="prefetch",
        offload_group_size=4,
        offload_num_in_group=2,
        offload_prefetch_step=3,
        offload_params=["mlp", "self_attn"],
        cpu_moe=True,
        n_cpu_moe=2,
        override_tensor=["b,c=CPU", "a=cpu"],
        expert_cache="2",
        expert_policy="fetch",
    ).settings()
    assert prefetch == resolve(
        {
            "offload_backend": "prefetch",
            "prefetch": {
                "offload_group_size": 4,
                "offload_num_in_group": 2,
                "offload_prefetch_step": 3,
                "offload_params": ["mlp", "self_attn"],
            },
            "overspill": {
                "placement": {
                    "cpu_moe": True,
                    "n_cpu_moe": 2,
                    "overrides": [{"pattern": "b,c", "device": "cpu"}, {"pattern": "a", "device": "cpu"}],
                },
                "expert_stream": {"cache_bytes": 2 << 30, "policy": "fetch"},
            },
        }
    )
