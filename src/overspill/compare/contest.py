"""The comparison: both sides in fresh processes, interleaved and repeated, then judged."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from overspill.api import OffloadDocument
from overspill.checkpoint.hub import download
from overspill.compare.answers import AnswerDifference, BlockDifference, block_difference, difference
from overspill.compare.processes import run_job
from overspill.compare.report import Report, SideReport, conditions
from overspill.compare.results import LOGITS, OBSERVED, RunResult
from overspill.compare.sides import Contest, Prompt, Side, make_contest
from overspill.compare.verdicts import Evidence, judge
from overspill.errors import ConfigError, DeviceOutOfMemoryError
from overspill.plan import Plan

DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Planned:
    """Both sides are planned; nothing has run. `baseline` is None where it does not fit."""

    baseline: Plan | None
    candidate: Plan


@dataclass(frozen=True)
class RunStarted:
    """Run `number` of `total`, all sides counted, begins."""

    side: str
    number: int
    total: int


@dataclass(frozen=True)
class RunFinished:
    side: str
    number: int
    total: int
    seconds: float


Event = Planned | RunStarted | RunFinished
Progress = Callable[[Event], None]


def compare(
    model: str | Path,
    baseline: OffloadDocument = None,
    candidate: OffloadDocument = None,
    *,
    prompts: Sequence[Prompt],
    max_tokens: int = 32,
    repeat: int = 3,
    output_dir: str | Path | None = None,
    progress: Progress | None = None,
    max_slowdown: float | None = None,
    deadline_s: float = DEADLINE_S,
    **options: Any,
) -> Report:
    """Run `model` as `baseline` (nothing offloaded) and as `candidate`, and judge what the offload did.

    `prompts` are texts or token ids, answered greedily with up to `max_tokens` tokens. Each side runs `repeat` times,
    every run in a process of its own that may take `deadline_s` seconds. `options` are the engine's settings for both
    sides (`device`, `device_memory_bytes`, `max_model_len`, …) and the flat offload flags for the candidate (vLLM's,
    and `cpu_moe`, `n_cpu_moe`, `override_tensor`, `expert_cache`, `expert_policy`).
    `max_model_len` is by default the longest prompt and its answer, so that memory forecasts are about this run.
    `max_slowdown` makes the time per token a verdict. `output_dir` takes report.json and report.html.

    A failed verdict is in the report, not raised. Raises ConfigError before any file is opened; what `overspill.load`
    raises, also from a run's process; DefectError or CapacityError where such a process dies or is killed.
    """
    for name, value in (("repeat", repeat), ("max_slowdown", max_slowdown), ("deadline_s", deadline_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}", hint=f"{name} must be above 0")
    if output_dir is not None:
        try:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output_dir):
                pass
        except OSError as error:
            raise ConfigError(
                f"output is {output_dir}: {error.strerror}", hint="a folder that can be made and written"
            ) from error
    contest = make_contest(model, baseline, candidate, prompts=prompts, max_tokens=max_tokens, options=options)
    hear = progress or _ignore
    hear(Planned(contest.baseline.plan if contest.baseline else None, contest.candidate.plan))
    checkpoint = contest.candidate.plan.model.checkpoint
    if checkpoint is not None and checkpoint.absent is not None:
        download(checkpoint)
    evidence = run_contest(contest, repeat=repeat, deadline_s=deadline_s, progress=hear)
    report = Report(
        model=str(model),
        architecture=contest.candidate.plan.model.architecture,
        prompts=contest.prompts,
        verdicts=judge(evidence, max_slowdown=max_slowdown),
        baseline=(
            _side_report(contest.baseline, evidence.baseline, evidence.baseline_differences)
            if contest.baseline is not None and evidence.baseline
            else None
        ),
        candidate=_side_report(contest.candidate, evidence.candidate, evidence.candidate_differences),
        baseline_missing=evidence.baseline_missing,
        notes=contest.notes,
        conditions=conditions(evidence.candidate[0], repeat=repeat, max_tokens=max_tokens),
    )
    return report if output_dir is None else report.write(Path(output_dir))


def run_contest(contest: Contest, *, repeat: int, deadline_s: float, progress: Progress) -> Evidence:
    """Run what `contest` says: first the baseline, then the candidate, then the other way round, and so on.

    Logits are held against the first run's as they arrive and dropped, so disk and memory keep two runs of them.
    """
    sides = [side for side in (contest.baseline, contest.candidate) if side is not None]
    missing = contest.baseline_missing
    runs: dict[str, list[RunResult]] = {"baseline": [], "candidate": []}
    apart: dict[str, list[tuple[AnswerDifference, ...]]] = {"baseline": [], "candidate": []}
    blocks: dict[str, list[BlockDifference]] = {"baseline": [], "candidate": []}
    reference: tuple[RunResult, Path] | None = None
    number, total = 0, repeat * len(sides)
    with tempfile.TemporaryDirectory(prefix="overspill-compare-") as scratch:
        for turn in range(repeat):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                number += 1
                folder = Path(scratch) / str(number)
                folder.mkdir()
                progress(RunStarted(side.name, number, total))
                started = time.perf_counter()
                try:
                    result = run_job(
                        replace(side.job, folder=str(folder)),
                        name=f"{side.name}, run {turn + 1} of {repeat}",
                        deadline_s=deadline_s,
                    )
                except DeviceOutOfMemoryError as error:
                    if not _may_be_missing(side, reference):
                        raise
                    missing = f"the baseline does not fit: {error.message}"
                    sides, total = [contest.candidate], repeat + 1
                    continue
                progress(RunFinished(side.name, number, total, time.perf_counter() - started))
                runs[side.name].append(result)
                if reference is None:
                    reference = (result, folder / LOGITS)
                else:
                    apart[side.name].append(_differences(*reference, result, folder / LOGITS))
                    if side.job.observe is not None:
                        blocks[side.name].append(_observed(side.job.observe, reference[1], folder / LOGITS))
                    shutil.rmtree(folder)
    return Evidence(
        baseline=tuple(runs["baseline"]),
        candidate=tuple(runs["candidate"]),
        baseline_differences=tuple(apart["baseline"]),
        candidate_differences=tuple(apart["candidate"]),
        baseline_missing=missing,
        baseline_blocks=tuple(blocks["baseline"]),
        candidate_blocks=tuple(blocks["candidate"]),
    )


def _may_be_missing(side: Side, reference: object) -> bool:
    """Whether this is the first run of a baseline without offload on a real device: then it need not fit."""
    resident = side.name == "baseline" and not side.plan.offloads
    return resident and side.plan.device_kind == "cuda" and reference is None


def _differences(
    reference: RunResult, reference_logits: Path, result: RunResult, logits: Path
) -> tuple[AnswerDifference, ...]:
    with safe_open(reference_logits, "pt") as left, safe_open(logits, "pt") as right:
        return tuple(
            difference(a, left.get_tensor(str(prompt)), b, right.get_tensor(str(prompt)))
            for prompt, (a, b) in enumerate(zip(reference.generations, result.generations, strict=True))
        )


def _observed(path: str, reference: Path, logits: Path) -> BlockDifference:
    with safe_open(reference, "pt") as left, safe_open(logits, "pt") as right:
        one, other = ({name: file.get_tensor(name) for name in OBSERVED} for file in (left, right))
        return block_difference(path, one, other)


def _side_report(
    side: Side, runs: tuple[RunResult, ...], apart: tuple[tuple[AnswerDifference, ...], ...]
) -> SideReport:
    return SideReport(side.name, side.job.document, side.job.engine, runs, apart)


def _ignore(event: Event) -> None:
    return
