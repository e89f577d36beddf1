"""A benchmark's result: rows, the bars they are held against, and the conditions; as a table, Markdown and JSON.

A column's name says its unit: `_s` seconds, `_ms`, `_bytes`, `_gbps` (10^9 bytes per second), `_ratio`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.conditions import conditions, finish
from overspill.config import format_bytes

SCHEMA = 1
_STYLES = {"reached": "green", "MISSED": "bold red"}
_UNITS = {"_s": " s", "_ms": " ms", "_gbps": " GB/s", "_bytes": "", "_ratio": ""}


@dataclass(frozen=True)
class Bar:
    """A number to reach (design.md's table): `value` at most, or at least, `reach`.

    `timed`: a ratio of times, which says nothing where other processes had the cores.
    """

    what: str
    value: float
    reach: float
    at_least: bool = False
    timed: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.reach if self.at_least else self.value <= self.reach

    def verdict(self, *, busy: bool) -> str:
        return "not judged, the machine was busy" if busy and self.timed else "reached" if self.met else "MISSED"

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{self.what}: {self.value:.2f} (reach {sign} {self.reach:g})"


@dataclass
class Report:
    """`rows` hold what the table shows and, under "samples", every single figure behind it.

    A section of a larger report has no `conditions` of its own. `busy`: other processes had so much of the machine
    that its times are not judged.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    conditions: dict[str, Any] | None = field(default_factory=conditions)
    busy: bool = False

    def finish(self) -> Report:
        assert self.conditions is not None
        self.busy = finish(self.conditions)
        return self

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; `schema` is raised when a key changes its meaning."""
        bars = [{**asdict(bar), "met": bar.met} for bar in self.bars]
        return {"schema": SCHEMA, **asdict(self), "bars": bars, "columns": list(self.columns)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        bars = [Bar(b["what"], b["value"], b["reach"], b["at_least"], b["timed"]) for b in found["bars"]]
        given = {name: value for name, value in found.items() if name not in ("schema", "bars")}
        return cls(**given, bars=bars)

    def write(self, folder: Path, stem: str) -> list[Path]:
        """Write `stem`.json and `stem`.md into `folder`; gives their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
        paths[0].write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        paths[1].write_text("\n".join(self.markdown()) + "\n", encoding="utf-8")
        return paths

    def render(self) -> RenderableType:
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(heading(column), justify="right" if unit_of(column) else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(shown(column, row.get(column))) for column in self.columns))
        lines = [Text(f"{verdict}: {bar}", style=_STYLES.get(verdict, "yellow")) for verdict, bar in self.judged()]
        return Group(table, *lines, *(Text(line, style="dim") for line in self._footer()))

    def markdown(self, level: int = 1) -> list[str]:
        """Lines; `level` is the title's."""
        lines = [f"{'#' * level} {self.title}", "", "| " + " | ".join(map(heading, self.columns)) + " |"]
        lines.append("|" + "|".join("---:" if unit_of(column) else "---" for column in self.columns) + "|")
        lines += ["| " + " | ".join(shown(c, row.get(c)) for c in self.columns) + " |" for row in self.rows]
        for title, items in (
            ("Numbers to reach", [f"{verdict}: {bar}" for verdict, bar in self.judged()]),
            ("Notes", self.notes),
            ("Limits and conditions", list(self._measured())),
        ):
            if items:
                lines += ["", f"{'#' * level}# {title}", "", *(f"- {item}" for item in items)]
        return lines

    def judged(self) -> Iterator[tuple[str, Bar]]:
        return ((bar.verdict(busy=self.busy), bar) for bar in self.bars)

    def _footer(self) -> Iterator[str]:
        yield from self.notes
        yield from self._measured()

    def _measured(self) -> Iterator[str]:
        for name, value in self.limits.items():
            yield f"{heading(name)}: {shown(name, value)}{_UNITS[unit_of(name)] if unit_of(name) else ''}"
        if self.conditions is not None:
            yield from condition_lines(self.conditions)


def condition_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Conditions for people, a line each."""
    yield f"{found['date']}, `{found['command']}`" + (f", commit {found['commit']}" if found.get("commit") else "")
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    yield f"Python {found['python']}, {packages}"
    yield (
        f"{found['cpu']}, {found['cores']} cores, {found['torch_threads']} torch threads, "
        f"{format_bytes(found['memory_bytes'])}, {found['system']}"
    )
    if "gpu" in found:
        yield (
            f"{found['gpu']}, {format_bytes(found['gpu_memory_bytes'])}, CUDA {found['cuda']}, "
            f"{found['driver'] or 'driver not known'}"
        )
    after = found.get("load_after")
    if after is None:
        yield f"load average {found['load_before']:.1f} before"
    else:
        yield (
            f"load average {found['load_before']:.1f} before, {after:.1f} after; other processes used "
            f"{found['others_share']:.0%} of all cores meanwhile"
        )


def unit_of(column: str) -> str:
    return next((unit for unit in _UNITS if column.endswith(unit)), "")


def heading(column: str) -> str:
    unit = unit_of(column)
    return column.removesuffix(unit).replace("_", " ") + {"_bytes": "", "_ratio": " ×"}.get(unit, _UNITS.get(unit, ""))


def shown(column: str, value: Any) -> str:
    """A value as the table shows it; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int | float) and unit_of(column) == "_bytes":
        return format_bytes(round(value))
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def spread(samples: Iterable[float]) -> dict[str, float]:
    """Median, least and most of what was measured."""
    values = sorted(samples)
    return {"median": statistics.median(values), "min": values[0], "max": values[-1], "runs": len(values)}


def console(*, stderr: bool = False) -> Console:
    """Wide enough for the tables where the output is no terminal."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=160)
