"""What stays on disk when memory does not hold the model: an even, fixed share of every layer, net of its buffers."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from emulated_runs import CONTEXT, DISABLE_UVA, emulated, mapped, planned, settings_for
from overspill.config import parse_bytes
from overspill.errors import CapacityError
from overspill.machine import cpu
from overspill.machine.cpu import CpuDevice
from overspill.model.sources import Extents
from overspill.model.weights import ModelMap
from overspill.plan import Access, Plan, Tier, capacity, disk, make_plan, planner
from overspill.plan.disk import AHEAD_BYTES, host_share, ring_from_disk
from overspill.plan.policy import ring_layers
from overspill.plan.report import plan_as_json, render_plan
from tiny_models import MakeTiny


@pytest.fixture(scope="module")
def llama(tiny: MakeTiny) -> ModelMap:
    return mapped(tiny("llama"))


@pytest.fixture(autouse=True)
def _no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models: what reading takes for itself is a thousand times what they have."""
    monkeypatch.setattr(disk, "READER_BYTES", 0)


def limited(folder: Path, share: float, **engine: object) -> Plan:
    """A plan for the CPU with `share` of the memory that the whole model takes."""
    model = mapped(folder)
    whole = make_plan(model, settings_for(device="cpu"), CpuDevice(), context_tokens=CONTEXT)
    limit = int(whole.memory.device_bytes * share)
    settings = settings_for(device="cpu", memory_limit_bytes=limit, **engine)
    return make_plan(mapped(folder), settings, CpuDevice(limit), context_tokens=CONTEXT)


def test_what_fits_is_untouched(tiny: MakeTiny) -> None:
    plan = limited(tiny("llama"), 1.0)
    assert not plan.offloads
    assert plan.ring is None


@pytest.mark.parametrize("share", [0.95, 0.8, 0.65, 0.55])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_plan_fits_and_its_share_is_even(name: str, share: float, tiny: MakeTiny) -> None:
    plan = limited(tiny(name), share)
    memory, ring = plan.memory, plan.ring
    assert memory.device_bytes <= memory.available_device_bytes
    assert ring is not None
    assert {layer.tier for layer in ring.layers} == {Tier.DISK}
    on_disk = plan.on(Tier.DISK)
    assert {p.access for p in on_disk} == {Access.PREFETCH}
    assert {p.weight.full for p in on_disk} == {w.full for layer in ring.layers for w in layer.weights}
    assert sum(p.weight.nbytes for p in plan.placements) == plan.model.nbytes
    given = [sum(w.nbytes for w in layer.weights) for layer in ring.layers]
    largest = max(p.weight.nbytes for p in on_disk)
    assert max(given) - min(given) <= largest
    assert plan.step.disk_bytes == sum(w.nbytes for layer in ring.copied for w in layer.weights) > 0
    assert plan.step.link_bytes == 0
    assert any("stay in the checkpoint and are read each step" in note for note in plan.notes)


def test_less_than_the_least_is_refused(tiny: MakeTiny) -> None:
    with pytest.raises(CapacityError, match="the limit is"):
        limited(tiny("llama"), 0.3)


def test_experts_go_behind_slots_first(tiny: MakeTiny) -> None:
    plan = limited(tiny("mixtral"), 0.7)
    assert plan.slots is not None
    assert plan.slots.tier is Tier.DISK
    assert plan.ring is None, "dense weights still fit"
    assert 1 < plan.slots.count < plan.slots.experts
    assert plan.memory.device_bytes <= plan.memory.available_device_bytes
    both = limited(tiny("deepseek_v2"), 0.55)
    assert both.slots is not None
    assert both.ring is not None
    assert both.ways == ("expert slots", "layers from disk")


@given(st.floats(0.05, 0.98), st.lists(st.integers(0, 54), min_size=4, max_size=54, unique=True))
def test_a_ring_frees_what_is_asked_for_net_of_its_buffers(share: float, chosen: list[int]) -> None:
    model = _llama_map()
    weights = [w for w in model if w.name.layer is not None]
    some = [weights[index % len(weights)] for index in sorted(set(chosen))]
    excess = int(share * sum(w.nbytes for w in some))
    found = ring_from_disk(some, lambda taken: ring_layers(model, taken), excess)
    if found is None:
        return
    ring, _ = found
    assert ring.nbytes - ring.pool_bytes >= excess
    assert 1 <= ring.step < len(ring.layers)
    assert all(isinstance(w.source, Extents) for layer in ring.layers for w in layer.weights)
    assert {w.full for layer in ring.layers for w in layer.weights} <= {w.full for w in some}


_maps: list[ModelMap] = []


def _llama_map() -> ModelMap:
    if not _maps:
        import tempfile

        from tiny_models import TINY

        folder = Path(tempfile.mkdtemp()) / "llama"
        TINY["llama"].save(folder)
        _maps.append(mapped(folder))
    return _maps[0]


def test_buffers_are_many_where_layers_are_small(llama: ModelMap) -> None:
    weights = [w for w in llama if w.name.layer is not None]
    found = ring_from_disk(weights, lambda taken: ring_layers(llama, taken), 1)
    assert found is not None
    ring, _ = found
    assert ring.buffer_bytes < AHEAD_BYTES
    assert ring.step == len(ring.layers) - 1 or ring.nbytes - (ring.step + 1) * ring.buffer_bytes < 1


def test_host_memory_holds_a_fixed_share_of_what_prefetch_copies(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}}
    whole = planned(tiny("llama"), document)
    assert whole.ring is not None
    for count in range(1, len(whole.ring.layers) + 1):
        found = host_share(whole.ring, count * whole.ring.buffer_bytes)
        assert found is not None
        on_disk = [index for index, layer in enumerate(found[0].layers) if layer.tier is Tier.DISK]
        assert len(on_disk) == count
        gaps = [b - a for a, b in zip(on_disk, [*on_disk[1:], on_disk[0] + len(whole.ring.layers)], strict=True)]
        assert max(gaps) - min(gaps) <= 1, "spread evenly"
    assert host_share(whole.ring, whole.ring.nbytes + 1) is None


def test_a_host_limit_leaves_layers_on_disk_and_stages_them(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}
    whole = planned(tiny("llama"), document)
    assert whole.ring is not None
    limit = whole.memory.host_bytes * 3 // 4
    settings = settings_for(document, memory_limit_bytes=limit)
    plan = make_plan(mapped(tiny("llama")), settings, emulated(), context_tokens=CONTEXT)
    assert plan.ring is not None
    assert plan.ring.on(Tier.DISK)
    assert plan.ring.on(Tier.HOST)
    assert plan.memory.host_bytes + plan.memory.staging_bytes <= limit
    assert plan.step.disk_bytes == sum(w.nbytes for layer in plan.ring.on(Tier.DISK) for w in layer.weights)
    assert plan.step.prefetch_bytes == whole.step.prefetch_bytes


@pytest.mark.parametrize("document", [{"uva": {"cpu_offload_gb": 1}}])
def test_what_is_read_in_place_needs_host_memory(document: dict[str, object], tiny: MakeTiny) -> None:
    settings = settings_for(document, memory_limit_bytes=100_000)
    with pytest.raises(CapacityError, match="host memory"):
        make_plan(mapped(tiny("llama")), settings, emulated(), context_tokens=CONTEXT)


def test_a_ring_without_look_ahead_needs_host_memory(tiny: MakeTiny) -> None:
    """It copies when a layer runs; reading from disk only then would be slower than anything asked for."""
    document = {"uva": {"cpu_offload_gb": 1}}
    whole = planned(tiny("llama"), document, DISABLE_UVA)
    assert whole.ring is not None
    assert not whole.ring.on(Tier.DISK)
    settings = settings_for(document, DISABLE_UVA, memory_limit_bytes=whole.memory.host_bytes - 1)
    with pytest.raises(CapacityError, match="host memory"):
        make_plan(mapped(tiny("llama")), settings, emulated(), context_tokens=CONTEXT)


def stated_least(told: str) -> int:
    found = re.search(r"--memory-limit (\d+(?:MiB|KiB|B))", told)
    assert found is not None, told
    return parse_bytes(found[1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_the_least_limit_is_named_and_starts(name: str, tiny: MakeTiny) -> None:
    with pytest.raises(CapacityError) as refused:
        limited(tiny(name), 0.1)
    least = stated_least(refused.value.hint or "")
    model = mapped(tiny(name))

    def plan_within(limit: int) -> Plan:
        settings = settings_for(device="cpu", memory_limit_bytes=limit)
        return make_plan(model, settings, CpuDevice(limit), context_tokens=CONTEXT)

    assert plan_within(least).memory.device_bytes <= least
    with pytest.raises(CapacityError):
        plan_within(least - 1024)


def test_the_least_host_memory_beside_a_device_is_named_and_starts(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}
    model = mapped(tiny("llama"))

    def plan_within(limit: int) -> Plan:
        settings = settings_for(document, memory_limit_bytes=limit)
        return make_plan(model, settings, emulated(), context_tokens=CONTEXT)

    with pytest.raises(CapacityError) as refused:
        plan_within(1000)
    least = stated_least(refused.value.hint or "")
    plan = plan_within(least)
    assert plan.memory.host_bytes + plan.memory.staging_bytes <= least
    with pytest.raises(CapacityError):
        plan_within(least - 1024)


def test_a_process_that_has_too_little_is_told_the_least_group(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading and running take counts against the control group, whatever is allowed for weights."""
    monkeypatch.setattr(planner, "PROCESS_BYTES", 0)
    model = mapped(tiny("llama"))

    def plan_within(free: int) -> Plan:
        monkeypatch.setattr(planner, "host_available_bytes", lambda: free)
        monkeypatch.setattr(cpu, "host_available_bytes", lambda: free)
        monkeypatch.setattr(capacity, "host_limit_bytes", lambda: free + (100 << 20))
        return make_plan(model, settings_for(device="cpu"), CpuDevice(), context_tokens=CONTEXT)

    with pytest.raises(CapacityError) as refused:
        plan_within(10_000)
    found = re.search(r"(\d+)(MiB|KiB|B) as the control group's limit", refused.value.hint or "")
    assert found is not None, refused.value.hint
    least = parse_bytes(found[1] + found[2]) - (100 << 20)
    plan = plan_within(least)
    assert disk.process_bytes(plan.memory) <= least
    with pytest.raises(CapacityError):
        plan_within(max(0, least - capacity.DRIFT_BYTES - (1 << 20)))


def test_the_report_says_what_loading_takes_and_what_the_process_has_where_that_binds(tiny: MakeTiny) -> None:
    plan = make_plan(mapped(tiny("llama")), settings_for(device="cpu"), CpuDevice(), context_tokens=CONTEXT)

    def told(**changes: int) -> tuple[dict[str, object], str]:
        changed = replace(plan, memory=replace(plan.memory, **changes))
        console = Console(file=StringIO(), width=200)
        console.print(render_plan(changed))
        return plan_as_json(changed)["memory"]["device"], console.file.getvalue()

    written, shown = told(loading_bytes=123 << 20, available_process_bytes=130 << 20)
    assert (written["loading_bytes"], written["available_process_bytes"]) == (123 << 20, 130 << 20)
    assert re.search(r"loading, at its most\s+│\s+123.00 MiB", shown)
    assert re.search(r"available for that and the reader\s+│\s+130.00 MiB", shown)
    assert "available for that" not in told(available_process_bytes=plan.memory.available_device_bytes)[1]
    beside = plan_as_json(planned(tiny("llama"), {"uva": {"cpu_offload_gb": 3e-5}}))["memory"]["device"]
    assert (beside["loading_bytes"], beside["available_process_bytes"]) == (None, None)


def test_a_limit_above_what_there_is_changes_nothing_and_that_is_said(tiny: MakeTiny) -> None:
    def told(limit: int | None) -> list[str]:
        plan = make_plan(
            mapped(tiny("llama")), settings_for(memory_limit_bytes=limit), emulated(), context_tokens=CONTEXT
        )
        return [note for note in plan.notes if note.startswith("memory: ")]

    (note,) = told(1 << 60)
    assert "are allowed, and machine and control group leave" in note
    assert told(1 << 30) == told(None) == []
