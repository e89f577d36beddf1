"""A table of line patterns: a plain text that must be in the line, and what is read from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from overspill.audit.records import Facts, Hit, Line, Setting, Value

_QUOTED = re.compile(r"'([^']{1,500})'|\"([^\"]{1,500})\"")
_ENOUGH, _LOOK_EVERY = 8, 256
_WRITER = re.compile(r"\((\w{1,64}) pid=\d{1,9}\)")


@dataclass(frozen=True)
class Pattern:
    kind: str
    literal: str
    regex: re.Pattern[str] | None = None


def pattern(kind: str, literal: str, regex: str | None = None) -> Pattern:
    """A row; without `regex` the literal says it all. A group named "label" names the writer."""
    return Pattern(kind, literal, re.compile(regex) if regex is not None else None)


@dataclass(frozen=True)
class Flag:
    """A setting as a command line, or a dump of the configuration, writes it."""

    name: str
    kind: type[float] | type[str] | type[bool] | type[list[str]]
    regex: re.Pattern[str]

    def read(self, text: str, *, last: bool) -> Value | None:
        """The value in the text: of several the last, as on a command line, or the first, as in a dump."""
        matches = list(self.regex.finditer(text))
        if not matches:
            return None
        if self.kind is list:
            words = [word for match in matches for word in _words(_found(match))]
            return words or None
        found = _found(matches[-1 if last else 0])
        if self.kind is bool:
            return found not in ("False", "0")
        if self.kind is float:
            return float(found)
        return found if found != "None" else None


def _found(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group is not None), "")


def _words(text: str) -> list[str]:
    """The names of a list as Python prints it, or as a command line has it."""
    if text[:1] in ("[", "{"):
        return [first or second for first, second in _QUOTED.findall(text)]
    return [word.strip("'\"") for word in text.split()]


@dataclass(frozen=True)
class Engine:
    """How one engine's log is read.

    `starts` are the kinds that begin a start, each with its stage; `command` matches the engine's command line, which
    has `command_literal` in it.
    """

    name: str
    table: Sequence[Pattern]
    starts: Mapping[str, int]
    command_literal: str
    command: re.Pattern[str]
    flags: Sequence[Flag]
    asked_kinds: Sequence[str] = ()


@dataclass
class Scan:
    """One engine's reading of a log. Only the last start counts."""

    engine: Engine
    facts: Facts = field(default_factory=Facts)
    known: int = 0
    _begun: dict[tuple[str, str], int] = field(default_factory=dict)

    def feed(self, line: Line) -> None:
        text = line.text
        self.facts.last_line = line
        if self.engine.command_literal in text and self.engine.command.match(text):
            self._take("command", Hit(line, "", {}))
        for row in self.engine.table:
            if row.literal in text:
                match = row.regex.search(text) if row.regex is not None else None
                if row.regex is None or match is not None:
                    groups = {name: value for name, value in match.groupdict().items() if value} if match else {}
                    self._take(row.kind, Hit(line, groups.get("label", "") or _writer(text), groups))

    def _take(self, kind: str, hit: Hit) -> None:
        self.known += 1
        if kind in self.engine.starts:
            self._begin(kind, hit)
        self.facts.add(kind, hit)
        asked = self.facts.asked
        if "version" in hit.groups:
            self.facts.version = hit.groups["version"].removeprefix("v")
        if kind in self.engine.asked_kinds:
            command = kind == "command"
            for flag in self.engine.flags:
                value = flag.read(hit.line.text, last=command)
                if value is not None and (command or kind != self.engine.asked_kinds[-1] or flag.name not in asked):
                    asked[flag.name] = Setting(value, hit.line)

    def _begin(self, kind: str, hit: Hit) -> None:
        """A sign of a start that this start has given already, or that belongs before one it has given, is a new one.

        One of the last stage comes of the same process, which was asked for the same as before.
        """
        stage = self.engine.starts[kind]
        if (kind, hit.label) in self._begun or any(stage < later for later in self._begun.values()):
            same_process = stage == max(self.engine.starts.values())
            before = self.facts
            self.facts = Facts(starts=before.starts, last_line=hit.line)
            if same_process:
                self.facts.asked, self.facts.version = before.asked, before.version
            self._begun = {}
        if not self._begun:
            self.facts.starts += 1
        self._begun[kind, hit.label] = stage


def scan(lines: Iterable[Line], engines: Sequence[Engine]) -> Scan | None:
    """The reading of the engine that knows most of the lines; None where none knows any.

    Once one engine has known enough of them, and no other any, the others look no further.
    """
    scans = [Scan(engine) for engine in engines]
    for line in lines:
        for one in scans:
            one.feed(line)
        if len(scans) > 1 and line.number is not None and line.number % _LOOK_EVERY == 0:
            known = [one for one in scans if one.known]
            scans = known if len(known) == 1 and known[0].known >= _ENOUGH else scans
    best = max(scans, key=lambda one: one.known)
    return best if best.known else None


def _writer(text: str) -> str:
    """The last of "(Worker pid=312) (Worker_TP0 pid=312)"; both stand before the message."""
    names = _WRITER.findall(text[:200])
    return str(names[-1]) if names else ""
