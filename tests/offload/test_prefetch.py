from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PretrainedConfig

from emulated_runs import DISABLE_UVA, emulated, settings_for
from overspill.errors import UnsupportedModelError
from overspill.machine.device import Transfer
from overspill.machine.emulated import EmulatedDevice
from overspill.model.map import map_live
from overspill.model.trace import Trace
from overspill.model.weights import ModelMap
from overspill.offload.placed import PlacedModel, place
from overspill.plan import Access, make_plan

WIDTH = 6
IDS = torch.tensor([[1, 4, 2]])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("this layer fails")
        return hidden + torch.tanh(self.linear(hidden))


class Chain(nn.Module):
    """A model of `count` layers that runs `order` (each once, in turn, unless told otherwise).

    `peeked` is a layer whose weight the model itself reads when all layers have run.
    """

    def __init__(self, count: int, order: Sequence[int] | None = None, peeked: int | None = None) -> None:
        torch.manual_seed(count)
        super().__init__()
        self.config = PretrainedConfig()
        self.embed = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.order = list(range(count)) if order is None else list(order)
        self.peeked = peeked

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        for number in self.order:
            hidden = self.layers[number](hidden)
        if self.peeked is not None:
            late: Any = self.layers[self.peeked]
            hidden = hidden @ late.linear.weight
        return SimpleNamespace(logits=hidden)


def prefetch(size: int = 1, number: int = 1, step: int = 1) -> dict[str, Any]:
    return {
        "prefetch": {
            "offload_group_size": size,
            "offload_num_in_group": number,
            "offload_prefetch_step": step,
        }
    }


def mapped_chain(model: Chain) -> ModelMap:
    return map_live(model.requires_grad_(False), tokens=IDS.shape[1])


def placed_chain(model: ModelMap, document: dict[str, Any], environ: dict[str, str] | None = None) -> PlacedModel:
    device = emulated()
    plan = make_plan(model, settings_for(document, environ), device, context_tokens=IDS.shape[1])
    return place(plan, device, debug=True)


def run(placed: PlacedModel) -> tuple[torch.Tensor, int]:
    """One pass: what came out, and the bytes that crossed the link."""
    placed.device.synchronize()
    before = placed.device.traffic.copy()
    with placed.running():
        logits = placed.model(placed.device.to_device(IDS)).logits
    placed.device.synchronize()
    return logits.clone(), (placed.device.traffic - before).bytes


def expected(model: Chain) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_layers_run_in_whatever_order_the_answer_stands(data: st.DataObject) -> None:
    """Skipped, repeated, shuffled: it may cost copies, never an answer."""
    count = data.draw(st.integers(2, 7), label="layers")
    step = data.draw(st.integers(1, count - 1), label="step")
    placed = placed_chain(mapped_chain(Chain(count)), prefetch(step=step))
    twin, model = Chain(count), placed.model
    assert isinstance(model, Chain)
    for _ in range(3):
        order = data.draw(st.lists(st.integers(0, count - 1), max_size=2 * count), label="order")
        model.order = twin.order = order
        assert torch.equal(run(placed)[0], expected(twin))


@pytest.mark.parametrize(("count", "step"), [(2, 1), (3, 1), (3, 2), (4, 2), (5, 2), (5, 4), (8, 3)])
def test_a_pass_carries_what_the_ring_says_and_never_comes_too_late(count: int, step: int) -> None:
    placed = placed_chain(mapped_chain(Chain(count)), prefetch(step=step))
    ring, prefetcher = placed.plan.ring, placed.prefetcher
    assert ring is not None
    assert prefetcher is not None
    placed.device.synchronize()
    assert placed.device.traffic.bytes == step * ring.layers[0].nbytes  # the first copies, before any pass
    for _ in range(4):
        logits, moved = run(placed)
        assert torch.equal(logits, expected(Chain(count)))
        assert moved == ring.pass_bytes
    assert prefetcher.out_of_turn == 0


def test_a_layer_out_of_turn_is_counted() -> None:
    placed = placed_chain(mapped_chain(Chain(4)), prefetch(step=2))
    prefetcher, model = placed.prefetcher, placed.model
    assert prefetcher is not None
    assert isinstance(model, Chain)
    model.order = [0, 3, 1]  # buffer 1 still holds layer 1 when 3 runs, and gets it back afterwards
    run(placed)
    assert prefetcher.out_of_turn == 1


def test_a_copied_layer_is_one_transfer() -> None:
    placed = placed_chain(mapped_chain(Chain(4)), prefetch(step=2))
    run(placed)
    before = placed.device.traffic.copy()
    run(placed)
    assert (placed.device.traffic - before).transfers == 4  # and not eight: weight and bias go together


@pytest.mark.parametrize("environ", [{}, DISABLE_UVA], ids=["prefetch", "uva without zero-copy"])
def test_a_pass_that_failed_in_the_middle_leaves_the_next_ones_right(environ: dict[str, str]) -> None:
    document = prefetch(step=2) if not environ else {"uva": {"cpu_offload_gb": 1}}
    placed = placed_chain(mapped_chain(Chain(5)), document, environ)
    layer = placed.model.get_submodule("layers.2")
    assert isinstance(layer, Layer)
    layer.fails = True
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            run(placed)
    layer.fails = False
    for _ in range(2):
        assert torch.equal(run(placed)[0], expected(Chain(5)))


def test_a_weight_that_the_model_reads_itself_stays_on_the_device() -> None:
    placed = placed_chain(mapped_chain(Chain(5, peeked=1)), prefetch(step=2))
    assert placed.plan.of("layers.1.linear.weight").access is Access.RESIDENT
    assert placed.plan.of("layers.1.linear.bias").access is Access.PREFETCH
    assert any("layers.1.linear.weight" in note for note in placed.plan.notes)
    for _ in range(2):
        assert torch.equal(run(placed)[0], expected(Chain(5, peeked=1)))


@pytest.mark.parametrize("environ", [{}, DISABLE_UVA], ids=["prefetch", "uva without zero-copy"])
def test_a_late_reader_of_a_released_buffer_reads_poison(environ: dict[str, str]) -> None:
    """The same model without what the trace found out: the debug mode makes the mistake visible."""
    model = mapped_chain(Chain(5, peeked=1))
    weights = tuple(replace(weight, read_outside=False) for weight in model.weights)
    unaware = replace(model, weights=weights, trace=replace(model.trace, outside_reads=frozenset()))
    document = prefetch(step=1) if not environ else {"uva": {"cpu_offload_gb": 1}}
    placed = placed_chain(unaware, document, environ)
    late = placed.model.get_submodule("layers.1.linear").weight
    chain = placed.model
    assert isinstance(chain, Chain)
    chain.peeked = None
    run(placed)
    if environ:  # nothing is copied ahead, so the poison stays
        assert late.isnan().all()
    chain.peeked = 1
    assert not torch.equal(run(placed)[0], expected(Chain(5, peeked=1)))


class _Looking(EmulatedDevice):
    """Notes of each copy whether it goes into memory that was poisoned before."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: list[bool] = []

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        self.poisoned.append(bool(target.view(torch.float32).isnan().all()))
        return super().transfer(target, source)


@pytest.mark.parametrize("debug", [True, False])
def test_a_buffer_is_poisoned_before_it_is_filled_again(debug: bool) -> None:
    device = _Looking()
    plan = make_plan(mapped_chain(Chain(5)), settings_for(prefetch(step=2)), device, context_tokens=3)
    placed = place(plan, device, debug=debug)
    for _ in range(2):
        assert torch.equal(run(placed)[0], expected(Chain(5)))
    assert device.poisoned == [debug] * (2 + 2 * 5)


def test_a_layer_that_runs_twice_a_pass_stays_on_the_device() -> None:
    order = [0, 1, 2, 1, 3, 4]
    placed = placed_chain(mapped_chain(Chain(5, order)), prefetch(step=2))
    ring = placed.plan.ring
    assert ring is not None
    assert [layer.number for layer in ring.layers] == [0, 2, 3, 4]
    assert any("[1]" in note and "exactly once" in note for note in placed.plan.notes)
    assert placed.plan.of("layers.1.linear.weight").access is Access.RESIDENT
    for _ in range(2):
        logits, moved = run(placed)
        assert torch.equal(logits, expected(Chain(5, order)))
        assert moved == ring.pass_bytes


@pytest.mark.parametrize("step", [1, 2, 3])
def test_layers_run_in_rounds_are_brought_in_each(step: int) -> None:
    order = [*range(4)] * 3
    placed = placed_chain(mapped_chain(Chain(4, order)), prefetch(step=step))
    ring = placed.plan.ring
    assert ring is not None
    assert placed.prefetcher is not None
    assert len(ring.layers) == 4
    assert any("3 times" in note for note in placed.plan.notes)
    for _ in range(2):
        logits, moved = run(placed)
        assert torch.equal(logits, expected(Chain(4, order)))
        assert moved == ring.pass_bytes == 3 * sum(layer.nbytes for layer in ring.copied)
    assert placed.prefetcher.out_of_turn == 0


def test_layers_run_in_rounds_are_read_as_often_across_the_link() -> None:
    placed = placed_chain(mapped_chain(Chain(4, [*range(4)] * 3)), {"uva": {"cpu_offload_gb": 1}})
    logits, moved = run(placed)
    assert torch.equal(logits, expected(Chain(4, [*range(4)] * 3)))
    weights = {w.full: w for w in placed.plan.model}
    assert weights["layers.2.linear.weight"].step_bytes(1) == 3 * weights["layers.2.linear.weight"].nbytes
    assert moved == sum(weight.step_bytes(IDS.shape[1]) for weight in weights.values())


@pytest.mark.parametrize("known", [True, False])
def test_a_layer_that_runs_within_another_never_shares_its_buffer(known: bool) -> None:
    """Seen in the trace such layers stay on the device; unseen, the pass fails and says why."""

    def nested() -> Chain:
        model = Chain(4, [0, 2, 3])
        inner, outer = model.layers[1], model.layers[2]
        forward: Any = outer.forward
        outer.forward = lambda hidden: forward(inner(hidden))  # type: ignore[method-assign]
        return model

    mapped = mapped_chain(nested())
    if known:
        placed = placed_chain(mapped, prefetch(step=1))
        assert placed.plan.ring is not None
        assert [layer.number for layer in placed.plan.ring.layers] == [0, 3]
        assert torch.equal(run(placed)[0], expected(nested()))
        return
    unread = tuple(replace(weight, read_outside=False) for weight in mapped)
    blind = replace(mapped, trace=Trace(3, 1, failure="blind"), weights=unread)
    placed = placed_chain(blind, prefetch(step=1))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1 runs while layers\.2 does"):
        run(placed)
    model = placed.model
    assert isinstance(model, Chain)
    model.order = [0, 1, 3]  # what is left of it runs
    twin = nested()
    twin.order = [0, 1, 3]
    assert torch.equal(run(placed)[0], expected(twin))


def test_a_layer_in_use_keeps_its_buffer_whatever_runs_within_it() -> None:
    """Of five layers in two buffers layer 2 runs layer 1, unseen: when that has run, its buffer alone is given on."""
    twin, model = Chain(5), Chain(5)
    placed = placed_chain(mapped_chain(model), prefetch(step=2))
    for chain in (twin, model):
        inner, outer = chain.layers[1], chain.layers[2]
        forward: Any = outer.forward
        outer.forward = lambda hidden, f=forward, i=inner: f(i(hidden))  # type: ignore[method-assign]
        chain.order = [0, 3, 2, 4]
    for _ in range(3):
        assert torch.equal(run(placed)[0], expected(twin))


def test_the_ring_follows_the_order_in_which_layers_run() -> None:
    order = [4, 3, 2, 1, 0]
    placed = placed_chain(mapped_chain(Chain(5, order)), prefetch(step=2))
    assert placed.plan.ring is not None
    assert placed.prefetcher is not None
    assert [layer.number for layer in placed.plan.ring.layers] == order
    for _ in range(2):
        assert torch.equal(run(placed)[0], expected(Chain(5, order)))
    assert placed.prefetcher.out_of_turn == 0


def test_removed_hooks_leave_the_layers_alone() -> None:
    placed = placed_chain(mapped_chain(Chain(4)), prefetch(step=2))
    layer = placed.model.get_submodule("layers.3")
    assert layer._forward_pre_hooks
    assert layer._forward_hooks
    assert placed.prefetcher is not None
    placed.prefetcher.remove()
    for hooked in placed.model.get_submodule("layers").children():
        assert not hooked._forward_pre_hooks
        assert not hooked._forward_hooks
    assert run(placed)[1] == 0


def test_released_buffers_are_not_poisoned_outside_the_debug_mode() -> None:
    device = emulated()
    plan = make_plan(
        mapped_chain(Chain(3)),
        settings_for({"uva": {"cpu_offload_gb": 1}}, DISABLE_UVA),
        device,
        context_tokens=3,
    )
    placed = place(plan, device)
    for _ in range(2):
        assert torch.equal(run(placed)[0], expected(Chain(3)))
    assert placed.model.get_submodule("layers.2.linear").weight.isfinite().all()
