"""A log, line by line: whose it is, and what the last start of each server in it says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from overspill.audit.patterns import Engine
from overspill.audit.records import Facts, Hit, Line, Setting, unique
from overspill.audit.sources import router_of

_ENOUGH, _LOOK_EVERY = 8, 256
_MOST_SOURCES = 64
_SECOND_ENGINE = 3
"""Kinds of lines that make a second engine of the same source: a single line may look alike."""
_WRITER = re.compile(r"\((\w{1,64}) pid=(\d{1,9})(?:, ip=[^()]{1,64})?\)")
_END_OF_COMMAND = re.compile(r"(?:'[^']*'|\"[^\"]*\"|[^'\"])*?(?:\s(?=[|&;<>]|\d>)|;\s)")


@dataclass
class Scan:
    """One engine's reading of the lines of one source. Only the last start counts."""

    engine: Engine
    source: str = ""
    facts: Facts = field(default_factory=Facts)
    asleep: bool = False
    kinds: set[str] = field(default_factory=set)
    """What was seen that only this engine writes."""
    known: int = 0
    _begun: dict[tuple[str, str], int] = field(default_factory=dict)
    _draft: bool = False

    def feed(self, line: Line) -> None:
        text = line.text
        self.facts.last_line = line
        if self.engine.command_literal in text and (command := self.engine.command.match(text)):
            self._take("command", Hit(line, "", {"command": _command(text, command.end())}))
        for row in self.engine.start_rows if self.asleep else self.engine.table:
            if row.literal in text:
                match = row.regex.search(text) if row.regex is not None else None
                if row.regex is None or match is not None:
                    groups = {name: value for name, value in match.groupdict().items() if value} if match else {}
                    self._take(row.kind, Hit(line, groups.get("label", "") or _writer(text), groups))

    def _take(self, kind: str, hit: Hit) -> None:
        if kind not in self.engine.anyones:
            self.known += 1
            self.kinds.add(kind)
            self.asleep = False
        if kind in self.engine.starts:
            self._begin(kind, hit)
        self._draft = self._draft or kind == "draft"
        self.facts.add(f"draft_{kind}" if self._draft and kind in self.engine.models else kind, hit)
        asked = self.facts.asked
        if "version" in hit.groups:
            self.facts.version = hit.groups["version"].removeprefix("v")
        if kind in self.engine.asked_kinds:
            command = hit.groups.get("command")
            for flag in self.engine.flags:
                read = flag.read(hit.line.text if command is None else command, last=command is not None)
                if read is not None and (kind != self.engine.asked_kinds[-1] or command or flag.name not in asked):
                    asked[flag.name] = Setting(read[0], hit.line, read[1])

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
                self.facts.hits = {kind: before.hits[kind] for kind in self.engine.once if kind in before.hits}
            self._begun, self._draft = {}, False
        if not self._begun:
            self.facts.starts += 1
            self.facts.first_line = hit.line
        self._begun[kind, hit.label] = stage


def scan(lines: Iterable[Line], engines: Sequence[Engine]) -> list[Scan]:
    """The reading of each server that wrote to the log, by the engine it is of; none where none is known.

    A server is a source (a container, a pod, a program) of which an engine knows lines that only it writes, beside
    its command line, which others show too. Once one engine has known enough of a source, and no other any, the
    others look only for their starts.
    """
    sources: dict[str, list[Scan]] = {}
    for line in lines:
        scans = sources.get(line.source)
        if scans is None:
            if len(sources) == _MOST_SOURCES:
                sources = {name: held for name, held in sources.items() if any(one.facts.hits for one in held)}
            scans = [Scan(engine, line.source) for engine in engines]
            if len(sources) < _MOST_SOURCES:
                sources[line.source] = scans
        for one in scans:
            one.feed(line)
        if line.number is not None and line.number % _LOOK_EVERY == 0 and any(one.known >= _ENOUGH for one in scans):
            for one in scans:
                one.asleep = one.known == 0
    servers = [one for held in sources.values() for one in _servers(held)]
    servers = _without_routers(servers) or [one for held in sources.values() for one in held if one.known][:1]
    _tell_of_kills(servers, sources.get("", []))
    return servers


def _servers(scans: Sequence[Scan]) -> list[Scan]:
    best = max(scans, key=lambda one: one.known)
    others = [one for one in scans if one is not best and len(one.kinds) >= _SECOND_ENGINE]
    return [one for one in (best, *others) if one.kinds - {"command"}]


def _without_routers(servers: Sequence[Scan]) -> list[Scan]:
    """A router loads nothing itself; its children run what it was asked for."""
    routers = {router_of(one.source) for one in servers}
    held: dict[str | None, Scan] = {one.source: one for one in servers if one.source in routers}
    for one in servers:
        router = held.get(router_of(one.source))
        if router is not None:
            one.facts.asked = router.facts.asked | one.facts.asked
    return [one for one in servers if one.source not in held]


def _tell_of_kills(servers: Sequence[Scan], of_machine: Sequence[Scan]) -> None:
    """What the kernel or Docker say of a kill belongs to the server they name, or to the only one."""
    for line in unique(hit.line for one in of_machine for hit in one.facts.all("host_oom")):
        meant = [one for one in servers if one.source in line.text] or servers
        for one in meant:
            if one.facts.first_line is None or line.follows(one.facts.first_line):
                one.facts.add("host_oom" if len(meant) == 1 else "unclaimed_kill", Hit(line, "", {}))


def _command(text: str, begin: int) -> str:
    """The command without what the shell does with its output."""
    end = _END_OF_COMMAND.match(text, begin)
    return text[: end.end()] if end is not None else text


def _writer(text: str) -> str:
    """The last of "(Worker pid=312) (Worker_TP0 pid=312)"; both stand before the message. Ray's all have one name."""
    names = _WRITER.findall(text[:200])
    if not names:
        return ""
    name, pid = names[-1]
    return f"{name} {pid}" if name.startswith("Ray") else str(name)
