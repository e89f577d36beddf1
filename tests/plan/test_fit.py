"""A model that does not fit is made to fit, by what takes least; one that fits, and what was stated, are left alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from emulated_runs import PROMPT, emulated, forward, mapped, placed, settings_for
from overspill.config import parse_bytes, resolve
from overspill.errors import CapacityError, ConfigError, UnsupportedModelError
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.machine.rates import Rates
from overspill.model.weights import ModelMap
from overspill.offload.placed import place
from overspill.plan import Plan, make_plan
from overspill.plan.fit import excess_bytes, fits
from overspill.plan.forecast import decode_forecast, pass_forecast
from tiny_models import TINY, MakeTiny, save_headers

MIB = 1 << 20
NO_FIT = {"overspill": {"placement": {"fit": False}}}
UVA_HALF = {"uva": {"cpu_offload_gb": 0.95}}


def rates(**changes: Any) -> Rates:
    figures: dict[str, Any] = {
        "origin": "made up", "read_bytes_s": {"bfloat16": 500e9}, "flops": {"bfloat16": 50e12}, "layer_s": 1e-4,
        "expert_bytes_s": 30e9, "expert_flops": 1e12, "disk_bytes_s": 2e9, "asynchronous": True,
    }  # fmt: skip
    return Rates(**{**figures, **changes})


def plan_of(
    model: ModelMap,
    memory_bytes: int,
    document: Any = None,
    *,
    link: float = 25e9,
    known: Rates | None = None,
    **engine: Any,
) -> Plan:
    device = EmulatedDevice(memory_bytes, Link(link, 1e-5, measured=False))
    tokens = model.trace.tokens
    return make_plan(model, settings_for(document, **engine), device, context_tokens=tokens, rates=known)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelMap:
    """1.5 GiB in sixteen layers, headers alone."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    save_headers(folder, config)
    return mapped(folder, tokens=1024)


def test_what_fits_is_left_alone(dense: ModelMap) -> None:
    plan = plan_of(dense, 8 << 30)
    assert not plan.offloads
    assert not any("fit" in note for note in plan.notes)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_what_does_not_fit_is_made_to_fit_in_one_line(dense: ModelMap, share: float) -> None:
    whole = plan_of(dense, 8 << 30).memory.device_bytes
    plan = plan_of(dense, int(whole * share), known=rates())
    assert plan.offloads
    assert fits(plan)
    assert plan.memory.device_bytes <= int(whole * share), "working memory of the longest prompt included"
    (note,) = [note for note in plan.notes if note.startswith("fit: ")]
    assert "--no-fit" in note
    assert "ms a step" in note


def test_the_line_s_settings_give_the_same_plan(dense: ModelMap) -> None:
    plan = plan_of(dense, int(plan_of(dense, 8 << 30).memory.device_bytes * 0.6), known=rates())
    again = plan_of(dense, plan.memory.available_device_bytes, plan.offload)
    assert [(p.weight.full, p.tier, p.access) for p in again.placements] == [
        (p.weight.full, p.tier, p.access) for p in plan.placements
    ]


def test_a_slow_device_hides_copies_and_a_fast_one_reads_in_place(dense: ModelMap) -> None:
    """What costs least hangs on the machine: beside slow computing copies ahead are free, beside fast they are more."""
    memory_bytes = int(plan_of(dense, 8 << 30).memory.device_bytes * 0.85)
    slow = plan_of(dense, memory_bytes, known=rates(read_bytes_s={"bfloat16": 10e9}, asynchronous=False))
    fast = plan_of(dense, memory_bytes, link=2e9, known=rates(read_bytes_s={"bfloat16": 4e12}, layer_s=1e-6))
    assert slow.backend == "prefetch"
    assert fast.backend == "uva"


def test_where_most_layers_are_copied_they_come_through_two_buffers(dense: ModelMap) -> None:
    """With one nothing is hidden behind the layers that are copied."""
    memory_bytes = int(plan_of(dense, 8 << 30).memory.device_bytes * 0.4)
    known = rates(read_bytes_s={"bfloat16": 10e9}, asynchronous=False)
    plan = plan_of(dense, memory_bytes, known=known)
    assert plan.ring is not None
    assert plan.ring.step == 2


def test_no_way_is_better_than_the_one_taken(tiny: MakeTiny) -> None:
    """Of a sparse model: every way that fits, forecast by hand."""
    model = mapped(tiny("qwen3_moe"), tokens=4)
    whole = plan_of(model, 1 << 30).memory.device_bytes
    for known in (rates(), rates(expert_bytes_s=1e6), rates(read_bytes_s={"float32": 1e6})):
        plan = plan_of(model, int(whole * 0.8), known=known)
        taken = pass_forecast(plan, known, 1, kept_tokens=2).seconds
        for document in (
            {"overspill": {"placement": {"cpu_moe": True}}},
            {"overspill": {"expert_stream": {"enabled": True}}},
            {"uva": {"cpu_offload_gb": excess_bytes(plan_of(model, 1 << 30)) / (1 << 30) + whole * 0.3 / (1 << 30)}},
            {"prefetch": {"offload_group_size": 1}},
        ):
            try:
                other = plan_of(model, int(whole * 0.8), document)
            except (CapacityError, ConfigError):
                continue
            if fits(other):
                assert pass_forecast(other, known, 1, kept_tokens=2).seconds >= taken * 0.999


@pytest.mark.parametrize(
    "document",
    [
        {"overspill": {"placement": {"fit": False}}},
        {"uva": {"cpu_offload_gb": 0.01}},
        {"prefetch": {"offload_group_size": 8}},
    ],
)
def test_what_was_stated_stands_and_is_refused_where_it_does_not_do(dense: ModelMap, document: Any) -> None:
    with pytest.raises(CapacityError, match=r"need .* of device memory"):
        plan_of(dense, 800 * MIB, document)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> ModelMap:
    """1.5 GiB, most of it experts of twelve layers, an embedding of 64 MiB; headers alone."""
    folder = tmp_path_factory.mktemp("sparse") / "model"
    config = Qwen3MoeConfig(
        vocab_size=32000, hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, num_experts=32, num_experts_per_tok=4, tie_word_embeddings=False,
    )  # fmt: skip
    save_headers(folder, config)
    return mapped(folder, tokens=1024)


def _every(model: ModelMap) -> list[dict[str, Any]]:
    """Settings of every family, one by one."""
    layers = model.decoder.layers
    found: list[dict[str, Any]] = [{"uva": {"cpu_offload_gb": hundredths / 100}} for hundredths in range(5, 160, 5)]
    for size in range(1, layers + 1):
        for number in range(1, size + 1):
            group = {"offload_group_size": size, "offload_num_in_group": number}
            found += [{"prefetch": {**group, "offload_prefetch_step": step}} for step in (1, 2)]
    for count in range(1, layers + 1):
        placed: dict[str, Any] = {"overspill": {"placement": {"n_cpu_moe": count, "fit": False}}}
        found += [placed, placed | {"uva": {"cpu_offload_gb": 0.07}}]  # and the embedding
    return found


@pytest.mark.parametrize("share", [0.9, 0.5])
@pytest.mark.parametrize("name", ["dense", "sparse"])
@pytest.mark.parametrize("host_share", [0.15, 0.55, 2.0])
def test_little_is_better_of_everything_that_could_be_asked(
    name: str, share: float, host_share: float, request: pytest.FixtureRequest
) -> None:
    """With little host memory more of a family is what does not fit."""
    model: ModelMap = request.getfixturevalue(name)
    memory_bytes = int(plan_of(model, 8 << 30).memory.device_bytes * share)
    host_bytes = int(model.nbytes * host_share)
    known = rates(expert_bytes_s=60e9)
    try:
        taken = plan_of(model, memory_bytes, known=known, memory_limit_bytes=host_bytes)
    except CapacityError:
        taken = None
    best = float("inf")
    for document in _every(model):
        try:
            other = plan_of(model, memory_bytes, document, known=known, memory_limit_bytes=host_bytes)
        except (CapacityError, ConfigError, UnsupportedModelError):
            continue
        if fits(other):
            best = min(best, decode_forecast(other, known).seconds)
    if taken is None:
        assert best == float("inf"), "refused, and there is a way"
    else:
        assert decode_forecast(taken, known).seconds <= 1.1 * best
        words = {settings: len(settings.split()) for settings, _ in taken.fitted}
        least = min(seconds for _, seconds in taken.fitted)
        assert words[taken.fitted[0][0]] == min(words[w] for w, seconds in taken.fitted if seconds <= 1.01 * least)


@pytest.mark.parametrize("stated", [{"n_cpu_moe": 0}, {"cpu_moe": False}])
def test_that_no_experts_are_to_be_placed_stands_too(stated: Any, sparse: ModelMap) -> None:
    memory_bytes = int(plan_of(sparse, 8 << 30).memory.device_bytes * 0.8)
    assert plan_of(sparse, memory_bytes, known=rates(expert_bytes_s=1e12)).placed
    plan = plan_of(sparse, memory_bytes, {"overspill": {"placement": stated}}, known=rates(expert_bytes_s=1e12))
    assert not plan.placed
    assert plan.slots is None
    assert plan.offloads


def test_beside_experts_that_were_placed_the_rest_is_fitted(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"), tokens=4)
    stated = {"overspill": {"placement": {"n_cpu_moe": 2}}}
    needed = plan_of(model, 1 << 30, stated).memory.device_bytes
    plan = plan_of(model, needed - 20_000, stated)
    assert len(plan.placed) == 2, "as stated"
    assert plan.backend is not None
    assert fits(plan)


def test_a_budget_for_weights_is_what_is_fitted_into(dense: ModelMap) -> None:
    plan = plan_of(dense, 64 << 30, {"overspill": {"device_fit": {"weight_budget_bytes": 700 * MIB}}})
    assert plan.offloads
    assert plan.memory.lasting_bytes <= 700 * MIB
    assert not plan_of(dense, 1 << 20, {"overspill": {"device_fit": {"weight_budget_bytes": 0}}}).offloads


@pytest.mark.parametrize("memory_mib", [700, 1200])
def test_a_budget_for_weights_is_no_memory_that_the_device_has_not(dense: ModelMap, memory_mib: int) -> None:
    document = {"overspill": {"device_fit": {"weight_budget_bytes": 1000 * MIB}}}
    plan = plan_of(dense, memory_mib * MIB, document)
    assert plan.memory.device_bytes <= memory_mib * MIB
    assert plan.memory.lasting_bytes <= 1000 * MIB
    with pytest.raises(CapacityError, match=r"KV cache need .* the limit is 700.00 MiB"):
        plan_of(dense, 700 * MIB, {"overspill": {**document["overspill"], "placement": {"fit": False}}} | UVA_HALF)


def test_host_memory_is_a_limit_too(dense: ModelMap) -> None:
    """What the host does not hold either comes from disk, or is refused with what would."""
    plan = plan_of(dense, 700 * MIB, memory_limit_bytes=500 * MIB)
    assert plan.memory.host_bytes + plan.memory.staging_bytes <= 500 * MIB
    with pytest.raises(CapacityError) as refused:
        plan_of(dense, 20 * MIB)
    assert refused.value.hint


def _figures(hint: str, flag: str) -> list[str]:
    return re.findall(rf"{flag} (\S+?)(?:,|$| )", hint)


@pytest.mark.parametrize("config", [LlamaConfig, Gemma3TextConfig], ids=["whole", "windows"])
def test_the_smaller_context_or_fewer_sequences_of_a_refusal_do(config: Any, tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048}
    windows = {"sliding_window": 128} if config is Gemma3TextConfig else {}
    save_headers(tmp_path / "model", config(**sizes, **heads, **windows))

    def planned(tokens: int, sequences: int, memory_bytes: int) -> Plan:
        model = mapped(tmp_path / "model", tokens=tokens, sequences=sequences)
        return plan_of(model, memory_bytes, NO_FIT, max_num_seqs=sequences)

    memory = planned(1024, 4, 8 << 30).memory
    memory_bytes = memory.lasting_bytes + 2 * (memory.kv_cache_bytes or 0) // 3
    with pytest.raises(CapacityError) as refused:
        planned(1024, 4, memory_bytes)
    hint = refused.value.hint or ""
    (tokens,), (sequences,) = _figures(hint, "--max-model-len"), _figures(hint, "--max-num-seqs")
    assert 256 < int(tokens) < 1024
    assert 1 <= int(sequences) < 4
    for fewer in (planned(int(tokens), 4, memory_bytes), planned(1024, int(sequences), memory_bytes)):
        assert fewer.memory.device_bytes <= memory_bytes, "working memory included"


def test_the_host_memory_that_would_do_is_named_and_does(dense: ModelMap) -> None:
    with pytest.raises(CapacityError) as refused:
        plan_of(dense, 700 * MIB, memory_limit_bytes=1 * MIB)
    (limit,) = _figures(refused.value.hint or "", "--memory-limit")
    needed = parse_bytes(limit, field="memory_limit")
    assert fits(plan_of(dense, 700 * MIB, memory_limit_bytes=needed))


def test_ways_out_are_none_that_the_host_has_no_room_for(dense: ModelMap) -> None:
    with pytest.raises(CapacityError) as refused:
        plan_of(dense, 700 * MIB, NO_FIT, memory_limit_bytes=10 * MIB)
    assert "--cpu-offload-gb" not in (refused.value.hint or "")


@pytest.mark.parametrize("asked", [True, False])
def test_on_the_cpu_fit_has_nothing_to_choose_and_says_so(asked: bool, tiny: MakeTiny) -> None:
    model, cpu = mapped(tiny("llama")), CpuDevice()
    settings = resolve({"overspill": {"placement": {"fit": asked}}}, engine={"device": "cpu"}, environ={})
    assert any("nothing to choose" in n for n in make_plan(model, settings, cpu, context_tokens=32).notes)
    plain = resolve(None, engine={"device": "cpu"}, environ={})
    assert not any("fit" in n for n in make_plan(model, plain, cpu, context_tokens=32).notes)


def test_offload_that_is_not_needed_is_called_out(dense: ModelMap) -> None:
    stated = {"uva": {"cpu_offload_gb": 0.5}}
    (note,) = [n for n in plan_of(dense, 8 << 30, stated).notes if "not needed" in n]
    assert "free on the device" in note
    assert "offloaded" in note
    budget = {"overspill": {"device_fit": {"weight_budget_bytes": 1310 * MIB}}}
    assert not any("not needed" in n for n in plan_of(dense, 8 << 30, stated | budget).notes), "the budget needs it"
    tight = plan_of(dense, plan_of(dense, 8 << 30, stated).memory.device_bytes + MIB, stated)
    assert not any("not needed" in n for n in tight.notes)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "nemotron_h"])
def test_a_fitted_model_runs_with_the_same_bits(name: str, tiny: MakeTiny, tmp_path: Path) -> None:
    expected, _, _ = forward(placed(tiny(name)), PROMPT)
    model = mapped(tiny(name))
    whole = plan_of(model, 1 << 30).memory.device_bytes
    device = emulated(int(whole * 0.85))
    plan = make_plan(model, settings_for({}), device, context_tokens=32)
    assert plan.offloads
    found, _, _ = forward(place(plan, device, debug=True), PROMPT)
    if plan.placed:  # other kernels
        assert (found - expected).square().sum() < 5e-4 * expected.square().sum()
    else:
        assert torch.equal(found, expected)
    assert device.peak_bytes() <= int(whole * 0.85)
    assert name in TINY
