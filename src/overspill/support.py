"""The support matrix: which architectures of transformers run here, with which ways of offloading.

The rows lie in support.json beside this file. They are what the tests found when they ran a tiny model of each
architecture (tests/support), and the tests fail where they find something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from overspill.errors import ConfigError

FILE = Path(__file__).with_name("support.json")

BACKENDS: Mapping[str, str] = {
    "uva": "weights in host memory, read across the link",
    "prefetch": "layers copied ahead from host memory",
    "disk": "layers read ahead from the checkpoint on disk",
    "placement": "routed experts computed by the CPU",
    "expert_stream": "routed experts through slots",
}
"""Ways of offloading, each with what it is."""


@dataclass(frozen=True)
class Row:
    """What is known of one architecture.

    `architecture` is transformers' class, `model_type` what a checkpoint's config.json says. `status` is "supported" or
    "refused", the latter with `reason`. `backends` are names of BACKENDS; `limits` say why others are refused, those
    that are in neither have nothing to act on. `features` are what the tiny model had.
    """

    architecture: str
    model_type: str
    status: str
    backends: tuple[str, ...] = ()
    reason: str | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """All rows, and the versions they were found with."""

    versions: Mapping[str, str]
    rows: tuple[Row, ...]

    def named(self, name: str) -> list[Row]:
        """The rows of an architecture, by class or model type. ConfigError where there is none."""
        found = [row for row in self.rows if name.lower() in (row.architecture.lower(), row.model_type.lower())]
        if not found:
            near = get_close_matches(name, sorted({w for row in self.rows for w in (row.architecture, row.model_type)}))
            raise ConfigError(
                f'"{name}" is no architecture of the support matrix',
                hint=f"the closest are {', '.join(near)}" if near else "`overspill support` lists them",
            )
        return found


@cache
def load_matrix() -> Matrix:
    content = json.loads(FILE.read_text())
    rows = (
        Row(**{**row, "backends": tuple(row["backends"]), "features": tuple(row["features"])})
        for row in content["rows"]
    )
    return Matrix(content["versions"], tuple(rows))


def save_matrix(matrix: Matrix) -> None:
    """Write support.json, a row a line."""
    rows = ",\n".join(json.dumps(row) for row in as_json(matrix.rows))
    FILE.write_text(f'{{"versions": {json.dumps(matrix.versions)},\n"rows": [\n{rows}\n]}}\n')


def as_json(rows: Iterable[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows are supported, run with each backend, and are refused."""
    return {
        "supported": sum(row.status == "supported" for row in rows),
        **{name: sum(name in row.backends for row in rows) for name in BACKENDS},
        "refused": sum(row.status == "refused" for row in rows),
    }


def as_markdown(matrix: Matrix) -> str:
    """docs/support.md."""
    rows = matrix.rows
    counted = counts(rows)
    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions.items())
    lines = [
        "# Supported architectures",
        "",
        "<!-- Made by `make support` from what the tests found. Do not edit: CI fails where they disagree. -->",
        "",
        f"{counted['supported']} of {len(rows)} entries run offloaded, {counted['refused']} are refused before a "
        f"weight is read. Found with {versions}, by running a tiny model of each on the emulated accelerator: a prompt "
        "in one pass and decoding over the cache, twice, the same bits as without offload and as transformers itself "
        "gives, no weight elsewhere than planned, and bytes over the link as planned. Experts on the CPU are within "
        "NMSE 5e-4. `overspill support --arch NAME` shows one; [architectures.md](architectures.md) says how an "
        "architecture is looked at, and what to do with one of your own.",
        "",
        "| backend | architectures | what it is |",
        "|---|---:|---|",
        *(f"| `{name}` | {counted[name]} | {what} |" for name, what in BACKENDS.items()),
        "",
        "## Refused",
        "",
        "| architecture | model type | reason |",
        "|---|---|---|",
        *(
            f"| {row.architecture} | `{row.model_type}` | {_cell(row.reason or '')} |"
            for row in rows
            if row.status == "refused"
        ),
        "",
        "## Backends refused",
        "",
        "| architecture | model type | backend | reason |",
        "|---|---|---|---|",
        *(
            f"| {row.architecture} | `{row.model_type}` | `{name}` | {_cell(reason)} |"
            for row in rows
            for name, reason in row.limits.items()
        ),
        "",
        "## All",
        "",
        "| architecture | model type | backends | what its tiny model has |",
        "|---|---|---|---|",
        *(
            f"| {row.architecture} | `{row.model_type}` | {', '.join(row.backends) or row.status} | "
            f"{', '.join(row.features)} |"
            for row in rows
        ),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
