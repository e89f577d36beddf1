"""Everything that only a GPU can say, in under nine minutes and without a network: `python benchmarks/cuda.py`.

Correctness comes first. Sections run one after the other in processes of their own, so that one that fails or hangs
takes no other with it; what has been measured is written after each row. `--device emulated` runs the same on any
machine, smaller, and labels it so.

Needs what overspill needs, typer apart; accelerate is compared where it is there. Overspill itself is taken from src/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # instead of this folder, whose names are common ones
    root = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(root), str(root / "src")]
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch

from benchmarks.conditions import ROOT, conditions, finish
from benchmarks.report import SCHEMA, Report, condition_lines, console
from benchmarks.sections import Clock, Run

SECTIONS = {"correctness": 150, "links": 40, "pinned": 45, "overlap": 25, "step": 200}  # seconds, imports not counted
TOTAL_S = 525
_IMPORTS_S = 30  # longer than any section takes to start and to end
_NEEDED = ("transformers", "safetensors", "pydantic", "gguf")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "measurements", metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="smaller models and sizes")
    parser.add_argument("--toy", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    size = "toy" if given.toy else "quick" if given.quick else "full"
    if given.section:
        return measure(given.section, given.device, size, given.seconds, given.output)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        parser.error(f"not installed: {', '.join(missing)}; a folder that holds them may be named in PYTHONPATH")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device emulated runs the same on the CPU, labelled so")
    return drive(given.device, size, given.only, given.output)


def measure(section: str, device: str, size: str, seconds: float, path: Path) -> int:
    """One section in this process; its report is in `path` after every row."""
    module = import_module(f"benchmarks.sections.{section}")
    report = Report(section, module.TITLE, module.COLUMNS, conditions=None)

    def keep() -> None:
        half = path.with_suffix(".part")
        half.write_text(json.dumps(report.as_json()), encoding="utf-8")
        half.rename(path)

    module.measure(Run(device, size, Clock(seconds), report, keep))
    keep()
    return 0


def drive(device: str, size: str, only: list[str], output: Path) -> int:
    """All sections; 1 where one failed or a bar of correctness is missed."""
    begun = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    found = conditions()
    label = found.get("gpu", "GPU") if device == "cuda" else "emulated accelerator"
    stem = f"cuda-{_slug(label)}-{datetime.now(UTC):%Y-%m-%d}"
    sections: list[tuple[Report, str]] = []
    out = console()
    for section in SECTIONS:  # in this order, whatever order was asked for
        if section not in only:
            continue
        allowed = min(SECTIONS[section], TOTAL_S - (time.monotonic() - begun) - _IMPORTS_S)
        report, outcome = _section(section, device, size, allowed, output)
        sections.append((report, outcome))
        busy = finish(found)
        for measured, _ in sections:
            measured.busy = busy
        _write(output, stem, label, device, sections, found)
        out.print(report.render())
        out.print(f"{section}: {outcome}\n")
    for line in condition_lines(found):
        out.print(line, highlight=False)
    out.print(f"written: {output / stem}.md, .json")
    bad = [
        r
        for r, outcome in sections
        if outcome != "done" or (r.name == "correctness" and not all(b.met for b in r.bars))
    ]
    return 1 if bad else 0


def _section(section: str, device: str, size: str, seconds: float, output: Path) -> tuple[Report, str]:
    """The section's report as far as it came, and how it ended."""
    path, log = output / f".{section}.json", output / f".{section}.log"
    path.unlink(missing_ok=True)
    arguments = ["--device", device, "--section", section, "--seconds", str(seconds), "--output", str(path)]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    begun, outcome = time.monotonic(), "left out for lack of time"
    if seconds > 0:
        with log.open("w") as stream:
            try:
                code = subprocess.run(
                    [sys.executable, "-m", "benchmarks.cuda", *arguments, *([f"--{size}"] if size != "full" else [])],
                    stdout=stream,
                    stderr=stream,
                    env=environment,
                    timeout=seconds + _IMPORTS_S,
                ).returncode
                outcome = "done" if code == 0 else f"FAILED with exit status {code}: {_last_lines(log)}"
            except subprocess.TimeoutExpired:
                outcome = f"CUT SHORT after {time.monotonic() - begun:.0f} s: {_last_lines(log)}"
    if path.is_file():
        report = Report.from_json(json.loads(path.read_text(encoding="utf-8")))
    else:
        module = import_module(f"benchmarks.sections.{section}")
        report = Report(section, module.TITLE, module.COLUMNS, conditions=None)
    report.limits["took_s"] = time.monotonic() - begun
    path.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    return report, outcome


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-6:])


def _write(
    output: Path, stem: str, label: str, device: str, sections: list[tuple[Report, str]], found: dict[str, Any]
) -> None:
    title = f"# On {label}" + (": EMULATED, no GPU; ratios carry over, times do not" if device == "emulated" else "")
    lines = [title, "", *(f"- {line}" for line in condition_lines(found)), ""]
    for report, outcome in sections:
        lines += [*report.markdown(level=2), "", f"Section `{report.name}`: {outcome}.", ""]
    (output / f"{stem}.md").write_text("\n".join(lines), encoding="utf-8")
    document = {
        "schema": SCHEMA,
        "name": "cuda",
        "device": label,
        "emulated": device == "emulated",
        "conditions": found,
        "sections": [{**report.as_json(), "outcome": outcome} for report, outcome in sections],
    }
    (output / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-").removeprefix("nvidia-")


if __name__ == "__main__":
    sys.exit(main())
