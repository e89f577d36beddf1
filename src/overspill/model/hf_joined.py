"""Caches of single sequences joined by row into the cache of a batch, and taken apart again.

For architectures whose layers keep a state beside, or instead of, keys and values: the states of a sequence are one row
of each tensor. Keys and values of shorter sequences are padded on the left, as `generate` pads prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

NoCacheLayer: type = getattr(cache_utils, "DummyLayer", type("NoCacheLayer", (), {}))  # 5.24 has it, 5.17 does not
"""What stands in a cache for a layer that keeps nothing."""

_ATTENDING = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_WITH_STATES = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def why_not_joinable(cache: Any) -> str | None:
    """Why the cache of a pass cannot be joined with others by row; None where it can."""
    if type(cache) is not DynamicCache:
        return f"its cache is a {type(cache).__name__}"
    known = {NoCacheLayer, *_ATTENDING, *_WITH_STATES}
    foreign = next((type(layer).__name__ for layer in cache.layers if type(layer) not in known), None)
    return None if foreign is None else f"a layer's cache is a {foreign}"


def attends(cache: Any) -> bool:
    """Whether a layer of the cache keeps keys and values, so that a padding mask has something to hide."""
    return any(isinstance(layer, _ATTENDING) for layer in cache.layers)


def join(caches: Sequence[Any], lengths: Sequence[int]) -> Any:
    """One cache of the rows of all `caches`; `lengths[i]` is the (padded) length of `caches[i]`. They are used up."""
    longest = max(lengths)
    joined = copy(caches[0])
    joined.layers = [_join_layer(layers, longest) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    return joined


def select(cache: Any, rows: Sequence[int], length: int, keep: int) -> Any:
    """Keep the given `rows` of a `cache` that is `length` long, and of each the last `keep` positions."""
    selected = copy(cache)
    selected.layers = [_select_layer(layer, list(rows), length, keep) for layer in cache.layers]
    return selected


def _join_layer(layers: Sequence[Any], longest: int) -> Any:
    layer = copy(layers[0])
    if isinstance(layer, _ATTENDING) and layer.keys is not None:
        held = max(other.keys.shape[-2] for other in layers)
        layer.keys = torch.cat([_padded(other.keys, held) for other in layers])
        layer.values = torch.cat([_padded(other.values, held) for other in layers])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = longest
    if isinstance(layer, _WITH_STATES):
        for name in ("conv_states", "recurrent_states"):
            setattr(
                layer, name, {i: _joined([getattr(other, name)[i] for other in layers]) for i in getattr(layer, name)}
            )
    return layer


def _joined(states: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [state for state in states if state is not None]
    assert len(present) in (0, len(states)), "every sequence has been through the same layers"
    return torch.cat(present) if present else None


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """[rows, heads, held, size] with zeros before the first of `length` positions."""
    return torch.nn.functional.pad(tensor, (0, 0, length - tensor.shape[-2], 0))


def _select_layer(layer: Any, rows: list[int], length: int, keep: int) -> Any:
    layer = copy(layer)
    if isinstance(layer, _ATTENDING) and layer.keys is not None:
        layer.keys = layer.keys[rows, :, -keep:]
        layer.values = layer.values[rows, :, -keep:]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length += keep - length
    if isinstance(layer, _WITH_STATES):
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            setattr(layer, name, {i: None if state is None else state[rows] for i, state in states.items()})
    return layer
