"""A Qwen3 checkpoint, dense or with routed experts, once more as a GGUF file: the same weights for llama.cpp.

Matrices stay bfloat16; norms and routers become float32, as llama.cpp's own converter writes them. Tensors are
copied one at a time. The vocabulary is made up: as many tokens as the model has rows, for prompts of token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_PLAIN = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_BOS, _EOS = 0, 1


def write(folder: Path, path: Path) -> None:
    """`folder`'s safetensors as the file `path`, which is there only when it is whole."""
    config = AutoConfig.from_pretrained(folder)
    half = path.with_suffix(".part")
    writer = gguf.GGUFWriter(half, "qwen3moe" if config.model_type == "qwen3_moe" else "qwen3")
    _settings(writer, config)
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, "pt"))
            found |= dict.fromkeys(opened.keys(), opened)
        parts = _sources(found)
        for name, sources in parts.items():
            shape = list(found[sources[0]].get_slice(sources[0]).get_shape())
            if len(sources) > 1:
                shape.insert(0, len(sources))
            wide = _stays_wide(name)
            kind = gguf.GGMLQuantizationType.F32 if wide else gguf.GGMLQuantizationType.BF16
            nbytes = int(np.prod(shape)) * (4 if wide else 2)
            writer.add_tensor_info(name, shape, np.dtype(np.float32 if wide else np.uint16), nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, sources in parts.items():
            writer.write_tensor_data(_data(name, [found[source].get_tensor(source) for source in sources]))
    writer.close()
    half.rename(path)


def _settings(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    tokens = [f"<{number}>" for number in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["< 0"])  # llama.cpp refuses a file without any
    writer.add_bos_token_id(_BOS)
    writer.add_eos_token_id(_EOS)
    writer.add_add_bos_token(False)


def _sources(names: Iterator[str] | dict[str, Any]) -> dict[str, list[str]]:
    """The checkpoint's tensors by the name of the file's tensor that they make, experts in their order."""
    made: dict[str, list[str]] = {}
    experts: dict[str, dict[int, str]] = {}
    for name in names:
        if name in _PLAIN:
            made[_PLAIN[name]] = [name]
            continue
        layer = _LAYER.fullmatch(name)
        assert layer is not None, name
        if expert := _EXPERT.fullmatch(layer[2]):
            experts.setdefault(f"blk.{layer[1]}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = name
        else:
            made[f"blk.{layer[1]}.{_IN_LAYER[layer[2]]}.weight"] = [name]
    return made | {name: [of[number] for number in sorted(of)] for name, of in experts.items()}


def _stays_wide(name: str) -> bool:
    return "norm" in name or "ffn_gate_inp" in name


def _data(name: str, tensors: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    tensor = tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))
    assert tensor.dtype == torch.bfloat16, f"{name} is {tensor.dtype}"
    return tensor.float().numpy() if _stays_wide(name) else tensor.view(torch.uint16).numpy()
