"""One way under one limit, once: a child in a memory control group of its own, and what became of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import ROOT

MEMLIMIT = ROOT / "tests" / "memlimit"
NO_GROUP = 99
RUNS = "runs"
_BEYOND_ALARMS_S = 120
_NO_LIMIT = 1 << 40


@dataclass
class Cell:
    """What was reached. `steps` are (seconds, bytes read) of one decoded token each, `prompts` by length in tokens.

    `outcome` is RUNS, or what ended the process before all was done.
    """

    outcome: str
    peak_bytes: int | None = None
    start_s: float | None = None
    start_bytes: int | None = None
    prompts: dict[int, tuple[float, int]] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    direct_gbps: list[float] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)


def run(job: Mapping[str, Any], limit_bytes: int | None) -> Cell:
    """Carry `job` out under `limit_bytes` of memory, page cache counted; None measures the peak only.

    Raises OSError where no control group can be made.
    """
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    limit = str(_NO_LIMIT if limit_bytes is None else limit_bytes)
    process = subprocess.Popen(
        [str(MEMLIMIT), limit, sys.executable, "-m", "benchmarks.disk_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    most_s = job["start_s"] + 2 * job["prompt_s"] + job["decode_s"] + job["step_s"] + _BEYOND_ALARMS_S
    output, errors = process.communicate(json.dumps(job), timeout=most_s)
    if process.returncode == NO_GROUP:
        raise OSError(f"no memory control group can be made here: {errors.strip()}")
    return read(output, errors, process.returncode)


def read(output: str, errors: str, status: int) -> Cell:
    """A child's events, and how it ended: finished, killed at its limit, out of time, or failed by itself."""
    cell, phase = Cell(RUNS), "its first line"
    for line in output.splitlines():
        if not line.startswith('{"event"'):
            continue
        told = json.loads(line)
        match told.pop("event"):
            case "phase":
                phase = told["name"]
            case "started":
                cell.start_s, cell.start_bytes = told["s"], told["read_bytes"]
            case "prompt":
                cell.prompts[told["tokens"]] = (told["s"], told["read_bytes"])
            case "step":
                cell.steps.append((told["s"], told["read_bytes"]))
            case "direct":
                cell.direct_gbps.append(told["gbps"])
            case event:
                cell.told.append({"event": event, **told})
    if peak := re.search(r"peak=(\d+)", errors):
        cell.peak_bytes = int(peak[1])
    if re.search(r"oom_kill[ =][1-9]", errors):
        cell.outcome = f"killed in {phase}"
    elif status == 128 + signal.SIGALRM:
        cell.outcome = f"out of time in {phase}"
    elif status:
        said = [line for line in errors.strip().splitlines() if not line.startswith("[memlimit]")]
        cell.outcome = f"fails in {phase}: {said[-1] if said else f'exit status {status}'}"[:160]
    return cell


def cold(paths: list[Path]) -> float:
    """Empty the page cache of `paths`; the share that stayed."""
    from benchmarks.limits import evict

    return evict(
        [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.safetensors")))]
    )
