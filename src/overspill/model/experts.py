"""Blocks of routed experts: the weights that one router chooses among, each with its experts along dimension 0."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from overspill.model.weights import ModelMap, Role, Weight

_SHARED = re.compile(r"shared_experts?|shared_mlp")


@dataclass(frozen=True)
class ExpertBlock:
    """The routed experts of one layer, as one module at `path` holds them.

    `weights` are its parameters, each [experts, ...], by the name the module gives them. `router` is the path of the
    module that scores the experts, `shared` that of the experts that every token passes, which the same parent calls
    with nothing but hidden states.
    """

    path: str
    layer: int
    experts: int
    top_k: int
    hidden_size: int
    weights: Mapping[str, Weight]
    router: str | None
    shared: str | None

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.nbytes // self.experts

    def chosen_bytes(self, tokens: int) -> tuple[int, int]:
        """The least and the most bytes of chosen experts that a pass over `tokens` tokens reads."""
        return self.top_k * self.expert_bytes, min(self.experts, self.top_k * tokens) * self.expert_bytes

    def parts(self) -> dict[str, tuple[str, ...]]:
        """For gate, up and down the names under which an override may know the weights: ours and GGUF's.

        Our modules hold gate and up as one parameter; GGUF files hold them as two, or as one.
        """
        prefix = f"blk.{self.layer}.ffn_"
        names: dict[str, tuple[str, ...]] = {}
        for attribute, weight in self.weights.items():
            if attribute.endswith("_bias") or not attribute.endswith("_proj"):
                continue
            which = attribute.removesuffix("_proj")
            for part in ("gate", "up") if which == "gate_up" else (which,):
                gguf = dict.fromkeys((f"{prefix}{part}_exps.weight", f"{prefix}{which}_exps.weight"))
                names[part] = (*gguf, weight.full, *weight.aliases)
        return names

    def bias_names(self) -> list[str]:
        """The names of its biases, ours and GGUF's: they go where the block goes."""
        names = []
        for attribute, weight in self.weights.items():
            if attribute.endswith("_bias"):
                which = attribute.removesuffix("_proj_bias")
                parts = ("gate", "up", "gate_up") if which == "gate_up" else (which,)
                names += [weight.full, *(f"blk.{self.layer}.ffn_{part}_exps.bias" for part in parts)]
        return names


def expert_blocks(model: ModelMap) -> tuple[ExpertBlock, ...]:
    """The blocks that a pass over `model` runs through transformers' experts interface, in the order of its layers."""
    by_owner: dict[str, dict[str, Weight]] = {}
    for weight in model:
        owner, _, attribute = weight.full.rpartition(".")
        if owner in model.trace.experts_top_k:
            by_owner.setdefault(owner, {})[attribute] = weight
    blocks = []
    for path, top_k in model.trace.experts_top_k.items():
        weights = by_owner.get(path, {})
        stacked = {n: w for n, w in weights.items() if w.routing is not None and w.name.layer is not None}
        if not stacked:
            continue
        module: Any = model.skeleton.get_submodule(path)
        first = next(weight for name, weight in stacked.items() if name.endswith("up_proj"))
        assert first.routing is not None
        assert first.name.layer is not None
        parent = model.skeleton.get_submodule(path.rpartition(".")[0])
        blocks.append(
            ExpertBlock(
                path,
                first.name.layer,
                first.routing.experts,
                top_k,
                first.shape[1 if module.is_transposed else 2],
                stacked,
                _below(path, _router(parent, first.routing.experts)),
                _below(path, _shared(parent)),
            )
        )
    return tuple(sorted(blocks, key=lambda block: block.layer))


def other_experts(model: ModelMap, blocks: Iterable[ExpertBlock]) -> list[Weight]:
    """Routed experts that no block holds: the architecture computes them by itself."""
    held = {weight.full for block in blocks for weight in block.weights.values()}
    return [weight for weight in model if weight.role is Role.ROUTED_EXPERT and weight.full not in held]


def _below(path: str, child: str | None) -> str | None:
    return None if child is None else f"{path.rpartition('.')[0]}.{child}"


def _router(parent: nn.Module, experts: int) -> str | None:
    """The child that holds a matrix with a row for each expert."""
    for name, child in parent.named_children():
        weight: Any = getattr(child, "weight", None)
        if weight is not None and weight.dim() == 2 and weight.shape[0] == experts:
            return name
    return None


def _shared(parent: nn.Module) -> str | None:
    for name, child in parent.named_children():
        if _SHARED.fullmatch(name):
            _, *others = inspect.signature(child.forward).parameters.values()
            alone = all(other.default is not other.empty or other.kind is other.VAR_KEYWORD for other in others)
            return name if alone else None
    return None
