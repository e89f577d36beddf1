"""What a model is made of, seen by weights: each with its role, its layer, its bytes and what a step reads of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overspill.config.selectors import WeightName
from overspill.machine.arena import tensor_bytes
from overspill.model.sources import Extents, Source
from overspill.model.stacks import Stack
from overspill.model.trace import Reads, Trace

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from overspill.checkpoint import Checkpoint, FileStamp


class Role(StrEnum):
    """What a weight is; design.md's words."""

    ATTENTION = "attention"
    DENSE_MLP = "dense_mlp"
    ROUTED_EXPERT = "routed_expert"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    NORM = "norm"
    EMBEDDING = "embedding"
    HEAD = "head"
    TOWER = "tower"
    BUFFER = "buffer"
    OTHER = "other"


@dataclass(frozen=True)
class Routing:
    """A block of routed experts: `top_k` of `experts` are chosen per token."""

    experts: int
    top_k: int

    def touched(self, tokens: int) -> float:
        """The share of the experts that a step over `tokens` tokens is expected to read: 1-(1-k/E)^b."""
        return float(1 - (1 - Fraction(self.top_k, self.experts)) ** tokens)


@dataclass(frozen=True)
class Weight:
    """One parameter, or one buffer that a checkpoint holds. Tied names are one weight: `name` and `aliases`.

    `reads` is what a step reads of it: of an embedding rows, tied to the head the whole as well, of a tower nothing.
    `runs` is how often a pass runs its layer.
    `twins` are what the checkpoint holds under its other tied names; loading refuses where they differ.
    `read_outside`: another module than its layer reads it, so a ring buffer cannot hold it. `written`: the architecture
    itself changes it while it runs.
    """

    name: WeightName
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Source
    aliases: tuple[str, ...] = ()
    routing: Routing | None = None
    reads: Reads = field(default_factory=Reads)
    runs: int = 1
    twins: tuple[Extents, ...] = ()
    read_outside: bool = False
    written: bool = False

    @property
    def full(self) -> str:
        return self.name.full

    @property
    def names(self) -> tuple[WeightName, ...]:
        """Its name, and its tied names (which lie outside any layer)."""
        return (self.name, *(WeightName(alias, None, None, None) for alias in self.aliases))

    @cached_property
    def nbytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)

    def step_bytes(self, tokens: int) -> float:
        """Bytes that one step over `tokens` tokens reads of this weight where it lies; expected, for experts."""
        if self.routing is not None:
            return self.nbytes * self.routing.touched(tokens) * self.runs
        return self.reads.whole_bytes + min(self.reads.token_bytes * tokens, self.nbytes)


@dataclass(frozen=True)
class ModelMap:
    """Every weight of a model in declaration order, and what a pass over it does. No tensor data has been read.

    `skeleton` has all its parameters on meta; the loader fills it. `stamps` tell whether a file has changed since.
    """

    architecture: str
    config: PretrainedConfig
    skeleton: nn.Module
    weights: tuple[Weight, ...]
    stacks: tuple[Stack, ...]
    trace: Trace
    checkpoint: Checkpoint | None
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def takes_text(self) -> bool:
        """Whether token ids are what it is given; sound or images alone are not text to go on from."""
        return getattr(self.skeleton, "main_input_name", "input_ids") == "input_ids"

    @property
    def encodes(self) -> bool:
        """Whether an encoder reads what is given, and a decoder answers."""
        return "decoder_input_ids" in inspect.signature(self.skeleton.forward).parameters

    @property
    def decoder(self) -> Stack:
        """The stack whose layers a ring brings."""
        return self.stacks[0]

    @property
    def rounds(self) -> int:
        """How often a pass runs all layers of the decoder, one after the other; 0 where it does not run them so."""
        order = [number for path, number in self.trace.layer_order if path == self.decoder.path]
        first = order[: self.decoder.layers]
        times = len(order) // self.decoder.layers
        return times if len(set(first)) == self.decoder.layers and order == first * times else 0

    @cached_property
    def out_of_order(self) -> frozenset[int]:
        """Layers of a traced decoder that a pass runs neither once nor in rounds over all; no ring holds them."""
        order = [number for path, number in self.trace.layer_order if path == self.decoder.path]
        if not order or self.rounds:
            return frozenset()
        return frozenset(number for number in range(self.decoder.layers) if order.count(number) != 1)

    def comes_in_turn(self, weight: Weight) -> bool:
        """Whether a ring can bring the weight: of a decoder layer run in order, read there alone, and never written."""
        name = weight.name
        in_decoder = name.stack == self.decoder.path and name.layer is not None
        return in_decoder and name.layer not in self.out_of_order and not weight.read_outside and not weight.written

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.weights)

    def position(self, weight: Weight) -> int:
        """Its place in declaration order."""
        return self._positions[weight.full]

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {weight.full: position for position, weight in enumerate(self.weights)}


def name_in_stacks(full: str, stacks: Iterable[Stack]) -> WeightName:
    """`full` with its stack, layer number and the rest of the name below the layer, where it lies in a stack."""
    for stack in stacks:
        if (match := re.fullmatch(rf"{re.escape(stack.path)}\.(\d+)\.(.+)", full)) is not None:
            return WeightName(full, match[2], stack.path, int(match[1]), tower=stack.tower)
    return WeightName(full, None, None, None)


_ROLE_BY_WORD: tuple[tuple[str, Role], ...] = (
    (r"shared_experts?(_gate)?|shared_mlp", Role.SHARED_EXPERT),
    (r"experts?", Role.ROUTED_EXPERT),
    (r"router|gate|gate_inp|e_score_correction_bias", Role.ROUTER),
    (r".*norm(_?\w+)?|ln_\w+|layernorm", Role.NORM),
    (r"(up|down)_proj", Role.DENSE_MLP),  # nemotron_h calls every block a mixer
    (r".*attn.*|.*attention.*|mixer|mamba|ssm|temporal_block|conv", Role.ATTENTION),
    (r"mlp|ffn|feed_forward|ff|block_sparse_moe|moe|fc\d?|dense_.*|w[123]", Role.DENSE_MLP),
)


def role_of(model: nn.Module, name: WeightName, aliases: Iterable[str], routed_modules: Iterable[str]) -> Role:
    """A weight's role, from where it hangs in the model and what its path's segments are called."""
    owners = [model.get_submodule(n.rpartition(".")[0]) for n in (name.full, *aliases)]
    if _got(model, "get_output_embeddings") in owners:
        return Role.HEAD
    if _got(model, "get_input_embeddings") in owners:
        return Role.EMBEDDING
    if name.tower:
        return Role.TOWER
    if any(name.full.startswith(f"{module}.") for module in routed_modules):
        return Role.ROUTED_EXPERT
    if "norm" in type(owners[0]).__name__.lower():
        return Role.NORM
    segments = (name.relative or name.full).split(".")
    for pattern, role in _ROLE_BY_WORD:
        if any(re.fullmatch(pattern, segment) for segment in segments):
            return role
    return Role.EMBEDDING if isinstance(owners[0], nn.Embedding) else Role.OTHER


def reads_of(model: nn.Module, names: Iterable[str], role: Role, shape: tuple[int, ...], dtype: torch.dtype) -> Reads:
    """What a step reads of a weight that no trace saw: of an embedding's table rows, of others all.

    What is the table of an embedding and the head under another of its `names` is both.
    """
    nbytes = tensor_bytes(shape, dtype)
    owners = (model.get_submodule(name.rpartition(".")[0]) for name in names)
    if not any(isinstance(owner, nn.Embedding) for owner in owners):
        return Reads(whole_bytes=nbytes, times=1)
    whole = role is Role.HEAD
    return Reads(whole_bytes=nbytes * whole, token_bytes=nbytes / shape[0], times=1 + whole)


def _got(model: nn.Module, getter: str) -> nn.Module | None:
    get: Any = getattr(model, getter, None)
    try:
        module = get() if callable(get) else None
    except NotImplementedError:  # transformers' answer of a model without such a module
        return None
    return module if isinstance(module, nn.Module) else None
