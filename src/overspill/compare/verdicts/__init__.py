"""What the runs prove: pure functions from measured results to verdicts."""

from __future__ import annotations

from overspill.compare.verdicts.bytes_moved import bytes_moved
from overspill.compare.verdicts.device_memory import device_memory
from overspill.compare.verdicts.records import Check, Evidence, Figure, Outcome, Verdict
from overspill.compare.verdicts.same_answer import same_answer
from overspill.compare.verdicts.time_per_token import time_per_token

__all__ = [
    "Check",
    "Evidence",
    "Figure",
    "Outcome",
    "Verdict",
    "bytes_moved",
    "device_memory",
    "judge",
    "same_answer",
    "time_per_token",
]


def judge(evidence: Evidence, *, max_slowdown: float | None = None) -> tuple[Verdict, ...]:
    """The four verdicts, in the order in which they are read."""
    return (
        bytes_moved(evidence.candidate),
        device_memory(evidence),
        same_answer(evidence),
        time_per_token(evidence, max_slowdown=max_slowdown),
    )
