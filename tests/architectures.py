"""A tiny model of every architecture that transformers can generate text with.

`SMALL` is a dictionary of common small sizes: each goes where an architecture's configuration has such a field, also
in configurations below it. `BY_HAND` says the rest. Weights are random, and all of them change the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    Gemma3Config,
    LlavaConfig,
    MusicgenDecoderConfig,
    MusicgenMelodyDecoderConfig,
    PretrainedConfig,
    Qwen3VLConfig,
    WhisperConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from tiny_models import draw_weights

transformers_logging.disable_progress_bar()

CAUSAL: Mapping[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The class of each model type in transformers' mapping of causal language models."""

SMALL: Mapping[str, Any] = {
    "vocab_size": 128,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "n_embed"), 64),
    "word_embed_proj_dim": 64,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "ffn_hidden_size", "dim_ff", "inner_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("sliding_window", "attention_window"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    "mamba_d_head": 32,
    "mamba_head_dim": 16,
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "mamba_expand": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

_ONLY_STATED = ("sliding_window", "head_dim", "n_inner", "q_lora_rank")
"""Fields whose None means that the architecture does without."""

_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
_MIXED = {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]}
_ALTERNATING = {"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_LATENT = {"num_key_value_heads": 4}
_NARROW_LATENT = {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "head_dim": 16}
_PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
_GEMMA4 = {**_PER_LAYER, "global_head_dim": 32, "num_kv_shared_layers": 0, **_ALTERNATING}
_DOTS3 = {
    **_LATENT,
    **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
    **{f"swa_{name}": 32 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")},
    **{f"swa_{name}": 16 for name in ("qk_nope_head_dim", "v_head_dim")},
    "index_head_dim": 32,
    "index_n_heads": 2,
    "head_dim": 48,
    "moe_shared_expert_intermediate_size": 32,
}
_INDEXED = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 4}
_INKLING = {
    "unpadded_vocab_size": 120,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "rel_extent": 32,
    "n_layers_per_attn_res_block": 2,
}
_QWEN4 = {
    **_MIXED,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "sliding_window",
)
_ASSISTANT = {
    "model_type": "gemma4_text",
    **{name: SMALL[name] for name in _SIZES},
    **_GEMMA4,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}


def _each(kinds: Iterable[str], options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return dict.fromkeys(kinds, options)


BY_HAND: Mapping[str, Mapping[str, Any]] = {
    **_each(
        ("axk2", "deepseek_v2", "glm4_moe_lite", "minicpm3", "sarvam_mla"), _LATENT),
    **_each(("deepseek_v32", "glm_moe_dsa"), {**_LATENT, **_INDEXED}),
    **_each(("axk1", "deepseek_v3", "youtu"), _NARROW_LATENT),
    "longcat_flash": {**_NARROW_LATENT, "ffn_hidden_size": 96, "zero_expert_num": 4},
    "deepseek_v4": {**_INDEXED, "index_head_dim": 16, "head_dim": 16, "o_groups": 4, "o_lora_rank": 8,
                    "sliding_window": 8, "partial_rotary_factor": 0.5,
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots3_note_text": _DOTS3,
    "dots3_note": {"text_config": _DOTS3,
                   "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
                   "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "num_key_value_heads": 4}},
    **_each(("codegen", "gptj"), {"rotary_dim": 8}),
    **_each(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 16}),
    "bailing_hybrid": {**_MIXED, **_LATENT, "num_experts": 8, "n_group": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        **_ALTERNATING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (_SLIDING, _FULL)},
    },
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gemma3n_text": {**_PER_LAYER, **_ALTERNATING, "num_kv_shared_layers": 2, "laurel_rank": 8,
                     "activation_sparsity_pattern": None, "altup_num_inputs": 2, "intermediate_size": 96},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": {"text_config": _ASSISTANT, "backbone_hidden_size": 64},
    "gemma4_text": _GEMMA4,
    "got_ocr2": {"vision_config": {"image_size": 64, "mlp_dim": 96, "output_channels": 64, "global_attn_indexes": [1],
                                   "window_size": 2}},
    "gemma4_unified": {"text_config": {"num_hidden_layers": 8}},
    "gemma4_unified_text": {"num_hidden_layers": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MIXED,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **_each(("inkling_text", "inkling2_text", "inkling2_loop_text"), _INKLING),
    "kimi_linear": {**_MIXED, **_LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "num_local_experts": 8},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv", _FULL], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "phi4_multimodal": {"audio_config": {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64,
                                         "nemo_conv_channels": 16, "num_blocks": 2},
                        "vision_config": {"image_size": 56, "crop_size": 56}},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"] * 2, "axial_pos_shape": [8, 16],
                 "axial_pos_embds_dim": [32, 32], "feed_forward_size": 96, "num_buckets": 4},
    "roc_bert": {"pronunciation_vocab_size": 32, "pronunciation_embed_dim": 16, "shape_vocab_size": 32,
                 "shape_embed_dim": 16},
    "rwkv": {"rescale_every": 2},
    "xlm": {"emb_dim": 64},
    "xlnet": {"d_inner": 96},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "head_dim": None},
    "xmod": {"is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": [_LINEAR, "hybrid"] * 2, "num_key_value_heads": 4, "mamba_d_state": 16,
              "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": [_LINEAR, "hybrid"] * 2, "num_key_value_heads": 4, "n_mamba_heads": 8,
               "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A tiny model of type `kind`, of transformers' class `architecture`.

    `inputs` is a prompt with a picture or sound, beside tokens; None where text is all. `rows` of tokens make one
    sequence. `cached` False: decoding takes all tokens again. `unbuildable`: there is only a configuration.
    """

    kind: str
    architecture: str
    config: PretrainedConfig
    inputs: Mapping[str, torch.Tensor] | None = None
    rows: int = 1
    cached: bool = True
    unbuildable: bool = False

    @property
    def model_type(self) -> str:
        return self.kind.partition(" ")[0]

    def model(self) -> nn.Module:
        """In float32, every weight drawn."""
        torch.manual_seed(0)
        model_class: Any = getattr(transformers, self.architecture)
        config = self.config if type(self.config) is model_class.config_class else self.config.get_text_config()
        model: nn.Module = model_class._from_config(config, dtype=torch.float32).eval()
        draw_weights(model)
        return model.requires_grad_(False)


def tiny(kind: str) -> Tiny:
    """The tiny model of type `kind`: one of CAUSAL's, or of those that take a picture or sound."""
    if kind in _WITH_INPUTS:
        return _WITH_INPUTS[kind]()
    by_hand = BY_HAND.get(kind, {})
    config = _made(_CONFIG_CLASSES.get(kind, CONFIG_MAPPING[kind]), by_hand)
    return Tiny(
        kind,
        CAUSAL[kind],
        config,
        rows=getattr(config, "num_codebooks", 1) if kind.startswith("musicgen") else 1,
        cached=kind != "cpmant",
        unbuildable=kind in UNBUILDABLE,
    )


UNBUILDABLE = ("blt", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant")

_CONFIG_CLASSES = {"musicgen": MusicgenDecoderConfig, "musicgen_melody": MusicgenMelodyDecoderConfig}

_IMAGE = 120
_ROW = torch.tensor([[5, 17, 121, _IMAGE, _IMAGE, _IMAGE, _IMAGE, 122, 40, 9]])


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _qwen3_vl() -> Tiny:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = _made(
        Qwen3VLConfig,
        {
            "text_config": {"rope_parameters": rope},
            "vision_config": vision,
            "image_token_id": _IMAGE,
            "vision_start_token_id": 121,
            "vision_end_token_id": 122,
        },
    )
    inputs = {
        "input_ids": _ROW,
        "pixel_values": _drawn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (_ROW == _IMAGE).long(),
    }
    return Tiny("qwen3_vl", "Qwen3VLForConditionalGeneration", config, inputs)


def _gemma3() -> Tiny:
    vision = {"image_size": 16, "patch_size": 4, "hidden_size": 32}
    config = _made(Gemma3Config, {"vision_config": vision, "mm_tokens_per_image": 4, "image_token_index": _IMAGE})
    inputs = {"input_ids": _ROW, "pixel_values": _drawn(1, 3, 16, 16), "token_type_ids": (_ROW == _IMAGE).long()}
    return Tiny("gemma3", "Gemma3ForConditionalGeneration", config, inputs)


def _llava() -> Tiny:
    vision = {"image_size": 8, "patch_size": 4, "hidden_size": 32}
    config = _made(LlavaConfig, {"vision_config": vision, "image_token_index": _IMAGE})
    return Tiny(
        "llava", "LlavaForConditionalGeneration", config, {"input_ids": _ROW, "pixel_values": _drawn(1, 3, 8, 8)}
    )


def _whisper() -> Tiny:
    config = _made(
        WhisperConfig,
        {
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 3,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
    )
    inputs = {"input_features": _drawn(1, 8, 32), "decoder_input_ids": torch.tensor([[3, 9, 4]])}
    return Tiny("whisper (sound)", "WhisperForConditionalGeneration", config, inputs)


_WITH_INPUTS = {"qwen3_vl": _qwen3_vl, "gemma3": _gemma3, "llava": _llava, "whisper (sound)": _whisper}

KINDS = (*CAUSAL, *(kind for kind in _WITH_INPUTS if kind not in CAUSAL))
"""All of them."""


def _made(config_class: type[PretrainedConfig], by_hand: Mapping[str, Any]) -> PretrainedConfig:
    options = _small(config_class)
    for name, value in by_hand.items():
        below = options.get(name)
        options[name] = {**below, **value} if isinstance(value, Mapping) and isinstance(below, dict) else value
    return config_class(**options)


def _small(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    try:
        default = config_class()
    except Exception:  # a configuration without defaults is made by hand
        return {}
    own = default.to_dict()
    options = {
        name: value
        for name, value in SMALL.items()
        if name in own and (isinstance(own[name], int) or (own[name] is None and name not in _ONLY_STATED))
    }
    for name in config_class.sub_configs:
        if isinstance(getattr(default, name, None), PretrainedConfig):
            options[name] = _small(type(getattr(default, name)))
    return options
