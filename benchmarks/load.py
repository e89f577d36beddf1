"""Load time and peak memory beside transformers and accelerate: fresh processes by turns, files not in the page cache.

"ready" is when the loader returns, "resident" when every page of every weight has been seen: transformers maps
safetensors files and returns at once. The limit is the direct sequential read of the same files in the same round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.conditions import ROOT
from benchmarks.limits import evict, read_seconds
from benchmarks.report import Bar, Report, spread
from overspill.config import GIB

MARGIN_BYTES = 300_000_000
_TIMEOUT_S = 600
COLUMNS = (
    "model",
    "loader",
    "device",
    "ready_s",
    "resident_s",
    "tokenizer_s",
    "cpu_s",
    "over_read_ratio",
    "over_ours_ratio",
    "peak_bytes",
    "peak_over_bar_ratio",
    "outcome",
)


@dataclass(frozen=True)
class Case:
    """A model and what loads it, overspill on each of `devices`; `path` makes the model when it is missing."""

    name: str
    path: Callable[[], Path]
    peers: Sequence[str]
    tokenizer: bool = False
    devices: Sequence[str] = ("cpu", "emulated")


@dataclass(frozen=True)
class Way:
    loader: str
    device: str

    def job(self, path: Path, files: Sequence[Path]) -> dict[str, Any]:
        nbytes = sum(file.stat().st_size for file in files)
        emulated = self.device == "emulated"
        return {
            "way": self.loader,
            "device": self.device,
            "path": str(path),
            "document": {"uva": {"cpu_offload_gb": nbytes / 2 / GIB}} if emulated else None,
            "device_memory_bytes": 16 * nbytes,
        }


def cases(cache: Path, gguf: Path | None, size: str) -> list[Case]:
    """`size`: "full", "quick" (a minute or two) or "toy" (tests)."""
    dense_layers, sparse_layers = {"full": (28, 12), "quick": (6, 3), "toy": (2, 1)}[size]
    wide: dict[str, Any] = {"hidden": 128, "vocabulary": 1000} if size == "toy" else {}
    dense = models.qwen3(dense_layers, **wide)
    sparse = models.qwen3_moe(sparse_layers, hidden=1024, experts=64, intermediate=384)
    both = ("transformers", "accelerate")
    made = [Case("dense bf16", lambda: models.checkpoint(dense, torch.bfloat16, cache), both)]
    if size != "toy":
        made.append(Case("sparse bf16", lambda: models.checkpoint(sparse, torch.bfloat16, cache), both))
    if gguf is not None:
        made.append(Case("demo GGUF Q4_1", lambda: gguf, ("transformers",), tokenizer=True))
    return made


def measure(cases: Sequence[Case], rounds: int, tell: Callable[[str], None]) -> Report:
    """Every case in turn; within one, all ways by turns, `rounds` times."""
    report = Report("load", "Load time and peak memory, page cache cold", COLUMNS)
    for case in cases:
        path = case.path()
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        ways = [Way("raw", ""), *(Way("overspill", device) for device in case.devices)]
        ways += [Way(peer, "cpu") for peer in case.peers]
        results: dict[Way, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                if results[way] and "error" in results[way][-1]:
                    continue  # it will not load this time either
                tell(f"{case.name}, round {number + 1} of {rounds}: {way.loader} {way.device}")
                cached = evict(files)
                result = _direct(files) if way.loader == "raw" else run(way.job(path, files))
                results[way].append({"round": number, "cached": cached, **result})
        nbytes = sum(file.stat().st_size for file in files)
        for row in _rows(case, results, nbytes):
            report.rows.append(row)
        report.bars += _bars(case, results)
        read = results[ways[0]]
        if "error" not in read[0]:
            report.limits[f"direct read of {case.name}_gbps"] = nbytes / 1e9 / _median(read, "weights_s")
    report.notes += [
        "every loader with one torch thread: beside a busy neighbour two are several times slower than one",
        "ready is when the loader returns, resident when every page of every weight has been seen (transformers "
        "and accelerate may map files); both without the tokenizer; imports are done before the clock starts",
        "cpu is the processor time of all of it, the tokenizer too; other processes do not show there",
        "over read is resident by the direct read of the same bytes in the same round; over ours is a loader's "
        "resident (with the tokenizer, where there is one) by overspill's on the CPU in the same round",
        "peak is VmHWM above what the process held after its imports, mapped files included; its bar is what the "
        "ledger says was allocated + the largest weight + 300 MB",
        "emulated: half of the weights' bytes in host memory (uva); memory is the same RAM",
    ]
    return report.finish()


def _direct(files: Sequence[Path]) -> dict[str, Any]:
    try:
        return {"weights_s": read_seconds(files)}
    except OSError as error:  # a file system without O_DIRECT
        return {"error": str(error)}


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """`job` in a fresh process; {"error": its last line} where it failed."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load_worker"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _rows(case: Case, results: Mapping[Way, list[dict[str, Any]]], nbytes: int) -> Iterator[dict[str, Any]]:
    read = _by_round(results, "raw", "")
    ours = _by_round(results, "overspill", "cpu")
    for way, samples in results.items():
        row: dict[str, Any] = {"model": case.name, "loader": way.loader, "device": way.device, "samples": samples}
        if "error" in samples[0]:
            yield {**row, "outcome": f"fails: {samples[0]['error']}"[:120]}
        elif way.loader == "raw":
            label = {"loader": "direct read", "outcome": "the limit"}
            yield {**row, **label, "ready_s": _median(samples, "weights_s"), "file_bytes": nbytes}
        else:
            bar = [s["peak_bytes"] / _allowed(s) for s in samples if "placed_bytes" in s]
            yield {
                **row,
                "ready_s": _median(samples, "weights_s"),
                "resident_s": _median(samples, "resident_s"),
                "tokenizer_s": _median(samples, "tokenizer_s") if case.tokenizer else None,
                "cpu_s": _median(samples, "cpu_s"),
                "over_read_ratio": _paired(samples, read, "resident_s", "weights_s"),
                "over_ours_ratio": None
                if way.loader == "overspill"
                else statistics.median(_ready(s) / _ready(ours[s["round"]]) for s in samples),
                "peak_bytes": _median(samples, "peak_bytes"),
                "peak_over_bar_ratio": statistics.median(bar) if bar else None,
                "outcome": "loads",
                "spread": spread(sample["resident_s"] for sample in samples),
            }


def _bars(case: Case, results: Mapping[Way, list[dict[str, Any]]]) -> Iterator[Bar]:
    read = _by_round(results, "raw", "")
    for way, samples in results.items():
        if way.loader != "overspill" or "error" in samples[0]:
            continue
        where = f"{case.name} on {way.device}"
        peak = max(s["peak_bytes"] / _allowed(s) for s in samples)
        yield Bar(f"{where}: peak over its bar", peak, 1.0, timed=False)
        for what, key in (("load over direct read", "weights_s"), ("the same without planning", "place_s")):
            if not case.tokenizer and (ratio := _paired(samples, read, key, "weights_s")) is not None:
                yield Bar(f"{where}: {what}", ratio, 1.15)
    theirs, ours = _by_round(results, "transformers", "cpu"), _by_round(results, "overspill", "cpu")
    if case.tokenizer and ours and theirs:
        for what, time_of in (("ready", _ready), ("weights alone", lambda s: s["weights_s"])):
            sooner = statistics.median(time_of(theirs[n]) / time_of(ours[n]) for n in theirs)
            yield Bar(f"{case.name}: {what} sooner than transformers", sooner, 10.0, at_least=True)


def _by_round(results: Mapping[Way, list[dict[str, Any]]], loader: str, device: str) -> dict[int, dict[str, Any]]:
    """Samples by round; none of a way that was not run or failed."""
    return {s["round"]: s for s in results.get(Way(loader, device), ()) if "error" not in s}


def _ready(sample: Mapping[str, Any]) -> float:
    """Every weight in memory, and the tokenizer."""
    return float(sample["resident_s"] + sample["tokenizer_s"])


def _paired(
    samples: Sequence[Mapping[str, Any]], limits: Mapping[int, Mapping[str, Any]], key: str, limit_key: str
) -> float | None:
    """The median of the ratios within a round; None without a limit."""
    ratios = [s[key] / limits[s["round"]][limit_key] for s in samples if s["round"] in limits]
    return statistics.median(ratios) if ratios else None


def _allowed(sample: Mapping[str, Any]) -> float:
    return float(sample["placed_bytes"] + sample["largest_bytes"] + MARGIN_BYTES)


def _median(samples: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(sample[key] for sample in samples))
