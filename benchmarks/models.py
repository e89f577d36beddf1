"""Random models of real shapes: in memory, as checkpoints, and placed on a device."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from overspill.config import resolve
from overspill.machine.device import Device
from overspill.model.hf import build_skeleton, rebuild_buffers
from overspill.model.map import map_live
from overspill.offload.placed import PlacedModel, place
from overspill.plan import make_plan

_TILE_ELEMENTS = 1 << 22
Weights = dict[str, torch.Tensor]


def llama(hidden: int, layers: int, *, intermediate: int, heads: int, vocabulary: int, tokens: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
    )


def qwen3(layers: int, *, hidden: int = 1024, vocabulary: int = 151936) -> Qwen3Config:
    """Qwen3-0.6B's shape at 28 layers."""
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=hidden // 8,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )


def qwen3_moe(
    layers: int,
    *,
    hidden: int,
    experts: int,
    intermediate: int,
    top_k: int = 4,
    heads: int = 16,
    vocabulary: int = 32000,
) -> Qwen3MoeConfig:
    """Top-`top_k` of `experts`; its checkpoints have a tensor for each expert."""
    return Qwen3MoeConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        moe_intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=top_k,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


def random_weights(config: PretrainedConfig, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Every parameter by name, in host memory; scaled so that each one matters to the logits and none explodes.

    One normal tile is repeated with an offset of its own for each parameter: drawing billions takes minutes.
    """
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randn(_TILE_ELEMENTS, generator=generator).to(dtype)
    weights: Weights = {}
    for name, parameter in build_skeleton(config, dtype).named_parameters():
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
        flat, at = tensor.view(-1), 0
        start = int(torch.randint(_TILE_ELEMENTS, (), generator=generator))
        while at < flat.numel():
            count = min(flat.numel() - at, _TILE_ELEMENTS - start)
            flat[at : at + count] = tile[start : start + count]
            at, start = at + count, 0
        if tensor.dim() < 2:
            tensor.mul_(0.1).add_(1.0)
        elif "embed" not in name:
            tensor.mul_(tensor.shape[-1] ** -0.5)
        weights[name] = tensor
    return weights


def assemble(config: PretrainedConfig, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """The transformers model over `weights` themselves, no copies."""
    dtype = next(iter(weights.values())).dtype
    model = build_skeleton(config, dtype)
    rebuild_buffers(model)
    for name, tensor in weights.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
    tie: Any = model.tie_weights
    tie()
    return model


def place_live(
    config: PretrainedConfig,
    weights: Mapping[str, torch.Tensor],
    document: Mapping[str, Any] | None,
    device: Device,
    *,
    tokens: int,
    sequences: int = 1,
    environ: Mapping[str, str] | None = None,
    debug: bool = False,
) -> PlacedModel:
    """A copy of `weights` on `device` as `document` says; with `debug` released ring buffers are poisoned."""
    settings = resolve(document, engine={"device": device.kind, "max_num_seqs": sequences}, environ=environ or {})
    mapped = map_live(assemble(config, weights), tokens=tokens, sequences=sequences)
    return place(make_plan(mapped, settings, device, context_tokens=tokens), device, debug=debug)


def checkpoint(config: PretrainedConfig, dtype: torch.dtype, cache: Path) -> Path:
    """A folder below `cache` with `config` and random weights, as transformers writes them; made once."""
    text = json.dumps(config.to_dict(), sort_keys=True, default=str) + str(dtype)
    folder = cache / f"{config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.exists():
        half = folder.with_suffix(".part")
        shutil.rmtree(half, ignore_errors=True)
        model: Any = assemble(config, random_weights(config, dtype))
        model.save_pretrained(half)
        half.rename(folder)
    return folder
