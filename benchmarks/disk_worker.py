"""One way of running a model larger than memory, in this fresh process: `python -m benchmarks.disk_worker`.

A job (JSON) comes on stdin; events go to stdout, a JSON line each, as soon as they are known: whoever is killed, or
runs out of time, leaves what it had reached. Time that a phase may take is enforced by an alarm that ends the process.
Nothing large is imported here: a way's imports are a part of what it takes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from benchmarks.disk_floor import direct_gbps

WAYS = {
    "overspill": "disk_overspill",
    "overspill, mapped": "disk_overspill",
    "transformers, mapped": "disk_mapped",
    "accelerate": "disk_accelerate",
    "llama.cpp, mapped": "disk_llama",
}

LONG = "the long prompt"
_IDLE_S = 0.05

Generate = Callable[[Sequence[int], Callable[[], bool]], None]
"""Runs a prompt, then a token a step; calls back after each token, the prompt's first, and ends where that is True."""


def main() -> None:
    job = json.load(sys.stdin)
    phase("imports", job["start_s"])
    way = import_module(f"benchmarks.{WAYS[job['way']]}")
    way.imports()
    phase("start", job["start_s"])
    begun, before = time.perf_counter(), read_bytes()
    generate: Generate = way.start(job)
    tell("started", s=time.perf_counter() - begun, read_bytes=read_bytes() - before)
    prompt, longest = job["prompts"]
    files = [Path(name) for name in job["files"]]
    settle()
    tell("direct", gbps=direct_gbps(files, job["direct_bytes"], seed=job["seed"]))
    took = run(generate, "prompt", ids(prompt, job), job["tokens"], job)
    settle()
    tell("direct", gbps=direct_gbps(files, job["direct_bytes"], seed=job["seed"] + 1))
    if longest and took < job["prompt_s"] / 3:
        run(generate, LONG, ids(longest, job), 1, job)
    tell("done")
    sys.stdout.flush()
    os._exit(0)  # what a library tears down at the end is nobody's time


def run(generate: Generate, name: str, prompt: Sequence[int], tokens: int, job: dict[str, Any]) -> float:
    """A prompt and up to `tokens` of its answer; the prompt's seconds. Decoding ends early after `decode_s`."""
    times: list[float] = []
    phase(name, job["prompt_s"])
    last, before = time.perf_counter(), read_bytes()

    def arrived() -> bool:
        nonlocal last, before
        now, read = time.perf_counter(), read_bytes()
        tell("step" if times else "prompt", tokens=1 if times else len(prompt), s=now - last, read_bytes=read - before)
        if not times:
            phase("decode", job["decode_s"] + job["step_s"])
        times.append(now - last)
        last, before = time.perf_counter(), read_bytes()
        return len(times) >= tokens or sum(times[1:]) >= job["decode_s"]

    generate(prompt, arrived)
    return times[0]


def ids(count: int, job: dict[str, Any]) -> list[int]:
    return [(7 * number + 11 * job["seed"]) % job["vocabulary"] for number in range(1, count + 1)]


def settle() -> None:
    """Wait until nothing is read ahead any more, which would share the disk with what measures it."""
    before, now = -1, read_bytes()
    while before != now:
        time.sleep(_IDLE_S)
        before, now = now, read_bytes()


def phase(name: str, seconds: float) -> None:
    """The process ends, wherever it is, when the phase takes longer than `seconds`."""
    tell("phase", name=name, most_s=seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def read_bytes() -> int:
    """What this process had read from block devices: direct reads, page faults and their read-ahead."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


if __name__ == "__main__":
    main()
