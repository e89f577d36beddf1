"""What llama.cpp calls a plan's weights: the names that a GGUF file of the model has, or may have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from overspill.model.experts import expert_blocks
from overspill.model.weights import ModelMap, Weight

_ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "falcon_mamba": "mamba",
    "glm_moe_dsa": "glm-dsa",
    "gpt_bigcode": "starcoder",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "mimo_v2_flash": "mimo2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron_h": "nemotron_h_moe",
    "olmo3": "olmo2",
    "phi": "phi2",
}
"""Where llama.cpp's name for an architecture is not transformers' model type, written a little otherwise."""

_SPLIT = {"attn_kv_b": ("attn_kv_b", "attn_k_b", "attn_v_b")}
"""Tensors that newer files hold in parts."""


def gguf_names(model: ModelMap) -> Mapping[str, tuple[str, ...]]:
    """By our name of a weight the names that GGUF files may have for it; weights whose name is not known are missing.

    Experts have several: gate and up are two tensors in most files, one in others.
    """
    found: dict[str, tuple[str, ...]] = {}
    for block in expert_blocks(model):
        for attribute, weight in block.weights.items():
            which, bias = attribute.removesuffix("_bias").removesuffix("_proj"), attribute.endswith("_bias")
            parts = ("gate", "up", "gate_up") if which == "gate_up" else (which,)
            kind = "bias" if bias else "weight"
            found[weight.full] = tuple(f"blk.{block.layer}.ffn_{part}_exps.{kind}" for part in parts)
    names = name_map(str(getattr(model.config, "model_type", "")), model.decoder.layers)
    for weight in model:
        if weight.full not in found and weight.nbytes and names is not None and (name := _name(weight, names)):
            stem, _, kind = name.rpartition(".")
            block_name, _, tensor = stem.rpartition(".")
            found[weight.full] = tuple(
                f"{block_name}.{part}.{kind}" if block_name else name for part in _SPLIT.get(tensor, (tensor,))
            )
    return found


def _name(weight: Weight, names: TensorNameMap) -> str | None:
    for full in (weight.full, *weight.aliases):
        for spelling in (full, f"backbone.{full.removeprefix('model.')}"):  # nemotron_h's older prefix
            name = names.get_name(spelling, try_suffixes=(".weight", ".bias"))
            if name is not None:
                return name if name.endswith((".weight", ".bias")) else f"{name}.weight"
    return None


@lru_cache(maxsize=8)
def name_map(model_type: str, layers: int) -> TensorNameMap | None:
    known = {_plain(name): number for number, name in MODEL_ARCH_NAMES.items()}
    number = known.get(_plain(_ARCHITECTURES.get(model_type, model_type.removesuffix("_text"))))
    return None if number is None else get_tensor_name_map(number, layers)


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "")
