"""The comparison for a terminal: the candidate's ledger, what was measured, the verdicts."""

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
    tables = (_ledger(report), _memory(report), _measured(report), _verdicts(report))
    parts: list[RenderableType] = [part for table in tables for part in (table, "")]
    parts += [Text(f"note: {note}") for note in report.notes]
    return Group(*parts)


def _table(title: str, *columns: tuple[str, bool]) -> Table:
    """`columns` are names, and whether they hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for name, number in columns:
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def _ledger(report: Report) -> Table:
    run = report.candidate.runs[0]
    table = _table("Ledger of the candidate", ("tier", False), ("access", False), ("weights", True), ("bytes", True))
    for row in ledger_rows(run.weights):
        table.add_row(row.tier, row.access.replace("_", "-"), str(row.weights), format_bytes(row.bytes))
    return table


def _memory(report: Report) -> Table:
    table = _table(
        "Memory of the candidate",
        ("", False),
        ("forecast", True),
        ("asked", True),
        ("allocated", True),
        ("measured", True),
        ("off by", True),
    )
    for row in memory_rows(report.candidate.runs):
        figures = (row.forecast, row.asked, row.allocated, row.measured)
        shown = ["" if figure is None else format_bytes(figure) for figure in figures]
        table.add_row(row.purpose, *shown, "" if row.error is None else f"{row.error:+.1%}")
    return table


def _measured(report: Report) -> Table:
    baseline = side_words(report.baseline) if report.baseline is not None else "not run"
    title = f"Measured, {report.conditions.repeat} runs a side: {baseline}, against {side_words(report.candidate)}"
    table = _table(title, ("", False), ("baseline", True), ("candidate", True))
    for row in measured_rows(report):
        table.add_row(row.name, row.baseline, row.candidate)
    return table


def _verdicts(report: Report) -> Table:
    table = _table("Verdicts", ("", False), ("", False), ("", False))
    table.show_header = False
    for verdict in report.verdicts:
        told = Text("\n").join(
            Text(check.text, style=_STYLE[check.outcome] if check.outcome is Outcome.FAIL else "")
            for check in verdict.checks
        )
        table.add_row(Text(verdict.outcome, style=_STYLE[verdict.outcome]), Text(verdict.name, style="bold"), told)
    return table
