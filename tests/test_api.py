from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from emulated_runs import PROMPT, gib
from overspill import api
from overspill.errors import CapacityError, CheckpointError, ConfigError, OverspillWarning, UnsupportedModelError
from overspill.machine.emulated import EmulatedDevice
from overspill.model.hf import cache_of
from overspill.model.map import map_live
from overspill.offload.placed import place
from overspill.plan import Tier, make_plan
from tiny_models import CONTEXT, TINY, MakeTiny

EMULATED: dict[str, Any] = {"device": "emulated", "max_model_len": CONTEXT, "debug": True}
UVA = {"uva": {"cpu_offload_gb": gib(100_000)}}
PREFETCH = {"prefetch": {"offload_group_size": 2}}
GREEDY = overspill.SamplingParams(max_tokens=6)


# -- plan and load -----------------------------------------------------------------------------------------------------


def test_plan_reads_headers_and_says_what_would_be_where(tiny: MakeTiny) -> None:
    plan = overspill.plan(tiny("llama"), UVA, **EMULATED)
    assert 100_000 <= plan.offloaded_bytes < plan.model.nbytes
    assert plan.backend == "uva"
    assert plan.context_tokens == CONTEXT
    assert all(p.device.type == "meta" for p in plan.model.skeleton.parameters())


def test_every_way_of_writing_an_offload_gives_the_same_plan(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2}}
    written = [
        overspill.plan(tiny("llama"), document, **EMULATED),
        overspill.plan(tiny("llama"), json.dumps(document), **EMULATED),
        overspill.plan(tiny("llama"), overspill.OffloadConfig.model_validate(document), **EMULATED),
        overspill.plan(
            str(tiny("llama")),
            offload_group_size=3,
            offload_num_in_group=2,
            offload_prefetch_step=2,
            **EMULATED,
        ),
    ]
    assert len({tuple(p.weight.full for p in plan.on(Tier.HOST)) for plan in written}) == 1
    assert written[0].ring is not None


@pytest.mark.parametrize("nothing", [None, "", "  ", {}])
def test_no_document_is_no_offload(nothing: Any, tiny: MakeTiny) -> None:
    plan = overspill.plan(tiny("llama"), nothing, **EMULATED)
    assert plan.offloaded_bytes == 0
    assert plan.backend is None


def test_load_gives_an_engine_that_answers_as_the_resident_one(tiny: MakeTiny) -> None:
    heard: list[int] = []
    resident = overspill.load(tiny("qwen3_moe"), progress=heard.append, **EMULATED)
    expected = resident.generate(list(PROMPT), GREEDY, logits=True, ignore_eos=True)
    assert sum(heard) == resident.plan.model.nbytes
    assert expected.logits is not None
    assert len(set(expected.token_ids)) > 1  # one repeated token would be no evidence
    for document in (UVA, PREFETCH):
        engine = overspill.load(tiny("qwen3_moe"), document, **EMULATED)
        answer = engine.generate(list(PROMPT), GREEDY, logits=True, ignore_eos=True)
        assert answer.token_ids == expected.token_ids
        assert answer.logits is not None
        assert torch.equal(answer.logits, expected.logits)
        assert all(step.traffic.bytes > 0 for step in answer.steps)
        assert engine.ledger.bytes_on(Tier.HOST) == engine.plan.offloaded_bytes > 0


def test_a_dropped_engine_frees_its_memory(tiny: MakeTiny) -> None:
    engine = overspill.load(tiny("llama"), PREFETCH, **EMULATED)
    engine.generate(list(PROMPT), GREEDY, ignore_eos=True)
    device = engine.placed.device
    assert device.held_bytes("weights") > 0
    assert device.held_bytes("buffer_pool") > 0
    del engine
    gc.collect()
    held = {purpose: device.held_bytes(purpose) for purpose in ("weights", "buffer_pool", "kv_cache", "working")}
    assert held == dict.fromkeys(held, 0)


# -- refusals, in their order ------------------------------------------------------------------------------------------


def test_the_configuration_is_refused_before_the_model_is_looked_for() -> None:
    nowhere = Path("/nowhere/at/all")
    with pytest.raises(ConfigError, match="cpu_offload_gb"):
        overspill.plan(nowhere, {"uva": {"cpu_offload_gb": -1}}, **EMULATED)
    with pytest.raises(ConfigError, match="would free nothing"):
        overspill.load(nowhere, UVA, device="cpu")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        overspill.load(nowhere, **{**EMULATED, "max_num_seqs": 0})
    with pytest.raises(CheckpointError, match="nowhere"):
        overspill.load(nowhere, UVA, **EMULATED)


def test_a_flag_against_the_document_is_refused(tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match="cpu_offload_gb"):
        overspill.plan(tiny("llama"), UVA, cpu_offload_gb=3, **EMULATED)


def test_an_unknown_option_is_refused(tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match="cpu_ofload_gb"):
        overspill.plan(tiny("llama"), cpu_ofload_gb=3, **EMULATED)


def test_memory_is_refused_before_it_is_taken(tiny: MakeTiny) -> None:
    with pytest.raises(CapacityError, match=r"the limit is 97\.66 KiB"):
        overspill.load(tiny("llama"), fit=False, device_memory_bytes=100_000, **EMULATED)
    engine = overspill.load(tiny("llama"), UVA, device_memory_bytes=170_000, **EMULATED)
    assert engine.generate(list(PROMPT), GREEDY, ignore_eos=True).token_ids


# -- offload of a live model -------------------------------------------------------------------------------------------


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        first = model(torch.tensor([ids[:-1]]), use_cache=True)
        assert cache_of(first) is not None
        result: torch.Tensor = model(torch.tensor([ids])).logits
    return result


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("document", [UVA, PREFETCH], ids=["uva", "prefetch"])
def test_a_live_model_answers_as_before(name: str, document: dict[str, Any], tiny: MakeTiny) -> None:
    model: Any = TINY[name].model()
    model.set_experts_implementation("eager")
    before = logits_of(model, list(PROMPT))
    placed = overspill.offload(model, document, tokens=CONTEXT, device="emulated", debug=True)
    assert placed.model is model
    device = placed.device
    moved = device.traffic.bytes
    with placed.running():
        after = model(device.to_device(torch.tensor([list(PROMPT)]))).logits
    assert torch.equal(after, before)
    assert device.traffic.bytes > moved
    assert placed.ledger.bytes_on(Tier.HOST) == placed.plan.offloaded_bytes > 0
    assert placed.ledger.read_bytes == 0


OURS, GGUF = r"layers\.[45]\.mlp\.experts", r"blk\.[45]\.ffn_.*_exps"


@pytest.mark.parametrize("pattern", [OURS, GGUF], ids=["our names", "GGUF's"])
def test_a_live_models_experts_are_placed_and_stream(pattern: str) -> None:
    model: Any = TINY["qwen3_moe"].model()
    model.set_experts_implementation("eager")
    before = logits_of(model, list(PROMPT))
    placed = overspill.offload(
        model,
        {"overspill": {"expert_stream": {"slots": 8}}},
        override_tensor=[f"{pattern}=cpu"],
        tokens=CONTEXT,
        device="emulated",
        debug=True,
    )
    assert [block.layer for block in placed.plan.placed] == [4, 5]
    with placed.running():
        after = model(placed.device.to_device(torch.tensor([list(PROMPT)]))).logits
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    assert float((after - before).square().sum() / before.square().sum()) < 1e-9
    assert {run.use.calls for _, run in placed.experts.by_module()} == {1}
    assert placed.experts.stream is not None
    assert placed.experts.stream.counts.lookups > 0


def test_a_live_models_streamed_experts_are_the_same_bits() -> None:
    model: Any = TINY["qwen3_moe"].model()
    model.set_experts_implementation("eager")
    before = logits_of(model, list(PROMPT))
    placed = overspill.offload(model, "", expert_cache="48KiB", tokens=CONTEXT, device="emulated", debug=True)
    with placed.running():
        after = model(placed.device.to_device(torch.tensor([list(PROMPT)]))).logits
    assert torch.equal(after, before)


def test_a_live_model_has_no_file_to_stream_from() -> None:
    with pytest.raises(ConfigError, match="in memory already has no file to stream from") as refused:
        overspill.offload(TINY["qwen3_moe"].model(), {"overspill": {"expert_stream": {"tier": "disk"}}}, device="cpu")
    assert "overspill.load()" in (refused.value.hint or "")


def test_a_live_model_is_not_touched_by_a_refusal() -> None:
    model: Any = TINY["llama"].model()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    for document, error in (
        (None, ConfigError),
        ({}, ConfigError),
        ({"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["nothing"]}}, ConfigError),
        ({"prefetch": {"offload_group_size": 2, "offload_prefetch_step": 5}}, ConfigError),
    ):
        with pytest.raises(error):
            overspill.offload(model, document, device="emulated")
    with pytest.raises(ConfigError, match="would free nothing"):
        overspill.offload(model, UVA, device="cpu")
    with pytest.raises(CapacityError):
        overspill.offload(model, UVA, device="emulated", device_memory_bytes=50_000)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


def test_offload_without_anything_to_offload_says_how() -> None:
    with pytest.raises(ConfigError, match="given no offload") as refused:
        overspill.offload(torch.nn.Linear(1, 1), "", device="emulated")
    assert "cpu_offload_gb" in (refused.value.hint or "")


def test_a_live_model_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no stack of layers"):
        overspill.offload(torch.nn.Linear(1, 1), UVA, device="emulated")


class _Watching(EmulatedDevice):
    """Notes, at each upload, how many of the watched tensors are still in memory."""

    def __init__(self, watched: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.watched = [weakref.ref(tensor.untyped_storage()) for tensor in watched]
        self.alive: list[int] = []

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().upload(target, source)
        self.alive.append(sum(reference() is not None for reference in self.watched))


def test_a_live_models_memory_is_handed_over_weight_by_weight() -> None:
    model = TINY["llama_tied"].model()
    count = len(list(model.parameters()))
    device = _Watching(model.parameters())
    settings = api.settings_of(UVA, {"device": "emulated"})
    place(make_plan(map_live(model, tokens=4), settings, device, context_tokens=4), device)
    assert device.alive[-count:] == list(range(count, 0, -1))  # each is gone before the next is copied
    assert all(reference() is None for reference in device.watched)


def test_training_is_switched_off_and_gradients_too() -> None:
    model = TINY["llama"].model().train().requires_grad_(True)
    placed = overspill.offload(model, UVA, tokens=CONTEXT, device="emulated")
    assert not placed.model.training
    assert not any(parameter.requires_grad for parameter in placed.model.parameters())


def test_the_cpu_as_the_device_answers_like_the_emulated_one(tiny: MakeTiny) -> None:
    expected = overspill.load(tiny("qwen3_moe"), **EMULATED).generate(list(PROMPT), GREEDY, logits=True)
    engine = overspill.load(tiny("qwen3_moe"), device="cpu", max_model_len=CONTEXT)
    answer = engine.generate(list(PROMPT), GREEDY, logits=True)
    assert answer.token_ids == expected.token_ids
    assert answer.logits is not None
    assert expected.logits is not None
    assert torch.equal(answer.logits, expected.logits)
    assert engine.plan.device_kind == "cpu"


def test_options_that_a_model_in_memory_has_no_use_for_are_refused() -> None:
    model = TINY["llama"].model()
    for option in ({"dtype": "bfloat16"}, {"max_model_len": 8}, {"revision": "main"}, {"seed": 1}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            overspill.offload(model, UVA, device="emulated", **option)
    with pytest.raises(ConfigError, match="tokens is 0"):
        overspill.offload(model, UVA, device="emulated", tokens=0)


def test_a_model_is_offloaded_once() -> None:
    placed = overspill.offload(TINY["llama"].model(), UVA, device="emulated", tokens=CONTEXT)
    with pytest.raises(ConfigError, match="offloaded already"):
        overspill.offload(placed.model, PREFETCH, device="emulated", tokens=CONTEXT)


def test_what_yields_to_something_else_is_warned_of(tiny: MakeTiny) -> None:
    with pytest.warns(OverspillWarning, match="cpu_offload_gb asks for"):
        overspill.load(tiny("llama"), {"uva": {"cpu_offload_gb": 1}}, device="emulated")
