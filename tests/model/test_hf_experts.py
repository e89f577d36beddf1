"""The contacts with transformers' experts interface."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from overspill.model import hf_experts
from overspill.model.hf_experts import IMPLEMENTATION, gate_of, install, original_forward, weights_from
from tiny_models import TINY


def test_the_choice_of_an_implementation_takes_a_name() -> None:
    inspect.signature(PreTrainedModel.set_experts_implementation).bind(object(), "eager")


def test_observed_experts_are_not_computed_and_the_choice_comes_back() -> None:
    model: Any = TINY["qwen3_moe"].model()
    model.set_experts_implementation("eager")
    seen: list[tuple[str, int]] = []
    paths = {module: path for path, module in model.named_modules()}
    ids = torch.tensor([[3, 4]])
    with torch.no_grad():
        before = model(ids).logits
        with hf_experts.observed_experts(model, lambda experts, top_k: seen.append((paths[experts], top_k))):
            model(ids)
        assert torch.equal(model(ids).logits, before)
    assert seen == [(f"model.layers.{layer}.mlp.experts", 2) for layer in range(6)]
    assert model.config._experts_implementation == "eager"


def test_the_experts_registry_takes_functions_by_name() -> None:
    called: list[Any] = []

    def double(experts: nn.Module, hidden: torch.Tensor, index: Any, weights: Any) -> torch.Tensor:
        called.append(index.shape)
        return 2 * hidden

    ALL_EXPERTS_FUNCTIONS.register("overspill_test_double", double)
    model = TINY["mixtral"].model()
    hf_experts.set_experts_implementation(model, "overspill_test_double")
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
    assert called == [(3, 2)] * 6
    hf_experts.set_experts_implementation(nn.Linear(1, 1), "eager")  # a module without experts is left alone


def experts_of(name: str) -> Any:
    model = TINY[name].model()
    return next(m for m in model.modules() if hf_experts.goes_through_interface(m))


INDEX = torch.tensor([[0, 2], [5, 0], [3, 2]])
WEIGHTS = torch.tensor([[0.5, 0.25], [1.0, 0.125], [0.75, 0.5]])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h"])
def test_the_original_loop_visits_experts_in_order_and_reads_only_the_chosen(name: str) -> None:
    experts = experts_of(name)
    hidden = torch.randn(3, 35, generator=torch.Generator().manual_seed(1))
    seen: list[int] = []

    class Table:
        def __init__(self, stack: torch.Tensor) -> None:
            self.stack = stack

        def __getitem__(self, expert: Any) -> torch.Tensor:
            seen.append(int(expert))
            return self.stack[expert]

    with torch.no_grad():
        expected = original_forward(experts)(hidden, INDEX, WEIGHTS)
        tables = {name: Table(parameter.data) for name, parameter in experts.named_parameters()}
        with weights_from(experts, tables):
            read = original_forward(experts)(hidden, INDEX, WEIGHTS)
    assert torch.equal(read, expected)
    assert list(dict.fromkeys(seen)) == [0, 2, 3, 5]
    assert seen == sorted(seen)
    assert isinstance(experts.down_proj, nn.Parameter), "the parameters are themselves again"


def test_an_installed_runner_takes_the_loops_place_and_other_modules_keep_theirs() -> None:
    model: Any = TINY["mixtral"].model()
    ids = torch.tensor([[3, 4]])
    with torch.no_grad():
        hf_experts.set_experts_implementation(model, "eager")
        eager = model(ids).logits
        hf_experts.set_experts_implementation(model, IMPLEMENTATION)
        assert torch.equal(model(ids).logits, eager)
        called: list[Any] = []

        def runner(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            called.append(index.shape)
            return torch.zeros_like(hidden)

        install(model.model.layers[1].mlp.experts, runner)
        assert not torch.equal(model(ids).logits, eager)
    assert called == [(2, 2)]


def test_a_gate_is_plain_where_nothing_but_the_activation_is_done_with_it() -> None:
    plain, gate = gate_of(experts_of("mixtral"))
    products = torch.randn(2, 22)
    assert plain is not None
    assert torch.equal(gate(products), plain(products[:, :11]) * products[:, 11:])
    assert gate_of(experts_of("gpt_oss"))[0] is None, "clamped and interleaved"
    experts = experts_of("nemotron_h")
    assert gate_of(experts) == (experts.act_fn, experts.act_fn)
