"""The comparison for a terminal: the candidate's ledger and memory, what was measured, the verdicts."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overspill.compare.report import Report
from overspill.compare.tables import ledger_rows, measured_rows, memory_rows, side_words
from overspill.compare.verdicts import Outcome
from overspill.config import format_bytes

_STYLE = {Outcome.PASS: "bold green", Outcome.FAIL: "bold red", Outcome.NOT_JUDGED: "yellow"}


def render_terminal(report: Report) -> RenderableType:
    """Tables, and the report's notes; they read without colour too."""
    baseline = side_words(report.baseline) if report.baseline is not None else "not run"
    runs = f"{report.conditions.repeat} run{'s' if report.conditions.repeat > 1 else ''} a side"
    titled = (
        ("Ledger of the candidate", _ledger(report)),
        ("Memory of the candidate", _memory(report)),
        (f"Measured, {runs}: {baseline}, against {side_words(report.candidate)}", _measured(report)),
        ("Verdicts", _verdicts(report)),
    )
    parts: list[RenderableType] = []
    for title, table in titled:
        parts += [Text(title, style="bold"), table, ""]
    return Group(*parts, *(Text(f"note: {note}") for note in report.notes))


def _table(*columns: str, numbers: bool = True) -> Table:
    """The first column holds names; the others numbers, or text."""
    table = Table(header_style="dim", box=None, pad_edge=False, show_header=any(columns))
    for at, column in enumerate(columns):
        number = numbers and at > 0
        table.add_column(column, justify="right" if number else "left", no_wrap=number)
    return table


def _ledger(report: Report) -> Table:
    table = _table("tier, access", "weights", "bytes")
    for row in ledger_rows(report.candidate.runs[0].weights):
        table.add_row(f"{row.tier}, {row.access.replace('_', '-')}", str(row.weights), format_bytes(row.bytes))
    return table


def _memory(report: Report) -> Table:
    table = _table("", "forecast", "asked", "allocated", "measured", "off by")
    for row in memory_rows(report.candidate.runs):
        figures = (row.forecast, row.asked, row.allocated, row.measured)
        shown = ["" if figure is None else format_bytes(figure) for figure in figures]
        table.add_row(row.purpose, *shown, "" if row.error is None else f"{row.error:+.1%}")
    return table


def _measured(report: Report) -> Table:
    table = _table("", "baseline", "candidate")
    for row in measured_rows(report):
        table.add_row(row.name, row.baseline, row.candidate)
    return table


def _verdicts(report: Report) -> Table:
    table = _table("", "", "", numbers=False)
    for verdict in report.verdicts:
        grounds = Text("\n").join(
            Text(check.text, style="red" if check.outcome is Outcome.FAIL else "") for check in verdict.checks
        )
        table.add_row(Text(verdict.outcome, style=_STYLE[verdict.outcome]), Text(verdict.name, style="bold"), grounds)
    return table
