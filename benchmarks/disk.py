"""Models larger than memory: decode and prompt under a limit of 100, 50 and 25 % of their weights, page cache cold.

Each way runs in a process of its own in a memory control group, page cache counted, by turns. The limit is the share
of the weights' bytes and an allowance, the same for each way, for the interpreter, its libraries, KV cache and
buffers. A way that is killed or takes too long stays in the table with what it had reached. Beside every row stands the
direct read bandwidth of the moment, and the least that any way must read.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from benchmarks import disk_cell, disk_floor, disk_models
from benchmarks.disk_cell import RUNS, Cell
from benchmarks.disk_models import Files
from benchmarks.disk_scales import SCALES, Scale
from benchmarks.disk_worker import WAYS
from benchmarks.limits import read_gbps
from benchmarks.report import Bar, Report, spread
from overspill.config import format_bytes

OURS, OURS_MAPPED, MAPPED, ACCELERATE, LLAMA = WAYS
DOCUMENTS: dict[str, dict[str, Any]] = {
    OURS: {},
    OURS_MAPPED: {"overspill": {"mmap": {"enabled": True, "prefault": False}}},
}
PROCESS_BYTES = 512 << 20
BUFFERS_BYTES = 128 << 20
COLUMNS = (
    "model",
    "limit",
    "way",
    "start_s",
    "prompt_tokens/s",
    "long_prompt_tokens/s",
    "step_s",
    "tokens/s",
    "read_bytes",
    "floor_s",
    "over_floor_ratio",
    "of_direct",
    "over_llama_ratio",
    "peak_bytes",
    "outcome",
)

Key = tuple[str, float, str]


@dataclass(frozen=True)
class Sample:
    """A cell of one round, and overspill's own reader before and after it."""

    round: int
    cell: Cell
    reader_gbps: tuple[float, float]
    cached: float

    @property
    def direct_gbps(self) -> float | None:
        return statistics.mean(self.cell.direct_gbps) if self.cell.direct_gbps else None


def measure(scale: Scale, cache: Path, tell: Callable[[str], None]) -> Report:
    models = {name: disk_models.made(config, cache) for name, config in _configs(scale)}
    report = Report("disk", "Models larger than memory", COLUMNS)
    begun = time.monotonic()
    report.limits["host read, all threads_gbps"] = read_gbps()
    samples: dict[Key, list[Sample]] = {
        (model, share, way): [] for model in models for share in scale.shares for way in scale.ways
    }
    took_s: dict[tuple[str, float], float] = {}
    for number, group in product(range(scale.rounds), product(models, scale.shares)):
        model, share = group
        if number and share == 1.0:
            continue  # nothing is read: once is enough
        started = time.monotonic()
        if number and started - begun + took_s[group] > scale.most_s:
            report.notes.append(
                f"round {number + 1} without {model} at {share:.0%}: it would pass {scale.most_s:.0f} s"
            )
            continue
        for way in (*scale.ways[number:], *scale.ways[:number]):
            of = samples[model, share, way]
            if any(not sample.cell.steps for sample in of):
                continue  # it will not run this time either
            tell(f"round {number + 1} of {scale.rounds}: {model}, {share:.0%}, {way}")
            of.append(_sample(scale, models[model], share, way, number))
        took_s.setdefault(group, time.monotonic() - started)
    for (model, share, way), of in samples.items():
        report.rows.append(_row(models[model], (model, share, way), of, samples.get((model, share, LLAMA), [])))
    report.bars += _bars(report.rows)
    report.limits["memory of a small model's process_bytes"] = _small_peak(scale, cache)
    for model, name in ((models[name], name) for name in models):
        readers = [gbps for key, of in samples.items() if key[0] == name for s in of for gbps in s.reader_gbps]
        directs = [gbps for key, of in samples.items() if key[0] == name for s in of for gbps in s.cell.direct_gbps]
        report.limits[f"{name}: direct read_gbps"] = statistics.median(directs)
        report.limits[f"{name}: overspill's reader alone_gbps"] = statistics.median(readers)
        report.notes.append(f"{name}: {format_bytes(model.nbytes)} of weights, of which {_reads(model)} a token")
    report.notes += _notes(scale)
    return report.finish()


def _configs(scale: Scale) -> Iterator[tuple[str, PretrainedConfig]]:
    yield "dense", scale.dense
    yield "experts", scale.sparse


def _sample(scale: Scale, files: Files, share: float, way: str, number: int) -> Sample:
    job = _job(scale, files, share, way, number)
    own = [Path(name) for name in job["files"]]
    cached = disk_cell.cold(own)
    before = disk_floor.reader_gbps(own, scale.direct_bytes, 2 * number)
    cell = disk_cell.run(job, limit_bytes(files, share))
    after = disk_floor.reader_gbps(own, scale.direct_bytes, 2 * number + 1)
    return Sample(number, cell, (before, after), cached)


def limit_bytes(files: Files, share: float) -> int:
    """Of the control group: whole pages, a share of the weights' bytes and the allowance."""
    return (int(share * files.nbytes) + PROCESS_BYTES + BUFFERS_BYTES) // 4096 * 4096


def _job(scale: Scale, files: Files, share: float, way: str, number: int) -> dict[str, Any]:
    """What disk_worker is told."""
    reads = {LLAMA: files.gguf, MAPPED: files.fused, ACCELERATE: files.fused}
    source = reads.get(way, files.folder)
    return {
        "way": way,
        "document": DOCUMENTS.get(way),
        "folder": str(files.folder),
        "fused": str(files.fused),
        "gguf": str(files.gguf),
        "files": [str(f) for f in ([source] if source.is_file() else sorted(source.glob("*.safetensors")))],
        "experts": bool(files.expert_bytes),
        "weights_bytes": files.nbytes,
        "share_bytes": int(share * files.nbytes),
        "memory_limit_bytes": int(share * files.nbytes) + BUFFERS_BYTES,
        "context": -(-(scale.long_prompt + scale.tokens) // 64) * 64,
        "threads": len(os.sched_getaffinity(0)),
        "vocabulary": scale.dense.vocab_size,
        "seed": number,
        "prompts": [scale.later_prompt, 0] if number else [scale.prompt, scale.long_prompt],
        "tokens": scale.tokens,
        "direct_bytes": scale.direct_bytes,
        "start_s": scale.start_s,
        "prompt_s": scale.prompt_s,
        "decode_s": scale.decode_s,
        "step_s": scale.step_s,
    }


def _row(files: Files, key: Key, of: Sequence[Sample], llama: Sequence[Sample]) -> dict[str, Any]:
    model, share, way = key
    steps = [seconds for sample in of for seconds, _ in sample.cell.steps]
    least = files.floor_bytes(share * files.nbytes)
    row: dict[str, Any] = {
        "model": model,
        "limit": f"{share:.0%}, {format_bytes(limit_bytes(files, share))}",
        "share": share,
        "way": way,
        "least_bytes": least,
        "limit_bytes": limit_bytes(files, share),
        "weights_bytes": files.nbytes,
        "peak_bytes": max((s.cell.peak_bytes for s in of if s.cell.peak_bytes is not None), default=None),
        "outcome": _outcome(of),
        "samples": [asdict(sample) for sample in of],
    }
    if of and of[0].cell.start_s is not None:
        row["start_s"] = statistics.median(s.cell.start_s for s in of if s.cell.start_s is not None)
        lengths = sorted(of[0].cell.prompts)
        for name, length in zip(("prompt_tokens/s", "long_prompt_tokens/s"), lengths, strict=False):
            row[name] = length / of[0].cell.prompts[length][0]
    directs = [sample.direct_gbps for sample in of if sample.direct_gbps is not None]
    if directs:
        row["direct_gbps"] = statistics.median(directs)
        row["floor_s"] = least / row["direct_gbps"] / 1e9 if least else None
    if steps:
        row["step_s"] = statistics.median(steps)
        row["tokens/s"] = 1 / row["step_s"]
        row["read_bytes"] = statistics.median(read for sample in of for _, read in sample.cell.steps)
        row["spread"] = spread(steps)
        row["over_floor_ratio"] = row["step_s"] / row["floor_s"] if row.get("floor_s") else None
        if least and (rates := list(_of_direct(of))):
            row["streamed_ratio"] = statistics.median(rates)
            row["of_direct"] = f"{row['streamed_ratio']:.0%}"
        if others := [seconds for sample in llama for seconds, _ in sample.cell.steps]:
            row["over_llama_ratio"] = statistics.median(others) / row["step_s"]
    return row


def _outcome(of: Sequence[Sample]) -> str:
    ends = {sample.cell.outcome: None for sample in of if sample.cell.outcome != RUNS}
    if any(sample.cell.steps for sample in of):
        return "; ".join((RUNS, *ends))
    return "; ".join(ends) or "not run"


def _of_direct(of: Sequence[Sample]) -> Iterator[float]:
    """By round: the rate at which decoding read, as a share of the direct bandwidth before and after it."""
    for sample in of:
        seconds, read = (sum(part) for part in zip(*sample.cell.steps, strict=True)) if sample.cell.steps else (0.0, 0)
        if seconds and sample.direct_gbps:
            yield read / seconds / 1e9 / sample.direct_gbps


def _bars(rows: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    for ours in (row for row in rows if row["way"] == OURS):
        where = f"{ours['model']} at {ours['share']:.0%}"
        if ours["peak_bytes"] is not None:
            yield Bar(f"{where}: peak over the limit", ours["peak_bytes"] / ours["limit_bytes"], 1.0, timed=False)
        if ours["limit_bytes"] >= ours["weights_bytes"] or "step_s" not in ours:
            continue  # who takes less of the allowance than we do has all of the model in memory
        if "streamed_ratio" in ours:
            yield Bar(f"{where}: streamed, of direct reads", ours["streamed_ratio"], 0.9, at_least=True)
        for other in rows:
            if (other["model"], other["share"]) != (ours["model"], ours["share"]) or other["way"] in DOCUMENTS:
                continue
            reach = 2.0 if other["way"] == LLAMA else 1.0
            if "step_s" in other:
                faster = other["step_s"] / ours["step_s"]
                yield Bar(f"{where}: decode sooner than {other['way']}", faster, reach, at_least=True)
            if "prompt_tokens/s" in other and "prompt_tokens/s" in ours:
                faster = ours["prompt_tokens/s"] / other["prompt_tokens/s"]
                yield Bar(f"{where}: prompt sooner than {other['way']}", faster, 1.0, at_least=True)


def _small_peak(scale: Scale, cache: Path) -> int:
    """The most that a process takes which imports what overspill does and runs a model of no size."""
    small = SCALES["toy"]
    files = disk_models.made(small.dense, cache)
    peak = disk_cell.run(_job(small, files, 1.0, OURS, 0), None).peak_bytes
    return peak or 0


def _reads(files: Files) -> str:
    experts = f" and {format_bytes(round(files.chosen * files.expert_bytes))} of experts" if files.expert_bytes else ""
    return f"{format_bytes(files.step_bytes)}{experts} are read"


def _notes(scale: Scale) -> Iterator[str]:
    allowance = PROCESS_BYTES + BUFFERS_BYTES
    yield (
        f"limit: the share of the weights' bytes and {format_bytes(allowance)}, for each way: "
        f"{format_bytes(PROCESS_BYTES)} for interpreter, libraries (the process of a small model, with torch and "
        f"transformers, is measured below) and what layers compute with, {format_bytes(BUFFERS_BYTES)} for KV cache "
        "and buffers; overspill's --memory-limit is all but the former. Page cache counts. llama.cpp has no torch to "
        "hold, and keeps more of the file in that room; a limit above the size of the model is not judged"
    )
    yield (
        "read: from the disk in one decoded token, by the kernel's count for the process (direct reads, page faults, "
        "read-ahead). Floor: what no fixed resident set of that share could spare a token, by direct"
    )
    yield (
        "direct: O_DIRECT, four requests of 4 MiB, of the same files, in the same process just before and just after "
        "decoding. Of direct: the rate at which decoding read, against it"
    )
    yield (
        f"prompts of {scale.prompt} and {scale.long_prompt} tokens, the long one only where the short one took less "
        f"than {scale.prompt_s / 3:.0f} s. Later rounds decode after a prompt of {scale.later_prompt}; at 100 % "
        f"one round. Decoding: up to {scale.tokens - 1} tokens or {scale.decode_s:.0f} s a round; medians of all steps"
    )
    yield (
        "killed: at the limit. Out of time: starting may take "
        f"{scale.start_s:.0f} s, a prompt {scale.prompt_s:.0f} s, a step {scale.step_s:.0f} s"
    )
    yield (
        "transformers and accelerate read a copy of the experts model whose experts are stacked already: from the "
        "checkpoint's own tensors transformers makes a copy of all experts in memory, and accelerate one on disk at "
        "each start. accelerate holds as many layers as the share has room for, in memory of their own"
    )
    if LLAMA in scale.ways:
        yield f"llama.cpp: xllamacpp {metadata.version('xllamacpp')}" if find_spec("xllamacpp") else "no xllamacpp here"
