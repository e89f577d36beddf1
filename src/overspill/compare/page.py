"""The comparison as one HTML file that needs nothing else: no script, no font, no image from elsewhere."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from overspill.compare.answers import AnswerDifference, format_logit
from overspill.compare.drawing import forecast_chart, layer_rows, step_chart
from overspill.compare.report import Report, SideReport
from overspill.compare.results import Generation, spread
from overspill.compare.tables import (
    MemoryRow,
    disk_rows,
    expert_rows,
    forecast_rows,
    ledger_rows,
    memory_rows,
    side_words,
)
from overspill.config import format_bytes


def render_page(report: Report) -> str:
    """`report` as HTML."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(size=_size, percent=_percent, ms=_ms)
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    run = report.candidate.runs[0]
    return template.render(
        report=report,
        name=Path(report.model).name if Path(report.model).exists() else report.model,
        date=datetime.fromisoformat(report.conditions.created).strftime("%Y-%m-%d %H:%M UTC"),
        conditions=report.conditions,
        emulated=report.conditions.device_kind == "emulated",
        words={side.name: side_words(side) for side in report.sides},
        ledger=ledger_rows(run.weights),
        model_bytes=sum(weight.bytes for weight in run.weights),
        layers=layer_rows(run.weights),
        memory=_memory(report),
        budgets={side.name: side.runs[0].memory.budget_bytes for side in report.sides},
        chart=step_chart(report),
        forecast=forecast_chart(report),
        held=forecast_rows(report),
        experts=expert_rows(report),
        runs=_run_rows(report),
        disk=bool(disk_rows(report)),
        answers=_answers(report),
        documents={side.name: _document(side) for side in report.sides},
        notes=(*report.notes, *dict.fromkeys(note for side in report.sides for note in side.runs[0].notes)),
    )


def _memory(report: Report) -> dict[str, tuple[MemoryRow | None, MemoryRow | None]]:
    """The candidate's and the baseline's row of each purpose."""
    candidate = {row.purpose: row for row in memory_rows(report.candidate.runs)}
    baseline = {row.purpose: row for row in memory_rows(report.baseline.runs)} if report.baseline is not None else {}
    return {purpose: (candidate.get(purpose), baseline.get(purpose)) for purpose in candidate | baseline}


@dataclass(frozen=True)
class RunRow:
    """One run's times, and what a step of it read from disk."""

    side: str
    number: int
    load_seconds: float
    prompt_s: float
    decode_s: tuple[float, float, float] | None
    stall_s: float
    read_bytes: float


def _run_rows(report: Report) -> list[RunRow]:
    return [
        RunRow(
            side.name,
            number,
            run.load_seconds,
            run.prompt_median_s,
            spread(run.decode_seconds) if run.decode_seconds else None,
            sum(p.stall_s for generation in run.generations for p in generation.decode)
            / max(1, len(run.decode_seconds)),
            run.step_read_bytes,
        )
        for side in report.sides
        for number, run in enumerate(side.runs, 1)
    ]


@dataclass(frozen=True)
class Token:
    id: int
    differs: bool


@dataclass(frozen=True)
class Answer:
    """One side's answer; tokens are marked from the first that differs."""

    side: str
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str


@dataclass(frozen=True)
class Answers:
    """One prompt's answers, and how far apart they are at the most in any run of the candidate.

    `badge` is "pass" where they are equal, "fail" where they should be, "open" where other kernels need not reach that;
    None without a baseline.
    """

    prompt: str
    sides: tuple[Answer, ...]
    verdict: str
    badge: str | None


def _answers(report: Report) -> list[Answers]:
    found = []
    for number, prompt in enumerate(report.prompts):
        apart = [run[number] for run in report.candidate.differences] if report.baseline is not None else []
        worst = max(range(len(apart)), key=lambda run: _badness(apart[run])) if apart else 0
        candidate = report.candidate.runs[worst].generations[number]
        sides = []
        if report.baseline is not None:
            baseline = report.baseline.runs[0].generations[number]
            sides.append(_answer("baseline", baseline, candidate))
            sides.append(_answer("candidate", candidate, baseline))
        else:
            sides.append(_answer("candidate", candidate, candidate))
        equal = all(d.first_difference is None and d.largest == 0 for d in apart)
        other_kernels = any(side.runs[0].plan.other_kernels is not None for side in report.sides)
        badge = "pass" if equal else "open" if other_kernels else "fail"
        found.append(Answers(prompt, tuple(sides), *((_told(apart[worst]), badge) if apart else ("", None))))
    return found


def _badness(apart: AnswerDifference) -> tuple[bool, float]:
    return apart.first_difference is not None, math.inf if math.isnan(apart.largest) else apart.largest


def _told(apart: AnswerDifference) -> str:
    ids = "same tokens" if apart.first_difference is None else f"token {apart.first_difference + 1} differs"
    return f"{ids}, largest logit difference {format_logit(apart.largest)} over {apart.positions} positions"


def _answer(side: str, answer: Generation, other: Generation) -> Answer:
    tokens = tuple(
        Token(token, i >= len(other.token_ids) or token != other.token_ids[i])
        for i, token in enumerate(answer.token_ids)
    )
    return Answer(side, answer.text, tokens, answer.finish_reason)


def _document(side: SideReport) -> str:
    return json.dumps({"offload_config": side.document, "engine": side.engine}, indent=2)


def _size(nbytes: float | None) -> str:
    return "–" if nbytes is None else format_bytes(round(nbytes))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"
