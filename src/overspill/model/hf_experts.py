"""Every contact with transformers' experts interface, pinned by tests/model/test_hf_experts.py.

`use_experts_implementation` wraps a class of routed experts so that its forward goes through a registry by the name in
the configuration, as `f(module, hidden [T, H], index [T, K], weights [T, K]) -> [T, H]`. Two names are registered here:
one observes a pass on meta, one hands a module over to what overspill installed on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

IMPLEMENTATION = "overspill_experts"
_OBSERVE = "overspill_observe"
_RUNNER = "_overspill_runner"

ExpertsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden [T, H], index [T, K], weights [T, K]) -> [T, H]."""


def goes_through_interface(module: nn.Module) -> bool:
    """Whether `module` holds routed experts that transformers dispatches by name."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate")


def set_experts_implementation(model: Any, name: str) -> None:
    """Choose how routed experts are computed, where the architecture goes through transformers' experts interface."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(name)


def install(module: nn.Module, runner: ExpertsForward) -> None:
    """Have `module`'s experts computed by `runner`, once the model's implementation is IMPLEMENTATION."""
    object.__setattr__(module, _RUNNER, runner)


def installed(module: nn.Module) -> ExpertsForward | None:
    """What `install` put there."""
    runner: ExpertsForward | None = vars(module).get(_RUNNER)
    return runner


def original_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """The architecture's own loop over its chosen experts ("eager"), of (hidden, index, weights).

    It visits experts in ascending order and reads each one's weights as `self.<parameter>[expert]`.
    """
    forward: Any = type(module).forward
    return lambda *arguments: forward.__wrapped__(module, *arguments)


@contextmanager
def weights_from(module: nn.Module, tables: Mapping[str, Any]) -> Iterator[None]:
    """Within this, `module.<parameter>[expert]` reads from `tables[parameter]` instead of the parameter."""
    attributes = vars(module)  # found before a module's parameters are
    attributes.update(tables)
    try:
        yield
    finally:
        for name in tables:
            del attributes[name]


def gate_of(module: Any) -> tuple[nn.Module | None, Callable[[torch.Tensor], torch.Tensor]]:
    """(the activation, where nothing but act(gate) * up or act(up) is done with it; what does it in any case)."""
    if not module.has_gate:
        return module.act_fn, module.act_fn
    plain = type(module)._apply_gate is _default_apply_gate and module.is_concatenated
    return module.act_fn if plain else None, module._apply_gate


def _run(module: nn.Module, *arguments: Any, **named: Any) -> torch.Tensor:
    runner = installed(module)
    if runner is not None:
        return runner(*arguments, **named)
    if next(module.parameters()).is_cuda:
        grouped: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *arguments, **named)
        return grouped
    forward: Any = type(module).forward
    eager: torch.Tensor = forward.__wrapped__(module, *arguments, **named)
    return eager


@contextmanager
def observed_experts(model: nn.Module, see: Callable[[nn.Module, int], None]) -> Iterator[None]:
    """Within this, routed experts are not computed: `see(experts module, experts per token)` is called instead."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    chosen = {key: getattr(config, "_experts_implementation", None) for key, config in configs.items()}
    _observers.append(see)
    try:
        set_experts_implementation(model, _OBSERVE)
        yield
    finally:
        _observers.remove(see)
        for key, config in configs.items():
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = chosen[key]


_observers: list[Callable[[nn.Module, int], None]] = []


def _observe(experts: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    _observers[-1](experts, index.shape[-1])
    widest = max(p.numel() // p.shape[0] // hidden.shape[-1] for p in experts.parameters() if p.dim() > 1)
    gate_up = hidden.new_empty(hidden.shape[0], widest)  # what one expert's tokens take meanwhile, at the most
    result = torch.empty_like(hidden)
    del gate_up
    return result


for _name, _function in ((IMPLEMENTATION, _run), (_OBSERVE, _observe)):  # for good: a closure would keep a model
    ALL_EXPERTS_FUNCTIONS.register(_name, _function)
