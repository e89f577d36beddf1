"""Tokens per second of 1, 8 and 32 streams, the demo model resident and offloaded over a slow emulated link.

A pass over the model serves all streams, so where the link is the limit of a step, streams beside the first cost
little. The link is chosen so that what a step moves takes LINK_OVER_COMPUTING times a resident step of one stream.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.report import Bar, Report, spread
from benchmarks.served import Served, serving
from benchmarks.streams import ask

COLUMNS = (
    "weights",
    "streams",
    "tokens_per_s",
    "over_one_stream_ratio",
    "step_ms",
    "link_ms",
    "stalled_ms",
    "first_token_s",
)
REACH = 8.0
LINK_OVER_COMPUTING = 3.0
RESIDENT, OFFLOADED = "resident", "prefetch of every layer, step 2"
_CONTEXT = 128
_PROMPT = (
    "The library at the corner of the old market square was built in the year of the great flood, and it has kept its "
    "doors open to every reader in the town ever since, whatever the weather. Its"
)


@dataclass(frozen=True)
class Scale:
    streams: tuple[int, ...]
    tokens: int
    rounds: int


SCALES = {"full": Scale((1, 8, 32), 32, 3), "quick": Scale((1, 8, 32), 8, 1), "toy": Scale((1, 4), 4, 1)}


@dataclass
class Side:
    """A server, and what was measured of it: a list of samples for each number of streams."""

    weights: str
    server: Served
    samples: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    def sample(self, streams: int, tokens: int) -> dict[str, float]:
        before = self.server.metrics()
        seconds = asyncio.run(_streamed(self.server, streams, tokens))
        moved = {name: value - before.get(name, 0.0) for name, value in self.server.metrics().items()}
        steps = moved["overspill_step_seconds_count"]
        found = {
            "tokens_per_s": streams * tokens / seconds,
            "step_ms": moved["overspill_step_seconds_sum"] / steps * 1e3,
            "moved_bytes": moved["overspill_link_bytes_total"] / steps,
            "stalled_ms": moved["overspill_link_stall_seconds_total"] / steps * 1e3,
            "first_token_s": moved["vllm:time_to_first_token_seconds_sum"] / streams,
        }
        self.samples.setdefault(streams, []).append(found)
        return found

    def median(self, streams: int, what: str) -> float:
        return statistics.median(sample[what] for sample in self.samples[streams])


def measure(model: Path, scale: Scale, tell: Callable[[str], None]) -> Report:
    """Sets torch to one thread in this process too, which computes nothing."""
    torch.set_num_threads(1)
    report = Report("serve", "Throughput of the server, the demo model on the emulated device", COLUMNS)
    shape = ("--max-model-len", _CONTEXT, "--max-num-seqs", max(scale.streams))
    with ExitStack() as stack:
        resident = Side(RESIDENT, stack.enter_context(serving(model, *shape)))
        tell("the resident server warms up")
        _warm_up(resident, scale)
        computing_s = min(resident.sample(1, scale.tokens)["step_ms"] for _ in range(2)) / 1e3
        resident.samples.clear()
        moved_bytes = _layer_bytes(model)
        bandwidth = moved_bytes / (LINK_OVER_COMPUTING * computing_s)
        link = ("--link-bandwidth", f"{bandwidth / 1e9:.3f}GB/s")
        offload = ("--offload-group-size", 1, "--offload-prefetch-step", 2)
        offloaded = Side(OFFLOADED, stack.enter_context(serving(model, *shape, *offload, *link)))
        tell(f"a resident step takes {computing_s * 1e3:.0f} ms; the link carries {bandwidth / 1e9:.3f} GB/s")
        _warm_up(offloaded, scale)
        for number in range(scale.rounds):
            for streams in scale.streams:
                for side in (resident, offloaded):
                    found = side.sample(streams, scale.tokens)
                    tell(f"round {number + 1}: {side.weights}, {streams}: {found['tokens_per_s']:.1f} tokens/s")
        _stop(resident)
        _stop(offloaded)
    for side in (resident, offloaded):
        report.rows += [_row(side, streams, bandwidth) for streams in scale.streams]
    most = max(scale.streams)
    reached = report.rows[-1]["over_one_stream_ratio"]
    report.bars.append(Bar(f"offloaded, {most} streams over one", reached, REACH, at_least=True))
    computing_ms = resident.median(1, "step_ms")
    link_ms = offloaded.median(1, "moved_bytes") / bandwidth * 1e3
    report.notes += [
        "emulated accelerator: ratios carry over to a device, times do not",
        f"the link carries {bandwidth / 1e9:.3f} GB/s: a step's bytes take {link_ms:.0f} ms, "
        f"{link_ms / computing_ms:.1f} times the {computing_ms:.0f} ms that a resident step of one stream computes",
        f"each stream has a prompt of its own of about 40 tokens and an answer of {scale.tokens}; tokens/s are of the "
        "answers, over the time until the last stream has ended, prompts included; medians of "
        f"{scale.rounds} interleaved round(s)",
        "the servers compute on one thread; the client, the server's event loop and the link's copies share the rest",
    ]
    return report.finish()


def _layer_bytes(model: Path) -> int:
    """What a step moves when every layer is offloaded, from the plan."""
    from overspill.api import prepare
    from overspill.config import resolve

    settings = resolve(
        {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}},
        engine={"device": "emulated", "max_model_len": _CONTEXT},
    )
    return round(prepare(str(model), settings).plan.step.link_bytes)


def _warm_up(side: Side, scale: Scale) -> None:
    asyncio.run(_streamed(side.server, 1, scale.tokens))
    asyncio.run(_streamed(side.server, max(scale.streams), 2))


async def _streamed(server: Served, streams: int, tokens: int) -> float:
    """Seconds until all have ended; each must have all its tokens."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=600.0, limits=limits) as client:
        body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        begun = time.perf_counter()
        asked = (ask(client, "/v1/completions", {"prompt": f"{n}. {_PROMPT}", **body, **usage}) for n in range(streams))
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - begun
    for answer in answers:
        if not answer.done or answer.errors or answer.usages[0]["completion_tokens"] != tokens:
            raise RuntimeError(f"an answer is not whole: {answer}")
    return seconds


def _stop(side: Side) -> None:
    side.server.process.terminate()
    if code := side.server.process.wait(60):
        raise RuntimeError(f"the server ended with {code}:\n" + "".join(side.server.log))


def _row(side: Side, streams: int, bandwidth: float) -> dict[str, Any]:
    samples = side.samples[streams]
    offloaded = side.weights == OFFLOADED
    return {
        "weights": side.weights,
        "streams": streams,
        "tokens_per_s": side.median(streams, "tokens_per_s"),
        "over_one_stream_ratio": statistics.median(
            sample["tokens_per_s"] / one["tokens_per_s"] for sample, one in zip(samples, side.samples[1], strict=True)
        ),
        "step_ms": side.median(streams, "step_ms"),
        "link_ms": side.median(streams, "moved_bytes") / bandwidth * 1e3 if offloaded else None,
        "stalled_ms": side.median(streams, "stalled_ms") if offloaded else None,
        "first_token_s": side.median(streams, "first_token_s"),
        "spread": spread(sample["tokens_per_s"] for sample in samples),
        "samples": samples,
    }
