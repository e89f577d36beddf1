"""The host memory that vLLM will really take, rounded for each fused tensor, also of true size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from advised import Made, line_with, made, uva, value_of, with_host
from transformers import LlamaConfig

from emulated_runs import mapped, settings_for
from overspill.config import format_bytes
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.plan import make_plan
from tiny_models import MakeTiny, save_headers

PIN = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"


def test_host_memory_is_rounded_for_each_fused_tensor(tiny: MakeTiny) -> None:
    made_ = made(tiny("qwen3_moe"), uva(1 << 20, ["experts"]))
    advice = made_.told("vllm")
    assert advice.host_bytes == 6 * (32768 + 16384)  # 18480 and 9240 bytes a layer
    assert f"{6 * 27720} bytes" in line_with(advice.notes, "next power of two")


def test_pinning_goes_where_rounding_would_exceed_the_host(tiny: MakeTiny) -> None:
    made_ = made(tiny("qwen3_moe"), uva(1 << 20, ["experts"]))
    enough, short, too_short = (with_host(made_, n).told("vllm") for n in (6 * 49152, 6 * 49152 - 1, 6 * 27720 - 1))
    assert not enough.environment
    assert dict(short.environment) == dict(too_short.environment) == {PIN: "1"}
    assert short.host_bytes == 6 * 27720
    assert short.shell.startswith(f"{PIN}=1 vllm serve ")
    assert not [line for line in short.cannot if "host memory" in line]
    line_with(too_short.cannot, "host memory", format_bytes(6 * 27720))


def test_prefetch_without_pinning_is_said_to_wait(tiny: MakeTiny) -> None:
    made_ = with_host(made(tiny("gemma3"), {"prefetch": {"offload_group_size": 2}}), 110_000)
    advice = made_.told("vllm")
    assert dict(advice.environment) == {PIN: "1"}
    line_with(advice.notes, "pageable")


def test_pinning_that_was_off_stays_off(tiny: MakeTiny) -> None:
    advice = made(tiny("llama"), uva(60_000), {PIN: "1"}).told("vllm")
    assert dict(advice.environment) == {PIN: "1"}


def test_each_rank_holds_its_share_and_rounds_it(even: Path) -> None:
    made_ = made(even, uva(1 << 20, ["mlp"]))
    advice = made_.told("vllm", ranks=2)
    assert value_of(advice, "--tensor-parallel-size") == "2"
    assert float(value_of(advice, "--cpu-offload-gb")) * 1024**3 <= made_.plan.offloaded_bytes / 2
    assert advice.host_bytes == 2 * 6 * (8192 + 4096)  # halves of 12960 and of 6480 bytes a layer
    assert "over 2 ranks" in line_with(advice.notes, "next power of two")
    norms = made(even, uva(1 << 20, ["input_layernorm"])).told("vllm", ranks=2)
    assert norms.host_bytes == 2 * 6 * 256, "norms are whole on each rank"


# -- a model of true size ----------------------------------------------------------------------------------------------

CONFIG_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """100 GiB of it beside a device of 48 GiB, and a host that holds them."""
    folder = tmp_path_factory.mktemp("large") / "llama-70b"
    save_headers(folder, CONFIG_70B)
    settings = settings_for({"uva": {"cpu_offload_gb": 100}, "overspill": {"order": "declaration"}})
    device = EmulatedDevice(48 << 30, Link(25e9, 1e-5, measured=False))
    device.host_memory_bytes = 256 << 30
    return Made(make_plan(mapped(folder), settings, device, context_tokens=32), settings)


def test_a_70b_model_of_which_100_gib_are_moved(large: Made) -> None:
    advice = large.told("vllm")
    assert value_of(advice, "--cpu-offload-gb") == "100"
    layer = {
        "qkv": (64 + 8 + 8) * 128 * 8192 * 2,
        "o": 8192 * 8192 * 2,
        "gate_up": 2 * 28672 * 8192 * 2,
        "down": 28672 * 8192 * 2,
        "norm": 8192 * 2,
        "norm2": 8192 * 2,
    }
    exact = rounded = 0
    for _ in range(80):
        for nbytes in layer.values():
            if exact >= 100 << 30:
                break
            exact += nbytes
            rounded += 1 << (nbytes - 1).bit_length()
    assert advice.host_bytes == rounded
    told = re.search(r"\((\d+) bytes\)", line_with(advice.notes, "next power of two"))
    assert told is not None
    assert int(told[1]) == exact
    assert 1.1 < rounded / exact < 1.2, "as reported of models of this shape"
