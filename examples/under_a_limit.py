"""A model under a memory limit smaller than its weights, beside the same without one: same answer, less memory.

Each runs as `overspill run` in a process of its own, inside a memory control group that a wrapper (tests/memlimit)
makes and reads the peak from: anonymous memory and page cache, the interpreter and its libraries included.

    python examples/under_a_limit.py MODEL [--memory-limit 300MiB] [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from overspill.config import format_bytes, parse_bytes

MEMLIMIT = Path(__file__).resolve().parents[1] / "tests" / "memlimit"
NO_GROUP = 99
PROMPT = "What is the capital of France?"
UNLIMITED_BYTES = 1 << 42
SPARE_BYTES = 96 << 20
"""What loading takes for itself is a larger part of a small model."""


class NoControlGroup(Exception):
    """No memory control group can be made here."""


@dataclass(frozen=True)
class Run:
    """`weights_bytes` in memory and `disk_bytes` on disk as the ledger has them, `peak_bytes` as the group has them."""

    limit_bytes: int | None
    group_bytes: int | None
    weights_bytes: int
    disk_bytes: int
    peak_bytes: int
    token_ids: list[int]
    text: str


def run(model: Path, limit_bytes: int | None = None, group_bytes: int | None = None) -> Run:
    """One answer; `limit_bytes` for what overspill counts, `group_bytes` for the process. Raises NoControlGroup."""
    command = [sys.executable, "-m", "overspill", "run", str(model), "--device", "cpu", "--dtype", "float32", "--json"]
    command += ["--max-model-len", "256", "--max-tokens", "24", "--prompt", PROMPT]
    if limit_bytes is not None:
        command += ["--memory-limit", f"{limit_bytes}B"]
    print(f"running {'without a limit' if limit_bytes is None else 'under it'}", file=sys.stderr)
    done = subprocess.run(
        [str(MEMLIMIT), str(group_bytes or UNLIMITED_BYTES), *command], capture_output=True, text=True, check=False
    )
    if done.returncode == NO_GROUP:
        raise NoControlGroup
    if done.returncode != 0:
        raise SystemExit(f"the run ended with {done.returncode}:\n{done.stderr}")
    peak = re.search(r"peak=(\d+)", done.stderr)
    assert peak is not None, done.stderr
    answer = json.loads(done.stdout)
    entries = answer["ledger"]["entries"]
    on_disk = sum(entry["bytes"] for entry in entries if entry["tier"] == "disk")
    in_memory = sum(entry["bytes"] for entry in entries) - on_disk
    return Run(limit_bytes, group_bytes, in_memory, on_disk, int(peak[1]), answer["token_ids"], answer["text"])


def warm(model: Path) -> None:
    """Have the libraries' files read outside of any group: pages count for the group that reads them first."""
    command = [sys.executable, "-m", "overspill", "plan", str(model), "--device", "cpu", "--json"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def under(limit_bytes: int, free: Run, model: Path) -> Run:
    """As much is taken from the whole process as the limit is below the weights: what else it takes hangs on torch."""
    less_bytes = max(0, free.weights_bytes - limit_bytes)
    return run(model, limit_bytes, free.peak_bytes - less_bytes + SPARE_BYTES)


def wrong(free: Run, limited: Run) -> list[str]:
    """What should not be."""
    assert limited.limit_bytes is not None
    assert limited.group_bytes is not None
    weights_bytes = limited.weights_bytes + limited.disk_bytes
    claims = [
        (limited.token_ids == free.token_ids, f"other answers: {free.text!r} and {limited.text!r}"),
        (limited.limit_bytes < weights_bytes, "the limit is not smaller than the weights: choose a smaller one"),
        (limited.disk_bytes > 0, "nothing stayed on disk"),
        (limited.peak_bytes <= limited.group_bytes, "the peak is over the limit"),
        (limited.peak_bytes < free.peak_bytes, "the limit saved nothing"),
    ]
    return [text for holds, text in claims if not holds]


def table(free: Run, limited: Run) -> Table:
    made = Table(title="One model, with and without a memory limit", title_justify="left")
    for column in ("", "no limit", "limit"):
        made.add_column(column, justify="left" if not column else "right")
    pair = (free, limited)
    made.add_row("memory limit", *("none" if r.limit_bytes is None else format_bytes(r.limit_bytes) for r in pair))
    made.add_row(
        "enforced on the process", *("nothing" if r.group_bytes is None else format_bytes(r.group_bytes) for r in pair)
    )
    made.add_row("weights in memory", *(format_bytes(r.weights_bytes) for r in pair))
    made.add_row("weights on disk", *(format_bytes(r.disk_bytes) for r in pair))
    made.add_row("peak of the process, from outside", *(format_bytes(r.peak_bytes) for r in pair))
    made.add_row("answer", *(r.text for r in pair))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory-limit", default="300MiB", metavar="SIZE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        warm(given.model)
        free = run(given.model)
        limited = under(parse_bytes(given.memory_limit), free, given.model)
    except NoControlGroup:
        print("skipped, the memory limit: no memory control group can be made here (it takes root)", file=sys.stderr)
        return 0
    faults = wrong(free, limited)
    if given.json:
        print(json.dumps({"unlimited": asdict(free), "limited": asdict(limited), "wrong": faults}))
    else:
        Console().print(table(free, limited))
        print(f"same answer: {'yes' if free.token_ids == limited.token_ids else 'no'}")
    for fault in faults:
        print(f"failed: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
