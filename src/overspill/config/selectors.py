"""Which weights a selector names. Names are transformers'; a selector is one of four things:

segments  `experts`, `mlp.down_proj`: vLLM's rule, whole dotted segments of the name relative to its layer
          (`.selector.` is in `.name.`), tried on transformers' spelling of the weight and on vLLM's
prefix    `lm_head`, `model.embed_tokens`: the full dotted name, or its beginning
layers    `layers.8-15`, `model.layers.3`: a stack (its last components suffice) and an inclusive range
both      `layers.8-15.mlp.down_proj`: a range, and segments within those layers

Weights outside every stack and weights of towers are matched by segments of their full name, which is where
vLLM's `visual` works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import pairwise

from overspill.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightName:
    """Where a weight hangs: `model.layers.3.mlp.down_proj.weight` has stack `model.layers`, layer 3 and
    relative name `mlp.down_proj.weight`. Outside every stack these three are None.

    `tower` marks what serves another modality than the decoder's (a vision encoder), in a stack or not.
    """

    full: str
    relative: str | None = None
    stack: str | None = None
    layer: int | None = None
    tower: bool = False


# vLLM fuses what transformers keeps apart. Outside of routed experts a segment is replaced by its fused name:
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
# Within `experts` the projection becomes a parameter `w13_weight`, `w2_bias`, …, since vLLM 0.33 one level
# deeper, under `routed_experts`:
_ROUTED = {
    "gate_up_proj": "w13",
    "gate_proj": "w13",
    "up_proj": "w13",
    "w1": "w13",
    "w3": "w13",
    "down_proj": "w2",
    "w2": "w2",
}
# The MoE block of mixtral and its kin, in vLLM and in older transformers:
_BLOCKS = {("mlp", "experts"), ("mlp", "gate")}
_OLD_BLOCK = "block_sparse_moe"

_LAYERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SEGMENT = re.compile(r"[\w-]+")


def matches(selector: str, name: WeightName) -> bool:
    """Whether the selector, of any of the module's four kinds, names this weight."""
    relative = name.relative if name.relative is not None and not name.tower else name.full
    return (
        any(_has_segments(selector, spelling) for spelling in spellings(relative))
        or any(f"{spelling}.".startswith(f"{selector}.") for spelling in spellings(name.full))
        or any(_in_layers(name, *span) for span in _layer_spans(selector))
    )


def check_selector(selector: str, *, field: str = "selector") -> None:
    """Raises ConfigError for a selector that could never match anything, naming `field` and what is wrong."""

    def refused(why: str, hint: str) -> ConfigError:
        return ConfigError(f'"{field}" has the selector "{selector}": {why}', hint=hint)

    if not selector.strip():
        raise refused("it is empty", 'name segments, like "experts"; leave the list empty to select everything')
    if "," in selector or any(character.isspace() for character in selector):
        raise refused(
            "one selector cannot hold several names",
            'on the command line separate names by spaces; in JSON write a list: ["experts", "o_proj"]',
        )
    segments = selector.split(".")
    if "" in segments:
        raise refused("a dot must stand between two segments", f'write "{".".join(filter(None, segments))}"')
    if any(_SEGMENT.fullmatch(segment) is None for segment in segments):
        raise refused(
            "it is no pattern: segments are whole names, without * ? or regular expressions",
            'name whole segments, like "experts" or "mlp.down_proj"; layers are given as "layers.8-15"',
        )
    ranges = [segment for segment in segments if "-" in segment and not segment.strip("0123456789-")]
    for segment in ranges:
        layers = _LAYERS.fullmatch(segment)
        if layers is None:
            raise refused(f'"{segment}" is not a range of layers', 'a range is written "layers.8-15"')
        if int(layers[2]) < int(layers[1]):
            raise refused(f'the range "{segment}" is reversed', f'write "{layers[2]}-{layers[1]}"')
    if len(ranges) > 1:
        raise refused("it has more than one range", "use one selector for each range of layers")
    if segments[0] in ranges:
        raise refused("a range needs its stack in front", f'write "layers.{selector}"')


def closest(selector: str, names: Iterable[WeightName], *, count: int = 3) -> list[str]:
    """Up to `count` selectors near this one, each naming a weight of `names`, the nearest first.

    For the error "matches no weight".
    """
    names = list(names)
    for stack, first, last, rest in _layer_spans(selector):
        within = [name for name in names if _in_layers(name, stack, first, last, None)]
        if within and rest is not None:
            head = selector.removesuffix(rest)
            inner = [WeightName(full="", relative=name.relative) for name in within]
            return [head + near for near in closest(rest, inner, count=count)]
    sought = selector.lower()

    def score(candidate: str) -> float:
        near = SequenceMatcher(None, sought, candidate.lower()).ratio()
        return near + 0.5 * candidate.lower().startswith(sought)

    scored = sorted((-score(candidate), candidate) for candidate in _candidates(selector, names))
    return [candidate for value, candidate in scored[:count] if value <= -0.5]


@lru_cache(maxsize=65536)
def spellings(name: str) -> frozenset[str]:
    """A weight's dotted name as transformers and as vLLM write it (`name` itself is one of them)."""
    parts = name.split(".")
    written = [parts, *_vllm_parts(parts)]
    for block in list(written):
        written += [
            [*block[:at], _OLD_BLOCK, *block[at + 1 :]] for at, pair in enumerate(pairwise(block)) if pair in _BLOCKS
        ]
        if _OLD_BLOCK in block:
            written.append(["mlp" if part == _OLD_BLOCK else part for part in block])
    return frozenset(".".join(parts) for parts in written)


def _vllm_parts(parts: list[str]) -> list[list[str]]:
    if "experts" not in parts:
        return [[_FUSED.get(part, part) for part in parts]]
    at = parts.index("experts") + 1
    inner = [part for part in parts[at:] if not part.isdigit()]
    fused = _ROUTED.get(inner[0].removesuffix("_bias")) if inner else None
    if fused is None:
        return []
    parameter = f"{fused}_bias" if inner[-1].endswith("bias") else f"{fused}_weight"
    return [[*parts[:at], parameter], [*parts[:at], "routed_experts", parameter]]


def _has_segments(selector: str, name: str) -> bool:
    return f".{selector}." in f".{name}."


def _layer_spans(selector: str) -> Iterator[tuple[str, int, int, str | None]]:
    """Every reading of the selector as (stack, first layer, last layer, what follows)."""
    segments = selector.split(".")
    for at, segment in enumerate(segments):
        layers = _LAYERS.fullmatch(segment)
        if at and layers:
            rest = ".".join(segments[at + 1 :]) or None
            yield ".".join(segments[:at]), int(layers[1]), int(layers[2] or layers[1]), rest


def _in_layers(name: WeightName, stack: str, first: int, last: int, rest: str | None) -> bool:
    if name.stack is None or name.layer is None or not first <= name.layer <= last:
        return False
    # A bare `layers` means the decoder's; a tower is named by more than its last component.
    if name.stack != stack and (not name.stack.endswith(f".{stack}") or (name.tower and "." not in stack)):
        return False
    if rest is None:
        return True
    return any(_has_segments(rest, spelling) for spelling in spellings(name.relative or ""))


def _candidates(selector: str, names: list[WeightName]) -> set[str]:
    """Selectors of about the same number of segments that name something."""
    bases = {name.full if name.relative is None or name.tower else name.relative for name in names}
    length = selector.count(".") + 1
    found = {
        ".".join(parts[start : start + size])
        for base in bases
        for parts in (spelling.split(".") for spelling in spellings(base))
        for size in range(max(1, length - 1), length + 2)
        for start in range(len(parts) - size + 1)
        if not any(part.isdigit() for part in parts[start : start + size])
    }
    if any(character.isdigit() for character in selector):
        layers: dict[str, list[int]] = {}
        for name in names:
            if name.stack is not None and name.layer is not None:
                layers.setdefault(name.stack, []).append(name.layer)
        found |= {f"{stack}.{min(each)}-{max(each)}" for stack, each in layers.items()}
    return found
