"""From a checkpoint's headers, or a live model, to the model map: the join of names, shapes, roles and sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from overspill.checkpoint import Checkpoint, stamps
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.model import hf
from overspill.model.gguf import config_from_gguf, sources_of_gguf
from overspill.model.hf_names import map_checkpoint_names
from overspill.model.misfits import refuse_misfits
from overspill.model.sources import Conversion, ConvertedShapes, Extents, Live, Source, converted, single
from overspill.model.stacks import Stack, find_stacks
from overspill.model.trace import Reads, Trace, trace
from overspill.model.weights import (
    ModelMap,
    Role,
    Routing,
    Weight,
    name_in_stacks,
    reads_of,
    role_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_CONTEXT_TOKENS = 4096


def read_config(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The transformers configuration, from config.json or from GGUF metadata."""
    if checkpoint.format == "gguf":
        return config_from_gguf(checkpoint)
    config = hf.load_config(checkpoint.folder, trust_remote_code=trust_remote_code)
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise UnsupportedModelError(
            f"{checkpoint.folder}: config.json says that the weights are quantised ({method})",
            hint="use the checkpoint in bfloat16, or a GGUF file",
        )
    return config


def context_tokens(config: PretrainedConfig, asked: int | None) -> int:
    """Tokens of a sequence that memory is kept for: what was asked, else the model's own limit up to 4096.

    Raises ConfigError where more is asked than the model was made for.
    """
    text = config.get_text_config(decoder=True)
    own = next(
        (int(v) for n in ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len", "seq_length")
         if isinstance(v := getattr(text, n, None), int) and v > 0),
        asked or DEFAULT_CONTEXT_TOKENS,
    )  # fmt: skip
    if asked is not None and asked > own:
        raise ConfigError(
            f"max_model_len is {asked}, the model was made for {own} tokens at the most",
            hint=f"a max_model_len of at most {own}",
        )
    return asked if asked is not None else min(own, DEFAULT_CONTEXT_TOKENS)


def resolve_dtype(asked: str, checkpoint: Checkpoint, config: PretrainedConfig, device: str) -> torch.dtype:
    """The parameters' dtype. "auto": the checkpoint's own; for packed weights what the device computes best in."""
    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    if checkpoint.format == "gguf":
        return torch.bfloat16 if device == "cuda" else torch.float32
    text = config.get_text_config(decoder=True)
    for stated in (getattr(config, "dtype", None), getattr(text, "dtype", None)):
        if isinstance(stated, torch.dtype):
            return stated
    stored = {record.encoding.name for record in checkpoint.tensors.values()}
    return next((getattr(torch, n) for n in ("bfloat16", "float16") if n in stored), torch.float32)


def map_model(
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    tokens: int,
    sequences: int = 1,
    trust_remote_code: bool = False,
) -> ModelMap:
    """Map every parameter of the architecture onto the checkpoint, from headers alone.

    The class is the one that the checkpoint names, or where transformers cannot run that over text, the causal language
    model of the same configuration, without towers. Raises UnsupportedModelError listing the parameters that no
    checkpoint tensor covers, and those whose shapes differ, before any weight is read.
    """

    def mapped(*, text_alone: bool) -> ModelMap:
        skeleton = hf.build_skeleton(config, dtype, trust_remote_code=trust_remote_code, text_alone=text_alone)
        if checkpoint.format == "gguf":
            sources, unused = sources_of_gguf(checkpoint, skeleton)
        else:
            sources, unused = _safetensors_sources(checkpoint, skeleton)
        return _join(skeleton, sources, unused, checkpoint, tokens=tokens, sequences=sequences)

    if not hf.has_text_class(config):
        return mapped(text_alone=False)
    own, refused = None, None
    try:
        own = mapped(text_alone=False)
        if own.trace.failure is None:
            return own
        why = f"{own.architecture} does not run over text in this transformers ({own.trace.failure})"
    except UnsupportedModelError as error:
        refused, why = error, "the checkpoint has not all of the class that it names"
    try:
        text = mapped(text_alone=True)
    except UnsupportedModelError as error:
        text, refused = None, refused or error
    if text is not None and text.trace.failure is None:
        return replace(text, notes=(f"{why}, so its language model alone is loaded, as {text.architecture}",))
    if own is None:
        assert refused is not None
        raise refused
    return own


def map_live(model: nn.Module, *, tokens: int, sequences: int = 1) -> ModelMap:
    """Map a model that the caller built and filled; its tensors are the sources. `model` itself is the skeleton."""
    sources: dict[str, Source] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.device.type == "meta":
            raise UnsupportedModelError(
                f"{name} is on the meta device: it has no value",
                hint="load the weights before overspill.offload(), or use overspill.load() on the checkpoint",
            )
        sources[name] = Live(tensor.detach())
    return _join(model, sources, (), None, tokens=tokens, sequences=sequences)


def _safetensors_sources(checkpoint: Checkpoint, skeleton: nn.Module) -> tuple[dict[str, Source], tuple[str, ...]]:
    renamed, groups, nowhere = map_checkpoint_names(skeleton, checkpoint.tensors)
    shapes = ConvertedShapes(skeleton, checkpoint.tensors)
    refuse_misfits(skeleton, renamed, groups, checkpoint.tensors, shapes)
    sources: dict[str, Source] = {target: single(checkpoint.tensors[name]) for target, name in renamed.items()}
    for group in groups:
        sources.update(converted(group, checkpoint.tensors, skeleton, shapes.of(group)))
    return sources, tuple(name for name in nowhere if not hf.ignored_unexpected(skeleton, name))


def _join(
    skeleton: nn.Module,
    sources: Mapping[str, Source],
    unused: tuple[str, ...],
    checkpoint: Checkpoint | None,
    *,
    tokens: int,
    sequences: int,
) -> ModelMap:
    stacks = find_stacks(skeleton)
    traced = _trace(skeleton, stacks, tokens=tokens, sequences=sequences)
    stacks = _stacks_as_run(stacks, traced)
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    names_of: dict[int, list[str]] = {}
    for name, tensor in skeleton.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    weights: list[Weight] = []
    uncovered: list[str] = []
    for name, tensor in skeleton.state_dict(keep_vars=True).items():
        names = names_of[id(tensor)]
        if names[0] != name:
            continue
        found = [sources[n] for n in names if n in sources]
        if not found:
            uncovered.append(name)
            continue
        weight = _weight(skeleton, names, tensor, found[0], stacks, traced, name not in parameters)
        twins = tuple(other for other in found[1:] if isinstance(other, Extents) and other != found[0])
        weights.append(replace(weight, twins=twins))
    if uncovered:
        listed = "\n  ".join(uncovered[:20]) + (f"\n  … and {len(uncovered) - 20} more" if len(uncovered) > 20 else "")
        raise UnsupportedModelError(
            f"{type(skeleton).__name__}: {len(uncovered)} parameters have no source in the checkpoint:\n  {listed}",
            hint="the checkpoint is incomplete, or its names are not those that transformers knows for this model",
        )
    return ModelMap(
        type(skeleton).__name__,
        skeleton.config,
        skeleton,
        tuple(weights),
        stacks,
        traced,
        checkpoint,
        stamps(checkpoint) if checkpoint is not None and checkpoint.absent is None else {},
        unused,
    )


def _stacks_as_run(stacks: tuple[Stack, ...], traced: Trace) -> tuple[Stack, ...]:
    """`stacks` by what decoding reads: one of which it reads nothing is a tower.

    The decoder stays the first of them, unless it is one.
    """
    if traced.reads is None:
        return stacks
    read = (*traced.reads, *(f"{path}." for path in traced.experts_top_k))
    named = [replace(stack, tower=not any(name.startswith(f"{stack.path}.") for name in read)) for stack in stacks]
    return tuple(sorted(named, key=lambda stack: stack.tower))


def _trace(skeleton: nn.Module, stacks: tuple[Stack, ...], *, tokens: int, sequences: int) -> Trace:
    """Trace on meta; a live model's parameters are looked at through meta stand-ins of the same identity-free shape."""
    if all(p.device.type == "meta" for p in skeleton.parameters()):
        return trace(skeleton, stacks, tokens=tokens, sequences=sequences)
    real = {
        (module, name): parameter
        for module in skeleton.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    stand_ins = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in real.values()}
    try:
        for (module, name), parameter in real.items():
            module._parameters[name] = stand_ins[id(parameter)]
        return trace(skeleton, stacks, tokens=tokens, sequences=sequences)
    finally:
        for (module, name), parameter in real.items():
            module._parameters[name] = parameter


def _weight(
    skeleton: nn.Module,
    names: list[str],
    tensor: torch.Tensor,
    source: Source,
    stacks: tuple[Stack, ...],
    traced: Trace,
    is_buffer: bool,
) -> Weight:
    name = name_in_stacks(names[0], stacks)
    role = Role.BUFFER if is_buffer else role_of(skeleton, name, names[1:], traced.experts_top_k)
    routing = next(
        (Routing(tensor.shape[0], k) for module, k in traced.experts_top_k.items()
         if role is Role.ROUTED_EXPERT and name.full.startswith(f"{module}.") and tensor.dim() > 1),
        None,
    )  # fmt: skip
    if traced.reads is None or role is Role.ROUTED_EXPERT:
        reads = reads_of(skeleton, names, role, tuple(tensor.shape), tensor.dtype)
    else:
        reads = traced.reads.get(names[0], Reads())
    return Weight(
        name,
        role,
        tuple(tensor.shape),
        tensor.dtype,
        source,
        aliases=tuple(names[1:]),
        routing=routing,
        reads=reads,
        runs=max(1, traced.layer_order.count((name.stack, name.layer))) if name.stack and name.layer is not None else 1,
        read_outside=_read_outside(names, stacks, traced),
        written=names[0] in traced.written,
    )


def _read_outside(names: list[str], stacks: tuple[Stack, ...], traced: Trace) -> bool:
    """Whether another module than one layer reads the weight: seen in the trace, or tied into another place."""
    places = {(n.stack, n.layer) for n in (name_in_stacks(name, stacks) for name in names)}
    return len(places) > 1 or any(name in traced.outside_reads for name in names)


def conversions(weights: tuple[Weight, ...]) -> list[tuple[Weight, str]]:
    """Weights that are transformed while loading, each with what is done to it (the plan says so)."""
    return [(weight, weight.source.why) for weight in weights if isinstance(weight.source, Conversion)]
