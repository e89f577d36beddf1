"""Tiny random checkpoints of real architectures, as transformers itself writes them.

Hidden and intermediate sizes are odd on purpose: rows, and single experts of a stack, then start at addresses that are
no multiple of 16, which is where a copy that forgets alignment shows (docs/architecture.md, "Same bits in every tier").
Rotary sizes are not: torch's product of two or three complex numbers has two results (docs/measurements/bits.md).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

VOCABULARY = 128
CONTEXT = 32

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 35,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter of `model` random values under which each of them changes the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.1 * drawn)
            elif "embed" in name:
                parameter.copy_(drawn)
            else:
                parameter.copy_(drawn * parameter.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Tiny:
    """One checkpoint: a configuration class, what to set in it, and how to write it."""

    config_class: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    fused: bool = False
    max_shard_size: str | None = None

    def config(self) -> Any:
        return getattr(transformers, self.config_class)(**{**_COMMON, **self.options})

    def model(self) -> nn.Module:
        """The model itself, seeded: every weight drawn so that every weight changes the logits."""
        torch.manual_seed(self.seed)
        config = self.config()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        draw_weights(model, self.seed)
        return model.to(self.dtype).requires_grad_(False)

    def save(self, folder: Path) -> None:
        """Write it. transformers writes merged experts under their original per-expert names; `fused` does not."""
        model = self.model()
        if self.fused:
            model.config.save_pretrained(folder)
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        elif self.max_shard_size is not None:
            model.save_pretrained(folder, max_shard_size=self.max_shard_size)
        else:
            model.save_pretrained(folder)


_LLAMA = {"intermediate_size": 45}
_MIXTRAL = {"intermediate_size": 11, "num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN3_MOE = {
    "intermediate_size": 45,
    "moe_intermediate_size": 11,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

_SHARED_EXPERTS = {
    "intermediate_size": 45,
    "moe_intermediate_size": 11,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **_SHARED_EXPERTS,
    "kv_lora_rank": 10,
    "q_lora_rank": 13,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
    "head_dim": 16,
    "num_key_value_heads": 5,
    "topk_group": 1,
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
    "num_hidden_layers": 8,
    "hidden_size": 35,
    "intermediate_size": 45,
    "moe_intermediate_size": 11,
    "moe_shared_expert_intermediate_size": 13,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
}

TINY: Mapping[str, Tiny] = {
    "llama": Tiny("LlamaConfig", _LLAMA),
    "llama_tied": Tiny("LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "llama_bf16": Tiny("LlamaConfig", _LLAMA, dtype=torch.bfloat16),
    "llama_sharded": Tiny("LlamaConfig", _LLAMA, max_shard_size="30KB"),
    "llama_dynamic": Tiny(
        "LlamaConfig",
        {
            **_LLAMA,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
    "mamba": Tiny("MambaConfig", {"hidden_size": 32, "state_size": 8, "intermediate_size": 64, "time_step_rank": 4}),
    "bamba": Tiny(
        "BambaConfig",
        {
            "hidden_size": 40,
            "intermediate_size": 45,
            "num_key_value_heads": 5,
            "mamba_n_heads": 10,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "attn_layer_indices": [1, 4],
        },
    ),
    "phi3_longrope": Tiny(
        "Phi3Config",
        {
            "intermediate_size": 45,
            "num_key_value_heads": 5,
            "hidden_size": 40,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 4,
                "long_factor": [8.0] * 4,
            },
        },
    ),
    "qwen3": Tiny("Qwen3Config", {"intermediate_size": 45}),
    "qwen3_moe": Tiny("Qwen3MoeConfig", _QWEN3_MOE),
    "mixtral": Tiny("MixtralConfig", _MIXTRAL),
    "mixtral_fused": Tiny("MixtralConfig", _MIXTRAL, fused=True),
    "mixtral_sharded": Tiny("MixtralConfig", _MIXTRAL, max_shard_size="30KB"),
    "gpt_oss": Tiny(
        "GptOssConfig",
        {
            "intermediate_size": 11,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3": Tiny(
        "Gemma3TextConfig",
        {"intermediate_size": 45, "sliding_window": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
    ),
    "deepseek_v2": Tiny("DeepseekV2Config", {**_DEEPSEEK, "n_group": 1}),
    "qwen3_next": Tiny(
        "Qwen3NextConfig",
        {
            **_QWEN3_MOE,
            "shared_expert_intermediate_size": 11,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["full_attention", "linear_attention", "full_attention"] * 2,
        },
    ),
    "qwen3_5_moe": Tiny(
        "Qwen3_5MoeTextConfig",
        {
            **_QWEN3_MOE,
            "shared_expert_intermediate_size": 11,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["full_attention", "linear_attention", "full_attention"] * 2,
        },
    ),
    "deepseek_v3": Tiny("DeepseekV3Config", {**_DEEPSEEK, "qk_head_dim": 24, "n_group": 2}),
    "deepseek_v4": Tiny(
        "DeepseekV4Config",
        {
            "hidden_size": 40,
            "head_dim": 16,
            "moe_intermediate_size": 11,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 13,
            "o_groups": 5,
            "o_lora_rank": 6,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "sliding_window": 8,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "partial_rotary_factor": 0.5,
        },
    ),
    "laguna": Tiny("LagunaConfig", {**_QWEN3_MOE, "shared_expert_intermediate_size": 11}),
    "glm4_moe": Tiny("Glm4MoeConfig", {**_SHARED_EXPERTS, "n_group": 1, "topk_group": 1}),
    "llama4": Tiny(
        "Llama4TextConfig",
        {"intermediate_size": 11, "intermediate_size_mlp": 45, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "dbrx": Tiny(
        "DbrxConfig",
        {
            "d_model": 40,
            "hidden_size": 40,
            "n_heads": 5,
            "n_layers": 4,
            "max_seq_len": 64,
            "ffn_config": {"ffn_hidden_size": 11, "moe_num_experts": 6, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
        },
    ),
    "jetmoe": Tiny(
        "JetMoeConfig",
        {
            "intermediate_size": 11,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "kv_channels": 8,
            "num_key_value_heads": 2,
        },
    ),
    "kimi_linear": Tiny(
        "KimiLinearConfig",
        {
            "intermediate_size": 45,
            "moe_intermediate_size": 11,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "head_dim": 4,
            "num_key_value_heads": 5,
            "linear_head_dim": 8,
            "linear_num_heads": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"] * 2,
        },
    ),
    "nemotron_h": Tiny("NemotronHConfig", _NEMOTRON),
    "nemotron_latent": Tiny("NemotronHConfig", {**_NEMOTRON, "moe_latent_size": 24}),
}  # fmt: skip

ARCHITECTURES = (
    "llama",
    "llama_tied",
    "llama_bf16",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "gpt_oss",
    "gemma3",
    "qwen3_next",
    "kimi_linear",
    "nemotron_h",
    "mixtral",
    "mixtral_fused",
)
"""What the equality matrix runs."""


def save_headers(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """A checkpoint of any size whose data is a hole in the file: it plans like a real one and takes no disk space.

    Names are the model's own, so only for architectures whose checkpoints have those (llama).
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + tensor.numel() * dtype.itemsize
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


MakeTiny = Callable[[str], Path]


def maker(root: Path) -> MakeTiny:
    """A function from a name in TINY to its folder below `root`, written when first asked for."""

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            TINY[name].save(folder)
        return folder

    return make
