"""A comparison as a value: the verdicts, every run behind them, and the conditions; written as JSON and HTML."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from overspill.compare.answers import AnswerDifference
from overspill.compare.results import RunResult
from overspill.compare.verdicts import Outcome, Verdict

SCHEMA = "overspill.compare/1"
"""The version of report.json. A field may be added under the same number; one is removed or changed under the next."""


@dataclass(frozen=True)
class Conditions:
    """What a figure must not travel without."""

    created: str
    command: str
    system: str
    processor: str
    cores: int
    threads: int
    memory_bytes: int
    device_kind: str
    device_name: str
    versions: dict[str, str]
    repeat: int
    max_tokens: int


@dataclass(frozen=True)
class SideReport:
    """One side: what was asked for and all its runs. Differences are against the reference run (Evidence)."""

    name: str
    document: dict[str, Any]
    engine: dict[str, Any]
    runs: tuple[RunResult, ...]
    differences: tuple[tuple[AnswerDifference, ...], ...]


@dataclass(frozen=True)
class Report:
    """A finished comparison. `baseline` is None where `baseline_missing` says why; `files` is what `write` wrote."""

    model: str
    architecture: str
    prompts: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    baseline: SideReport | None
    candidate: SideReport
    baseline_missing: str | None
    notes: tuple[str, ...]
    conditions: Conditions
    files: tuple[Path, ...] = field(default=(), compare=False)

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """The verdicts that failed: none where all is well."""
        return tuple(verdict for verdict in self.verdicts if verdict.outcome is Outcome.FAIL)

    @property
    def sides(self) -> tuple[SideReport, ...]:
        return tuple(side for side in (self.baseline, self.candidate) if side is not None)

    def as_json(self) -> dict[str, Any]:
        """Everything, in JSON's own types; a number that JSON has no word for is its name ("nan")."""
        fields = asdict(replace(self, files=()))
        del fields["files"]
        for verdict, written in zip(self.verdicts, fields["verdicts"], strict=True):
            written.update(outcome=verdict.outcome, reason=verdict.reason)
        return {"schema": SCHEMA, "failed": [v.name for v in self.failed], **_plain(fields)}

    def write(self, folder: Path) -> Report:
        """Write report.json and report.html into `folder`, which is made; the same report, knowing its files."""
        from overspill.compare.page import render_page

        folder.mkdir(parents=True, exist_ok=True)
        written = folder / "report.json", folder / "report.html"
        written[0].write_text(json.dumps(self.as_json(), indent=1, allow_nan=False), encoding="utf-8")
        written[1].write_text(render_page(self), encoding="utf-8")
        return replace(self, files=written)


def conditions(run: RunResult, *, repeat: int, max_tokens: int) -> Conditions:
    """The conditions of a comparison whose candidate ran as `run`, read from this machine now."""
    return Conditions(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        system=platform.platform(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        threads=run.threads,
        memory_bytes=psutil.virtual_memory().total,
        device_kind=run.device_kind,
        device_name=run.device_name,
        versions=run.versions,
        repeat=repeat,
        max_tokens=max_tokens,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
