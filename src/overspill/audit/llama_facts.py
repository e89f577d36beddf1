"""What the findings ask of llama.cpp's lines."""

from __future__ import annotations

import re
from collections import Counter

from overspill.audit.records import Facts

_UNBOUNDED = re.compile(r"[*+]|\{\d*,\d*\}")
_NESTED = re.compile(r"\)[*+{]")
LONGEST_PATTERN = 200


def weights_mib(facts: Facts) -> Counter[str]:
    """MiB of the model's weights in each buffer; those of a draft model are not in it."""
    return held_mib(facts, "weights")


def held_mib(facts: Facts, kind: str) -> Counter[str]:
    """MiB in each buffer. The fit's trial loads, whose buffers are empty, add nothing."""
    held: Counter[str] = Counter()
    for hit in facts.all(kind):
        mib = hit.number("mib")
        if mib > 0:
            held[hit.label] += mib  # type: ignore[assignment]
    return held


def on_host(buffer: str) -> bool:
    """CPU, CPU_Mapped, CPU_REPACK, CUDA_Host, …"""
    return buffer.startswith("CPU") or buffer.endswith("_Host")


def host_mib(facts: Facts) -> float:
    return sum(mib for name, mib in weights_mib(facts).items() if on_host(name))


def is_sparse(facts: Facts) -> bool:
    return any(hit.number("count") > 0 for hit in facts.all("experts"))


def overrides(facts: Facts) -> list[tuple[str, str]]:
    """(pattern, buffer) of -ot, as llama.cpp splits it: at commas first, then at the first "="."""
    value = facts.setting("override_tensor")
    parts = [part for text in value for part in text.split(",")] if isinstance(value, list) else []
    return [(pattern, buffer) for pattern, sign, buffer in (part.partition("=") for part in parts) if sign]


def cpu_override_asked(facts: Facts) -> bool:
    return (
        facts.setting("cpu_moe") is True
        or facts.asked_number("n_cpu_moe") > 0
        or any(buffer.startswith("CPU") for _, buffer in overrides(facts))
    )


def mapped(facts: Facts) -> bool:
    """Whether weights are used from a mapping of the file."""
    mode = facts.last("load_mode")
    return (mode is not None and "mmap" in mode.groups["mode"]) or any("_Mapped" in name for name in weights_mib(facts))


def matches(pattern: str, tensor: str) -> bool | None:
    """Whether a pattern of the log finds a tensor; None where running it could take for ever."""
    if len(pattern) > LONGEST_PATTERN or len(_UNBOUNDED.findall(pattern)) > 2 or _NESTED.search(pattern):
        return None
    try:
        return re.search(pattern, tensor) is not None
    except re.error:
        return None  # of ECMAScript's grammar, and not of Python's
