"""What a verdict is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from overspill.compare.answers import AnswerDifference, BlockDifference
from overspill.compare.results import RunResult


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Check:
    """One thing looked at, and what was found."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Figure:
    """A number behind a verdict. `unit`: "bytes", "seconds", "ratio", "percent" or "" for a bare number."""

    name: str
    value: float | None
    unit: str = ""


@dataclass(frozen=True)
class Verdict:
    """A judgement with its grounds. The first check is the claim; the others can only make it fail."""

    name: str
    headline: str
    checks: tuple[Check, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def outcome(self) -> Outcome:
        failed = any(check.outcome is Outcome.FAIL for check in self.checks)
        return Outcome.FAIL if failed else self.checks[0].outcome

    @property
    def reason(self) -> str:
        """The first check that failed, or else the claim."""
        return next((c.text for c in self.checks if c.outcome is Outcome.FAIL), self.checks[0].text)


@dataclass(frozen=True)
class Evidence:
    """All runs, in the order in which each side ran. `baseline` is empty where `baseline_missing` says why.

    Differences are by run, then by prompt, against the first run of the baseline (of the candidate where the baseline
    is missing); the reference itself has none, so the side that it is of has one run fewer there. `*_blocks` are by
    run, against the same run, of the experts that other kernels may compute first; empty where none do.
    """

    baseline: tuple[RunResult, ...]
    candidate: tuple[RunResult, ...]
    baseline_differences: tuple[tuple[AnswerDifference, ...], ...]
    candidate_differences: tuple[tuple[AnswerDifference, ...], ...]
    baseline_missing: str | None = None
    baseline_blocks: tuple[BlockDifference, ...] = ()
    candidate_blocks: tuple[BlockDifference, ...] = ()
