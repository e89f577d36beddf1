"""Weights that the checkpoint holds otherwise than the model computes with them, and what tells one such from another.

A conversion's result hangs on the bytes it starts from, on what is done to them, and on the model it is done for;
never on a name alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from overspill.checkpoint import Extent
from overspill.checkpoint.contents import span_of
from overspill.model.sources import Conversion, Extents, Live
from overspill.model.weights import ModelMap, Weight

FORMAT = 2
"""Raised when the same source becomes other bytes than before, or they are kept in another way."""


def needs_conversion(weight: Weight) -> bool:
    """Whether a file must be made before the weight can be read from one as the model computes with it."""
    source = weight.source
    return isinstance(source, Conversion) or (isinstance(source, Extents) and source.dtype != weight.dtype)


def how_converted(weight: Weight) -> str:
    """What is done to the weight, for people."""
    source = weight.source
    assert not isinstance(source, Live), weight.full
    return source.why if isinstance(source, Conversion) else f"cast from {_name(source)}"


def origins(weight: Weight) -> tuple[Extent, ...]:
    """What the weight is made from, in order."""
    source = weight.source
    assert not isinstance(source, Live), weight.full
    return tuple(r.extent for r in source.records) if isinstance(source, Conversion) else source.extents


@dataclass(frozen=True)
class Recipe:
    """What the weights of one model have in common: who converts them, and for which architecture and sizes."""

    digest: str

    @classmethod
    def of(cls, model: ModelMap) -> Recipe:
        config = model.config.to_dict()
        sizes = {k: v for k, v in config.items() if not k.startswith("_") and k != "transformers_version"}
        converters = [f"{name} {metadata.version(name)}" for name in ("transformers", "gguf")]
        return cls(_digest([FORMAT, *converters, model.architecture, sizes]))

    def key(self, weight: Weight, contents: Sequence[str]) -> str:
        """SHA-256 that two weights share only if they are the same bytes; `contents` are the hashes of its origins."""
        source = weight.source
        made: list[object]
        if isinstance(source, Conversion):
            records = [(r.name, r.encoding.name, r.shape) for r in source.records]
            made = [self.digest, source.why, records]
        else:
            made = [FORMAT, how_converted(weight), [(e.at, e.length) for e in origins(weight)]]
        return _digest([weight.full, str(weight.dtype), weight.shape, made, list(contents)])


def weight_keys(weights: Iterable[Weight], model: ModelMap, known: Mapping[Path, Mapping[str, str]]) -> dict[str, str]:
    """The keys, by name, of those `weights` of which all contents are `known` (SHA-256 by file and `span_of`)."""
    recipe = Recipe.of(model)
    keys = {}
    for weight in weights:
        contents = [known.get(extent.file, {}).get(span_of(extent)) for extent in origins(weight)]
        if None not in contents:
            keys[weight.full] = recipe.key(weight, [digest for digest in contents if digest is not None])
    return keys


def _name(source: Extents) -> str:
    return str(source.dtype).removeprefix("torch.")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
