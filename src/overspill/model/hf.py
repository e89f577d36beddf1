"""Every contact with transformers' less public functions, pinned by tests/model/test_hf.py.

Written against transformers 5.17 to 5.24. What is used and is not documented as public: the conversion mapping
(`get_model_conversion_mapping`, `rename_source_key`, `WeightConverter`, which PEFT uses too), the rebuilding of
buffers (`_initialize_missing_keys`), the dtype plan, and the class that marks decoder layers. GGUF's tables are in
hf_gguf.py, the experts registry in hf_experts.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
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
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
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


@dataclass
class ConversionGroup:
    """Checkpoint tensors that transformers turns into one or more parameters together.

    `sources` are checkpoint names by transformers' pattern, in the order in which the operations take them.
    """

    target: str
    converter: WeightConverter
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def operations(self) -> list[tuple[str, int | None]]:
        """(class name, dimension) of each operation."""
        return [(type(op).__name__, getattr(op, "dim", None)) for op in self.converter.operations]

    def convert(self, model: nn.Module, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters by full name; `read` gives a checkpoint tensor by its name (meta tensors show the shapes)."""
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, read(name))
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in converter.convert(self.target, model=model, config=model.config).items()
        }


def map_checkpoint_names(model: Any, names: Iterable[str]) -> tuple[dict[str, str], list[ConversionGroup], list[str]]:
    """Where each checkpoint tensor goes: (parameter -> its one tensor, groups to convert, names that go nowhere).

    Of several tensors for one parameter the one of its own name is taken, else the first.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    skeleton = model.state_dict()
    prefix = model.base_model_prefix
    renamed: dict[str, str] = {}
    groups: dict[str, ConversionGroup] = {}
    nowhere: list[str] = []

    def target_of(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, skeleton)
        if target not in skeleton and name in skeleton:
            target, pattern = rename_source_key(name, [], [], prefix, skeleton)
        return target, pattern

    ordered = sorted(names, key=natural_key)
    alike = _experts_alike(ordered, target_of)
    for name in ordered:
        target, pattern = alike.get(_EXPERT.sub(r"\1*", name)) or target_of(name)
        if target not in skeleton or (target in renamed and name != target):
            nowhere.append(name)
        elif pattern is None:
            nowhere += [renamed[target]] if target in renamed else []
            renamed[target] = name
        else:
            group = groups.setdefault(target, ConversionGroup(target, by_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(name)
    nowhere += [name for target in renamed.keys() & groups.keys() for name in groups.pop(target).names]
    for group in groups.values():  # operations take tensors in the order of their patterns, not of their names
        patterns = group.converter.source_patterns
        group.sources = {pattern: group.sources[pattern] for pattern in patterns if pattern in group.sources}
    return renamed, list(groups.values()), nowhere


def natural_key(name: str) -> str:
    """transformers' order of state-dict names (its dot_natural_key): numbers as such, and before words.

    As text, which takes a fifth of the memory of its lists: all keys are there at once.
    """
    parts = []
    for part in name.split("."):
        if part.isdigit():
            parts.append(f"\1{int(part):020}")
        else:
            word = part.rstrip("0123456789")
            number = part[len(word) :]
            parts.append(f"\2{word}\1{int(number):020}" if number else f"\2{word}")
    return "\0".join(parts)


_EXPERT = re.compile(r"(\.experts\.)\d+(?=\.)")


def _experts_alike(
    ordered: Sequence[str], target_of: Callable[[str], tuple[str, str | None]]
) -> dict[str, tuple[str, str | None]]:
    """Where each weight of a block's experts goes, by its name with * for the expert, asked for the first and the last.

    Where both go into one stack, those between do too. A large model has tens of thousands of them.
    """
    ends: dict[str, list[str]] = {}
    for name in ordered:
        if (block := _EXPERT.sub(r"\1*", name)) != name:
            ends.setdefault(block, [name, name])[1] = name
    found: dict[str, tuple[str, str | None]] = {}
    for block, (first, last) in ends.items():
        target, pattern = target_of(first)
        if pattern is not None and target_of(last) == (target, pattern):
            found[block] = target, pattern
    return found


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
