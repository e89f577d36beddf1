"""Hundreds of clients at once against a real server of the demo model, some of them rude: `python benchmarks/soak.py`.

Every request must be answered, each answer must be its own request's, the server's memory must not grow, and it must
end idle, in peace and with exit status 0. Each client asks for one thing after the other, drawn from the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

if not __package__:  # instead of this folder, whose names are common ones
    root = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(root), str(root / "src")]
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import httpx
import torch
from examples.demo_model import demo_model_path

from benchmarks.conditions import ROOT
from benchmarks.report import Bar, Report, console
from benchmarks.served import Served, serving
from benchmarks.soak_asks import (
    CONTEXT,
    FORCED,
    GREEDY,
    KNOWN,
    MAX_BODY_BYTES,
    MAX_WAITING,
    QUESTIONS,
    WORDS,
    Known,
    Reference,
)
from benchmarks.soak_clients import Crowd
from benchmarks.soak_memory import SETTLED_S, Memory
from benchmarks.streams import ask

COLUMNS = ("asked_for", "requests", "whole", "closed", "refused", "queue_full", "wrong", "median_s", "longest_s")
REACH_GROWTH = 1.02
SHOWN_FAULTS = 20
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
REST_TRIES, END_S = 100, 120.0
OPTIONS = (
    *("--max-model-len", CONTEXT, "--max-num-batched-tokens", 256, "--max-num-seqs", 32),
    *("--max-waiting", MAX_WAITING, "--max-body-bytes", MAX_BODY_BYTES),
    *("--device-memory", "448MiB", "--kv-cache-memory-bytes", "36MiB"),
    *("--offload-group-size", 2, "--offload-prefetch-step", 2),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="what the clients ask for, and in which order")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "measurements", metavar="DIR")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where the demo model is kept")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the demo model, if it is not to be fetched")
    given = parser.parse_args(arguments)
    model = given.gguf or demo_model_path(given.cache)
    report = measure(model, 60.0 * given.minutes, given.clients, given.seed, tell)
    console().print(report.render())
    for path in report.write(given.output, f"soak-{datetime.now(UTC):%Y-%m-%d}"):
        tell(f"written: {path}")
    return 0 if all(bar.met for bar in report.bars) else 1


def measure(model: Path, seconds: float, clients: int, seed: int, tell: Callable[[str], None]) -> Report:
    """The whole soak. Memory is judged from the first minute on, of a shorter one from its first third on."""
    torch.set_num_threads(1)
    report = Report("soak", f"{clients} clients for {seconds / 60:g} minutes, the demo model offloaded", COLUMNS)
    settled_s = min(60.0, seconds / 3)
    with serving(model, *OPTIONS) as server:
        tell("the server answers known prompts while nobody else asks")
        known = asyncio.run(_learn(server))
        crowd = Crowd(server, known, clients, seed)
        with Memory(server.process.pid) as memory:
            asyncio.run(crowd.run(seconds, lambda: tell(_progress(crowd, memory))))
        asyncio.run(crowd.ask_known_alone())
        after, faults = _at_rest(server)
        faults += _end(server)
    ready = next(number for number, line in enumerate(server.log) if line.startswith("serving "))
    said = [line.rstrip() for line in server.log[ready + 1 :] if not line.startswith("stopping: ")]
    faults += [f"the log says: {line}" for line in said]
    report.rows = crowd.rows()
    for what, value, most in (
        ("answers that are wrong or mixed up", len(crowd.faults), 0.0),
        ("requests without an answer", len(crowd.unanswered), 0.0),
        ("server not at rest at the end, exit status, unexpected log", len(faults), 0.0),
        (f"memory after the first {settled_s:.0f} s over before", memory.growth_ratio(settled_s), REACH_GROWTH),
    ):
        report.bars.append(Bar(what, float(value), most, timed=False))
    checked = sum(row["whole"] for row in report.rows if row["asked_for"] in (FORCED, GREEDY))
    report.bars.append(Bar("answers whose tokens were known", checked, clients / 4, at_least=True, timed=False))
    report.limits["memory at most, before_bytes"] = memory.peak_bytes(settled_s - SETTLED_S, settled_s)
    report.limits["memory at most, after_bytes"] = memory.peak_bytes(settled_s, math.inf)
    report.notes += [
        "emulated accelerator, prefetch of every second layer; overspill serve " + " ".join(map(str, OPTIONS)),
        f"{crowd.most_open} requests were open at once; {after['overspill_steps_total']:.0f} steps, "
        f"{after['vllm:generation_tokens_total']:.0f} tokens generated, {after['vllm:num_preemptions_total']:.0f} "
        "times a request gave its pages back to be computed again",
        f"log-probabilities of known prompts' tokens were within {crowd.deviation:.2g} of those without load; tokens "
        "are held against them up to the first where the two likeliest are nearer than 0.02",
        *(f"FAULT: {fault}" for fault in [*faults, *crowd.unanswered, *crowd.faults][:SHOWN_FAULTS]),
    ]
    assert report.conditions is not None
    report.conditions["server_memory_samples"] = memory.samples
    return report.finish()


async def _learn(server: Served) -> Known:
    """Tokens of prompts and words, and the server's own answers to the known prompts, one after the other."""
    async with httpx.AsyncClient(base_url=server.address, timeout=120.0) as client:

        async def tokens(body: dict[str, object]) -> list[int]:
            answer = await client.post("/tokenize", json=body)
            return list(answer.raise_for_status().json()["tokens"])

        counts = {prompt: len(await tokens({"prompt": prompt})) for prompt in KNOWN}
        for question in QUESTIONS:
            counts[question] = len(await tokens({"messages": [{"role": "user", "content": question}]}))
        ids = await tokens({"prompt": WORDS, "add_special_tokens": False})
        words = (f" {word}" for word in WORDS.split())
        known = Known(server.model, counts, dict(zip(words, ids, strict=True)), {})
        for prompt in KNOWN:
            asked = known.greedy_for(prompt)
            answer = await ask(client, asked.path, asked.body)
            if faults := list(asked.faults(answer)):
                raise RuntimeError(f"alone, {prompt!r} is answered wrongly: {faults}")
            known.references[prompt] = Reference.of(answer.choices[0])
        grammar = known.by_schema(random.Random(0))  # its tables are made once, and are no growth
        await ask(client, grammar.path, grammar.body)
    return known


def _at_rest(server: Served) -> tuple[Counter[str], list[str]]:
    """The server's counters, and what is still held when nobody asks any more; a closed stream's for a step at most."""
    metrics: Counter[str] = Counter()
    for _ in range(REST_TRIES):
        try:
            metrics = Counter(server.metrics())
        except httpx.HTTPError as error:
            return metrics, [f"/metrics is not answered at the end: {type(error).__name__} {error}"]
        left = [f"{name} is {metrics[name]:g} at the end" for name in HELD if metrics[name]]
        if not left:
            break
        time.sleep(0.1)
    return metrics, left


def _end(server: Served) -> list[str]:
    server.process.terminate()
    try:
        code = server.process.wait(END_S)
    except subprocess.TimeoutExpired:
        return [f"it did not end within {END_S:.0f} s of SIGTERM"]
    return [f"it ended with exit status {code}"] if code else []


def _progress(crowd: Crowd, memory: Memory) -> str:
    return (
        f"{crowd.elapsed_s:4.0f} s: {crowd.answered} answered, {crowd.open} open, {len(crowd.faults)} wrong, "
        f"memory {memory.samples[-1][1] / 1e6:.0f} MB"
    )


def tell(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    console(stderr=True).print(text, style="dim", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
