"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from overspill.checkpoint import Checkpoint, open_checkpoint

EPSILON = 2.0**-20
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """A tiny model of `model_type` as a file of `architecture`.

    `fields` are the metadata keys below the architecture; `forward` is what the converter does to a tensor,
    by a pattern of its name in the file; what `close` matches is rounded on the way.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any]
    fields: Mapping[str, Any]
    forward: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    close: str = "never"


BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPSILON,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FIELDS = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": EPSILON,
    "rope.freq_base": 5000.0,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
NORM = r".*norm\.weight"


def permute(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """From halves of a head's dimensions to pairs of them, as llama.cpp's rotary wants them."""

    def run(w: torch.Tensor) -> torch.Tensor:
        return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)

    return run


def plus_one(w: torch.Tensor) -> torch.Tensor:
    return w + 1


def transpose(w: torch.Tensor) -> torch.Tensor:
    return w.T


def heads_apart(w: torch.Tensor) -> torch.Tensor:
    """Bloom's [heads, (q, k, v), head_dim, ...] as all q, all k, all v."""
    return w.reshape(4, 3, 16, *w.shape[1:]).transpose(0, 1).reshape(w.shape)


def tile_heads(w: torch.Tensor, head_dim: int = 1) -> torch.Tensor:
    """Rows grouped by key head (2 keys of 2 values each), as llama.cpp tiles them: k0v0 k1v0 k0v1 k1v1."""
    return w.reshape(2, 2, head_dim, *w.shape[1:]).transpose(0, 1).reshape(w.shape)


def case(model_type: str, architecture: str, config: Any = (), fields: Any = (), **more: Any) -> Case:
    return Case(model_type, architecture, {**BASE, **ROPE, **dict(config)}, {**FIELDS, **dict(fields)}, **more)


LLAMA_FORWARD = {r".*attn_q\..*": permute(4), r".*attn_k\..*": permute(2)}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MOE_FIELDS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
LAYER_NORM = {"attention.layer_norm_epsilon": EPSILON}
CASES = {
    "llama": case("llama", "llama", fields={"rope.dimension_count": 16}, forward=LLAMA_FORWARD),
    "llama-tied": case("llama", "llama", {"tie_word_embeddings": True}, forward=LLAMA_FORWARD),
    "llama-yarn": case(
        "llama",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
        forward=LLAMA_FORWARD,
    ),
    "qwen2": case("qwen2", "qwen2"),
    "qwen3": case("qwen3", "qwen3", {"head_dim": 32}, {"attention.key_length": 32}),
    "qwen3moe": case(
        "qwen3_moe",
        "qwen3moe",
        {**MOE, "head_dim": 32, "norm_topk_prob": True},
        {**MOE_FIELDS, "attention.key_length": 32},
    ),
    "qwen2moe": case(
        "qwen2_moe",
        "qwen2moe",
        {**MOE, "shared_expert_intermediate_size": 64},
        {**MOE_FIELDS, "expert_shared_feed_forward_length": 64},
        forward={r".*gate_inp_shexp.*": lambda w: w[0]},
    ),
    "gpt-oss": case(
        "gpt_oss",
        "gpt-oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "attention.key_length": 32,
            "attention.sliding_window": 4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "gemma2": case(
        "gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4, "attn_logit_softcapping": 40.0},
        {"attention.key_length": 32, "attention.sliding_window": 4, "attn_logit_softcapping": 40.0},
        forward={NORM: plus_one},
        close=NORM,
    ),
    "gemma3": case(
        "gemma3_text",
        "gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 4,
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "attention.key_length": 32,
            "attention.sliding_window": 4,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        forward={NORM: plus_one},
        close=NORM,
    ),
    "phi3": case("phi3", "phi3", {"sliding_window": 4}, {"attention.sliding_window": 4}),
    "starcoder2": case("starcoder2", "starcoder2", {"norm_epsilon": EPSILON}, LAYER_NORM),
    "stablelm": case(
        "stablelm",
        "stablelm",
        {
            "layer_norm_eps": EPSILON,
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
        {**LAYER_NORM, "rope.dimension_count": 8},
    ),
    "nemotron": case(
        "nemotron",
        "nemotron",
        {
            "norm_eps": EPSILON,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
        {**LAYER_NORM, "rope.dimension_count": 8},
        forward={NORM: plus_one},
        close=NORM,
    ),
    "gpt2": case(
        "gpt2",
        "gpt2",
        {
            "n_positions": 128,
            "n_embd": 64,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_inner": 96,
            "layer_norm_epsilon": EPSILON,
        },
        LAYER_NORM,
        forward={r"blk.*(attn_qkv|attn_output|ffn_up|ffn_down)\.weight": transpose},
    ),
    "bloom": case(
        "bloom",
        "bloom",
        {"n_layer": LAYERS, "n_head": 4, "layer_norm_epsilon": EPSILON},
        LAYER_NORM,
        forward={r".*attn_qkv.*": heads_apart},
    ),
    "falcon": case(
        "falcon",
        "falcon",
        {"layer_norm_epsilon": EPSILON, "ffn_hidden_size": 96, "num_kv_heads": 1},
        {**LAYER_NORM, "attention.head_count_kv": 1},
    ),
    "minimax-m2": case(
        "minimax_m2",
        "minimax-m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        {"expert_count": 4, "expert_used_count": 2, "attention.key_length": 16, "rope.dimension_count": 16},
    ),
    "mamba": case(
        "mamba",
        "mamba",
        {
            "state_size": 8,
            "conv_kernel": 4,
            "time_step_rank": 4,
            "layer_norm_epsilon": EPSILON,
            "intermediate_size": 128,
        },
        {
            "ssm.conv_kernel": 4,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 128,
            "attention.head_count": 0,
            "feed_forward_length": 0,
        },
        forward={r".*ssm_conv1d\.weight": lambda w: w[:, 0], r".*ssm_a": lambda w: -torch.exp(w)},
        close=r".*ssm_a",
    ),
    "qwen35": case(
        "qwen3_5_text",
        "qwen35",
        {
            "num_hidden_layers": LAYERS,
            "head_dim": 32,
            "full_attention_interval": 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        {
            "attention.key_length": 32,
            "full_attention_interval": 2,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 64,
            "rope.dimension_sections": [2, 1, 1, 0],
            "rope.dimension_count": 8,
        },
        forward={
            r".*ssm_a": lambda w: -torch.exp(tile_heads(w)),
            r".*ssm_dt\.bias": lambda w: tile_heads(w),
            r".*ssm_(alpha|beta)\.weight": lambda w: tile_heads(w),
            r".*attn_gate\.weight": lambda w: tile_heads(w, 16),
            r".*attn_qkv\.weight": lambda w: torch.cat((w[:64], tile_heads(w[64:], 16))),
            r".*ssm_conv1d\.weight": lambda w: torch.cat((w[:64], tile_heads(w[64:], 16)))[:, 0],
            r".*ssm_out\.weight": lambda w: tile_heads(w.T, 16).T,
            r"(?!.*ssm_norm)" + NORM: plus_one,
        },
        close=NORM + r"|.*ssm_a",
    ),
    "lfm2": case(
        "lfm2",
        "lfm2",
        {
            "norm_eps": EPSILON,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
        },
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]},
        forward={r".*shortconv\.conv\.weight": lambda w: w[:, 0]},
    ),
}


def tiny_model(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[case.model_type](**case.config)).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.05)
            if "norm" in name and name.endswith("weight"):
                tensor.add_(1.0 if "gemma" not in case.architecture else 0.0)
    return model


def split_experts(name: str, tensor: torch.Tensor, interleaved: bool) -> dict[str, torch.Tensor]:
    """A fused experts parameter as the tensors that llama.cpp keeps."""
    layer, which, bias = re.fullmatch(r".*\.(\d+)\..*experts\.(gate_up|down)_proj(_bias)?", name).groups()
    suffix = "_exps.bias" if bias else "_exps.weight"
    if interleaved and not bias:
        tensor = tensor.transpose(1, 2)
    if which == "down":
        return {f"blk.{layer}.ffn_down{suffix}": tensor}
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if interleaved else tensor.chunk(2, dim=1)
    return {f"blk.{layer}.ffn_gate{suffix}": gate, f"blk.{layer}.ffn_up{suffix}": up}


RENAMED = {"e_score_correction_bias": "exp_probs_b.bias", "dt_bias": "ssm_dt.bias"}


def file_tensors(case: Case, model: nn.Module) -> dict[str, torch.Tensor]:
    """The file's tensors by name."""
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    tied = model.config.tie_word_embeddings
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if ".experts." in name:
            tensors |= split_experts(name, tensor, interleaved=case.model_type == "gpt_oss")
        elif (leaf := RENAMED.get(name.rpartition(".")[2])) is not None:
            tensors[f"blk.{re.search(r'[0-9]+', name)[0]}.{leaf}"] = tensor
        else:
            base, suffix = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name).groups()
            found = names.get_name(base) or names.get_name(base.removeprefix("transformer."))
            tensors[found + (suffix or ("" if "ssm" in found else ".weight"))] = tensor
    for name in tensors:
        for pattern, forwarded in case.forward.items():
            if re.fullmatch(pattern, name):
                tensors[name] = forwarded(tensors[name]).contiguous()
    return tensors


def write_gguf(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, Any] | None = None,
    ggml_type: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Checkpoint:
    writer = gguf.GGUFWriter(path, architecture)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    values = {f"{architecture}.{key}": value for key, value in fields.items()}
    ids = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("bos", 1), ("eos", 2), ("padding", 0))}
    for key, value in (values | ids | dict(metadata or {})).items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        data = tensor.detach().numpy()
        kind = ggml_type if data.ndim > 1 and data.shape[-1] % 32 == 0 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


def save_gguf(path: Path, name: str, kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0, *, seed: int = 0) -> Path:
    """The case `name` as a file, packed as `kind`."""
    case = CASES[name]
    write_gguf(path, case.architecture, case.fields, file_tensors(case, tiny_model(case, seed)), ggml_type=kind)
    return path
