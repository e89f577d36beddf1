"""GGUF files written from tiny random models as llama.cpp's converter does, and read back into the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from emulated_runs import forward, placed, planned
from overspill.checkpoint import Checkpoint, Encoding, Extent, TensorRecord, open_checkpoint
from overspill.errors import CheckpointError, ConfigError, UnsupportedModelError
from overspill.model import gguf_blocks, hf_gguf
from overspill.model.gguf import (
    config_from_gguf,
    dequantize,
    generation_config_from_gguf,
    sources_from_gguf,
    sources_of_gguf,
    tokenizer_from_gguf,
    unused_tensors,
)
from overspill.model.sources import Conversion, Extents

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


def raw_bytes(record: TensorRecord) -> torch.Tensor:
    data = record.extent.file.read_bytes()[record.extent.offset : record.extent.offset + record.extent.length]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_from_gguf(checkpoint))


def load(checkpoint: Checkpoint) -> nn.Module:
    """The model, through the configuration and the sources; every parameter must have one or be tied."""
    sources = sources_from_gguf(checkpoint, skeleton(checkpoint))
    assert unused_tensors(checkpoint, sources) == ()
    weights = {
        name: source.read([raw_bytes(record) for record in source.records], torch.float32)
        for name, source in sources.items()
    }
    model = AutoModelForCausalLM.from_config(config_from_gguf(checkpoint)).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= set(model._tied_weights_keys or ())
    assert not unexpected
    return model


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", CASES)
def test_a_written_model_comes_back(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = tiny_model(case)
    checkpoint = write_gguf(tmp_path / "m.gguf", case.architecture, case.fields, file_tensors(case, model))
    loaded = load(checkpoint)
    sources = sources_from_gguf(checkpoint, skeleton(checkpoint))
    for key, expected in model.state_dict().items():
        found = loaded.state_dict()[key]
        rounds = key in sources and any(re.fullmatch(case.close, r.name) for r in sources[key].records)
        if rounds:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found, expected), key
    assert logits(model).std() > 1e-3
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "Ã ©", "1 2"]
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "<|end|>",
        *byte_alphabet(),
        *(m.replace(" ", "") for m in MERGES),
    ],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (256 + len(MERGES))],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<|end|>{% endfor %}",
}
PIECES = ["▁", *"helowrd12", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "ld", "▁wor", "▁world"]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES],
    "tokenizer.ggml.scores": [0.0] * 259 + [float(-i) for i in range(len(PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
    "tokenizer.ggml.unknown_token_id": 0,
}
# Ids that transformers' own loaders (5.17 and 5.24) give for these files.
BYTE_LEVEL_GOLDEN = {
    "hello world": [262, 267],
    " hello  world": [35, 262, 35, 267],
    "": [],
    "\n\t hello\r\n": [13, 12, 35, 262, 16, 13],
    "12 1212 3.5": [270, 35, 270, 270, 35, 54, 49, 56],
    "café — “日本” 🙂": [
        *(102, 100, 105, 269, 35, 229, 131, 151, 35, 229, 131, 159, 233, 154, 168),
        *(233, 159, 175, 229, 131, 160, 35, 243, 162, 156, 133),
    ],
    "<s>hello<|end|>": [1, 262, 2],
    "</s> world": [63, 50, 118, 65, 267],
    "he's HELLO": [259, 42, 118, 35, 75, 72, 79, 79, 82],
    "  ": [268],
}
SENTENCEPIECE_GOLDEN = {
    "hello world": [273, 278],
    "": [],
    "\n\t hello\r\n": [259, 13, 12, 273, 16, 13],
    "12 1212 3.5": [259, 267, 268, 259, 267, 268, 267, 268, 259, 54, 49, 56],
    "café — “日本” 🙂": [
        *(259, 102, 100, 105, 198, 172, 259, 229, 131, 151, 259, 229, 131, 159, 233, 154, 168),
        *(233, 159, 175, 229, 131, 160, 259, 243, 162, 156, 133),
    ],
    "he's HELLO": [259, 269, 42, 118, 259, 75, 72, 79, 79, 82],
}


def tokenizer_of(tmp_path: Path, metadata: Mapping[str, Any]) -> Any:
    return tokenizer_from_gguf(write_gguf(tmp_path / "t.gguf", "llama", FIELDS, {}, metadata))


def test_byte_level_tokenizer_gives_the_golden_ids(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, BYTE_LEVEL)
    assert {text: tokenizer(text)["input_ids"] for text in BYTE_LEVEL_GOLDEN} == BYTE_LEVEL_GOLDEN
    assert {text: tokenizer.decode(ids) for text, ids in BYTE_LEVEL_GOLDEN.items()} == {t: t for t in BYTE_LEVEL_GOLDEN}
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "<|end|>", "<unk>")
    assert len(tokenizer) == len(BYTE_LEVEL["tokenizer.ggml.tokens"])
    assert max(tokenizer("<|endoftext|>")["input_ids"]) < len(tokenizer)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<s>user hello<|end|>"


def test_sentencepiece_tokenizer_gives_the_golden_ids_after_bos(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, SENTENCEPIECE)
    found = {text: tokenizer(text)["input_ids"] for text in SENTENCEPIECE_GOLDEN}
    assert found == {text: [1, *ids] for text, ids in SENTENCEPIECE_GOLDEN.items()}
    assert tokenizer.decode(found["hello world"], skip_special_tokens=True).strip() == "hello world"


@pytest.mark.parametrize(("metadata", "add"), [(BYTE_LEVEL, True), (SENTENCEPIECE, False)])
def test_the_file_decides_about_bos(tmp_path: Path, metadata: Mapping[str, Any], add: bool) -> None:
    tokenizer = tokenizer_of(tmp_path, {**metadata, "tokenizer.ggml.add_bos_token": add})
    assert (tokenizer("hello")["input_ids"][0] == 1) is add


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, {}) is None


def test_an_unknown_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = write_gguf(tmp_path / "t.gguf", "lfm2", FIELDS, {}, {**BYTE_LEVEL, "tokenizer.ggml.model": "rwkv"})
    with pytest.raises(UnsupportedModelError, match="rwkv"):
        tokenizer_from_gguf(checkpoint)


def test_the_configuration_takes_the_special_tokens_of_the_file(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, {}, {**BYTE_LEVEL, **metadata})
    config, generation = config_from_gguf(checkpoint), generation_config_from_gguf(checkpoint)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [2, 5], 0)
    assert config.vocab_size == len(BYTE_LEVEL["tokenizer.ggml.tokens"])


def test_a_special_token_that_no_token_has_is_none(tmp_path: Path) -> None:
    metadata = {**BYTE_LEVEL, "tokenizer.ggml.unknown_token_id": 2**32 - 1}
    assert tokenizer_of(tmp_path, metadata).unk_token is None


def test_a_mistral_is_known_by_its_name(tmp_path: Path) -> None:
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, {}, {"general.name": "mistral"})
    assert config_from_gguf(checkpoint).model_type == "mistral"


def test_a_27b_gemma_scales_its_queries_by_its_width(tmp_path: Path) -> None:
    fields = {**FIELDS, "block_count": 46, "attention.key_length": 32}
    config = config_from_gguf(write_gguf(tmp_path / "m.gguf", "gemma2", fields, {}))
    assert (config.head_dim, config.query_pre_attn_scalar) == (32, 16)


# ---- what is refused


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    checkpoint = write_gguf(tmp_path / "m.gguf", "rwkv7", {}, {})
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7'.*llama, .*qwen3moe") as caught:
        config_from_gguf(checkpoint)
    assert caught.value.hint


def test_the_architectures_that_transformers_maps() -> None:
    causal = {case.architecture for case in CASES.values()}
    assert causal <= set(hf_gguf.known_architectures())
    assert not {"t5", "t5encoder", "deci", "general", "tokenizer"} & set(hf_gguf.known_architectures())


def test_a_header_without_a_needed_key_is_damaged(tmp_path: Path) -> None:
    fields = {key: value for key, value in FIELDS.items() if key != "block_count"}
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        config_from_gguf(write_gguf(tmp_path / "m.gguf", "llama", fields, {}))


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("llama", {"attention.head_count_kv": [2, 4]}, "differs between layers"),
        ("llama", {"rope.scaling.type": "su"}, "'su'"),
        ("falcon", {"attention.head_count_kv": 2}, "more than one key head"),
        ("llama", {"embedding_length": "wide"}, "refuses"),
    ],
)
def test_what_transformers_cannot_express_is_refused(
    architecture: str, fields: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = write_gguf(tmp_path / "m.gguf", architecture, {**FIELDS, **fields}, {})
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_gguf(checkpoint)


def llama_tensors() -> dict[str, torch.Tensor]:
    return file_tensors(CASES["llama"], tiny_model(CASES["llama"]))


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.1.ffn_up.weight": torch.zeros(64, 96)}
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, tensors)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj.*\[96, 64\].*blk\.1\.ffn_up.*\[64, 96\]"):
        sources_from_gguf(checkpoint, skeleton(checkpoint))


def test_a_parameter_that_the_file_lacks_has_no_source(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["blk.0.ffn_up.weight"]
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, tensors)
    model = skeleton(checkpoint)
    assert set(model.state_dict()) - set(sources_from_gguf(checkpoint, model)) == {"model.layers.0.mlp.up_proj.weight"}


def test_tensors_that_nothing_is_made_of_are_named(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.0.attn_q.bias": torch.zeros(64), "mystery.weight": torch.zeros(2)}
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, tensors)
    sources = sources_from_gguf(checkpoint, skeleton(checkpoint))
    assert set(unused_tensors(checkpoint, sources)) == {"blk.0.attn_q.bias", "mystery.weight"}


# ---- rotary frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_frequencies_are_taken_up(tmp_path: Path) -> None:
    case = Case("llama", "llama", {**BASE, "head_dim": 64, "rope_parameters": LLAMA3}, FIELDS, LLAMA_FORWARD)
    model = tiny_model(case)
    plain = 5000.0 ** (-torch.arange(32) / 32)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.max() == pytest.approx(8.0, rel=1e-5)
    assert factors.min() == pytest.approx(1.0)
    tensors = file_tensors(case, model) | {"rope_freqs.weight": factors}
    loaded = load(write_gguf(tmp_path / "m.gguf", "llama", {**FIELDS, "attention.key_length": 64}, tensors))
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def test_other_frequencies_are_refused_by_index(tmp_path: Path) -> None:
    factors = torch.tensor([1.0, 3.0, 1.0, 8.0, 8.0, 8.0, 8.0, 8.0])
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, {"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="divides frequency 1 by 3"):
        config_from_gguf(checkpoint)


def test_long_and_short_factors_become_longrope(tmp_path: Path) -> None:
    short, long = torch.linspace(1, 1.5, 8), torch.linspace(1, 40, 8)
    checkpoint = write_gguf(
        tmp_path / "m.gguf",
        "phi3",
        {**FIELDS, "rope.scaling.original_context_length": 32},
        {"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )
    rope = config_from_gguf(checkpoint).rope_parameters
    assert (rope["rope_type"], rope["short_factor"], rope["long_factor"]) == (
        "longrope",
        short.tolist(),
        long.tolist(),
    )
    assert (rope["original_max_position_embeddings"], rope["factor"]) == (32, 4.0)


# ---- packed blocks


@pytest.mark.parametrize(("name", "steps"), [("Q8_0", 127 * 2), ("Q4_1", 15), ("Q4_0", 15)])
def test_a_packed_model_comes_back_within_its_steps(name: str, steps: int, tmp_path: Path) -> None:
    """Every weight within one step of its block's range, and exactly what the gguf package decodes."""
    case, kind = CASES["llama"], GGMLQuantizationType[name]
    model = tiny_model(case)
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", case.fields, file_tensors(case, model), ggml_type=kind)
    assert checkpoint.tensors["blk.0.attn_q.weight"].encoding.name == name
    loaded = load(checkpoint)
    for key, expected in model.state_dict().items():
        found = loaded.state_dict()[key]
        reach = 2 * expected.abs().max()
        assert (found - expected).abs().max() <= 1.01 * reach / steps, key
    weight = "model.layers.1.mlp.down_proj.weight"
    reference = gguf.quants.dequantize(gguf.quants.quantize(model.state_dict()[weight].numpy(), kind), kind)
    assert np.array_equal(loaded.state_dict()[weight].numpy(), reference)


def test_a_packed_moe_comes_back_within_its_steps(tmp_path: Path) -> None:
    case, kind = CASES["qwen3moe"], GGMLQuantizationType.Q8_0
    model = tiny_model(case)
    checkpoint = write_gguf(
        tmp_path / "m.gguf", case.architecture, case.fields, file_tensors(case, model), ggml_type=kind
    )
    assert checkpoint.tensors["blk.0.ffn_gate_exps.weight"].encoding.packed
    found = load(checkpoint).state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    torch.testing.assert_close(found, model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"], rtol=0, atol=2e-3)


def test_gate_and_up_in_one_tensor_are_taken_as_they_lie(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]
    model = tiny_model(case)
    tensors = file_tensors(case, model)
    for layer in range(LAYERS):
        halves = [tensors.pop(f"blk.{layer}.ffn_{which}_exps.weight") for which in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(halves, dim=1)
    checkpoint = write_gguf(tmp_path / "m.gguf", case.architecture, case.fields, tensors)
    source = sources_from_gguf(checkpoint, skeleton(checkpoint))["model.layers.0.mlp.experts.gate_up_proj"]
    assert source.convert is None
    torch.testing.assert_close(logits(load(checkpoint)), logits(model), rtol=1e-4, atol=1e-5)


def test_the_model_map_reads_dense_weights_in_place_and_decodes_the_rest(tmp_path: Path) -> None:
    case, kind = CASES["llama"], GGMLQuantizationType.Q8_0
    tensors = file_tensors(case, tiny_model(case))
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", case.fields, tensors, ggml_type=kind)
    model = skeleton(checkpoint).to(torch.bfloat16)
    sources, unused = sources_of_gguf(checkpoint, model)
    assert unused == ()
    assert set(sources) == set(model.state_dict())
    norm = sources["model.norm.weight"]
    assert isinstance(norm, Extents)
    assert norm.extents == (checkpoint.tensors["output_norm.weight"].extent,)
    for name, why in (("mlp.up_proj", "decoded from Q8_0"), ("self_attn.q_proj", "decoded from Q8_0, rearranged")):
        full = f"model.layers.0.{name}.weight"
        source = sources[full]
        assert isinstance(source, Conversion)
        assert source.why == why
        ((found, tensor),) = source.run([raw_bytes(record) for record in source.records]).items()
        assert (found, tensor.dtype, tensor.shape) == (full, torch.bfloat16, model.get_parameter(full).shape)


def test_reading_in_another_dtype_is_the_float32_tensor_rounded(tmp_path: Path) -> None:
    for name in ("llama", "qwen3moe"):
        case = CASES[name]
        tensors = file_tensors(case, tiny_model(case))
        path = tmp_path / f"{name}.gguf"
        checkpoint = write_gguf(path, case.architecture, case.fields, tensors, ggml_type=GGMLQuantizationType.Q8_0)
        for source in sources_from_gguf(checkpoint, skeleton(checkpoint)).values():
            raw = [raw_bytes(record) for record in source.records]
            exact = source.read(raw, torch.float32)
            assert torch.equal(source.read(raw, torch.bfloat16), exact.to(torch.bfloat16))


def record_of(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> TensorRecord:
    encoding = Encoding(name, *block)
    elements = int(np.prod(shape))
    return TensorRecord("t", encoding, shape, Extent(Path("t.gguf"), 0, encoding.nbytes(elements)))


DECODED = sorted(kind.name for kind in gguf.quants._type_traits if kind.name != "BF16")


@pytest.mark.parametrize("name", DECODED)
@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_every_packed_type_decodes_as_the_gguf_package_does(name: str, rows: int, seed: int) -> None:
    kind = GGMLQuantizationType[name]
    block = GGML_QUANT_SIZES[kind]
    record = record_of(name, (rows, 512), block)
    raw = np.random.default_rng(seed).integers(0, 256, record.nbytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(rows, -1), kind)
        found = dequantize(raw, record)
    assert found.shape == (rows, 512)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


def test_slices_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of("Q4_1", (7, 96), (32, 20))
    raw = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32), GGMLQuantizationType.Q4_1
    )
    whole = dequantize(raw.reshape(-1), record)
    monkeypatch.setattr(gguf_blocks, "SLICE_ELEMENTS", 64)
    assert torch.equal(dequantize(raw.reshape(-1), record), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_dense_record_keeps_its_values(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 12, dtype=dtype)
    raw = values.view(torch.uint8)
    record = record_of(str(dtype).removeprefix("torch."), (3, 4), (1, dtype.itemsize))
    found = dequantize(raw, record)
    assert torch.equal(found, values.float().view(3, 4))
    assert (found.data_ptr() == raw.data_ptr()) is (dtype == torch.float32)


def test_a_dense_record_may_lie_unaligned() -> None:
    values = torch.arange(4.0)
    shifted = torch.empty(17, dtype=torch.uint8)[1:]
    shifted.copy_(values.view(torch.uint8))
    assert torch.equal(dequantize(shifted, record_of("float32", (4,), (1, 4))), values)


@pytest.mark.parametrize("name", ["Q9_9", "Q8_K"])
def test_a_type_that_nobody_decodes_is_refused_by_name(name: str) -> None:
    block = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_K] if name == "Q8_K" else (32, 18)
    record = record_of(name, (256,), block)
    with pytest.raises(UnsupportedModelError, match=f"'t'.*{name}"):
        dequantize(np.zeros(record.nbytes, np.uint8), record)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_routed_experts_of_a_file_are_placed_by_its_own_names_and_streamed(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tensors = file_tensors(case, tiny_model(case))
    path = tmp_path / "m.gguf"
    write_gguf(path, case.architecture, case.fields, tensors, ggml_type=GGMLQuantizationType.Q8_0)
    ids = (5, 3, 9, 1, 7)
    resident, _, _ = forward(placed(path), ids)
    overrides = [{"pattern": r"blk\.1\.ffn_(gate|up|down)_exps\.weight", "device": "CPU"}]
    model = placed(path, {"overspill": {"placement": {"overrides": overrides}, "expert_stream": {"slots": 3}}})
    assert [block.layer for block in model.plan.placed] == [1]
    torch.testing.assert_close(forward(model, ids)[0], resident, rtol=0, atol=1e-4)
    model.experts.prove_used()
    streamed = placed(path, {"overspill": {"expert_stream": {"slots": 3}}})
    assert torch.equal(forward(streamed, ids)[0], resident)
    with pytest.raises(ConfigError, match="is transformed while loading"):
        planned(path, {"overspill": {"expert_stream": {"slots": 3, "tier": "disk"}}})


def test_experts_that_lie_in_a_file_as_they_are_computed_with_stream_from_it(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]
    tensors = file_tensors(case, tiny_model(case))
    for layer in range(LAYERS):
        halves = [tensors.pop(f"blk.{layer}.ffn_{which}_exps.weight") for which in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(halves, dim=1)
    path = tmp_path / "m.gguf"
    write_gguf(path, case.architecture, case.fields, tensors)
    ids = (5, 3, 9, 1, 7)
    resident, _, _ = forward(placed(path), ids)
    streamed = placed(path, {"overspill": {"expert_stream": {"slots": 3, "tier": "disk"}}})
    assert torch.equal(forward(streamed, ids)[0], resident)
