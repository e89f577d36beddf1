"""A table of line patterns: a plain text that must be in the line, and what is read from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from overspill.audit.records import Value

_QUOTED = re.compile(r"'([^']{1,500})'|\"([^\"]{1,500})\"")


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

    def read(self, text: str, *, last: bool) -> tuple[Value, int] | None:
        """The value in the text, and where: of several the last, as on a command line, or the first, as in a dump."""
        matches = list(self.regex.finditer(text))
        if not matches:
            return None
        match = matches[-1 if last else 0]
        value = self._value(_found(match), matches)
        return (value, match.start()) if value is not None else None

    def _value(self, found: str, matches: Sequence[re.Match[str]]) -> Value | None:
        if self.kind is list:
            return [word for match in matches for word in _words(_found(match))] or None
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
    has `command_literal` in it. Kinds of `anyones` are lines that other programs write as well. Those of `once` are
    written once in a process, however often it loads. After a line of kind "draft" those of `models` are of a second
    model.
    """

    name: str
    table: Sequence[Pattern]
    starts: Mapping[str, int]
    command_literal: str
    command: re.Pattern[str]
    flags: Sequence[Flag]
    asked_kinds: Sequence[str]
    anyones: Collection[str]
    once: Collection[str] = ()
    models: Collection[str] = ()

    @cached_property
    def start_rows(self) -> Sequence[Pattern]:
        return [row for row in self.table if row.kind in self.starts]
