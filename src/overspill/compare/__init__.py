"""The comparison: both sides run, every claim judged, a report that shows its grounds."""

from __future__ import annotations

from overspill.compare.contest import Event, Planned, Progress, RunFinished, RunStarted, compare
from overspill.compare.report import Report
from overspill.compare.terminal import render_terminal
from overspill.compare.verdicts import Outcome, Verdict

__all__ = [
    "Event",
    "Outcome",
    "Planned",
    "Progress",
    "Report",
    "RunFinished",
    "RunStarted",
    "Verdict",
    "compare",
    "render_terminal",
]
