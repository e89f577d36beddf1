"""The soak of one minute, and that its checks find what they are for. The throughput benchmark at toy size."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.soak_asks import (  # noqa: E402
    MAX_WAITING,
    TEXT,
    Ask,
    Malformed,
    Reference,
    full_queue_faults,
)
from benchmarks.soak_memory import Memory  # noqa: E402
from benchmarks.streams import Answer, Choice, ask  # noqa: E402
from examples.demo_model import demo_model_path  # noqa: E402

from benchmarks import serve  # noqa: E402

CLIENTS = 200


@pytest.mark.real_model
def test_two_hundred_clients_for_a_minute(tmp_path: Path) -> None:
    """Through the command itself, which judges wrong and missing answers, memory, rest, exit status and log."""
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--minutes", "1", "--clients", str(CLIENTS)]
    options = ["--gguf", str(demo_model_path()), "--output", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (document,) = tmp_path.glob("soak-*.json")
    found = json.loads(document.read_text())
    assert len(found["bars"]) == 5
    assert all(bar["met"] for bar in found["bars"]), found["bars"]
    rows = {row["asked_for"]: row for row in found["rows"]}
    assert all(rows[kind]["whole"] for kind in ("forced token", "known prompt, greedy", "sampled", "JSON schema"))
    assert rows["closed half-way"]["closed"]
    assert rows["malformed"]["refused"] == rows["malformed"]["requests"] > 0
    assert len(found["conditions"]["server_memory_samples"]) > 60
    assert "FAULT" not in document.with_suffix(".md").read_text()


@pytest.mark.real_model
def test_throughput_has_every_number_of_streams_with_and_without_offload(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        report = serve.measure(demo_model_path(), serve.SCALES["toy"], lambda _: None)
    finally:
        torch.set_num_threads(threads)
    rows = {(row["weights"], row["streams"]): row for row in report.rows}
    assert set(rows) == {(weights, streams) for weights in (serve.RESIDENT, serve.OFFLOADED) for streams in (1, 4)}
    assert all(row["over_one_stream_ratio"] > 0 and row["step_ms"] > 0 for row in report.rows)
    assert rows[serve.RESIDENT, 1]["samples"][0]["moved_bytes"] == 0
    one = rows[serve.OFFLOADED, 1]
    assert one["step_ms"] > 0.9 * one["link_ms"], "a step waits for what it moves"
    assert one["link_ms"] > 100, "the link is slow on purpose"
    assert "emulated" in report.notes[0]
    report.write(tmp_path, report.name)


CHUNKS: list[dict[str, Any]] = [
    {"id": "a", "choices": [{"index": 0, "text": " river", "logprobs": None, "finish_reason": None}]},
    {"id": "a", "choices": [{"index": 0, "text": " river", "logprobs": None, "finish_reason": "length"}]},
    {"id": "a", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}},
]
for _chunk in CHUNKS[:2]:
    _chunk["choices"][0]["logprobs"] = {"tokens": [" river"], "token_logprobs": [-1.0], "top_logprobs": [{" a": -2.0}]}

FORCED = Ask("forced", TEXT, {"max_tokens": 2, "logprobs": 0, "ignore_eos": True}, 5, forced=" river")


def streamed(*chunks: Mapping[str, Any], done: bool = True) -> Answer:
    """The answer as a client reads it from these events."""

    async def events() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        if done:
            yield b"data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events())

    async def read() -> Answer:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as client:
            return await ask(client, TEXT, {})

    return asyncio.run(read())


def changed(number: int, **changes: Any) -> list[dict[str, Any]]:
    chunks = json.loads(json.dumps(CHUNKS))
    place = chunks[number]["choices"][0] if number < 2 else chunks[number]
    place.update(changes)
    return chunks


def test_a_whole_answer_has_no_fault() -> None:
    assert list(FORCED.faults(streamed(*CHUNKS))) == []


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (streamed(*CHUNKS, done=False), "[DONE] is missing"),
        (streamed(*CHUNKS[:2]), "usage comes 0 times"),
        (streamed(CHUNKS[0], CHUNKS[2]), "finishes with []"),
        (streamed(*changed(1, finish_reason="stop")), "finishes with ['stop']"),
        (streamed(*changed(1, text=" stone")), "mixed up"),
        (streamed(CHUNKS[0], *CHUNKS), "3 tokens, more than 2"),
        (streamed(CHUNKS[0], {**CHUNKS[1], "id": "b"}, CHUNKS[2]), "ids ['a', 'b']"),
        (streamed(*changed(1, index=1)), "the choices are [0, 1] of 1"),
        (streamed(*changed(2, usage={"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8})), "has 5 tokens"),
        (streamed(*changed(2, usage={"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8})), "2 tokens came"),
        (streamed(CHUNKS[0], {"error": {"message": "it failed"}}), "it failed"),
        (Answer(500, httpx.Headers()), "status 500"),
    ],
)
def test_a_fault_is_found(answer: Answer, fault: str) -> None:
    assert any(fault in found for found in FORCED.faults(answer)), list(FORCED.faults(answer))


def test_an_answer_to_a_known_prompt_is_held_against_it_up_to_the_first_near_tie() -> None:
    alone = Choice(tokens=["a", "b", "c"], logprobs=[-1.0, -1.0, -1.0], margins=[1.0, 0.5, 0.001])
    reference = Reference.of(alone)
    assert reference.certain == 2
    assert reference.differs(Choice(tokens=["a", "b", "d"])) is None
    assert reference.differs(Choice(tokens=["a", "x", "c"])) is not None
    assert reference.differs(Choice(tokens=["a"])) is not None
    assert reference.deviation(Choice(tokens=["a", "x"], logprobs=[-1.25, -9.0])) == 0.25


def test_json_of_another_request_is_found() -> None:
    known = Ask("schema", TEXT, {"max_tokens": 9, "logprobs": 0}, 5, among=("river", "stone"))
    choice = {"tokens": ["x"], "finish_reasons": ["stop"]}
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    for word, faults in (("stone", 0), ("music", 1)):
        answer = Answer(200, httpx.Headers(), ids={"a"}, usages=[usage], done=True)
        answer.choices[0] = Choice(text=json.dumps({"word": word}), **choice)
        assert len(list(known.faults(answer))) == faults


def test_a_malformed_body_must_be_refused_for_its_own_reason() -> None:
    wrong = Malformed("unknown field", TEXT, b"{}", 400, "max_token")
    assert list(wrong.faults(refused(400, "max_token"))) == []
    assert list(wrong.faults(refused(400, "prompt")))
    assert list(wrong.faults(refused(500, "max_token")))
    assert list(wrong.faults(streamed(*CHUNKS)))


def test_a_full_queue_must_have_been_full() -> None:
    said = f"{MAX_WAITING} requests wait, 1 more would be above the {MAX_WAITING} that may; ask again later"
    full = refused(429, None, code="queue_full", message=said, headers={"Retry-After": "1"})
    assert list(full_queue_faults(full, MAX_WAITING + 1)) == []
    assert list(full_queue_faults(full, MAX_WAITING))
    assert list(full_queue_faults(refused(429, None, code="queue_full", message=said), MAX_WAITING + 1))
    empty = refused(429, None, code="queue_full", message=said.replace(str(MAX_WAITING), "0", 1))
    assert list(full_queue_faults(empty, MAX_WAITING + 1))


def refused(
    status: int, param: str | None, *, code: str | None = None, message: str = "no", headers: Any = None
) -> Answer:
    error = {"error": {"message": message, "type": "x", "param": param, "code": code}}
    return Answer(status, httpx.Headers(headers), ended="refused", errors=[error])


def test_growth_is_over_what_memory_was_when_it_had_settled() -> None:
    memory = Memory(pid=1)
    memory.samples = [(0.0, 300), (55.0, 100), (61.0, 101), (299.0, 103)]
    assert memory.growth_ratio(60.0) == pytest.approx(1.03)
    assert memory.peak_bytes(0.0, 60.0) == 300
