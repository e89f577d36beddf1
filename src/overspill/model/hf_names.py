"""Where each tensor of a checkpoint goes, by transformers' own renamings and conversions.

What is used and is not documented as public: the conversion mapping (`get_model_conversion_mapping`,
`rename_source_key`, `WeightConverter`, which PEFT uses too), and the order of names (`dot_natural_key`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


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

    for block in _blocks(names):
        for found, (target, pattern) in _targets(block, target_of):
            if target not in skeleton or (target in renamed and found != [target]):
                nowhere += found
            elif pattern is None:
                nowhere += [renamed[target]] if target in renamed else []
                (renamed[target],) = found
            else:
                group = groups.setdefault(target, ConversionGroup(target, by_pattern[pattern]))
                group.sources.setdefault(pattern, []).extend(found)
    nowhere += [name for target in renamed.keys() & groups.keys() for name in groups.pop(target).names]
    for group in groups.values():  # operations take tensors in the order of their patterns, not of their names
        patterns = group.converter.source_patterns
        group.sources = {pattern: group.sources[pattern] for pattern in patterns if pattern in group.sources}
    return renamed, list(groups.values()), nowhere


def _blocks(names: Iterable[str]) -> Iterator[list[str]]:
    """Names in transformers' order; those that differ in the number of an expert alone come together."""
    blocks: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        before, experts, after = name.partition(".experts.")
        number, _, weight = after.partition(".")
        if number.isdecimal():
            blocks.setdefault(f"{before}{experts}0.{weight}", []).append((int(number), name))
        else:
            blocks[name] = [(0, name)]
    for block in sorted(blocks, key=dot_natural_key):
        yield [name for _, name in sorted(blocks[block])]


def _targets(
    block: list[str], target_of: Callable[[str], tuple[str, str | None]]
) -> Iterator[tuple[list[str], tuple[str, str | None]]]:
    """Where names of one block go. Where the first and the last expert go into one stack, those between do too."""
    first = target_of(block[0])
    if block[1:] and (first[1] is None or target_of(block[-1]) != first):
        yield from (([name], target_of(name)) for name in block)
    else:
        yield block, first
