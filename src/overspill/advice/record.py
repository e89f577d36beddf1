"""Advice for one engine, for people (a shell script whose comments are the rest) and for machines (JSON)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overspill.config import format_bytes


@dataclass(frozen=True)
class Advice:
    """`command`, in `environment`, is the nearest to a plan that `engine` has; `cannot` is what it does not have.

    `host_bytes` are what the engine will really take of host memory for weights, its allocator's rounding included.
    """

    engine: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]
    cannot: tuple[str, ...]
    host_bytes: int

    @property
    def shell(self) -> str:
        """One line for a shell, the environment first."""
        variables = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join((*variables, shlex.join(self.command)))


def render(advice: Advice) -> str:
    """The command line; below it, as comments of a shell, what cannot be done, notes and host memory."""
    lines = [advice.shell]
    lines += [f"# {advice.engine} cannot: {line}" for line in advice.cannot]
    lines += [f"# note: {line}" for line in advice.notes]
    lines.append(
        f"# host memory that {advice.engine} will really take for weights: {format_bytes(advice.host_bytes)} "
        f"({advice.host_bytes} bytes)"
    )
    return "\n".join(lines)


def as_json(advice: Advice) -> dict[str, Any]:
    return {
        "engine": advice.engine,
        "shell": advice.shell,
        "command": list(advice.command),
        "environment": dict(advice.environment),
        "cannot": list(advice.cannot),
        "notes": list(advice.notes),
        "host_bytes": advice.host_bytes,
    }
