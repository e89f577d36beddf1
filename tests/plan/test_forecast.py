"""Time of a pass from bytes, operations and rates, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from emulated_runs import gib, mapped, settings_for
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.machine.rates import Rates
from overspill.model.weights import ModelMap
from overspill.plan import Access, Plan, make_plan
from overspill.plan.forecast import (
    BATCHES,
    CPU,
    DEVICE_COMPUTE,
    DEVICE_MEMORY,
    DISK,
    LAUNCHES,
    LINK,
    decode_forecast,
    forecast,
)
from overspill.plan.forecast import pass_forecast as pass_of
from tiny_models import MakeTiny

NOTHING = 1e30
"""So many a second that it takes no time."""
FREE = Link(NOTHING, 0.0, measured=False)


def rates(**changes: Any) -> Rates:
    figures: dict[str, Any] = {
        "origin": "made up", "read_bytes_s": {"float32": NOTHING}, "flops": {"float32": NOTHING}, "layer_s": 0.0,
        "expert_bytes_s": NOTHING, "expert_flops": NOTHING, "disk_bytes_s": NOTHING,
    }  # fmt: skip
    return Rates(**{**figures, **changes})


def plan_of(model: ModelMap, document: Any = None, link: Link = FREE, **engine: Any) -> Plan:
    device = EmulatedDevice(1 << 30, link)
    return make_plan(model, settings_for(document, **engine), device, context_tokens=model.trace.tokens)


@pytest.fixture(scope="module")
def llama(tiny: MakeTiny) -> ModelMap:
    return mapped(tiny("llama"), tokens=8)


def test_one_token_reads_every_weight_once_and_the_cache(llama: ModelMap) -> None:
    step = pass_of(plan_of(llama), rates(read_bytes_s={"float32": 1e9}), 1, kept_tokens=5)
    read = sum(weight.step_bytes(1) for weight in llama) + 3 * 5 * llama.trace.kv_token_bytes
    assert step.seconds == pytest.approx(read / 1e9)
    assert step.limit == DEVICE_MEMORY


def test_many_tokens_are_bound_by_arithmetic(llama: ModelMap) -> None:
    step = pass_of(plan_of(llama), rates(read_bytes_s={"float32": 1e15}, flops={"float32": 1e9}), 100, kept_tokens=0)
    products = [w for w in llama if len(w.shape) > 1 and w.reads.whole_bytes]
    assert step.seconds == pytest.approx(sum(2 * 100 * w.nbytes / 4 for w in products) / 1e9)
    assert step.limit == DEVICE_COMPUTE
    assert step.tokens_per_s == pytest.approx(100 / step.seconds)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_layers_overhead_adds_unless_it_runs_beside(llama: ModelMap, asynchronous: bool) -> None:
    read = sum(weight.step_bytes(1) for weight in llama)
    known = rates(read_bytes_s={"float32": read / 0.010}, layer_s=0.001, asynchronous=asynchronous)
    step = pass_of(plan_of(llama), known, 1, kept_tokens=0)
    assert step.seconds == pytest.approx(0.010 if asynchronous else 0.016)
    assert step.parts[LAUNCHES] == pytest.approx(0.006)


def test_zero_copy_adds_to_computing(llama: ModelMap) -> None:
    link = Link(1e6, 1e-4, measured=False)
    uva = plan_of(llama, {"uva": {"cpu_offload_gb": gib(30_000)}}, link)
    step = pass_of(uva, rates(layer_s=0.01), 1, kept_tokens=0)
    assert step.seconds == pytest.approx(0.06 + (uva.step.link_floor_s or 0))


@pytest.mark.parametrize(("step", "layer_s", "seconds"), [(1, 0.01, "in turn"), (2, 0.01, "link"), (2, 1.0, "layers")])
def test_a_ring_copies_ahead_as_far_as_it_has_buffers(llama: ModelMap, step: int, layer_s: float, seconds: str) -> None:
    """With one buffer for all layers nothing is copied while a layer runs."""
    link = Link(1e6, 1e-4, measured=False)
    document = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": step}}
    ahead = plan_of(llama, document, link)
    floor = ahead.step.link_floor_s or 0
    assert 6 * 0.01 < floor < 6 * 1.0
    found = pass_of(ahead, rates(layer_s=layer_s), 1, kept_tokens=0)
    expected = {"in turn": floor + 6 * layer_s, "link": floor, "layers": 6 * layer_s}[seconds]
    assert found.seconds == pytest.approx(expected)
    assert found.limit == (LAUNCHES if seconds == "layers" else LINK)


def test_copies_slow_what_is_computed_beside_them(llama: ModelMap) -> None:
    """A copy that takes 40 ms of the memory's time costs computing, at half its speed meanwhile, 20 ms."""
    ahead = plan_of(llama, {"prefetch": {"offload_group_size": 2}}, FREE)
    assert ahead.ring is not None
    known = rates(layer_s=0.1, copy_bytes_s=ahead.ring.layers[0].nbytes / 0.04, beside_copies=2.0)
    assert pass_of(ahead, known, 1, kept_tokens=0).seconds == pytest.approx(0.6 + 3 * 0.02)


def test_a_link_is_no_faster_than_the_copying_behind_it(llama: ModelMap) -> None:
    ahead = plan_of(llama, {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}}, FREE)
    found = pass_of(ahead, rates(copy_bytes_s=1e6), 1, kept_tokens=0)
    assert found.seconds == pytest.approx(ahead.step.prefetch_bytes / 1e6)
    found = pass_of(ahead, rates(copy_bytes_s=1e6, copies_beside=1.5), 1, kept_tokens=0)
    assert found.seconds == pytest.approx(1.5 * ahead.step.prefetch_bytes / 1e6)


def test_layers_with_experts_have_an_overhead_of_their_own(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"), tokens=8)
    known = rates(layer_s=0.001, step_s=0.5, expert_layer_s={"device": 0.01, "cpu": 0.02, "slots": 0.03})
    for document, seconds in (
        (None, 0.01),
        ({"overspill": {"placement": {"cpu_moe": True}}}, 0.02),
        ({"overspill": {"expert_stream": {"slots": 36}}}, 0.03),
    ):
        step = pass_of(plan_of(model, document), known, 1, kept_tokens=0)
        assert step.seconds == pytest.approx(0.5 + model.decoder.layers * seconds)


def test_experts_are_read_as_far_as_tokens_choose_them(tiny: MakeTiny) -> None:
    """E·(1−(1−k/E)^b), of six experts two."""
    model = mapped(tiny("qwen3_moe"), tokens=8)
    plan = plan_of(model, {"overspill": {"placement": {"cpu_moe": True}}})
    experts = sum(p.weight.nbytes for p in plan.placements if p.access is Access.IN_PLACE)
    for tokens in (1, 2, 8):
        step = pass_of(plan, rates(expert_bytes_s=1e6), tokens, kept_tokens=0)
        assert step.seconds == pytest.approx(experts * (1 - (1 - 2 / 6) ** tokens) / 1e6)
        assert step.limit == CPU
    work = 2 * 50 * experts / 4 * 2 / 6
    assert pass_of(plan, rates(expert_flops=1e6), 50, kept_tokens=0).seconds == pytest.approx(work / 1e6)


def test_what_is_missed_in_slots_is_computed_where_that_was_asked_or_is_faster(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"), tokens=8)
    known, link = rates(expert_bytes_s=2e6), Link(1e6, 0.0, measured=False)
    for policy, limit, rate in (("fetch", LINK, 1e6), ("cpu", CPU, 2e6), ("auto", CPU, 2e6)):
        plan = plan_of(model, {"overspill": {"expert_stream": {"slots": 9, "policy": policy}}}, link)
        assert plan.slots is not None
        step = pass_of(plan, known, 1, kept_tokens=0)
        assert (step.limit, step.seconds) == (limit, pytest.approx(plan.slots.expected_bytes(1) / rate))
    slow = rates(expert_bytes_s=0.5e6)
    assert pass_of(plan, slow, 1, kept_tokens=0).limit == LINK, "auto, where the CPU is slower"


def test_layers_with_a_window_read_no_more_than_it_of_the_cache(tiny: MakeTiny) -> None:
    model = mapped(tiny("gemma3"), tokens=30)
    assert len(model.trace.kv_windows) == 2
    window = min(model.trace.kv_windows)
    whole = model.trace.kv_windows[30]
    plan = plan_of(model)
    short, long, longer = (pass_of(plan, rates(read_bytes_s={"float32": 1e9}), 1, kept_tokens=kept).seconds
                           for kept in (window, 20, 25))  # fmt: skip
    assert long - short == pytest.approx(3 * (20 - window) * whole / 1e9)
    assert longer - long == pytest.approx(3 * 5 * whole / 1e9)


def test_a_prompt_computes_the_logits_of_its_last_token_alone(llama: ModelMap) -> None:
    known = rates(flops={"float32": 1e9})
    found = forecast(plan_of(llama), known).prompt
    whole = pass_of(plan_of(llama), known, found.tokens, kept_tokens=0)
    head = next(w for w in llama if w.role == "head")
    assert whole.seconds - found.seconds == pytest.approx(2 * (found.tokens - 1) * head.nbytes / 4 / 1e9)


def test_a_gpu_reads_in_place_over_the_link_alone(llama: ModelMap) -> None:
    """Where an emulated device brings it into its memory and reads it there."""
    plan = plan_of(llama, {"uva": {"cpu_offload_gb": 1}})
    slow = {"float32": 1e6}
    assert pass_of(plan, rates(read_bytes_s=slow, asynchronous=True), 1, kept_tokens=0).seconds < 1e-6
    assert pass_of(plan, rates(read_bytes_s=slow), 1, kept_tokens=0).seconds > 0.01


def test_a_server_s_sequences_share_the_cache_that_there_is(tiny: MakeTiny) -> None:
    model = mapped(tiny("llama"), tokens=32)
    device = EmulatedDevice(plan_of(model).memory.device_bytes + 30_000, FREE)
    settings = settings_for(None, max_num_seqs=64, max_num_batched_tokens=32)
    plan = make_plan(model, settings, device, context_tokens=32)
    assert plan.kv_cache_tokens is not None
    assert 32 <= plan.kv_cache_tokens < 64 * 16
    known = rates(read_bytes_s={"float32": 1e9})
    expected = pass_of(plan, known, 64, kept_tokens=plan.kv_cache_tokens // 64)
    assert decode_forecast(plan, known) == expected
    assert decode_forecast(plan, known, 1) == pass_of(plan, known, 1, kept_tokens=16)


def test_what_is_missed_in_slots_comes_over_the_link_or_from_disk(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"), tokens=8)
    for tier, known, part in (("host", rates(), LINK), ("disk", rates(disk_bytes_s=1e6), DISK)):
        link = Link(1e6 if tier == "host" else NOTHING, 0.0, measured=False)
        plan = plan_of(model, {"overspill": {"expert_stream": {"slots": 9, "tier": tier}}}, link)
        assert plan.slots is not None
        step = pass_of(plan, known, 1, kept_tokens=0)
        assert step.seconds == pytest.approx(plan.slots.expected_bytes(1) / 1e6)
        assert step.limit == part


def test_layers_on_disk_are_bound_by_the_disk(llama: ModelMap) -> None:
    document = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}}
    host = plan_of(llama, document).memory.host_bytes
    plan = plan_of(llama, document, memory_limit_bytes=host - 4096)
    assert plan.step.disk_bytes
    step = pass_of(plan, rates(disk_bytes_s=1e6, layer_s=1e-4), 1, kept_tokens=0)
    assert step.seconds == pytest.approx(plan.step.disk_bytes / 1e6, rel=0.01)
    assert step.limit == DISK


def test_reads_slow_what_is_computed_beside_them(llama: ModelMap) -> None:
    """The disk is busy for a tenth of the computing, which takes twice as long meanwhile."""
    document = {"prefetch": {"offload_group_size": 2}}
    plan = plan_of(llama, document, memory_limit_bytes=plan_of(llama, document).memory.host_bytes - 4096)
    assert plan.ring is not None
    on_disk = plan.step.disk_bytes
    reading_s = 0.1
    fast = rates(disk_bytes_s=on_disk / reading_s, layer_s=1.0, beside_reads=2.0)
    assert pass_of(plan, fast, 1, kept_tokens=0).seconds == pytest.approx(6 + reading_s / 2)
    assert pass_of(plan, rates(disk_bytes_s=on_disk / reading_s, layer_s=1.0), 1, kept_tokens=0).seconds == 6


def test_a_correction_is_of_its_way_and_of_every_part(llama: ModelMap) -> None:
    plain, uva = plan_of(llama), plan_of(llama, {"uva": {"cpu_offload_gb": 1}}, Link(1e6, 0.0, measured=False))
    known = rates(layer_s=0.01)
    corrected = rates(layer_s=0.01, corrections={"uva": (2.0, "a run"), "*": (3.0, "others")})
    for plan, times in ((uva, 2.0), (plain, 3.0)):
        before, after = (pass_of(plan, r, 1, kept_tokens=0) for r in (known, corrected))
        assert after.seconds == pytest.approx(times * before.seconds)
        assert dict(after.parts) == pytest.approx({name: times * part for name, part in before.parts.items()})
        assert after.limit == before.limit
    assert forecast(uva, corrected).origin == "made up, corrected by 2.00 (a run)"


def test_the_forecast_is_of_batches_to_256_and_a_prompt(llama: ModelMap) -> None:
    found = forecast(plan_of(llama), rates(read_bytes_s={"float32": 1e9}, flops={"float32": 1e9}))
    assert [step.tokens for step in found.decode] == list(BATCHES) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [s.seconds for s in found.decode] == sorted(s.seconds for s in found.decode)
    assert found.prompt.tokens == 8
    assert found.origin == "made up"
