"""A GGUF header as a transformers configuration.

The key names are those of ggml's docs/gguf.md. transformers' tables carry most of them; what they leave out
although it changes what the model computes (an expert's width, rotary scaling, logit caps) is added here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import GenerationConfig

from overspill.checkpoint.records import Checkpoint, TensorRecord
from overspill.errors import CheckpointError, UnsupportedModelError
from overspill.model import hf_gguf
from overspill.model.gguf_blocks import dequantize

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ALSO: Mapping[str, Mapping[str, str]] = {
    "falcon": {
        "attention.head_count_kv": "num_kv_heads",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "feed_forward_length": "ffn_hidden_size",
    },
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
    "gemma4": {"final_logit_softcapping": "final_logit_softcapping"},
    "gpt-oss": {"attention.sliding_window": "sliding_window"},
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "lfm2": {"attention.layer_norm_rms_epsilon": "norm_eps"},
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
    "phi3": {
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "stablelm": {"rope.freq_base": "rope_theta"},
    "starcoder2": {"rope.freq_base": "rope_theta"},
}
_PARTIAL_ROTARY = ("nemotron", "phi3", "stablelm")
_TIED_THOUGH_STORED = ("bloom", "falcon")
# The 27 B models scale queries by hidden_size / heads, not by head_dim; llama.cpp, too, knows them by depth.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GATING = {0: "none", 1: "softmax", 2: "sigmoid"}


def architecture_of(checkpoint: Checkpoint) -> str:
    """`general.architecture`; UnsupportedModelError for one that transformers has no GGUF mapping for."""
    architecture = checkpoint.metadata.get("general.architecture")
    known = hf_gguf.known_architectures()
    if architecture not in known:
        raise UnsupportedModelError(
            f"{checkpoint.files[0]}: GGUF architecture {architecture!r} is not one that transformers maps: "
            f"{', '.join(known)}",
            hint="give the original model's folder or hub id (safetensors), or a newer transformers",
        )
    return str(architecture)


def config_from_gguf(checkpoint: Checkpoint) -> PretrainedConfig:
    """The model's configuration; its dtype is left to the caller.

    Of the file it reads at most a few hundred bytes of rotary factors; all else is in the header. Raises
    UnsupportedModelError for an unknown architecture and for what transformers cannot express,
    CheckpointError for a header that lacks a key.
    """
    architecture = architecture_of(checkpoint)
    try:
        if hf_gguf.by_function(architecture):
            values = hf_gguf.config_by_function(checkpoint.metadata, tuple(checkpoint.tensors), _vocab_size(checkpoint))
        else:
            values = _values_by_table(architecture, checkpoint)
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint.files[0]}: the header has no key {error} for its {architecture} model"
        ) from error
    return hf_gguf.build_config(values)


def generation_config_from_gguf(checkpoint: Checkpoint) -> GenerationConfig:
    """Greedy, with the file's special tokens; the end of a sequence, a turn or a message ends generation."""
    metadata = checkpoint.metadata
    ids = hf_gguf.special_ids(metadata)
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(token for token in named if token is not None))
    if metadata.get("general.architecture") == "gemma4":
        ends = _GEMMA4_ENDS
    return GenerationConfig(
        bos_token_id=ids.get("bos_token_id"),
        pad_token_id=ids.get("pad_token_id"),
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
    )


_GEMMA4_ENDS = [1, 106, 50]  # the file names one of <eos>, <turn|>, <|tool_response>


def _values_by_table(architecture: str, checkpoint: Checkpoint) -> dict[str, Any]:
    metadata, tensors = checkpoint.metadata, checkpoint.tensors
    model_type = hf_gguf.model_type(architecture, metadata.get("general.name"))
    fields = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    if absent := [key for key in ("block_count", "embedding_length", "context_length") if key not in fields]:
        raise KeyError(f"{architecture}.{absent[0]}")
    values = hf_gguf.config_defaults(architecture)
    values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    values |= {"model_type": model_type, **hf_gguf.special_ids(metadata)}
    values["tie_word_embeddings"] = "output.weight" not in tensors or architecture in _TIED_THOUGH_STORED
    names = {**hf_gguf.config_names(architecture), **_ALSO.get(architecture, {})}
    for key, name in names.items():
        if name is not None and key in fields:
            values[name] = _uniform(architecture, key, fields[key])
    if (vocab_size := _vocab_size(checkpoint)) is not None:
        values["vocab_size"] = vocab_size
    _add_head_dim(architecture, model_type, fields, values)
    _add_rotary_scaling(architecture, fields, tensors, values)
    _add_specials(architecture, fields, tensors, values)
    return values


def _uniform(architecture: str, key: str, value: Any) -> Any:
    """A value that may be given per layer, as the one that all layers share."""
    if not isinstance(value, list):
        return value
    if architecture == "lfm2":
        return max(value)
    if len(set(value)) != 1:
        raise UnsupportedModelError(
            f"{architecture}.{key} differs between layers: {value}",
            hint="transformers has one value for all layers here; give the original model's folder",
        )
    return value[0]


def _vocab_size(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding, which may be padded beyond the vocabulary."""
    if (embedding := checkpoint.tensors.get("token_embd.weight")) is not None:
        return embedding.shape[0]
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens is not None else None


def _add_head_dim(architecture: str, model_type: str, fields: Mapping[str, Any], values: dict[str, Any]) -> None:
    """head_dim where the configuration has one: the key's length, or what llama.cpp takes without it."""
    if architecture == "gemma4":  # head_dim is that of its sliding layers, which only the default tells
        return
    width, heads = fields.get("embedding_length"), fields.get("attention.head_count")
    head_dim = fields.get("attention.key_length")
    if head_dim is None and isinstance(width, int) and isinstance(heads, int) and heads:
        head_dim = width // heads
    if head_dim is None:
        return
    if hf_gguf.has_field(model_type, "head_dim"):
        values["head_dim"] = head_dim
    if architecture in _PARTIAL_ROTARY:
        values["partial_rotary_factor"] = fields.get("rope.dimension_count", head_dim) / head_dim


def _add_specials(
    architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, TensorRecord], values: dict[str, Any]
) -> None:
    """What only the presence of tensors tells, and values written in another language than transformers'."""
    if architecture == "stablelm":
        values["use_qkv_bias"] = "blk.0.attn_q.bias" in tensors
        values["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
        values["qk_layernorm"] = "blk.0.attn_q_norm.weight" in tensors
    elif architecture == "minimax-m2":
        if "expert_gating_func" in fields:
            values["scoring_func"] = _GATING.get(fields["expert_gating_func"], "softmax")
    elif architecture in _LAYERS_OF_27B:
        of_27b = fields.get("block_count") == _LAYERS_OF_27B[architecture]
        values["query_pre_attn_scalar"] = (
            fields["embedding_length"] // fields["attention.head_count"] if of_27b else values["head_dim"]
        )
    elif architecture == "lfm2":
        kv_heads = fields["attention.head_count_kv"]
        values["block_auto_adjust_ff_dim"] = False
        values["full_attn_idxs"] = [layer for layer, heads in enumerate(kv_heads) if heads]
    elif architecture == "gemma4":
        values["eos_token_id"] = _GEMMA4_ENDS
    elif architecture == "falcon" and ("blk.0.attn_norm_2.weight" in tensors or values.get("num_kv_heads", 1) != 1):
        raise UnsupportedModelError(
            "falcon with more than one key head: llama.cpp stores its fused attention in another order",
            hint="give the original model's folder",
        )


def _add_rotary_scaling(
    architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, TensorRecord], values: dict[str, Any]
) -> None:
    """`rope_scaling` from the keys `rope.scaling.*` and from the tensors of rotary factors."""
    scaling = {key.removeprefix("rope.scaling."): v for key, v in fields.items() if key.startswith("rope.scaling.")}
    kind = scaling.get("type", "none")
    original = scaling.get("original_context_length", values.get("max_position_embeddings"))
    long, short = (tensors.get(f"rope_factors_{which}.weight") for which in ("long", "short"))
    if long is not None and short is not None:
        values["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": _floats(long),
            "short_factor": _floats(short),
            "original_max_position_embeddings": original,
            "factor": values["max_position_embeddings"] / original,
        }
    elif kind == "linear":
        values["rope_scaling"] = {"rope_type": "linear", "factor": scaling["factor"]}
    elif kind == "yarn":
        values["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": scaling["factor"],
            "original_max_position_embeddings": original,
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if key in scaling:
                values["rope_scaling"][name] = scaling[key]
        if architecture == "gpt-oss":
            values["rope_scaling"]["truncate"] = False
    elif kind != "none":
        raise UnsupportedModelError(
            f"{architecture}.rope.scaling.type is {kind!r}, of linear, yarn and longrope (with its tensors)",
            hint="give the original model's folder",
        )
    elif architecture == "llama" and (record := tensors.get("rope_freqs.weight")) is not None:
        values["rope_scaling"] = _llama3_scaling(_floats(record), values)


def _llama3_scaling(factors: list[float], values: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, of which llama.cpp stores each frequency's divisor [head_dim / 2].

    The largest divisor is the factor; the other numbers are Meta's own, and are held against the whole list.
    """
    factor, low, high, original = max(factors), 1.0, 4.0, 8192
    for index, found in enumerate(factors):
        wavelength = 2 * math.pi * values.get("rope_theta", 10000.0) ** (index / len(factors))
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(found, expected, rel_tol=1e-3):
            raise UnsupportedModelError(
                f"rope_freqs.weight divides frequency {index} by {found:.5g}, Llama 3 by {expected:.5g}",
                hint="give the original model's folder, whose config.json states the rotary scaling",
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _floats(record: TensorRecord) -> list[float]:
    """A small tensor's values, read from its file."""
    with record.extent.file.open("rb") as file:
        file.seek(record.extent.offset)
        raw = file.read(record.extent.length)
    if len(raw) != record.extent.length:
        raise CheckpointError(f"{record.extent.file} ends within tensor {record.name!r}")
    values: list[float] = dequantize(np.frombuffer(bytearray(raw), np.uint8), record).flatten().tolist()
    return values
