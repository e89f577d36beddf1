"""One pass over the model on meta: what it reads where, and what memory it takes, without any arithmetic."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.model.hf import cache_argument, cache_of, decode_inputs, inputs, tensors_in
from overspill.model.hf_experts import observed_experts
from overspill.model.meta_results import MetaResults
from overspill.model.stacks import Stack

_SHORT = 8
"""Tokens of a second prompt, where a decode step cannot follow the first."""


@dataclass(frozen=True)
class Reads:
    """What a step reads of a weight: `whole_bytes` whatever the tokens, `token_bytes` for each of them (rows).

    `times` is how often it goes there.
    """

    whole_bytes: float = 0
    token_bytes: float = 0
    times: int = 0


@dataclass(frozen=True)
class Trace:
    """What a prompt pass over `tokens` tokens of each of `sequences` sequences does, and a decode step after it.

    `kv_cache_bytes` is the cache after the prompt, `kv_token_bytes` what one token takes in all its layers (also in
    those that keep only a window), `kv_windows` for each number of tokens that layers keep what one token takes in
    these, `working_bytes` the most that was held beside it and the weights.
    `outside_reads` are weights of a layer that were read while another module ran, or that runs within another;
    `written` those that the architecture changes while it runs. `reads` is what a decode step reads of each parameter
    but routed experts; where none could be traced, what the prompt pass does. `layer_order` are the layers as they ran
    in the prompt pass, as (stack path, number). `guesses` counts the values that the architecture asked for, which
    there are none of on meta.
    `failure` says why the architecture could not be traced; the rest is then empty. `decode_failure` says why only the
    prompt pass could be.
    """

    tokens: int
    sequences: int
    kv_cache_bytes: int = 0
    kv_token_bytes: int = 0
    kv_windows: Mapping[int, int] = field(default_factory=dict)
    working_bytes: int = 0
    outside_reads: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    reads: Mapping[str, Reads] | None = None
    layer_order: tuple[tuple[str, int], ...] = ()
    experts_top_k: Mapping[str, int] = field(default_factory=dict)
    guesses: int = 0
    failure: str | None = None
    decode_failure: str | None = None

    def kept_bytes(self, tokens: int) -> int:
        """What the cache of one sequence holds after so many tokens; layers with a window hold no more than that."""
        return sum(
            nbytes * (tokens if kept == self.tokens else min(tokens, kept)) for kept, nbytes in self.kv_windows.items()
        )


def trace(model: nn.Module, stacks: tuple[Stack, ...], *, tokens: int, sequences: int = 1) -> Trace:
    """Run `model`, whose parameters are on meta, once. Buffers may be real; they are looked at, not used."""
    layers = {
        model.get_submodule(f"{stack.path}.{number}"): (stack.path, number)
        for stack in stacks
        for number in range(stack.layers)
    }
    owners: dict[str, list[tuple[str, nn.Module]]] = {}  # by the first name; a tied weight may lie in several layers
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    weights: dict[nn.Module, list[str]] = {}
    for layer, (path, number) in layers.items():
        named = dict(layer.named_parameters(prefix=f"{path}.{number}"))
        weights[layer] = [*named]
        for name, parameter in named.items():
            owners.setdefault(first[id(parameter)], []).append((name, layer))
    order: list[tuple[str, int]] = []
    running: list[nn.Module] = []
    outside: set[str] = set()
    top_k: dict[str, int] = {}
    paths = {module: path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        order.append(layers[module])
        if len(order) > _ENDLESS * len(layers):
            raise RuntimeError(f"its layers ran {_ENDLESS} times and more: how often hangs on values")
        if running:  # a layer within another: both would be in use at once
            outside.update(weights[running[-1]], weights[module])
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def read(name: str) -> None:
        holders = owners.get(name, [])
        if not any(layer in running for _, layer in holders):
            outside.update(name for name, _ in holders)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(enter).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        stack.enter_context(observed_experts(model, lambda experts, k: top_k.__setitem__(paths[experts], k)))
        stack.enter_context(_buffers_on_meta(model))
        stack.enter_context(torch.no_grad())
        observer = _Observer(model, read)
        stack.enter_context(_FusedAttention(observer))
        stack.enter_context(observer)
        stack.enter_context(torch.device("meta"))
        try:
            given = inputs(model, tokens=tokens, sequences=sequences)
            output = model(**given, use_cache=True)
            kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(cache_of(output))}
            kv_cache_bytes = sum(kept.values())
            kv_windows: Counter[int] = Counter()
            for tensor in tensors_in(cache_of(output)):
                if (nbytes := _token_bytes(tensor)) > 0:
                    kv_windows[tensor.shape[2]] += nbytes
            prompt_order = tuple(order)
        except Exception as error:  # an architecture's own code may do anything on meta; the reason is kept and shown
            return Trace(tokens, sequences, failure=_first_line(error))
        decode_failure = None
        reads = observer.reads(sequences * tokens)
        if (cache := cache_of(output)) is not None:
            observer.forget_reads()
            try:
                model(**decode_inputs(model, given, output), use_cache=True, **{cache_argument(model): cache})
                reads = observer.reads(sequences)
            except Exception as error:  # as above
                decode_failure = _first_line(error)
            if decode_failure is not None and tokens > _SHORT:  # perhaps that was one token more than the model takes
                running.clear()  # of layers that the first try did not leave
                with contextlib.suppress(Exception):  # the reason of the first try is kept
                    short = inputs(model, tokens=_SHORT, sequences=sequences)
                    output = model(**short, use_cache=True)
                    observer.forget_reads()
                    kept_there = {cache_argument(model): cache_of(output)}
                    model(**decode_inputs(model, short, output), use_cache=True, **kept_there)
                    reads, decode_failure = observer.reads(sequences), None
    return Trace(
        tokens,
        sequences,
        kv_cache_bytes,
        kv_windows.total(),
        dict(kv_windows),
        max(0, observer.peak_bytes - kv_cache_bytes),
        frozenset(outside),
        frozenset(observer.written),
        reads,
        prompt_order,
        top_k,
        observer.guesses,
        decode_failure=decode_failure,
    )


def _token_bytes(kept: torch.Tensor) -> int:
    """Of keys or values [sequences, heads, tokens, size], what a sequence has of each token; 0 of anything else."""
    return kept[0, :, 0].numel() * kept.element_size() if kept.dim() == 4 and kept.shape[2] else 0


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Real buffers stand aside for meta ones meanwhile, so that no operation mixes the two.

    What else a pass leaves in the modules is gone afterwards too: some rotary embeddings keep tensors in attributes,
    some models put parameters in the place of others.
    """
    before = [
        (module, dict(vars(module)), dict(module._buffers), dict(module._parameters)) for module in model.modules()
    ]
    try:
        for module, _, buffers, _ in before:
            for name, buffer in buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
        yield
    finally:
        for module, attributes, buffers, parameters in before:
            vars(module).clear()
            vars(module).update(attributes)
            for held, kept in ((module._buffers, buffers), (module._parameters, parameters)):
                held.clear()
                held.update(kept)  # type: ignore[arg-type]


class _FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels do it: no matrix of scores is kept."""

    def __init__(self, observer: _Observer) -> None:
        self._observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            self._observer.see(_tensors((args, kwargs)))
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


# -- what depends on values ----------------------------------------------------------------------------------------
#
# On meta there are none. A number that an architecture asks for is 0, a truth False, and a mask chooses everything:
# checks of the input find nothing, and what is computed of chosen rows is counted for all of them.


def _scalar(tensor: torch.Tensor) -> Any:
    return torch.zeros((), dtype=tensor.dtype, device="cpu").item()


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.long, device="meta")


def _index(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.ops.aten.index.Tensor(tensor, _rows(indices))  # type: ignore[no-any-return]


def _index_put(tensor: torch.Tensor, indices: list[torch.Tensor | None], *rest: Any) -> torch.Tensor:
    return torch.ops.aten.index_put_.default(tensor, _rows(indices), *rest)  # type: ignore[no-any-return]


def _rows(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """`indices` with the rows that each mask chooses in its place."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        masks = index is not None and index.dtype is torch.bool
        found += _nonzero(index).unbind(1) if masks and index is not None else [index]
    return found


_GUESSED = {
    torch.ops.aten._local_scalar_dense.default: _scalar,
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.index_put_.default: _index_put,
}


_ENDLESS = 256
"""A pass that runs all layers so often is one whose end hangs on values, of which there are none."""


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation changes, in lists of them too."""
    if not func._schema.is_mutable:
        return
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(given.get(argument.name))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor of an operation's arguments or result; several times faster than pytree's walk."""
    found: list[torch.Tensor] = []
    _gather((value,), found)
    return found


def _gather(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _gather(value, found)
        elif isinstance(value, dict):
            _gather(value.values(), found)


_GATHERS = frozenset({"embedding", "index_select", "index", "gather"})


class _Observer(TorchDispatchMode):
    """Shows each parameter that an operation reads, by name, and follows the bytes of what operations return.

    What they read of parameters is counted as a device counts it that reads them across a link: a view costs nothing,
    what gathers rows reads those.
    """

    def __init__(self, model: nn.Module, read: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = read
        self.run = MetaResults()
        self.live_bytes = self.peak_bytes = self.guesses = 0
        self.parameters = {t.untyped_storage()._cdata: name for name, t in model.named_parameters()}
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.whole_bytes: Counter[str] = Counter()
        self.gathered_bytes: Counter[str] = Counter()
        self.times: Counter[str] = Counter()
        self.written: set[str] = set()

    def forget_reads(self) -> None:
        for counter in (self.whole_bytes, self.gathered_bytes, self.times):
            counter.clear()

    def reads(self, tokens: int) -> dict[str, Reads]:
        """What was read since they were forgotten, in a pass over `tokens` tokens."""
        return {
            name: Reads(self.whole_bytes[name], self.gathered_bytes[name] / tokens, times)
            for name, times in self.times.items()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        guess: Any = _GUESSED.get(func)
        self.guesses += guess in (_scalar, _nonzero)
        result = guess(*args, **kwargs) if guess is not None else self.run(func, args, kwargs)
        made = [tensor.untyped_storage() for tensor in _tensors(result)]
        self._count(func, args, kwargs, {storage._cdata for storage in made}, result)
        for storage in made:
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes()).atexit = False
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: set[int], result: Any) -> None:
        """What this operation reads of parameters, and which it writes; `made` is the memory of its results."""
        read = {}
        for argument in _tensors((args, kwargs)):
            name = self.parameters.get(argument.untyped_storage()._cdata)
            if name is not None and argument.numel():
                read[id(argument)] = argument, name
        if not read:
            return
        written = {id(tensor) for tensor in _written(func, args, kwargs)}
        gathers = func.overloadpacket.__name__ in _GATHERS
        for argument, name in read.values():
            if id(argument) in written:
                self.written.add(name)
            elif argument.untyped_storage()._cdata in made:  # a view of it
                continue
            elif gathers and argument is args[0]:
                self.read(name)
                self.times[name] += 1
                self.gathered_bytes[name] += result.numel() * result.itemsize
            else:
                self.see([argument])

    def see(self, arguments: Iterable[torch.Tensor]) -> None:
        """Whole reads of what of these is a parameter, or a view of one."""
        for argument in arguments:
            if (name := self.parameters.get(argument.untyped_storage()._cdata)) is not None:
                self.read(name)
                self.times[name] += 1
                sizes = zip(argument.shape, argument.stride(), strict=True)
                self.whole_bytes[name] += math.prod(n for n, stride in sizes if stride) * argument.itemsize

    def forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live_bytes -= nbytes
