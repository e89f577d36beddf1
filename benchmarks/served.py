"""A real `overspill serve` process of the demo model on the emulated device, and what can be seen of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.conditions import ROOT

_SOURCES = str(ROOT / "src")


@dataclass
class Served:
    """A process that serves at `address`; `log` is what it has written to stderr so far."""

    process: subprocess.Popen[str]
    address: str
    model: str
    log: list[str]

    def metrics(self) -> dict[str, float]:
        """Every sample's name with its value, summed over labels."""
        totals: dict[str, float] = {}
        answer = httpx.get(f"{self.address}/metrics", timeout=60.0)
        for family in text_string_to_metric_families(answer.raise_for_status().text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


@contextlib.contextmanager
def serving(model: Path, *options: object, threads: int = 1) -> Iterator[Served]:
    """`overspill serve model` at a free port of this machine, with so many torch threads; killed if it is left running.

    Raises RuntimeError with the process's log where it does not start.
    """
    command = [sys.executable, "-m", "overspill", "serve", str(model), "--device", "emulated", "--port", "0", "--json"]
    paths = [_SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [*command, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda stream: log.extend(stream), args=(process.stderr,), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        if not line:
            process.wait()
            reader.join()
            raise RuntimeError("the server did not start:\n" + "".join(log))
        ready = json.loads(line)
        yield Served(process, ready["address"], ready["models"][0], log)
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()
