"""Whole models with routed experts: placed on the CPU, streamed through slots, from host memory and from disk."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from emulated_runs import DECODED, PROMPT, emulated, forward, passes, placed, planned
from overspill.engine import SamplingParams
from overspill.errors import CheckpointError, ConfigError, PlacementDefect, UnsupportedModelError
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Transfer
from overspill.machine.reads import FileReader
from overspill.model.experts import ExpertBlock
from overspill.model.hf_experts import install, installed
from overspill.offload.expert_sources import DiskSource, ExpertSource
from overspill.offload.fetches import DiskFetch, Fetch
from overspill.offload.ledger import take_ledger
from overspill.offload.placed import PlacedModel, place
from overspill.offload.stream import _without
from overspill.plan import Access, Tier
from tiny_models import TINY, MakeTiny

MODELS = (
    "qwen3_moe", "qwen3_5_moe", "qwen3_next", "nemotron_h", "deepseek_v2", "deepseek_v3", "deepseek_v4",
    "nemotron_latent", "kimi_linear", "laguna", "gpt_oss", "mixtral", "mixtral_fused", "glm4_moe",
)  # fmt: skip
ITS_OWN_LOOP = {
    "llama4": "Llama4ForCausalLM computes its routed experts .* by itself",
    "dbrx": "DbrxForCausalLM computes its routed experts .* by itself",
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


@pytest.mark.parametrize("name", ["deepseek_v2", "nemotron_latent"])
def test_shared_experts_are_ahead_only_for_what_the_block_was_given(name: str, tiny: MakeTiny) -> None:
    """Nemotron-H's latent experts see a projection of it, which its shared experts must not get."""
    model = placed(tiny(name), CPU_MOE)
    run = model.experts.in_place[0]
    shared = model.model.get_submodule(run.block.shared or "")
    ahead, parent = run._shared, model.model.get_submodule(run.block.parent)
    assert ahead is not None
    hidden = torch.randn(1, 3, 35)
    with torch.no_grad():
        ahead._begin(parent, (hidden,))
        assert ahead.ahead_of(torch.randn(3, 24)) is None, "something else than the block was given"
        compute = ahead.ahead_of(hidden.view(3, 35))
        assert compute is not None
        compute()
        before = ahead.used
        expected = shared(hidden.clone())  # other memory: not what was computed ahead
        assert ahead.used == before
        ahead._begin(parent, (hidden,))
        compute = ahead.ahead_of(hidden.view(3, 35))
        assert compute is not None
        compute()
        assert torch.equal(shared(hidden), expected)
        assert ahead.used == before + 1
        ahead._begin(parent, (hidden,))
        compute = ahead.ahead_of(hidden.view(3, 35))
        assert compute is not None
        compute()
        hidden.add_(1)
        ahead._begin(parent, (hidden,))  # a new pass over the same memory: what was computed before is stale
        assert not torch.equal(shared(hidden), expected)


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


def test_slots_before_a_disk_are_full_from_the_start_with_experts_of_each_block_alike(tiny: MakeTiny) -> None:
    heard: list[int] = []
    document = extension(expert_stream={"slots": 14, "tier": "disk"})
    engine = overspill.load(tiny("qwen3_moe"), document, device="cpu", progress=heard.append)
    plain = overspill.load(tiny("qwen3_moe"), device="cpu")
    stream = engine.placed.experts.stream
    assert stream is not None
    blocks = stream.slots.blocks
    assert [block.experts for block in blocks] == [6] * 6
    three, two = [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4)], [(n, e) for n in range(2, 6) for e in (0, 3)]
    assert sorted(stream.cache) == sorted(three + two)
    for number, expert in stream.cache:
        for attribute, weight in blocks[number].weights.items():
            own = plain.placed.model.get_parameter(weight.full)[expert]
            room = stream.room(stream.cache.slot((number, expert)))
            assert torch.equal(engine.placed.experts.streamed[number].view(attribute, expert, room), own)
    stream.cache.check()
    assert (stream.counts.loaded, stream.counts.fills, stream.counts.lookups) == (14, 14, 0)
    loaded_bytes = sum(blocks[number].expert_bytes for number, _ in stream.cache)
    assert stream.counts.bytes == loaded_bytes
    resident_bytes = sum(p.weight.nbytes for p in engine.plan.placements if p.tier is not Tier.DISK)
    assert engine.ledger.read_bytes >= sum(heard) == resident_bytes + loaded_bytes


def test_experts_that_cannot_be_loaded_fail_when_the_others_have_come(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their slots are given back then: nothing may land there later."""
    started: list[DiskFetch] = []
    start = DiskSource.start

    def first_fails(self: DiskSource, block: ExpertBlock, expert: int, slot: torch.Tensor) -> DiskFetch:
        if not started:
            failed: Future[list[Transfer]] = Future()
            failed.set_exception(CheckpointError("it is gone"))
            started.append(DiskFetch(failed))
        else:
            fetch = start(self, block, expert, slot)
            assert isinstance(fetch, DiskFetch)
            started.append(fetch)
        return started[-1]

    read = FileReader.read
    monkeypatch.setattr(FileReader, "read", lambda *given: (time.sleep(0.05), read(*given))[1])
    monkeypatch.setattr(DiskSource, "start", first_fails)
    with pytest.raises(CheckpointError, match="it is gone"):
        overspill.load(tiny("qwen3_moe"), extension(expert_stream={"slots": 4, "tier": "disk"}), device="cpu")
    assert len(started) == 4
    assert all(fetch._read.done() for fetch in started)


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


@pytest.mark.parametrize("harm", ["overwritten", "replaced"])
@pytest.mark.parametrize("used", [False, True], ids=["before the first pass", "after it"])
def test_a_checkpoint_that_became_another_is_noticed(harm: str, used: bool, tmp_path: Path) -> None:
    TINY["qwen3_moe"].save(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    model = placed(tmp_path / "model", extension(expert_stream={"slots": 8, "tier": "disk"}))
    if used:
        forward(model, PROMPT)
    other = bytes(255 - byte for byte in file.read_bytes())
    if harm == "overwritten":
        file.write_bytes(other)
    else:
        (tmp_path / "download").write_bytes(other)
        (tmp_path / "download").rename(file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed since its header was read"):
        forward(model, PROMPT[::-1])


def test_a_router_is_asked_out_of_turn_only_where_it_lies_on_the_device(tiny: MakeTiny) -> None:
    def guesses(document: dict[str, Any]) -> int:
        model = placed(tiny("qwen3_moe"), {**document, **extension(expert_stream={"slots": 12})})
        found, moved = passes(model)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        stream = model.experts.stream
        assert stream is not None
        known = (model.plan.step.zero_copy_bytes + model.plan.step.prefetch_bytes) * len(moved)
        assert sum(moved) >= known + stream.counts.bytes - model.plan.memory.buffer_pool_bytes
        return stream.counts.prefetched

    expected, _ = passes(placed(tiny("qwen3_moe")))
    assert guesses({}) > 0
    assert guesses({"prefetch": {"offload_group_size": 1, "offload_params": ["mlp.gate"]}}) == 0
    assert guesses({"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp.gate"]}}) == 0


def test_a_sweep_evicts_nothing_and_a_step_keeps_what_the_next_block_will_want(tiny: MakeTiny) -> None:
    model = placed(tiny("qwen3_moe"), extension(expert_stream={"slots": 12}))
    stream = model.experts.stream
    assert stream is not None
    cache: Any = None
    for token in PROMPT:
        _, cache, _ = forward(model, [token], cache)
    held, evicted = set(stream.cache), stream.counts.evictions
    assert stream.cache.free == 0
    assert evicted > 0
    forward(model, PROMPT)
    assert stream.counts.streamed > 0
    assert (set(stream.cache), stream.counts.evictions) == (held, evicted), "a prompt passes through"
    used = stream.counts.prefetch_used
    for token in PROMPT:
        _, cache, _ = forward(model, [token], cache)
    assert stream.counts.prefetch_used > used


class Slow(ExpertSource):
    """Fetches that land when they are told to: what was on its way to a slot must not land after what came later."""

    def __init__(self, inner: ExpertSource) -> None:
        self.inner = inner
        self.pending: list[tuple[Any, ...]] = []

    def start(self, block: Any, expert: int, slot: torch.Tensor) -> Any:
        late = Late(lambda: self.inner.start(block, expert, slot).settle())
        self.pending.append((late,))
        return late


class Late(Fetch):
    def __init__(self, land: Callable[[], bool]) -> None:
        self._land = land
        self.landed = False

    def settle(self) -> bool:
        if not self.landed:
            self.landed = True
            self._land()
        return True

    def wait(self) -> None:
        self.settle()


def test_what_was_evicted_on_its_way_lands_before_what_comes_to_its_slot(tiny: MakeTiny) -> None:
    expected, _ = passes(placed(tiny("qwen3_moe")))
    model = placed(tiny("qwen3_moe"), extension(expert_stream={"slots": 4}))
    stream = model.experts.stream
    assert stream is not None
    stream.source = slow = Slow(stream.source)
    keep: set[Any] = set()
    with model.running():
        for expert in range(4):
            assert stream.admit((0, expert), keep)
        first = [late for (late,) in slow.pending]
        for expert in range(4):
            stream.counts.fetched += 2
            assert stream.admit((1, expert), keep)
        assert all(late.landed for late in first), "their slots are others' now"
    logits, _ = passes(model)
    assert all(torch.equal(one, other) for one, other in zip(logits, expected, strict=True))


def test_what_a_broken_pass_was_streaming_lands_before_the_next_pass(tiny: MakeTiny) -> None:
    model = placed(tiny("qwen3_moe"), extension(expert_stream={"slots": 1}))
    stream = model.experts.stream
    assert stream is not None
    forward(model, PROMPT)
    stream.source = slow = Slow(stream.source)
    run = model.experts.streamed[2]
    loop = run._loop

    def broken(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("in the middle of a pass")

    run._loop = broken
    with pytest.raises(RuntimeError, match="in the middle"):
        forward(model, PROMPT)
    assert all(late.landed for (late,) in slow.pending)
    run._loop = loop
    expected, _, _ = forward(placed(tiny("qwen3_moe")), PROMPT)
    assert torch.equal(forward(model, PROMPT)[0], expected)


def test_a_token_goes_to_no_expert_that_it_did_not_choose() -> None:
    """With no weight as well: what an expert makes of a foreign token need not be finite, and 0 times that is not 0."""
    index = torch.tensor([[4, 1, 2], [3, 0, 4]])
    weights = torch.rand(2, 3)
    elsewhere = torch.tensor([[True, False, False], [False, True, True]])
    chosen, left = _without(index, weights, elsewhere)
    assert chosen.tolist() == [[1, 1, 2], [3, 3, 3]]
    assert torch.equal(left == 0, elsewhere)
    assert torch.equal(left[~elsewhere], weights[~elsewhere])


def test_an_expert_that_overflows_for_foreign_tokens_spoils_no_answer(tiny: MakeTiny) -> None:
    model = placed(tiny("mixtral"), extension(expert_stream={"slots": 12, "policy": "cpu"}))
    run = model.experts.streamed[0]
    device = model.device
    hidden = torch.randn(2, 35)
    hidden[1] *= 1e20  # any expert's gated product of it is beyond float32
    hidden = device.to_device(hidden)
    with model.running():
        run.stream.admit((0, 1), set())
        run.stream.counts.fetched += 1
        index, weights = device.to_device(torch.tensor([[1, 2], [3, 4]])), device.to_device(torch.rand(2, 2))
        result = run(hidden, index, weights)
    assert result[0].isfinite().all()


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
        take_ledger(
            model.model,
            model.plan,
            model.blocks,
            model.hosts,
            model.mapped.tensors,
            model.device,
            read_bytes=0,
            load_seconds=0.0,
        )

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
