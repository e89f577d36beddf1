"""llama.cpp's flags that keep exactly certain weights on the CPU: by experts, by whole layers, or by patterns of names.

Every CPU flag becomes a pattern in llama.cpp, searched in the full name of a tensor, and the first that matches wins.
`cpu_flags` proves that those it gives find the tensors that they are for and no others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from overspill.config.experts import EXPERTS_PATTERN
from overspill.model.experts import ExpertBlock, expert_blocks
from overspill.model.weights import ModelMap, Role, Weight

ALL_LAYERS = "999"
"""More than any model has. llama.cpp counts layers that predict further tokens too, which a plan does not have."""


@dataclass(frozen=True)
class CpuFlags:
    """`flags` keep `names` on the CPU, by `patterns`.

    `unnamed` are weights that no pattern can be written for, since their GGUF name is not known.
    """

    flags: tuple[str, ...]
    patterns: tuple[str, ...]
    names: frozenset[str]
    unnamed: tuple[Weight, ...]

    def on_cpu(self, name: str) -> bool:
        """Whether llama.cpp keeps the tensor of this GGUF name on the CPU; token_embd always is, and not asked here."""
        return any(re.search(pattern, name) for pattern in self.patterns)


def cpu_flags(model: ModelMap, moved: Collection[str], names: Mapping[str, tuple[str, ...]]) -> CpuFlags:
    """Flags for the weights called `moved` by us; `names` are `gguf_names`."""
    whole = _whole_layers(model, moved)
    flags = ["-ngl", ALL_LAYERS]
    patterns: list[str] = []
    written = {w.full for w in model if w.name.layer in whole and w.name.stack == model.decoder.path}

    blocks = [block for block in expert_blocks(model) if block.layer not in whole]
    placed = [block for block in blocks if all(weight.full in moved for weight in block.weights.values())]
    if placed:
        expert_flags, expert_patterns = _expert_flags(blocks, placed)
        flags += expert_flags
        patterns += expert_patterns
        written |= {weight.full for block in placed for weight in block.weights.values()}

    overrides = [rf"^blk\.{_any(whole)}\."] if whole else []
    overrides += _tensor_patterns(name for full in moved if full not in written for name in names.get(full, ()))
    for pattern in overrides:
        flags += ["-ot", f"{pattern}=CPU"]
    patterns += overrides
    on_cpu = frozenset(name for full in {*moved, *written} for name in names.get(full, ()))
    unnamed = tuple(w for w in model if w.full in moved and w.full not in names and w.full not in written)
    found = CpuFlags(tuple(flags), tuple(patterns), on_cpu, unnamed)
    _prove(found, [name for each in names.values() for name in each])
    return found


def _prove(found: CpuFlags, names: Iterable[str]) -> None:
    for pattern in found.patterns:
        assert "," not in pattern, f"llama.cpp cuts {pattern} at its comma"
        assert "=" not in pattern, f'llama.cpp cuts {pattern} at its first "="'
    for name in names:
        assert found.on_cpu(name) == (name in found.names), f"{name}: {found.flags}"


def _whole_layers(model: ModelMap, moved: Collection[str]) -> list[int]:
    """Layers of the decoder of which every weight is moved."""
    staying: dict[int, bool] = {}
    for weight in model:
        if weight.name.stack == model.decoder.path and weight.role is not Role.BUFFER and weight.nbytes:
            assert weight.name.layer is not None
            stays = staying.get(weight.name.layer, False)
            staying[weight.name.layer] = stays or weight.full not in moved
    return sorted(layer for layer, stays in staying.items() if not stays)


def _expert_flags(blocks: Sequence[ExpertBlock], placed: Sequence[ExpertBlock]) -> tuple[list[str], list[str]]:
    layers = [block.layer for block in placed]
    count = max(layers) + 1
    if len(placed) == len(blocks):
        return ["--cpu-moe"], [EXPERTS_PATTERN]
    if len(placed) == sum(block.layer < count for block in blocks):
        return ["--n-cpu-moe", str(count)], [rf"blk\.{layer}{EXPERTS_PATTERN}" for layer in range(count)]
    pattern = rf"blk\.{_any(layers)}{EXPERTS_PATTERN}"
    return ["-ot", f"{pattern}=CPU"], [pattern]


def _tensor_patterns(names: Iterable[str]) -> list[str]:
    """One pattern for all tensors that are moved in the same layers, and one for those outside of any layer."""
    layers_of: dict[str, set[int]] = {}
    outside = []
    for name in sorted(names):
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if layer is None:
            outside.append(name)
        else:
            layers_of.setdefault(layer[2], set()).add(int(layer[1]))
    groups: dict[tuple[int, ...], list[str]] = {}
    for tensor, layers in layers_of.items():
        groups.setdefault(tuple(sorted(layers)), []).append(tensor)
    found = [rf"^blk\.{_any(layers)}\.{_any(tensors)}$" for layers, tensors in groups.items()]
    return found + ([rf"^{_any(outside)}$"] if outside else [])


def _any(words: Sequence[int | str]) -> str:
    """A pattern that finds any of these words."""
    found = "|".join(re.escape(str(word)) for word in words)
    return f"({found})" if len(words) > 1 else found
