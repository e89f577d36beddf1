"""`overspill support`: which architectures run, with which ways of offloading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from overspill.cli.progress import err, out
from overspill.support import BACKENDS, Row, as_json, counts, load_matrix


def command(
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="NAME", help="One architecture, by class or model type.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> None:
    """Show what runs of every architecture that transformers generates text with."""
    matrix = load_matrix()
    rows = matrix.rows if arch is None else matrix.named(arch)
    if json_output:
        print(json.dumps(as_json(rows)))
        return
    if arch is None:
        out.print(_table(rows))
        err.print(", ".join(f"{name} {count}" for name, count in counts(rows).items()), highlight=False, markup=False)
    else:
        for row in rows:
            for line in _described(row):
                out.print(line, highlight=False, markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions.items())
    err.print(f"found with {versions}, by running a tiny model of each", highlight=False, markup=False)


def _table(rows: Sequence[Row]) -> Table:
    table = Table()
    for column in ("architecture", "model type", "backends", "refused"):
        table.add_column(column, overflow="fold")
    for row in rows:
        refused = row.reason or "; ".join(f"{name}: {_first(reason)}" for name, reason in row.limits.items())
        table.add_row(row.architecture, row.model_type, ", ".join(row.backends) or row.status, refused)
    return table


def _described(row: Row) -> list[str]:
    lines = [f"{row.architecture} ({row.model_type}): {row.status}"]
    if row.reason is not None:
        return [*lines, f"  {row.reason}"]
    lines += [f"  {name}: {BACKENDS[name]}" for name in row.backends]
    lines += [f"  not {name}: {reason}" for name, reason in row.limits.items()]
    return [*lines, f"  tried with: {', '.join(row.features)}"] if row.features else lines


def _first(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
