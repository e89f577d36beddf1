from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from emulated_runs import CONTEXT, DISABLE_UVA, emulated, gib, mapped, settings_for
from overspill.config import FLAGS
from overspill.errors import CapacityError, ConfigError
from overspill.machine.arena import packed_bytes
from overspill.machine.cpu import CpuDevice
from overspill.model.map import map_live
from overspill.model.sources import Conversion
from overspill.model.weights import ModelMap
from overspill.plan import Access, Plan, Tier, make_plan, refuse_device
from tiny_models import MakeTiny, save_headers

GIB = 1 << 30
UVA = {"uva": {"cpu_offload_gb": gib(100_000)}}
NO_FIT: dict[str, Any] = {"overspill": {"placement": {"fit": False}}}


def plan_of(
    model: ModelMap,
    document: dict[str, Any] | None = None,
    memory_bytes: int = GIB,
    environ: dict[str, str] | None = None,
) -> Plan:
    settings = settings_for(document, environ)
    return make_plan(model, settings, emulated(memory_bytes), context_tokens=model.trace.tokens)


@cache
def tiny_llama() -> ModelMap:
    config = LlamaConfig(
        vocab_size=37, hidden_size=20, intermediate_size=21, num_hidden_layers=9, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False)
    return map_live(model, tokens=CONTEXT)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ModelMap:
    """4.6 GB of weights of which only the headers exist: a plan needs no more."""
    folder = tmp_path_factory.mktemp("large") / "llama"
    save_headers(
        folder,
        LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
    )
    return mapped(folder, tokens=4096)


@given(
    document=st.one_of(
        st.none(),
        st.builds(
            lambda budget, order: {"uva": {"cpu_offload_gb": gib(budget)}, "overspill": {"order": order}},
            st.integers(1, 200_000),
            st.sampled_from(["traffic", "declaration"]),
        ),
        st.builds(
            lambda size, number, step: {
                "prefetch": {
                    "offload_group_size": size,
                    "offload_num_in_group": min(size, number),
                    "offload_prefetch_step": step,
                }
            },
            st.integers(1, 4),
            st.integers(1, 4),
            st.integers(1, 4),
        ),
    ),
    zero_copy=st.booleans(),
)
def test_every_byte_of_the_model_is_in_one_tier(document: dict[str, Any] | None, zero_copy: bool) -> None:
    model = tiny_llama()
    plan, refusal = None, ""
    try:
        plan = plan_of(model, document, environ={} if zero_copy else DISABLE_UVA)
    except ConfigError as error:
        refusal = str(error)
    if plan is None:
        assert re.search(r"nothing (is|would be) saved", refusal)
        return
    assert [p.weight for p in plan.placements] == list(model.weights)
    by_tier = {tier: [p.weight for p in plan.on(tier)] for tier in Tier}
    assert sum(w.nbytes for weights in by_tier.values() for w in weights) == model.nbytes
    assert sum(plan.bytes_by_access().values()) == model.nbytes
    assert all((p.tier is Tier.DEVICE) == (p.access is Access.RESIDENT) for p in plan.placements)

    memory = plan.memory
    assert memory.weights_bytes == packed_bytes(w.nbytes for w in by_tier[Tier.DEVICE]) + plan.buffers_bytes
    assert 0 <= memory.host_bytes - packed_bytes(w.nbytes for w in by_tier[Tier.HOST]) < 4096
    assert plan.offloaded_bytes == sum(w.nbytes for w in by_tier[Tier.HOST])
    assert plan.saved_bytes == plan.offloaded_bytes - memory.buffer_pool_bytes
    assert (document is None) == (plan.offloaded_bytes == 0)
    if plan.ring is None:
        assert memory.buffer_pool_bytes == 0
    else:
        assert memory.buffer_pool_bytes == plan.ring.step * max(layer.nbytes for layer in plan.ring.layers)
        assert {w.full for layer in plan.ring.layers for w in layer.weights} == {w.full for w in by_tier[Tier.HOST]}


def test_the_step_forecast_adds_up() -> None:
    plan = plan_of(tiny_llama(), {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 3}})
    assert plan.ring is not None
    assert plan.step.link_bytes == plan.ring.pass_bytes == 9 * plan.ring.layers[0].nbytes
    assert plan.step.transfers == 9
    link = plan.step.link
    assert link is not None
    assert plan.step.link_floor_s == pytest.approx(plan.step.link_bytes / link.bandwidth + 9 * link.latency_s)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [
        NO_FIT,
        {"uva": {"cpu_offload_gb": 0.5}},
        {"uva": {"cpu_offload_gb": 0.5}, "overspill": {"order": "declaration"}},
        {"prefetch": {"offload_group_size": 8}},
        {"prefetch": {"offload_group_size": 12, "offload_num_in_group": 2, "offload_prefetch_step": 2}},
    ],
    ids=["no offload", "uva", "declaration", "prefetch", "prefetch two of twelve"],
)
def test_the_hint_of_a_full_device_fits_when_it_is_followed(document: dict[str, Any] | None, large: ModelMap) -> None:
    with pytest.raises(CapacityError, match=r"the limit is 3\.00 GiB") as refused:
        plan_of(large, document, 3 * GIB)
    hint = refused.value.hint or ""
    found = re.search(r"\((--[a-z-]+) ([\d.]+)\)", hint)
    assert found is not None, hint
    flag = found[1].removeprefix("--").replace("-", "_")
    section, field = FLAGS[flag]
    followed: dict[str, Any] = {name: dict(value) for name, value in (document or {}).items()}
    followed.setdefault(section, {})[field] = float(found[2])
    plan = plan_of(large, followed, 3 * GIB)
    needed = plan.memory.device_bytes - (plan.memory.working_bytes or 0)
    assert needed <= 3 * GIB
    # … and is no more than is needed, but for the last weight or layer group and the figure's rounding.
    assert needed > 2.6 * GIB


def test_the_hint_of_a_full_device_holds_without_zero_copy(large: ModelMap) -> None:
    """There the pool takes some of what the budget frees: the figure must still fit."""
    document = {"uva": {"cpu_offload_gb": 0.5}}
    with pytest.raises(CapacityError) as refused:
        plan_of(large, document, 3 * GIB, DISABLE_UVA)
    found = re.search(r"--cpu-offload-gb ([\d.]+)", refused.value.hint or "")
    assert found is not None
    plan_of(large, {"uva": {"cpu_offload_gb": float(found[1])}}, 3 * GIB, DISABLE_UVA)


def test_a_device_too_small_for_the_cache_is_not_told_to_offload_more(large: ModelMap) -> None:
    cache_bytes = large.trace.kv_cache_bytes
    for document in (NO_FIT, {"uva": {"cpu_offload_gb": 100}}, {"prefetch": {"offload_group_size": 1}}):
        with pytest.raises(CapacityError, match="KV cache") as refused:
            plan_of(large, document, cache_bytes // 2)
        assert "moving weights alone is not enough" in (refused.value.hint or "")
        assert "--max-model-len" in (refused.value.hint or "")


def test_the_refusal_of_a_full_device_names_parts_and_the_largest_weight(large: ModelMap) -> None:
    with pytest.raises(CapacityError, match=r"emulated.* need 4\.\d+ GiB") as refused:
        plan_of(large, NO_FIT, 3 * GIB)
    assert "KV cache 384.00 MiB for 1 x 4096 tokens" in refused.value.message
    assert "model.embed_tokens.weight, 125.00 MiB" in refused.value.message


def test_more_than_the_host_has_is_refused(tmp_path: Path) -> None:
    """Weights of 4 TiB, all headers: no machine that runs this test has that much memory."""
    config = LlamaConfig(
        vocab_size=1 << 20, hidden_size=1 << 19, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4096
    )
    save_headers(tmp_path / "giant", config)
    model = mapped(tmp_path / "giant", tokens=1)
    with pytest.raises(CapacityError, match=r"host memory: the plan places 4096\.\d+ GiB there"):
        plan_of(model, {"uva": {"cpu_offload_gb": 1 << 20}}, 1 << 50)


def test_a_stated_weight_budget_is_the_limit_for_weights_and_pool(large: ModelMap) -> None:
    document = {"overspill": {"device_fit": {"weight_budget_bytes": 2 * GIB}, **NO_FIT["overspill"]}}
    with pytest.raises(CapacityError, match=r"weights and buffer pool need .* the limit is 2\.00 GiB") as refused:
        plan_of(large, document, 64 * GIB)
    assert "weight_budget_bytes" in (refused.value.hint or "")
    found = re.search(r"--cpu-offload-gb ([\d.]+)", refused.value.hint or "")
    assert found is not None
    plan = plan_of(large, document | {"uva": {"cpu_offload_gb": float(found[1])}}, 64 * GIB)
    assert plan.memory.weights_bytes <= 2 * GIB


def test_a_weight_budget_of_zero_means_no_verdict_before_loading(large: ModelMap) -> None:
    plan = plan_of(large, {"overspill": {"device_fit": {"weight_budget_bytes": 0}}}, 1000)
    assert plan.memory.device_bytes > 1000 == plan.memory.available_device_bytes


def test_memory_just_enough_is_enough() -> None:
    memory = plan_of(tiny_llama(), UVA).memory
    enough = memory.device_bytes - (memory.working_bytes or 0)
    plan_of(tiny_llama(), UVA, enough)
    with pytest.raises(CapacityError):
        plan_of(tiny_llama(), UVA, enough - 1)


def sparse_refusal(model: ModelMap, document: dict[str, Any] | None, limit: int) -> str:
    with pytest.raises(CapacityError) as refused:
        plan_of(model, document, limit)
    return refused.value.hint or ""


def needed_by(model: ModelMap, document: dict[str, Any] | None) -> int:
    """The device memory that `document` takes, working memory included, for which a hint leaves room."""
    return plan_of(model, document).memory.device_bytes


def placing(**placement: Any) -> dict[str, Any]:
    return {"overspill": {"placement": placement}}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_a_full_device_names_the_least_layers_of_experts_for_the_cpu(name: str, tiny: MakeTiny) -> None:
    """The first layer of deepseek_v2 is dense, and is one of those that are counted."""
    model = mapped(tiny(name), tokens=1)
    for layers, written in ((3, "--n-cpu-moe 3)"), (6, "--cpu-moe)")):
        limit = needed_by(model, placing(n_cpu_moe=layers))
        for document in (NO_FIT, placing(n_cpu_moe=2, fit=False)):
            assert f"or {written}" in sparse_refusal(model, document, limit)
        assert written not in sparse_refusal(model, NO_FIT, limit - 1)
    assert "cpu-moe" not in sparse_refusal(model, placing(cpu_moe=True, fit=False), model.trace.kv_cache_bytes)


def test_a_dense_model_is_not_told_of_experts(large: ModelMap) -> None:
    assert "cpu-moe" not in sparse_refusal(large, NO_FIT, 3 * GIB)


@pytest.mark.parametrize(
    ("stated", "smaller"),
    [
        ({"slots": 30}, r'"expert_stream": \{"slots": (\d+)\}'),
        ({"slots": 30, "slot_bytes": 5000}, r'"expert_stream": \{"slots": (\d+), "slot_bytes": (\d+)\}'),
        ({"cache_bytes": 150_000}, r"--expert-cache (\d+KiB)"),
    ],
)
def test_a_cache_that_is_too_large_is_told_what_fits(stated: dict[str, int], smaller: str, tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"), tokens=1)
    limit = needed_by(model, {"overspill": {"expert_stream": {"slots": 25}}})
    hint = sparse_refusal(model, {"overspill": {"expert_stream": stated}}, limit)
    found = re.search(rf"take a smaller expert cache \({smaller}\)", hint)
    assert found is not None, hint
    values = [value if value.endswith("KiB") else int(value) for value in found.groups()]
    plan = plan_of(model, {"overspill": {"expert_stream": dict(zip(stated, values, strict=True))}}, limit)
    assert plan.slots is not None
    assert 23 <= plan.slots.count <= 25


def test_a_cache_of_what_the_device_has_left_is_not_told_to_shrink(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"), tokens=1)
    document = {"overspill": {"expert_stream": {"enabled": True}}}
    least = needed_by(model, {"overspill": {"expert_stream": {"slots": 1}}}) - (model.trace.working_bytes or 0)
    assert plan_of(model, document, least).memory.expert_slots_bytes > 0
    assert "expert cache" not in sparse_refusal(model, document, least - 1)


# -- devices and words -------------------------------------------------------------------------------------------------


def test_the_cpu_refuses_host_offload_before_any_model() -> None:
    for document in (UVA, {"prefetch": {"offload_group_size": 2}}):
        with pytest.raises(ConfigError, match="would free nothing") as refused:
            refuse_device(settings_for(document), CpuDevice())
        assert "emulated" in (refused.value.hint or "")
    refuse_device(settings_for(None), CpuDevice())
    with pytest.raises(ConfigError, match="would free nothing"):
        make_plan(tiny_llama(), settings_for(UVA), CpuDevice(), context_tokens=CONTEXT)


def test_a_full_cpu_is_not_told_to_offload(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=1 << 20, hidden_size=1 << 19, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4096
    )
    save_headers(tmp_path / "giant", config)
    model = mapped(tmp_path / "giant", tokens=1)
    with pytest.raises(CapacityError, match="CPU") as refused:
        make_plan(model, settings_for(None), CpuDevice(), context_tokens=1)
    assert "--cpu-offload-gb" not in (refused.value.hint or "")


def test_the_plan_says_what_is_transformed_while_loading(tiny: MakeTiny) -> None:
    model = mapped(tiny("llama"))
    assert not any("transformed" in note for note in plan_of(model).notes)
    query = model.weights[1]
    records = tuple(model.checkpoint.tensors.values())[:1] if model.checkpoint is not None else ()
    source = Conversion(records, (query.full,), lambda raw: {}, "Transpose(0)")
    turned = replace(model, weights=(model.weights[0], replace(query, source=source), *model.weights[2:]))
    (note,) = [note for note in plan_of(turned).notes if "transformed" in note]
    assert note.startswith("1 weights (")
    assert "Transpose(0)" in note


def test_the_plan_says_how_a_budget_moves_without_zero_copy() -> None:
    notes = plan_of(tiny_llama(), UVA, environ=DISABLE_UVA).notes
    assert any(note.startswith("without zero-copy") for note in notes)
    assert not any("zero-copy" in note for note in plan_of(tiny_llama(), UVA).notes)
