"""Every contact with transformers' GGUF support, pinned by tests/model/test_gguf_model.py.

Written against transformers 5.17 to 5.24, which know GGUF architectures in two ways: by table (a name for
each metadata key, a processor for each tensor: `modeling_gguf_pytorch_utils`) and, for a few that grow with
each version, by a function and conversions (`integrations.gguf`). Their loaders read the header several
times and build a name map for every child module; only their tables and per-tensor functions are used here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations import ggml
from transformers.integrations import gguf as integration
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_CONFIG_DEFAULTS_MAPPING,
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from overspill.errors import UnsupportedModelError
from overspill.model.hf_names import ConversionGroup

_TABLES: Mapping[str, Mapping[str, str | None]] = GGUF_TO_TRANSFORMERS_MAPPING["config"]
_TABLE_OF = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
_MODEL_TYPE_OF = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
_ARCHITECTURE_NUMBER = {name: number for number, name in MODEL_ARCH_NAMES.items()}


def by_function(architecture: str) -> bool:
    """Whether transformers maps this GGUF architecture by a function and conversions, not by table."""
    return architecture in integration.GGUF_CONFIG_ARCHS and integration.is_gguf_arch_supported(architecture)


def table_architectures() -> frozenset[str]:
    """GGUF architectures that the tables carry as far as a causal language model."""
    names = {table: name for name, table in _TABLE_OF.items()}
    return frozenset(
        name
        for table in _TABLES
        if (name := names.get(table, table)) in _ARCHITECTURE_NUMBER
        and model_type(name) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def known_architectures() -> list[str]:
    return sorted({*table_architectures(), *filter(by_function, integration.GGUF_CONFIG_ARCHS)})


def model_type(architecture: str, model_name: str | None = None) -> str:
    """transformers' model type. A Mistral model is written as `llama`; only its name tells."""
    if architecture == "llama" and model_name == "mistral":
        return "mistral"
    return _MODEL_TYPE_OF.get(architecture) or _TABLE_OF.get(architecture, architecture)


def config_names(architecture: str) -> Mapping[str, str | None]:
    """Metadata key below the architecture -> the configuration's attribute (None: unused on purpose)."""
    return _TABLES[_TABLE_OF.get(architecture, architecture)]


def config_defaults(architecture: str) -> dict[str, Any]:
    """What every GGUF file of this architecture means without saying it."""
    return dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(_TABLE_OF.get(architecture, architecture), {}))


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The configuration's `bos_token_id` and its like; without those that no token has (-1 for none)."""
    count = len(metadata.get("tokenizer.ggml.tokens", ())) or math.inf
    named = {name: metadata.get(f"tokenizer.{key}") for key, name in _TABLES["tokenizer"].items()}
    return {name: value for name, value in named.items() if name and value is not None and 0 <= value < count}


def config_by_function(
    metadata: Mapping[str, Any], tensor_names: tuple[str, ...], vocab_size: int | None
) -> dict[str, Any]:
    """The configuration's values where `by_function`; KeyError where the header lacks a key."""
    counted = {**metadata, "tokenizer.ggml.tokens": vocab_size}
    values: dict[str, Any] = integration.get_gguf_config(counted, tensor_names)
    return values


def has_field(model_type: str, name: str) -> bool:
    """Whether this model type's configuration has the attribute `name`."""
    return name in {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}


def build_config(values: dict[str, Any]) -> PretrainedConfig:
    """The configuration object. UnsupportedModelError where its class refuses the values."""
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UnsupportedModelError(
            f"transformers refuses the {values['model_type']} configuration in the GGUF header: {error}",
            hint="give the original model's folder",
        ) from error


def build_tokenizer(architecture: str, model_type: str, metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata describes.

    5.17 takes the model type, later versions the architecture. The special tokens are named from the
    metadata, because 5.17's converters swap bos and eos, and `add_bos_token` follows 5.24's rule
    everywhere.
    """
    convert, known_as = (
        (ggml.convert_gguf_tokenizer, model_type)
        if hasattr(ggml, "convert_gguf_tokenizer")
        else (integration.convert_gguf_tokenizer, architecture)
    )
    kind_in_file = metadata.get("tokenizer.ggml.model")
    renames: Mapping[str, str] = GGUF_TO_TRANSFORMERS_MAPPING["tokenizer"]["tokenizer"]
    tokens, ids = metadata["tokenizer.ggml.tokens"], special_ids(metadata)
    vocabulary = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in renames.items()
        if f"tokenizer.{key}" in metadata and (name in ids or not name.endswith("_token_id"))
    }
    if kind_in_file == "gpt2":  # byte-level: a space is a byte, or 5.17 drops the first one when decoding
        vocabulary["add_prefix_space"] = False
    try:
        backend, _ = convert(known_as, vocabulary)
    except (KeyError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(
            f"transformers cannot build the tokenizer {kind_in_file!r} of a {architecture} model: {error}",
            hint="a newer transformers may know it, or give the original model's folder",
        ) from error
    sentencepiece, template_writes_bos = kind_in_file == "llama", kind_in_file == "gemma4"
    return PreTrainedTokenizerFast(
        tokenizer_object=_without_invented_tokens(backend, len(tokens)),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", sentencepiece) and not template_writes_bos,
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        **{
            name: tokens[ids[f"{name}_id"]] if f"{name}_id" in ids else None
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        },
    )


def _without_invented_tokens(backend: Tokenizer, count: int) -> Tokenizer:
    """The tokenizer without added tokens beyond the file's `count`, which no embedding row answers to.

    transformers' GPT-2 class adds `<|endoftext|>` to every vocabulary that has none.
    """
    if backend.get_vocab_size() <= count:
        return backend
    kept = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(kept, part, value)
    added = [token for number, token in sorted(backend.get_added_tokens_decoder().items()) if number < count]
    kept.add_special_tokens([token for token in added if token.special])
    kept.add_tokens([token for token in added if not token.special])
    return kept


class Names:
    """llama.cpp's tensor names for a model's parameters: its own table and the processor's additions."""

    def __init__(self, architecture: str, model: nn.Module) -> None:
        layers = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
        self._map = get_tensor_name_map(_ARCHITECTURE_NUMBER[architecture], layers)
        self._prefix = f"{model.base_model_prefix}."
        config = model.config.get_text_config().to_dict()  # type: ignore[union-attr, operator]
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)

    def candidates(self, name: str) -> list[str]:
        """The names under which a file may hold parameter `name`, the likeliest first."""
        base, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, dot, suffix = name, "", ""
        found = self._map.get_name(base) or self._map.get_name(base.removeprefix(self._prefix))
        if found is None:
            additions: dict[str, str] = {}
            self._processor.perform_fallback_tensor_mapping(additions, dot + suffix, "", name)
            return list(additions)
        return [found + dot + suffix] if suffix else [found, f"{found}.weight"]

    def leaves_alone(self, name: str) -> bool:
        """Whether the tensor `name` goes into its parameter as it is.

        Asked of the processor itself: what it hands back untouched, it leaves alone.
        """
        untouched = object()
        try:
            return self._process(untouched, name) is untouched
        except (AttributeError, TypeError, ValueError):
            return False

    def process(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter made from the file's float32 tensor `name`: new memory or a view of `tensor`'s."""
        processed = self._process(tensor.numpy(), name)
        return torch.from_numpy(np.ascontiguousarray(processed))

    def _process(self, weights: Any, name: str) -> Any:
        return self._processor.process(weights, name, parsed_parameters={"tensors": {}}).weights


def experts_layout(module: nn.Module) -> tuple[bool, bool] | None:
    """Of stacked experts: (weights are [E, in, out], gate and up alternate); None for other modules."""
    if not hasattr(module, "is_transposed"):
        return None
    return bool(module.is_transposed), not module.is_concatenated


def conversions(
    architecture: str, model: nn.Module, tensor_names: tuple[str, ...]
) -> tuple[dict[str, str], list[ConversionGroup]]:
    """Where `by_function`: (parameter -> its one tensor, groups of tensors to convert)."""
    transforms = integration.get_gguf_conversion_mapping(architecture, model.config)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    renamed: dict[str, str] = {}
    groups: dict[str, ConversionGroup] = {}
    for name in tensor_names:
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            renamed[target] = name
        else:
            group = groups.setdefault(target, ConversionGroup(target, by_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(name)
    for group in groups.values():
        order = group.converter.source_patterns
        group.sources = dict(sorted(group.sources.items(), key=lambda item: order.index(item[0])))
    return renamed, list(groups.values())
