"""What the findings ask of vLLM's lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from overspill.audit.records import Facts, Hit

GIB = 1024**3

_SPARSE = re.compile(
    r"moe|mixtral|deepseekv[2-9]|gptoss|kimi|grok|dbrx|jamba|minimax|glm4.?[5-9]|llama4|ernie4_5|bailing", re.I
)
_VERSION = re.compile(r"0\.(\d{1,3})")
_NEWER = tuple("123456789")
OLDEST, NEWEST = 27, 33
"""Minor versions whose lines are known: in older ones a line that is missing proves nothing."""


@dataclass(frozen=True)
class PrefetchLine:
    """The line of PrefetchOffloader; its GB are powers of 1000."""

    hit: Hit
    modules: int
    saved_bytes: float
    pool_bytes: float
    num: int
    step: int


def prefetch_lines(facts: Facts) -> Iterator[PrefetchLine]:
    for hit in facts.all("prefetch"):
        modules, num, step = (int(hit.groups[name]) for name in ("modules", "num", "step"))
        yield PrefetchLine(hit, modules, hit.number("saved_gb") * 1e9, hit.number("pool_gb") * 1e9, num, step)


def asked_uva_gib(facts: Facts) -> float:
    return facts.asked_number("cpu_offload_gb")


def selectors(facts: Facts, name: str) -> list[str]:
    value = facts.setting(name)
    return value if isinstance(value, list) else []


def was_loaded(facts: Facts) -> bool:
    return facts.first("loaded", "kv_memory") is not None


def is_sparse(facts: Facts) -> bool:
    architecture = facts.first("architecture")
    return facts.first("moe") is not None or bool(architecture and _SPARSE.search(architecture.groups["name"]))


def older_than(version: str | None, minor: int) -> bool:
    """Whether vLLM is older than 0.`minor`; an unknown version may be."""
    match = _VERSION.match(version or "")
    return (match is None or int(match[1]) < minor) and not (version or "").startswith(_NEWER)


def beyond(version: str | None) -> bool:
    """Whether vLLM is newer than what is known."""
    return not older_than(version, NEWEST + 1)


def offloaded_gib(facts: Facts) -> float:
    """What one rank moved, of the rank that moved most; net of buffers where it is prefetch."""
    moved = [hit.number("gib") for hit in facts.per_label("uva_bytes").values()]
    moved += [max(0.0, line.saved_bytes - line.pool_bytes) / GIB for line in prefetch_lines(facts)]
    return max((gib for gib in moved if gib == gib), default=0.0)


def host_gib(facts: Facts) -> float:
    """What one rank holds on the host; prefetch keeps all of it there."""
    moved = [hit.number("gib") for hit in facts.per_label("uva_bytes").values()]
    moved += [line.saved_bytes / GIB for line in prefetch_lines(facts)]
    return max((gib for gib in moved if gib == gib), default=0.0)


def sharding(facts: Facts) -> int:
    """Ranks that share one copy of the weights."""
    asked = facts.asked_number("tensor_parallel_size", 1) * facts.asked_number("pipeline_parallel_size", 1)
    return int(asked) if 1 <= asked <= 4096 else 1


def ranks(facts: Facts) -> int:
    """Processes that offload: as many as said so, or as were asked for."""
    told = len(facts.per_label("uva_bytes")) or 1
    copies = facts.asked_number("data_parallel_size", 1)
    return max(told, sharding(facts) * (int(copies) if 1 <= copies <= 4096 else 1))


def checkpoint_gib(facts: Facts) -> float:
    """What was read: of each file set once (a drafter may be in the model's own), by the writer that read most."""
    sizes: dict[str, set[float]] = {}
    for hit in facts.all("checkpoint"):
        sizes.setdefault(hit.label, set()).add(hit.number("gib"))
    return max((sum(held) for held in sizes.values()), default=0.0)


def dead_selector(text: str, version: str | None) -> str | None:
    """Why a selector can match nothing; None where the text alone does not tell."""
    if "," in text:
        return "a list with commas is one name"
    if any(mark in text for mark in "*?[]^$\\|+()"):
        return "there are no patterns"
    if text != text.strip("."):
        return "a dot at its end"
    segments = text.split(".")
    if segments[0] in ("layers", "model") or any(part.isdigit() for part in segments[:2]):
        return "names are relative to the layer, so layers cannot be named"
    if text in ("expert", "w2", "w13"):
        return "only whole segments match"
    if text in ("experts.w2_weight", "experts.w13_weight") and not older_than(version, 33):
        return f"in 0.33.0 the weight is experts.routed_experts.{segments[-1]}"
    return None
