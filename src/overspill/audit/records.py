"""What a log says, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    source: str = field(default="", compare=False)
    """The container, pod or program that the log names before the text."""
    at: int = field(default=0, compare=False)
    """Where in a long text the evidence is."""

    def follows(self, other: Line) -> bool:
        return (self.number or 0) > (other.number or 0)

    @property
    def quoted(self) -> str:
        text = self.text.strip()
        begin = self.at - LONGEST_QUOTE // 2 if self.at > LONGEST_QUOTE * 3 // 4 else 0
        told = text[begin : begin + LONGEST_QUOTE]
        return f"{'…' if begin else ''}{told}{'…' if begin + len(told) < len(text) else ''}"


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
    at: int = 0


@dataclass
class Facts:
    """What the last start of a log says: hits by kind, in order, and the settings asked for."""

    version: str | None = None
    asked: dict[str, Setting] = field(default_factory=dict)
    hits: dict[str, list[Hit]] = field(default_factory=dict)
    starts: int = 0
    first_line: Line | None = None
    last_line: Line | None = None

    def add(self, kind: str, hit: Hit) -> None:
        held = self.hits.setdefault(kind, [])
        if len(held) == KEPT_HITS:
            held.pop()
        held.append(hit)

    def fatal(self, kind: str, *survived: str) -> Hit | None:
        """The first of this kind after which no line of the kinds `survived` came: what went on was not ended by it."""
        ends = [hit.line for hit in map(self.last, survived) if hit is not None]
        return next((hit for hit in self.all(kind) if not any(end.follows(hit.line) for end in ends)), None)

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
        held = [self.asked[name] for name in names if name in self.asked]
        return unique(replace(setting.line, at=setting.at) for setting in held)


@dataclass(frozen=True)
class Finding:
    id: str
    severity: Severity
    evidence: tuple[Line, ...]
    why: str
    remedy: str


@dataclass(frozen=True)
class Audit:
    """The verdict on one server of a log: which, where it is not the only one. `unjudged` says what has no line."""

    log: str
    server: str | None
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
