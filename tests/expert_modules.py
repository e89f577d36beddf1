"""Every class of routed experts that transformers dispatches by name, made tiny and alone, without its model."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from overspill.config.selectors import WeightName
from overspill.model.experts import ExpertBlock
from overspill.model.sources import Live
from overspill.model.weights import Role, Routing, Weight

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 35, 11

_SETTINGS = {
    **dict.fromkeys(("hidden_size", "hidden_dim", "moe_hidden_size"), HIDDEN),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size", "expert_dim"), INTERMEDIATE),
    **dict.fromkeys(("hidden_act", "hidden_activation"), "silu"),
    "num_experts_per_tok": TOP_K,
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "moe_latent_dim": None,
    "swiglu_limit": 1.5,
    "swiglu_alpha": 1.702,
    "mlp_gate_softcap": 2.0,
    "mlp_up_softcap": 3.0,
    **dict.fromkeys(("rms_norm_eps", "post_norm_eps"), 1e-6),
}


@cache
def experts_classes() -> dict[str, tuple[str, str]]:
    """(module, class) of each, by "family.Class", found in the source of the transformers that is installed."""
    found = {}
    folder = Path(transformers.__file__).parent / "models"
    for file in sorted(folder.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "use_experts_implementation" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any("use_experts" in ast.dump(d) for d in node.decorator_list):
                module = f"transformers.models.{file.parent.name}.{file.stem}"
                found[f"{file.parent.name}.{node.name}"] = (module, node.name)
    return found


def make_experts(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The experts of `experts_classes()[name]` with random weights; a fixed seed."""
    module, class_name = experts_classes()[name]
    config = PretrainedConfig()
    for key, value in _SETTINGS.items():
        setattr(config, key, value)
    config._experts_implementation = "eager"
    experts: nn.Module = getattr(importlib.import_module(module), class_name)(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return experts.to(dtype).eval().requires_grad_(False)


def block_of(experts: nn.Module, number: int = 0) -> ExpertBlock:
    """The block that these experts are, as layer `number` of a model would have it."""
    module: Any = experts
    weights = {
        attribute: Weight(
            WeightName(f"layers.{number}.experts.{attribute}", f"experts.{attribute}", "layers", number),
            Role.ROUTED_EXPERT,
            tuple(parameter.shape),
            parameter.dtype,
            Live(None),
            routing=Routing(EXPERTS, TOP_K),
        )
        for attribute, parameter in stacked(experts)
    }
    up = next(weight for attribute, weight in weights.items() if attribute.endswith("up_proj"))
    hidden_size = up.shape[1 if module.is_transposed else 2]
    return ExpertBlock(f"layers.{number}.experts", number, EXPERTS, TOP_K, hidden_size, weights, None, None)


def stacked(experts: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that hold an expert at each index of their first dimension."""
    return ((name, p) for name, p in experts.named_parameters() if p.shape[0] == EXPERTS)


def routed(tokens: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [tokens, HIDDEN], index [tokens, TOP_K], weights [tokens, TOP_K]) at random, float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
    return hidden, index, torch.rand(tokens, TOP_K, generator=generator)
