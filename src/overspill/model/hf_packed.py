"""Many sequences in one row, by transformers' attention interface, mask interface and cache layers.

Everything but attention treats tokens one by one, so a pass over prompt chunks and decoding tokens of many sequences
is a pass over one long row. Here its attention is taken apart: keys and values go to memory that the engine owns, and
each group of sequences is attended by the architecture's own attention function under the mask that the architecture
itself describes. Sequences of one token each form a group, padded on the left with zeros.

What is used: `ALL_ATTENTION_FUNCTIONS` and `ALL_MASK_ATTENTION_FUNCTIONS` (documented for registering), the cache
layers' classes, and the name `eager_attention_forward` in each architecture's module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as SlidingLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from overspill.errors import UnsupportedModelError
from overspill.model.hf import cache_argument
from overspill.model.hf_joined import NoCacheLayer

IMPLEMENTATION = "overspill_packed"


@dataclass(frozen=True)
class LayerShape:
    """A layer's keys [tokens, heads, key size] and values [tokens, heads, value size]; `window` None attends to all."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int | None

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass
class Group:
    """`sequences` x `tokens` rows of a pass, next to each other, attended in one call.

    `read[window]` says where in a pool the group's keys lie: int64 [sequences, longest], padded on the left, or a
    slice where one sequence's lie side by side. `padding[window]` is bool [sequences, longest], False where padded;
    None where nothing is.
    """

    sequences: int
    tokens: int
    read: dict[int | None, torch.Tensor | slice]
    padding: dict[int | None, torch.Tensor | None]
    longest: dict[int | None, int]

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens


@dataclass
class Pass:
    """One pass: groups in the order of their rows, and where in the cache the rows' keys go, int64 [rows] by window."""

    cache: PackedCache
    groups: Sequence[Group]
    write: dict[int | None, torch.Tensor]
    mask_function: Callable[..., Any]


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer over `keys` [slots, heads, key size] and `values` [slots, heads, value size] of the engine's."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> None:
        super().__init__()
        self.keys, self.values, self.window = keys, values, window
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a packed layer has its memory from the start")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = _current[-1].write[self.window]
        self.keys.index_copy_(0, slots, key_states[0].transpose(0, 1))
        self.values.index_copy_(0, slots, value_states[0].transpose(0, 1))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def gather(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's keys and values, [sequences, heads, longest, size] each."""
        where = group.read[self.window]
        if isinstance(where, slice):
            return self.keys[where].transpose(0, 1)[None], self.values[where].transpose(0, 1)[None]
        return self.keys[where].transpose(1, 2), self.values[where].transpose(1, 2)


class _Masks:
    """Stands for the attention mask on its way through the model; makes the mask of each group when it is asked."""

    def __init__(self, numbers: dict[str, Any]) -> None:
        self.numbers = numbers
        self._made: dict[tuple[int, int], Any] = {}

    def of(self, number: int, group: Group, window: int | None) -> Any:
        longest, padding = group.longest[window], group.padding[window]
        if (number, longest) not in self._made:
            self._made[number, longest] = _current[-1].mask_function(
                **self.numbers
                | {
                    "batch_size": group.sequences,
                    "q_length": group.tokens,
                    "kv_length": longest,
                    "q_offset": longest - group.tokens,
                    "kv_offset": 0,
                    "attention_mask": padding,
                    "allow_is_causal_skip": padding is None and self.numbers.get("allow_is_causal_skip", False),
                }
            )
        return self._made[number, longest]


_current: list[Pass] = []


def _mask(**numbers: Any) -> _Masks:
    return _Masks(numbers)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend each group of the pass. query [1, heads, rows, size]; returns [1, rows, heads, value size]."""
    current = _current[-1]
    layer = current.cache.layers[module.layer_idx]
    if not isinstance(attention_mask, _Masks) or not isinstance(layer, PackedLayer):
        raise UnsupportedModelError(f"{type(module).__name__} attends in a way of its own")
    inner = _inner(module, current.cache.implementation)
    results, row = [], 0
    for number, group in enumerate(current.groups):
        rows = query[0, :, row : row + group.rows]
        split = rows.unflatten(1, (group.sequences, group.tokens)).transpose(0, 1)
        keys, values = layer.gather(group)
        if hasattr(module, "expand_kv"):  # multi-head latent attention keeps the compressed latents
            keys, values = module.expand_kv(keys, values)  # type: ignore[operator]
        mask = attention_mask.of(number, group, layer.window)
        result = inner(module, split, keys, values, mask, **kwargs)[0]
        results.append(result.flatten(0, 1)[None])
        row += group.rows
    return torch.cat(results, dim=1), None


def _inner(module: nn.Module, implementation: str) -> Callable[..., Any]:
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]  # type: ignore[no-any-return]
    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


class PackedCache(Cache):  # type: ignore[misc]
    """The cache that the model is given: one PackedLayer for each layer that attends."""

    def __init__(self, layers: list[Any], implementation: str) -> None:
        super().__init__(layers=layers)
        self.implementation = implementation


class PackedModel:
    """Runs passes of many sequences through `model`, whose layers have the `shapes` of its own cache."""

    def __init__(self, model: nn.Module, keys_values: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        self.model: Any = model
        shapes = layer_windows(model)
        layers = [
            PackedLayer(*pair, window) if pair is not None else NoCacheLayer()
            for pair, window in zip(keys_values, shapes, strict=True)
        ]
        configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self._configs = list(configs.values())
        config: Any = model.config
        self.cache = PackedCache(layers, config.get_text_config(decoder=True)._attn_implementation)
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        groups: Sequence[Group],
        write: dict[int | None, torch.Tensor],
    ) -> torch.Tensor:
        """Logits [len(wanted), vocabulary] of the rows `wanted` of a pass over `ids` [1, rows] at `positions`."""
        mask_function = ALL_MASK_ATTENTION_FUNCTIONS[self.cache.implementation]
        extra = {"logits_to_keep": wanted} if self._keeps_logits else {}
        with self._packed(Pass(self.cache, groups, write, mask_function)):
            output = self.model(
                input_ids=ids, position_ids=positions, use_cache=True, **{self._cache_argument: self.cache}, **extra
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[wanted]

    @contextmanager
    def _packed(self, current: Pass) -> Iterator[None]:
        before = [config._attn_implementation_internal for config in self._configs]
        _current.append(current)
        try:
            for config in self._configs:
                config._attn_implementation_internal = IMPLEMENTATION
            yield
        finally:
            _current.pop()
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = implementation


def layer_windows(model: nn.Module) -> list[int | None]:
    """The attention window of each layer of the model's own cache; None where it attends to everything."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]


def layer_shapes(model: nn.Module, cache: Any) -> list[LayerShape | None] | str:
    """From a `cache` that a pass has filled each layer's shape (None: it keeps nothing), or why it cannot be packed."""
    if not isinstance(cache, DynamicCache):
        return f"its cache is a {type(cache).__name__}"
    config: Any = model.config
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if "chunked_attention" in types:
        return "its attention is chunked by absolute position"
    shapes: list[LayerShape | None] = []
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, SlidingLayer):
            keys, values = layer.keys, layer.values
            if keys is None or keys.dim() != 4 or values.dim() != 4 or keys.dtype != values.dtype:
                return "its keys and values are no rows per token"
            shapes.append(
                LayerShape(
                    keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, getattr(layer, "sliding_window", None)
                )
            )
        elif type(layer) is NoCacheLayer:
            shapes.append(None)
        else:
            return f"a layer's cache is a {type(layer).__name__}"
    if len(shapes) != len(layer_windows(model)):
        return "its cache has other layers than its configuration says"
    return shapes
