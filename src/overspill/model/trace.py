"""One pass over the model on meta: what it reads where, and what memory it takes, without any arithmetic."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from overspill.model.hf import cache_argument, cache_of, tensors_in
from overspill.model.hf_experts import observed_experts
from overspill.model.stacks import Stack


@dataclass(frozen=True)
class Trace:
    """What a prompt pass over `tokens` tokens of each of `sequences` sequences does, and a decode step after it.

    `kv_cache_bytes` is the cache after the prompt, `kv_token_bytes` what one token takes in all its layers (also in
    those that keep only a window), `working_bytes` the most that was held beside it and the weights.
    `outside_reads` are weights of a layer that were read while another module ran, `layer_order` the layers as they
    ran, as (stack path, number). `failure` says why the architecture could not be traced; the rest is then empty.
    `decode_failure` says why only the prompt pass could be.
    """

    tokens: int
    sequences: int
    kv_cache_bytes: int = 0
    kv_token_bytes: int = 0
    working_bytes: int = 0
    outside_reads: frozenset[str] = frozenset()
    layer_order: tuple[tuple[str, int], ...] = ()
    experts_top_k: Mapping[str, int] = field(default_factory=dict)
    failure: str | None = None
    decode_failure: str | None = None


def trace(model: nn.Module, stacks: tuple[Stack, ...], *, tokens: int, sequences: int = 1) -> Trace:
    """Run `model`, whose parameters are on meta, once. Buffers may be real; they are looked at, not used."""
    layers = {
        model.get_submodule(f"{stack.path}.{number}"): (stack.path, number)
        for stack in stacks
        for number in range(stack.layers)
    }
    owners: dict[int, list[tuple[str, nn.Module]]] = {}  # a tied weight may lie in several layers
    for layer in layers:
        for name, parameter in _named_below(model, layer):
            owners.setdefault(id(parameter), []).append((name, layer))
    order: list[tuple[str, int]] = []
    running: list[nn.Module] = []
    outside: set[str] = set()
    top_k: dict[str, int] = {}
    paths = {module: path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        order.append(layers[module])
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def read(tensor: torch.Tensor) -> None:
        holders = owners.get(id(tensor), [])
        if not any(layer in running for _, layer in holders):
            outside.update(name for name, _ in holders)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(enter).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        stack.enter_context(observed_experts(model, lambda experts, k: top_k.__setitem__(paths[experts], k)))
        stack.enter_context(_buffers_on_meta(model))
        stack.enter_context(_without_padding_token(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_FusedAttention())
        observer = stack.enter_context(_Observer(model, read))
        stack.enter_context(torch.device("meta"))
        ids = torch.zeros(sequences, tokens, dtype=torch.long)
        extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        try:
            output = model(input_ids=ids, use_cache=True, **extra)
            kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(cache_of(output))}
            kv_cache_bytes = sum(kept.values())
            kv_token_bytes = sum(map(_token_bytes, tensors_in(cache_of(output))))
            prompt_order = tuple(order)
        except Exception as error:  # an architecture's own code may do anything on meta; the reason is kept and shown
            return Trace(tokens, sequences, failure=_first_line(error))
        decode_failure = None
        if (cache := cache_of(output)) is not None:
            try:
                model(input_ids=ids[:, :1], use_cache=True, **{cache_argument(model): cache}, **extra)
            except Exception as error:  # as above
                decode_failure = _first_line(error)
    return Trace(
        tokens,
        sequences,
        kv_cache_bytes,
        kv_token_bytes,
        max(0, observer.peak_bytes - kv_cache_bytes),
        frozenset(outside),
        prompt_order,
        top_k,
        decode_failure=decode_failure,
    )


def _token_bytes(kept: torch.Tensor) -> int:
    """Of keys or values [sequences, heads, tokens, size], what a sequence has of each token; 0 of anything else."""
    return kept[0, :, 0].numel() * kept.element_size() if kept.dim() == 4 and kept.shape[2] else 0


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _named_below(model: nn.Module, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    path = next(path for path, module in model.named_modules() if module is layer)
    yield from layer.named_parameters(prefix=path)


@contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Real buffers stand aside for meta ones meanwhile, so that no operation mixes the two.

    What else a pass leaves in the modules is gone afterwards too: some rotary embeddings keep tensors in attributes.
    """
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        for module, _, buffers in before:
            for name, buffer in buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def _without_padding_token(model: nn.Module) -> Iterator[None]:
    """So that no architecture looks among the token ids for padding, to warn of it: on meta there is nothing to see."""
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    tokens = {key: config.pad_token_id for key, config in configs.items() if hasattr(config, "pad_token_id")}
    try:
        for key in tokens:
            configs[key].pad_token_id = None
        yield
    finally:
        for key, token in tokens.items():
            configs[key].pad_token_id = token


class _FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels do it: no matrix of scores is kept."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


class _Observer(TorchDispatchMode):
    """Shows each tensor that an operation reads, and follows the bytes of what operations return."""

    def __init__(self, model: nn.Module, read: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = read
        self.live_bytes = self.peak_bytes = 0
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for argument in tree_iter((args, kwargs)):
            if isinstance(argument, torch.Tensor):
                self.read(argument)
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.live_bytes += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes()).atexit = False
        return result

    def forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live_bytes -= nbytes
