"""Decoder stacks and towers, found generically: the lists of layers that a model runs one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from overspill.errors import UnsupportedModelError
from overspill.model.hf import DecoderLayer


@dataclass(frozen=True)
class Stack:
    """A ModuleList of layers; `path` is its dotted name.

    A tower is a stack that decoding does not pass (vision, an encoder).
    """

    path: str
    layers: int
    tower: bool


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """All stacks of `model`, the decoder first.

    A stack is a ModuleList of transformers' checkpointable layers or, where a model has none, its largest ModuleList.
    The decoder is the largest stack under what `get_decoder()` returns, or else the largest of all. Raises
    UnsupportedModelError where there is no ModuleList at all.
    """
    lists = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 0
    }
    marked = {p: m for p, m in lists.items() if all(isinstance(layer, DecoderLayer) for layer in m)}
    candidates = marked or _largest(lists)
    if not candidates:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no stack of layers (no ModuleList)",
            hint="overspill moves weights layer by layer; such a model runs without offload only",
        )
    candidates = {p: m for p, m in candidates.items() if not any(p.startswith(f"{q}.") for q in candidates)}
    decoder_root = _decoder_root(model)
    inside = {p: m for p, m in candidates.items() if decoder_root is not None and p.startswith(f"{decoder_root}.")}
    decoder = next(iter(_largest(inside or candidates)))
    stacks = [Stack(path, len(module), tower=path != decoder) for path, module in candidates.items()]
    return tuple(sorted(stacks, key=lambda stack: stack.tower))


def _decoder_root(model: nn.Module) -> str | None:
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if decoder is None or decoder is model:
        return None
    return next((path for path, module in model.named_modules() if module is decoder), None)


def _largest(lists: dict[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    if not lists:
        return {}
    path = max(lists, key=lambda p: sum(parameter.numel() for parameter in lists[p].parameters()))
    return {path: lists[path]}
