from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from emulated_runs import gib, placed
from overspill.errors import PlacementDefect
from overspill.offload.ledger import Ledger, take_ledger
from overspill.offload.placed import PlacedModel
from overspill.plan import Access, Plan, Tier
from tiny_models import MakeTiny

HALF = {"uva": {"cpu_offload_gb": gib(110_000)}, "overspill": {"order": "declaration"}}
PREFETCH = {"prefetch": {"offload_group_size": 2}}
QUERY = "model.layers.0.self_attn.q_proj.weight"
LAST = "model.layers.5.mlp.down_proj.weight"


@pytest.fixture
def half(tiny: MakeTiny) -> PlacedModel:
    """A tiny llama whose first layers are in host memory."""
    return placed(tiny("llama"), HALF)


def walk(model: PlacedModel, plan: Plan | None = None, **changed: Any) -> Ledger:
    """The ledger of the model as it is now; `changed` replaces what was allocated."""
    allocated: dict[str, Any] = {"blocks": model.blocks, "hosts": model.hosts} | changed
    return take_ledger(
        model.model,
        plan or model.plan,
        allocated["blocks"],
        allocated["hosts"],
        model.mapped.tensors,
        model.device,
        read_bytes=0,
        load_seconds=0.0,
    )


def test_a_placed_model_is_what_its_plan_says(half: PlacedModel) -> None:
    ledger, plan = walk(half), half.plan
    assert ledger.entries == half.ledger.entries
    assert [entry.name for entry in ledger.entries] == [p.weight.full for p in plan.placements]
    for entry in ledger.entries:
        placement = plan.of(entry.name)
        assert (entry.tier, entry.access, entry.bytes) == (
            placement.tier,
            placement.access,
            placement.weight.nbytes,
        )
        assert (entry.host_address is not None) == (entry.tier is Tier.HOST)
        assert entry.address == half.model.get_parameter(entry.name).data_ptr()
    assert ledger.bytes_on(Tier.HOST) == plan.offloaded_bytes
    assert ledger.bytes_on(Tier.DEVICE) + ledger.bytes_on(Tier.HOST) == plan.model.nbytes
    assert ledger.allocated_on(Tier.HOST) == plan.memory.host_bytes
    json.dumps(ledger.as_json())


def test_what_was_asked_for_and_what_was_taken_are_told_apart(half: PlacedModel) -> None:
    blocks = {block.purpose: block for block in half.ledger.blocks}
    assert blocks.keys() == {"weights", "host"}
    assert blocks["weights"].requested_bytes == half.plan.memory.weights_bytes
    for block in blocks.values():
        assert 0 <= block.allocated_bytes - block.requested_bytes < 4096


def a_copy_in_other_memory(model: nn.Module) -> None:
    set_parameter(model, LAST, model.get_parameter(LAST).detach().clone())


def a_host_weight_on_the_device(model: nn.Module) -> None:
    """As vLLM's post-processing leaves it: rebound to a device tensor, and counted as offloaded still."""
    set_parameter(model, QUERY, torch.zeros(model.get_parameter(QUERY).shape))


def a_device_weight_over_host_memory(model: nn.Module) -> None:
    host: Any = model.get_parameter(QUERY)
    set_parameter(model, "model.layers.5.self_attn.q_proj.weight", host.detach())


def never_filled(model: nn.Module) -> None:
    set_parameter(model, LAST, torch.empty(model.get_parameter(LAST).shape, device="meta"))


def of_another_dtype(model: nn.Module) -> None:
    set_parameter(model, LAST, model.get_parameter(LAST).detach().to(torch.bfloat16))


def taken_out(model: nn.Module) -> None:
    owner, _, attribute = LAST.rpartition(".")
    del model.get_submodule(owner)._parameters[attribute]


def one_too_many(model: nn.Module) -> None:
    model.get_submodule("model.layers.5.mlp").register_parameter("scale", nn.Parameter(torch.ones(1)))


def a_buffer_too_many(model: nn.Module) -> None:
    model.get_submodule("model.layers.5.mlp").register_buffer("scale", torch.ones(3), persistent=False)


def set_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner)._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (a_copy_in_other_memory, f"{LAST}: not in the device's weight block"),
        (a_host_weight_on_the_device, f"{QUERY}: the device's view is not over its host copy"),
        (
            a_device_weight_over_host_memory,
            "model.layers.5.self_attn.q_proj.weight: not in the device's weight block",
        ),
        (never_filled, f"{LAST}: still on the meta device"),
        (of_another_dtype, f"{LAST}: 3150 bytes of torch.bfloat16, planned 6300 of torch.float32"),
        (taken_out, f"{LAST}: missing from the model"),
        (one_too_many, "model.layers.5.mlp.scale: in the model but not in the plan"),
        (a_buffer_too_many, "model.layers.5.mlp.scale: in the model but not in the plan"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_moved_behind_our_back_is_named(move: Callable[[nn.Module], None], named: str, half: PlacedModel) -> None:
    move(half.model)
    with pytest.raises(PlacementDefect) as defect:
        walk(half)
    (found,) = [line.strip() for line in defect.value.message.splitlines()[1:]]
    assert found.startswith(named)
    assert defect.value.exit_code == 4
    assert "report" in (defect.value.hint or "")


def test_a_ring_weight_outside_its_buffer_is_named(tiny: MakeTiny) -> None:
    model = placed(tiny("llama"), PREFETCH)
    name = "model.layers.3.mlp.down_proj.weight"
    set_parameter(model.model, name, model.model.get_parameter(name).detach().clone())
    with pytest.raises(PlacementDefect, match=rf"{name}: not at its place in its ring buffer"):
        walk(model)


def test_a_ring_weight_in_another_layers_buffer_is_named(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}}
    model = placed(tiny("llama"), document)
    name, other = "model.layers.3.mlp.down_proj.weight", "model.layers.4.mlp.down_proj.weight"
    set_parameter(model.model, name, model.model.get_parameter(other).detach())
    with pytest.raises(PlacementDefect, match=name):
        walk(model)


def test_two_weights_in_one_place_are_named(half: PlacedModel) -> None:
    """Each lies in the weight block; only its address tells that it is another's memory."""
    set_parameter(half.model, "model.layers.4.mlp.down_proj.weight", half.model.get_parameter(LAST).detach())
    with pytest.raises(PlacementDefect, match=r"shares memory with model\.layers\.[45]\.mlp\.down_proj"):
        walk(half)


def test_a_tied_name_that_went_astray_is_named(tiny: MakeTiny) -> None:
    model = placed(tiny("llama_tied"), HALF)
    set_parameter(model.model, "lm_head.weight", model.model.get_parameter("lm_head.weight").detach().clone())
    with pytest.raises(PlacementDefect, match=r"lm_head\.weight: not in the device's weight block"):
        walk(model)


def test_a_host_copy_outside_the_host_block_is_named(half: PlacedModel) -> None:
    with pytest.raises(PlacementDefect, match=rf"{QUERY}: its host copy is not in the host block"):
        walk(half, hosts={**half.hosts, QUERY: torch.zeros(40, 35)})


def test_an_offload_that_consulted_nothing_is_our_defect(half: PlacedModel, tiny: MakeTiny) -> None:
    resident = placed(tiny("llama"))
    empty = replace(resident.plan, backend="uva")
    with pytest.raises(PlacementDefect, match="offloads with uva, and no weight was consulted"):
        walk(resident, empty)
    assert {p.access for p in half.plan.on(Tier.HOST)} == {Access.ZERO_COPY}
