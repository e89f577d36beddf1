"""A GGUF checkpoint as what transformers needs: configuration, tokenizer, a source for each parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from overspill.checkpoint.records import Checkpoint, TensorRecord
from overspill.errors import UnsupportedModelError
from overspill.model import hf_gguf
from overspill.model.gguf_blocks import dequantize
from overspill.model.gguf_config import architecture_of, config_from_gguf, generation_config_from_gguf
from overspill.model.hf_names import ConversionGroup
from overspill.model.sources import Conversion, Source, single

__all__ = [
    "GgufSource",
    "config_from_gguf",
    "dequantize",
    "generation_config_from_gguf",
    "sources_from_gguf",
    "sources_of_gguf",
    "tokenizer_from_gguf",
    "unused_tensors",
]

Convert = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, eq=False)
class GgufSource:
    """What a parameter is made of.

    `convert` takes the dequantised tensors of `records` in order, in float32, and gives the parameter, in
    memory of its own or in theirs; where it only moves elements (`moves_only`), any float dtype will do.
    Without `convert` the one record is the parameter as it is, and where it is dense its bytes may be read
    straight into place.
    """

    records: tuple[TensorRecord, ...]
    convert: Convert | None = None
    moves_only: bool = True

    def read(self, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`, given each record's bytes (uint8 [nbytes], in order).

        Takes the parameter's bytes once, and once more where there is something to convert.
        """
        decoded = dtype if self.moves_only else torch.float32
        parts = [dequantize(data, record, decoded) for data, record in zip(raw, self.records, strict=True)]
        return parts[0] if self.convert is None else self.convert(parts).to(dtype)


def tokenizer_from_gguf(checkpoint: Checkpoint) -> PreTrainedTokenizerFast | None:
    """The tokenizer and chat template in the file; None where the file has no vocabulary.

    Raises UnsupportedModelError where transformers cannot build a tokenizer of this kind.
    """
    metadata = checkpoint.metadata
    architecture = architecture_of(checkpoint)
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    return hf_gguf.build_tokenizer(
        architecture, hf_gguf.model_type(architecture, metadata.get("general.name")), metadata
    )


def sources_from_gguf(checkpoint: Checkpoint, model: nn.Module) -> dict[str, GgufSource]:
    """Where each parameter and persistent buffer of `model` (on meta) comes from, by full name.

    A name without a source is absent: tied to another, or missing from the file, which is the caller's to
    tell. Raises UnsupportedModelError where a tensor's shape is not the parameter's. No tensor data is
    read.
    """
    architecture = architecture_of(checkpoint)
    skeleton = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    if hf_gguf.by_function(architecture):
        sources = _sources_by_conversion(architecture, checkpoint, model, skeleton)
    else:
        names = hf_gguf.Names(architecture, model)
        found = {name: _source(name, checkpoint.tensors, model, names) for name in skeleton}
        sources = {name: source for name, source in found.items() if source is not None}
    for name, source in sources.items():
        _check_shape(name, tuple(skeleton[name].shape), source)
    return sources


def sources_of_gguf(checkpoint: Checkpoint, model: nn.Module) -> tuple[dict[str, Source], tuple[str, ...]]:
    """`sources_from_gguf` as the model map keeps them, in the dtypes of `model`; and `unused_tensors`."""
    found = sources_from_gguf(checkpoint, model)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    sources = {name: _as_source(name, source, dtypes[name]) for name, source in found.items()}
    return sources, unused_tensors(checkpoint, found)


def _as_source(name: str, source: GgufSource, dtype: torch.dtype) -> Source:
    if source.convert is None and not source.records[0].encoding.packed:
        return single(source.records[0])
    encodings = ", ".join(dict.fromkeys(record.encoding.name for record in source.records))
    why = f"decoded from {encodings}" if source.convert is None else f"decoded from {encodings}, rearranged"
    return Conversion(source.records, (name,), lambda raw: {name: source.read(raw, dtype)}, why)


def unused_tensors(checkpoint: Checkpoint, sources: Mapping[str, GgufSource]) -> tuple[str, ...]:
    """Tensors of the file that neither a parameter nor the configuration is made of."""
    used = {record.name for source in sources.values() for record in source.records}
    configured = {"rope_factors_long.weight", "rope_factors_short.weight"}
    if checkpoint.metadata.get("general.architecture") in ("llama", "gemma4"):
        configured.add("rope_freqs.weight")
    return tuple(name for name in checkpoint.tensors if name not in used | configured)


_EXPERTS = re.compile(r"(?P<module>.+\.(?P<layer>\d+)\..*experts)\.(?P<which>gate_up|down)_proj(?P<bias>_bias)?")


def _source(
    name: str, tensors: Mapping[str, TensorRecord], model: nn.Module, names: hf_gguf.Names
) -> GgufSource | None:
    if (match := _EXPERTS.fullmatch(name)) is not None:
        layout = hf_gguf.experts_layout(model.get_submodule(match["module"]))
        if layout is not None:
            return _experts_source(match, tensors, *layout)
    record = next((tensors[n] for n in names.candidates(name) if n in tensors), None)
    if record is None:
        return None
    if names.leaves_alone(record.name):
        return GgufSource((record,))
    return GgufSource((record,), partial(_processed, names, record.name), moves_only=False)


def _processed(names: hf_gguf.Names, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return names.process(name, parts[0])


def _experts_source(
    match: re.Match[str], tensors: Mapping[str, TensorRecord], transposed: bool, interleaved: bool
) -> GgufSource | None:
    """Routed experts of one layer. The file has [E, out, in] for gate, up and down, or gate and up as one."""
    prefix, suffix = f"blk.{match['layer']}.ffn_", "_exps.bias" if match["bias"] else "_exps.weight"
    gate_up = match["which"] == "gate_up"
    together = f"{prefix}{match['which']}{suffix}"
    wanted = (
        (together,) if together in tensors or not gate_up else tuple(f"{prefix}{w}{suffix}" for w in ("gate", "up"))
    )
    if any(name not in tensors for name in wanted):
        return None
    records = tuple(tensors[name] for name in wanted)
    transposed = transposed and not match["bias"]
    interleaved = interleaved and gate_up
    if len(records) == 1 and not transposed and not interleaved:
        return GgufSource(records)
    return GgufSource(records, partial(_stack_experts, gate_up, transposed, interleaved))


def _stack_experts(gate_up: bool, transposed: bool, interleaved: bool, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[E, out, in] tensors (biases: [E, out]) in the layout that the model keeps them in."""
    stack = parts[0]
    if gate_up:
        gate, up = parts if len(parts) == 2 else stack.chunk(2, dim=1)
        stack = torch.stack((gate, up), dim=2).flatten(1, 2) if interleaved else torch.cat((gate, up), dim=1)
    return stack.transpose(1, 2).contiguous() if transposed else stack


def _sources_by_conversion(
    architecture: str, checkpoint: Checkpoint, model: nn.Module, skeleton: Iterable[str]
) -> dict[str, GgufSource]:
    renamed, groups = hf_gguf.conversions(architecture, model, tuple(checkpoint.tensors))
    sources = {name: GgufSource((checkpoint.tensors[tensor],)) for name, tensor in renamed.items()}
    for group in groups:
        records = tuple(checkpoint.tensors[name] for name in group.names)
        sources[group.target] = GgufSource(records, partial(_converted, group, model), moves_only=False)
    return {name: sources[name] for name in skeleton if name in sources}


def _converted(group: ConversionGroup, model: nn.Module, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    named = dict(zip(group.names, parts, strict=True))
    return group.convert(model, named.__getitem__)[group.target]


def _check_shape(name: str, shape: tuple[int, ...], source: GgufSource) -> None:
    """Conversions never add or drop elements: their number must agree, and without a conversion the shape."""
    stored = [record.shape for record in source.records]
    elements = sum(record.elements for record in source.records)
    if elements == torch.Size(shape).numel() and (source.convert is not None or stored == [shape]):
        return
    tensors = ", ".join(f"{record.name} {list(record.shape)}" for record in source.records)
    raise UnsupportedModelError(
        f"{name} has the shape {list(shape)}, the file holds {tensors}",
        hint="the file's header and its tensors disagree, or transformers reads this header wrongly; "
        "give the original model's folder",
    )
