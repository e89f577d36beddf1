"""A real `overspill serve` process, and what its counters say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

CONTEXT, MAX_WAITING, MAX_BODY_BYTES = 96, 8, 64 * 1024  # of the server that most tests share
PATIENCE_S = 60.0  # for what must happen, however busy the machine is


@dataclass
class Server:
    """A process that serves at `address`; what it writes to stderr is read as it comes."""

    process: subprocess.Popen[str]
    address: str
    key: str | None
    lines: list[str]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key=self.key or "none", max_retries=0, timeout=PATIENCE_S)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, headers=self.headers, timeout=PATIENCE_S)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name and these labels."""
        with self.http() as http:
            families = text_string_to_metric_families(http.get("/metrics").text)
            return sum(
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def started(
    model: Path, *options: object, key: str | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`overspill serve model` at a free port on the emulated device, killed at the end if it still runs."""
    command = [sys.executable, "-m", "overspill", "serve", str(model), "--port", "0", "--json", "--device", "emulated"]
    process = subprocess.Popen(
        [*command, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda stream: lines.extend(stream), args=(process.stderr,), daemon=True)
    reader.start()
    try:
        ready = process.stdout.readline()
        if not ready:
            process.wait()
            reader.join()
            raise AssertionError("the server did not start:\n" + "".join(lines))
        yield Server(process, json.loads(ready)["address"], key, lines)
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true within a patience that only a defect exceeds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
