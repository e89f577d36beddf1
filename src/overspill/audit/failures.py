"""Ends that both engines' logs tell in a line: what it means, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from overspill.audit.records import Facts, Finding, Severity, unique

QUOTED_HITS = 3


@dataclass(frozen=True)
class Failure:
    """A kind of line that is a finding by itself."""

    kind: str
    id: str
    severity: Severity
    why: str
    remedy: str


def told(facts: Facts, failures: Sequence[Failure]) -> Iterator[Finding]:
    for failure in failures:
        lines = unique(hit.line for hit in facts.all(failure.kind))
        if lines:
            yield Finding(failure.id, failure.severity, lines[:QUOTED_HITS], failure.why, failure.remedy)


def start_incomplete(facts: Facts, judged: bool) -> Iterator[Finding]:
    """A log that ends before anything can be judged is no healthy one."""
    ready = facts.last("ready")
    if not judged and ready is not None:
        yield Finding(
            "nothing-to-judge",
            "warning",
            (ready.line,),
            "the server is ready, and no line says what it loaded, so what was asked for cannot be held against what "
            "happened.",
            "give the whole log of the start, at the level of INFO (VLLM_LOGGING_LEVEL, -lv)",
        )
    elif not judged and facts.last_line is not None:
        yield Finding(
            "start-incomplete",
            "warning",
            (facts.last_line,),
            "the log ends before the model was loaded, so what was asked for cannot be held against what happened.",
            "give the whole log of the start, from the command to the first request",
        )
