"""`overspill bench`: measure this machine, for plans that say what a token takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from overspill.cli.progress import err, out
from overspill.config import format_bytes, resolve
from overspill.errors import CheckpointError


def command(
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cuda, cpu or emulated.")] = "auto",
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where to measure the disk: where models lie.")
    ] = Path(),
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the figures, for `overspill plan`.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> None:
    """Measure what this machine does, and keep it for planning. Twenty to thirty seconds."""
    settings = resolve(None, engine={"device": device})
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder", hint="--folder names the one in which models lie")
    from overspill.bench import as_json, measure_machine
    from overspill.machine.rates import refuse_folder, save_report
    from overspill.machine.select import select_device

    chosen = select_device(settings.engine)
    if keep:
        refuse_folder()
    try:
        report = measure_machine(chosen, folder, lambda what: err.print(what, style="dim", highlight=False))
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the disk cannot be measured there ({error.strerror or error})",
            hint="--folder names one that can be written, with 256 MiB free",
        ) from error
    path = save_report(report) if keep else None
    if json_output:
        print(json.dumps(as_json(report)))
    else:
        out.print(f"{report.device_name}, {report.machine['processor']}, {report.machine['cores']} cores", markup=False)
        out.print(_table(report.figures))
        out.print(_memory(report.machine), markup=False, highlight=False)
    if path is not None:
        err.print(f"kept in {path}", style="dim", highlight=False, markup=False)


def _table(figures: Mapping[str, object]) -> Table:
    table = Table()
    table.add_column("what")
    table.add_column("figure", justify="right")
    for what, figure in figures.items():
        for part, value in _parts(figure):
            table.add_row(f"{what}{part}", _figure(what, value))
    return table


def _parts(figure: object, before: str = "") -> list[tuple[str, float]]:
    if isinstance(figure, Mapping):
        return [part for name, value in figure.items() for part in _parts(value, f"{before}, {_named(str(name))}")]
    assert isinstance(figure, int | float)
    return [(before, float(figure))]


def _named(name: str) -> str:
    return format_bytes(int(name)) if name.isdigit() else name


def _figure(what: str, value: float) -> str:
    if "times as long" in what:
        return f"{value:.2f}"
    if "besides" in what:
        return f"{value * 1e3:.3f} ms"
    return f"{value / 1e9:.1f} GFLOP/s" if "many" in what or "products" in what else f"{value / 1e9:.2f} GB/s"


def _memory(machine: Mapping[str, Any]) -> str:
    limit = machine["control_group_limit_bytes"]
    nodes = machine["numa_nodes"]
    return (
        f"memory: {format_bytes(machine['memory_free_bytes'])} free, "
        f"{format_bytes(machine['memory_left_bytes'])} left to this process, control group "
        + (f"limited to {format_bytes(limit)}" if limit is not None else "without a limit that binds")
        + f"; {len(nodes)} memory node{'s' * (len(nodes) != 1)}"
    )
