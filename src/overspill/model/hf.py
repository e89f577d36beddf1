"""Every contact with transformers' less public functions, pinned by tests/model/test_hf.py.

Written against transformers 5.17 to 5.24. What is used and is not documented as public: the rebuilding of buffers
(`_initialize_missing_keys`), the dtype plan, and the class that marks decoder layers. Checkpoints' names are in
hf_names.py, GGUF's tables in hf_gguf.py, the experts registry in hf_experts.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from overspill.errors import UnsupportedModelError

DecoderLayer = GradientCheckpointingLayer


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The edge where whatever transformers raises over a model's own files becomes our error, its cause kept."""
    try:
        yield
    except ImportError as error:
        wanted = dict.fromkeys(re.findall(r"pip install ([\w-]+)", str(error)))
        raise UnsupportedModelError(
            f"{what}: packages that it needs are not installed",
            hint=f"pip install {' '.join(wanted)}" if wanted else str(error),
        ) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        custom = "trust_remote_code" in text
        raise UnsupportedModelError(
            f"{what}: {text[:600]}{'…' if len(text) > 600 else ''}",
            hint="--trust-remote-code runs the code that the model brings along"
            if custom
            else "the model's files must be complete, and of an architecture that this transformers knows",
        ) from error


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's configuration. UnsupportedModelError where transformers does not know the architecture."""
    with _translated(f"{folder}: transformers cannot read this model's configuration"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer, or None where it has none (a model made by a test)."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
    if not any((folder / name).is_file() for name in names):
        return None
    with _translated(f"{folder}: transformers cannot build this model's tokenizer"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def load_generation_config(folder: Path, config: PretrainedConfig) -> GenerationConfig:
    if (folder / "generation_config.json").is_file():
        with _translated(f"{folder}: transformers cannot read generation_config.json"):
            return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)


_DRAFTS = "drafts tokens from the keys and values of another model, and does not run alone"
_RUN_NOWHERE = {
    "Gemma4AssistantForCausalLM": _DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": _DRAFTS,
    "BltForCausalLM": (
        "cannot be run by transformers itself: its configuration lacks what the cache of its byte patches is made from"
    ),
}
"""Architectures that build and do not run, as transformers 5.24 has them."""


def _own_class(config: PretrainedConfig) -> Any:
    """The class that the checkpoint itself names, where transformers has it and it generates text; else None.

    A checkpoint of a model with towers is thereby loaded with them, and an encoder-decoder with its encoder.
    """
    for name in getattr(config, "architectures", None) or ():
        own: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        generates = isinstance(own, type) and issubclass(own, PreTrainedModel) and issubclass(own, GenerationMixin)
        if generates and own.config_class is type(config):
            return own
    return None


def has_text_class(config: PretrainedConfig) -> bool:
    """Whether transformers has another class for text alone than the one that the checkpoint names."""
    text: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    own = _own_class(config)
    return text is not None and own is not None and text is not own


def build_skeleton(
    config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False, text_alone: bool = False
) -> nn.Module:
    """The model with every parameter and buffer on meta, in the dtypes that `from_pretrained` would give them.

    Of the class that the checkpoint names; with `text_alone` of transformers' causal language model.
    """
    brought = trust_remote_code and bool(getattr(config, "auto_map", None))  # the checkpoint has code of its own
    own = None if text_alone or brought else _own_class(config)
    named = own.__name__ if own is not None else type(config).__name__
    with _translated(f"{named}: transformers cannot build a language model from this"), torch.device("meta"):
        model: Any = (
            own._from_config(config, dtype=dtype)
            if own is not None
            else AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        )
    if (reason := _RUN_NOWHERE.get(type(model).__name__)) is not None:
        raise UnsupportedModelError(f"{type(model).__name__} {reason}", hint="another model")
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        for pattern, kept in plan.items():
            if re.search(rf"(^|\.){pattern}(\.|$)".replace("*", r"\d+"), name) and tensor.dtype != kept:
                owner, _, attribute = name.rpartition(".")
                replaced = tensor.detach().to(kept)
                if isinstance(tensor, nn.Parameter):
                    replaced = nn.Parameter(replaced, requires_grad=False)
                setattr(model.get_submodule(owner), attribute, replaced)
    model.tie_weights()
    skeleton: nn.Module = model.eval().requires_grad_(False)
    return skeleton


def non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that no checkpoint holds (rotary frequencies): (full name, tensor)."""
    yield from model.named_non_persistent_buffers()  # type: ignore[operator]


def rebuild_buffers(model: nn.Module) -> None:
    """Give the buffers that no checkpoint holds their values, on the CPU; everything else stays as it is."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for name, buffer in list(non_persistent_buffers(model)):
        owner, _, attribute = name.rpartition(".")
        if buffer.device.type == "meta":
            setattr(model.get_submodule(owner), attribute, torch.empty_like(buffer, device="cpu"))
    model._initialize_missing_keys(is_quantized=False)  # type: ignore[operator]


def ignored_unexpected(model: nn.Module, name: str) -> bool:
    """Whether transformers itself passes over this checkpoint tensor (an extra prediction head, an old buffer)."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    return any(re.search(pattern, name) for pattern in patterns)


def inputs(model: nn.Module, *, tokens: int, sequences: int) -> dict[str, Any]:
    """What a prompt pass of `model` takes, all zeros: `tokens` tokens of each of `sequences` sequences.

    An encoder gets as much as it takes at the most (speech), or as many tokens as the decoder.
    """
    config: Any = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    ids = torch.zeros(sequences, tokens, dtype=torch.long)
    given: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    if getattr(model, "main_input_name", None) == "input_features":
        dtype: Any = model.dtype
        frames = 2 * config.max_source_positions
        given["input_features"] = torch.zeros(sequences, config.num_mel_bins, frames, dtype=dtype)
    else:
        given["input_ids"] = ids
    if "decoder_input_ids" in parameters:
        given["decoder_input_ids"] = ids
    return given


def decode_inputs(model: nn.Module, prompt: Mapping[str, Any], output: Any) -> dict[str, Any]:
    """What a decode step takes beside the cache, after a pass over `prompt` gave `output`."""
    encoded = getattr(output, "encoder_last_hidden_state", None)
    given = {name: value for name, value in prompt.items() if name == "logits_to_keep"}
    name = "decoder_input_ids" if "decoder_input_ids" in prompt else "input_ids"
    given[name] = prompt[name][:, :1]
    return given if encoded is None else {**given, "encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}


def forget_longest(model: nn.Module) -> None:
    """Before a new sequence, while running: rotary frequencies that grew with the longest one so far shrink again.

    transformers' "dynamic" ones otherwise stay grown until a shorter pass than the original length comes by, so that
    an answer would depend on what was asked before.
    """
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if original is not None and hasattr(module, "original_max_seq_len"):
                setattr(module, name, module.original_max_seq_len)
                getattr(module, f"{prefix}inv_freq").copy_(original)


_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "mems", "state")


def cache_of(output: Any) -> Any:
    """The cache that a forward pass returned, whatever this architecture calls it; None without one."""
    for name in _CACHE_NAMES:
        if (cache := getattr(output, name, None)) is not None:
            return cache
    return None


def cache_argument(model: nn.Module) -> str:
    """What this architecture's forward calls the cache that it takes back."""
    parameters = inspect.signature(model.forward).parameters
    return next((n for n in _CACHE_NAMES if n in parameters), "past_key_values")


def tensors_in(value: Any, depth: int = 9) -> Iterator[torch.Tensor]:
    """Every tensor that a cache object holds, also in its layers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and "cache" in type(value).__module__ + type(value).__name__.lower():
        yield from tensors_in(vars(value), depth - 1)
