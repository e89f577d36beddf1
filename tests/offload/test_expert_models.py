"""Whole models with routed experts: placed on the CPU, streamed through slots, from host memory and from disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import overspill
from emulated_runs import DECODED, PROMPT, emulated, forward, passes, placed, planned
from overspill.engine import SamplingParams
from overspill.errors import CheckpointError, ConfigError, PlacementDefect, UnsupportedModelError
from overspill.machine.cpu import CpuDevice
from overspill.model.hf_experts import install, installed
from overspill.offload.ledger import take_ledger
from overspill.offload.placed import PlacedModel, place
from overspill.plan import Access, Tier
from tiny_models import TINY, MakeTiny

MODELS = (
    "qwen3_moe", "qwen3_5_moe", "qwen3_next", "nemotron_h", "deepseek_v2", "deepseek_v3", "deepseek_v4",
    "kimi_linear", "laguna", "gpt_oss", "mixtral", "mixtral_fused", "glm4_moe",
)  # fmt: skip
ITS_OWN_LOOP = {
    "llama4": "Llama4ForCausalLM computes its routed experts .* by itself",
    "dbrx": "DbrxForCausalLM could not be traced",
    "jetmoe": "JetMoeForCausalLM could not be traced",
}
EVERY_WAY = ("qwen3_moe", "mixtral", "gpt_oss")
"""These in all ways, the others in those that differ most."""
NMSE_BOUND = 5e-4


def extension(**fields: Any) -> dict[str, Any]:
    return {"overspill": fields}


CPU_MOE = extension(placement={"cpu_moe": True})
SAME_BITS = {
    "slots for some": extension(expert_stream={"slots": 8}),
    "one slot": extension(expert_stream={"slots": 1}),
    "slots for all": extension(expert_stream={"enabled": True}),
    "from disk": extension(expert_stream={"slots": 5, "tier": "disk"}),
    "with a budget": {"uva": {"cpu_offload_gb": 1e-5}, **extension(expert_stream={"slots": 8})},
    "with prefetch": {
        "prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1, "offload_params": ["self_attn"]},
        **extension(expert_stream={"slots": 8}),
    },
}
NEAR = {
    "all on the CPU": CPU_MOE,
    "the first layers on the CPU": extension(placement={"n_cpu_moe": 3}),
    "placed and streamed": extension(placement={"n_cpu_moe": 3}, expert_stream={"slots": 8}),
    "misses on the CPU": extension(expert_stream={"slots": 8, "policy": "cpu"}),
    "what costs less": extension(expert_stream={"slots": 8, "policy": "auto"}),
}


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (result.double() - expected.double()).square().sum()
    return float(difference / expected.double().square().sum())


@dataclass(frozen=True)
class Reference:
    name: str
    logits: list[torch.Tensor]
    blocks: list[torch.Tensor]


def block_outputs(model: PlacedModel) -> list[torch.Tensor]:
    """What the first block of routed experts makes of the prompt: all before it is computed alike everywhere."""
    seen: list[torch.Tensor] = []
    path = next(iter(model.plan.model.trace.experts_top_k))
    hook = model.model.get_submodule(path).register_forward_hook(lambda m, args, output: seen.append(output.clone()))
    forward(model, PROMPT)
    hook.remove()
    return seen


@pytest.fixture(scope="module")
def reference_of(tiny: MakeTiny) -> Callable[[str], Reference]:
    @cache
    def make(name: str) -> Reference:
        resident = placed(tiny(name))
        logits, _ = passes(resident)
        return Reference(name, logits, block_outputs(resident))

    return make


def cases(ways: Iterable[str], most: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, way) for name in MODELS for way in (ways if name in EVERY_WAY else most)]


@pytest.mark.parametrize(("name", "way"), cases(SAME_BITS, ("slots for some", "from disk")))
def test_streamed_experts_give_the_same_bits(
    name: str, way: str, reference_of: Callable[[str], Reference], tiny: MakeTiny
) -> None:
    reference = reference_of(name)
    model = placed(tiny(name), SAME_BITS[way])
    tier = Tier.DISK if way == "from disk" else Tier.HOST
    streamed = [p for p in model.plan.placements if p.access is Access.STREAM]
    assert {p.tier for p in streamed} == {tier}
    assert {p.weight.role for p in streamed} == {"routed_expert"}
    held = {e.name: e for e in model.ledger.entries}
    assert all((held[p.weight.full].tier, held[p.weight.full].access) == (tier, Access.STREAM) for p in streamed)
    for _ in range(2):  # again: what slots hold by then changes nothing
        logits, _ = passes(model)
        assert all(torch.equal(one, other) for one, other in zip(logits, reference.logits, strict=True))
    stream = model.experts.stream
    assert stream is not None
    stream.cache.check()
    assert stream.counts.misses > 0
    assert stream.counts.lookups == stream.counts.hits + stream.counts.misses
    brought = stream.counts.fills + stream.counts.streamed
    assert stream.counts.bytes == brought * stream.slots.blocks[0].expert_bytes
    assert model.device.held_bytes("expert_slots") == stream.slots.pool_bytes == model.plan.memory.expert_slots_bytes
    model.experts.prove_used()


@pytest.mark.parametrize(("name", "way"), cases(NEAR, ("all on the CPU", "misses on the CPU")))
def test_experts_on_the_cpu_stay_within_the_bound(
    name: str, way: str, reference_of: Callable[[str], Reference], tiny: MakeTiny
) -> None:
    reference = reference_of(name)
    model = placed(tiny(name), NEAR[way])
    logits, moved = passes(model)
    assert all(torch.isfinite(result).all() for result in logits)
    for result, expected in zip(block_outputs(model), reference.blocks, strict=True):
        assert nmse(result, expected) < 1e-9, "float32 on both sides"
    assert max(nmse(one, other) for one, other in zip(logits, reference.logits, strict=True)) < NMSE_BOUND
    for run in model.experts.in_place:
        assert run.use.calls == 2 + len(DECODED)
        assert run.use.tokens == 2 * len(PROMPT) + len(DECODED)
        least = run.use.calls * run.block.expert_bytes  # a token may choose an expert twice (DeepSeek V4 hashes)
        assert least <= run.use.bytes <= run.use.calls * run.block.nbytes
    told = {entry.path: entry for entry in model.ledger.experts}
    assert told.keys() == {block.path for block in model.plan.placed} | {
        run.block.path for run in model.experts.streamed
    }
    for path, run in model.experts.by_module():
        entry = told[path]
        assert (entry.access, entry.calls, entry.bytes) == (run.access, run.use.calls, run.use.bytes)
        assert entry.calls > 0
    assert (model.ledger.slots is None) is (model.experts.stream is None)
    if way == "all on the CPU":
        assert moved[-1] == model.plan.step.in_place_bytes == round(model.plan.step.link_bytes)
        assert moved[0] == len(PROMPT) * moved[-1]
        assert not [p for p in model.plan.on(Tier.DEVICE) if p.weight.role == "routed_expert"]
    if model.experts.stream is not None:
        model.experts.stream.cache.check()


def test_shared_experts_are_computed_while_the_cpu_works(tiny: MakeTiny) -> None:
    """DeepSeek calls them after the routed ones, Qwen3-Next before: there is nothing to do ahead then."""
    for name, ahead in (("deepseek_v2", 1 + len(DECODED)), ("qwen3_next", 0)):
        model = placed(tiny(name), CPU_MOE)
        passes(model)
        shares = [run._shared for run in model.experts.in_place]
        assert {share.used for share in shares if share is not None} == {ahead}


def test_hidden_states_cross_once_each_way(tiny: MakeTiny) -> None:
    model = placed(tiny("qwen3_moe"), extension(placement={"n_cpu_moe": 2}))
    device = model.device
    forward(model, PROMPT)
    before = device.traffic.copy()
    forward(model, PROMPT)
    crossed = device.traffic - before
    tokens, hidden, top_k = len(PROMPT), 35, 2
    assert crossed.bytes == 2 * tokens * hidden * 4
    assert crossed.transfers == 2
    assert crossed.returned_bytes == 2 * tokens * (hidden * 4 + top_k * 8 + top_k * 4)


def test_more_tokens_than_staging_holds_go_in_pieces(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, _ = forward(placed(tiny("qwen3_moe"), CPU_MOE), PROMPT)
    monkeypatch.setattr(sys.modules["overspill.plan.staging"], "STAGED_TOKENS", 4)
    pieces, _, _ = forward(placed(tiny("qwen3_moe"), CPU_MOE), PROMPT)
    assert torch.equal(whole, pieces)


def test_the_cpu_device_streams_from_disk(tiny: MakeTiny) -> None:
    ids = list(PROMPT)
    plain = overspill.load(tiny("qwen3_moe"), device="cpu").generate(ids, SamplingParams(max_tokens=4), logits=True)
    engine = overspill.load(tiny("qwen3_moe"), extension(expert_stream={"slots": 8, "tier": "disk"}), device="cpu")
    streamed = engine.generate(ids, SamplingParams(max_tokens=4), logits=True)
    assert streamed.token_ids == plain.token_ids
    assert torch.equal(streamed.logits, plain.logits)
    assert engine.ledger.bytes_on(Tier.DISK) == engine.plan.offloaded_bytes > 0
    assert "host" not in {block.purpose for block in engine.ledger.blocks}


def test_a_file_cut_short_fails_the_pass_and_a_later_one_works(tiny: MakeTiny, tmp_path: Any) -> None:
    TINY["qwen3_moe"].save(tmp_path)
    file = tmp_path / "model.safetensors"
    reference, _, _ = forward(placed(tmp_path), PROMPT)
    model = placed(tmp_path, extension(expert_stream={"slots": 8, "tier": "disk"}))
    content, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    with file.open("r+b") as opened:
        opened.truncate(len(content) // 3)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed since its header was read \(size"):
        forward(model, PROMPT)
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=times)
    logits, _, _ = forward(model, PROMPT)
    assert torch.equal(logits, reference), "no slot is believed to hold what never came"
    assert model.experts.stream is not None
    model.experts.stream.cache.check()


@pytest.mark.parametrize("document", [CPU_MOE, extension(expert_stream={"slots": 8})], ids=["placed", "streamed"])
@pytest.mark.parametrize("name", ITS_OWN_LOOP)
def test_an_architecture_with_its_own_loop_is_refused_by_name(name: str, document: Any, tiny: MakeTiny) -> None:
    with pytest.raises(UnsupportedModelError, match=ITS_OWN_LOOP[name]) as refused:
        planned(tiny(name), document)
    assert "uva" in (refused.value.hint or "")
    assert "prefetch" in (refused.value.hint or "")


@pytest.mark.parametrize("name", ITS_OWN_LOOP)
def test_its_experts_are_moved_whole(name: str, tiny: MakeTiny) -> None:
    reference, _ = passes(placed(tiny(name)))
    moved = placed(tiny(name), {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]}})
    logits, _ = passes(moved)
    assert moved.plan.offloaded_bytes > 0
    assert all(torch.equal(one, other) for one, other in zip(logits, reference, strict=True))


def test_a_block_that_nothing_computes_as_planned_is_our_defect(tiny: MakeTiny) -> None:
    model = placed(tiny("mixtral"), CPU_MOE)
    module = model.model.get_submodule("model.layers.2.mlp.experts")
    runner = installed(module)
    del vars(module)["_overspill_runner"]

    def again() -> None:
        take_ledger(model.model, model.plan, model.blocks, model.hosts, model.device, read_bytes=0, load_seconds=0.0)

    with pytest.raises(PlacementDefect, match=r"model\.layers\.2\.mlp\.experts\.gate_up_proj: nothing computes"):
        again()
    assert runner is not None
    install(module, runner)
    again()


def test_a_placed_layer_that_no_pass_ran_is_our_defect(tiny: MakeTiny) -> None:
    model = placed(tiny("mixtral"), CPU_MOE)
    with pytest.raises(PlacementDefect, match=r"experts of 6 layers .*model\.layers\.0\.mlp\.experts"):
        model.experts.prove_used()
    forward(model, PROMPT)
    model.experts.prove_used()


def test_on_the_cpu_a_placement_is_inert_and_says_so(tiny: MakeTiny) -> None:
    from emulated_runs import CONTEXT, mapped, settings_for
    from overspill.plan import make_plan

    settings = settings_for(CPU_MOE, device="cpu")
    plan = make_plan(mapped(tiny("mixtral")), settings, CpuDevice(), context_tokens=CONTEXT)
    assert "device placement: 1 override resolves to the engine's own device (cpu), so nothing is placed" in plan.notes
    assert not plan.offloads
    place(plan, CpuDevice())
    with pytest.raises(ConfigError, match="would free nothing"):
        make_plan(
            mapped(tiny("mixtral")),
            settings_for(extension(expert_stream={"slots": 8}), device="cpu"),
            CpuDevice(),
            context_tokens=CONTEXT,
        )


def test_slots_take_what_the_device_has_left(tiny: MakeTiny) -> None:
    roomy = planned(tiny("qwen3_moe"), extension(expert_stream={"enabled": True}))
    assert roomy.slots is not None
    assert roomy.slots.count == roomy.slots.experts == 36
    tight = planned(tiny("qwen3_moe"), extension(expert_stream={"enabled": True}), device=emulated(250_000))
    assert tight.slots is not None
    assert 1 < tight.slots.count < 36
    assert tight.memory.device_bytes <= 250_000
    assert any("slots, for want of a stated number" in note for note in tight.notes)
    stated = planned(tiny("qwen3_moe"), extension(expert_stream={"cache_bytes": 5 * tight.slots.slot_bytes + 1}))
    assert stated.slots is not None
    assert stated.slots.count == 5
