"""What a log says, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]
Value = str | float | int | bool | list[str]

KEPT_HITS = 2048  # of one kind: a log of hundreds of megabytes is held in one
LONGEST_QUOTE = 400


@dataclass(frozen=True)
class Line:
    """A line of the log, counted from 1; what /proc says has no number."""

    number: int | None
    text: str

    @property
    def quoted(self) -> str:
        text = self.text.strip()
        return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


@dataclass(frozen=True)
class Hit:
    """A line that a pattern of the engine's table knows: who wrote it ("Worker_TP0"; "" where it does not say)."""

    line: Line
    label: str
    groups: Mapping[str, str]

    def number(self, group: str) -> float:
        return as_number(self.groups.get(group))


@dataclass(frozen=True)
class Setting:
    """What was asked for, and where the log shows it."""

    value: Value
    line: Line


@dataclass
class Facts:
    """What the last start of a log says: hits by kind, in order, and the settings asked for."""

    version: str | None = None
    asked: dict[str, Setting] = field(default_factory=dict)
    hits: dict[str, list[Hit]] = field(default_factory=dict)
    starts: int = 0
    last_line: Line | None = None

    def add(self, kind: str, hit: Hit) -> None:
        held = self.hits.setdefault(kind, [])
        if len(held) == KEPT_HITS:
            held.pop()
        held.append(hit)

    def all(self, *kinds: str) -> list[Hit]:
        return [hit for kind in kinds for hit in self.hits.get(kind, [])]

    def first(self, *kinds: str) -> Hit | None:
        return next(iter(self.all(*kinds)), None)

    def last(self, kind: str) -> Hit | None:
        return self.hits[kind][-1] if kind in self.hits else None

    def per_label(self, kind: str) -> dict[str, Hit]:
        """The last hit of each writer."""
        return {hit.label: hit for hit in self.hits.get(kind, [])}

    def setting(self, name: str) -> Value | None:
        return self.asked[name].value if name in self.asked else None

    def asked_number(self, name: str, default: float = 0.0) -> float:
        value = self.setting(name)
        return as_number(value) if value is not None else default

    def asked_lines(self, *names: str) -> tuple[Line, ...]:
        """Where the log shows these settings, each line once."""
        return unique(self.asked[name].line for name in names if name in self.asked)


@dataclass(frozen=True)
class Finding:
    id: str
    severity: Severity
    evidence: tuple[Line, ...]
    why: str
    remedy: str


@dataclass(frozen=True)
class Audit:
    """The verdict on one log. `unjudged` says what the log has no line for."""

    log: str
    engine: str | None
    version: str | None
    asked: Mapping[str, Value]
    happened: Mapping[str, Value]
    findings: tuple[Finding, ...]
    unjudged: tuple[str, ...]
    starts: int

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity != "note")


def as_number(value: Value | None) -> float:
    """The number of a log's text, NaN where it is none; "10,720" is 10720."""
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return float("nan")


def unique(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(dict.fromkeys(lines))
