from __future__ import annotations

import base64
import json
import signal
import socket
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from serving import CONTEXT, Server, eventually, started

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": CONTEXT - 8, "extra_body": {"ignore_eos": True}}


def test_a_stream_that_is_closed_half_way_frees_its_slots(server: Server, client: OpenAI) -> None:
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    generated = server.metric("vllm:generation_tokens_total")
    with client.completions.create(model="talking", stream=True, n=4, **LONG) as stream:
        for _ in range(8):
            next(stream)
        assert server.metric("vllm:num_requests_running") == 4
    assert eventually(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 4
    assert server.metric("vllm:generation_tokens_total") < generated + 4 * LONG["max_tokens"]
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_client_that_goes_away_without_a_stream_frees_its_slot(server: Server) -> None:
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    body = json.dumps({"prompt": "x", "max_tokens": CONTEXT - 8, "ignore_eos": True})
    lines = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", "", body)
    request = "\r\n".join(("POST /v1/completions HTTP/1.1", *lines))
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request.encode())
        assert eventually(lambda: server.metric("vllm:num_requests_running") == 1)
    assert eventually(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_a_reader_that_does_not_read_holds_up_nobody(server: Server, client: OpenAI) -> None:
    ended = server.metric("vllm:request_success_total", finished_reason="length")
    with client.completions.create(model="talking", stream=True, n=3, logprobs=20, **LONG) as unread:
        client.completions.create(model="talking", prompt="y", max_tokens=2)
        assert eventually(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.metric("vllm:request_success_total", finished_reason="length") >= ended + 3
        assert {chunk.choices[0].finish_reason for chunk in unread} == {None, "length"}


def test_sigterm_finishes_what_runs_refuses_what_comes_and_ends_with_0(talking: Path) -> None:
    key = "a key"
    names = ("--served-model-name", "first", "--served-model-name", "second")
    vllms = ("--tensor-parallel-size", 1, "--allowed-origins", '["https://example.org"]')
    options = (*names, *vllms, "--max-model-len", CONTEXT)
    with started(talking, *options, key=key, env={"VLLM_API_KEY": key}) as server, server.client() as client:
        assert "note: --tensor-parallel-size changes nothing: one device computes\n" in server.lines
        _knows_its_key(server)
        assert [model.id for model in client.models.list()] == ["first", "second"]
        assert client.completions.create(model="second", prompt="x", max_tokens=1).model == "second"
        with client.completions.create(model="first", stream=True, **LONG) as stream:
            chunks = [next(stream)]
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.InternalServerError) as refused:
                _ask_until_refused(client)
            assert (refused.value.status_code, refused.value.code) == (503, "draining")
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(60) == 0
    assert not any("Traceback" in line for line in server.lines)


def _ask_until_refused(client: OpenAI) -> None:
    while True:  # the signal is heard a moment after it is sent
        client.completions.create(model="first", prompt="y", max_tokens=1)


def _knows_its_key(server: Server) -> None:
    with server.http() as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/v1/models", headers={"Host": "any.example"}).status_code == 200
        assert http.get("/", auth=("any name", server.key or "")).status_code == 200
        http.headers.clear()
        key = server.key or ""
        near = [*(key[:end].rstrip() for end in range(1, len(key))), key + "x", key.upper()]
        wrong = ["Bearer", "Basic", "Basic !", f"Token {key}", "Bearer wrong", *(f"Bearer {text}" for text in near)]
        wrong += [f"Basic {base64.b64encode(f'user:{text}'.encode()).decode()}" for text in ("", *near)]
        for path, challenge in (("/v1/models", "Bearer"), ("/metrics", "Bearer"), ("/", 'Basic realm="overspill"')):
            for given in ({}, *({"Authorization": text} for text in wrong)):
                answer = http.get(path, headers=given)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == challenge
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/health").status_code == 200
        allowed = http.get("/health", headers={"Origin": "https://example.org"}).headers
        assert allowed["Access-Control-Allow-Origin"] == "https://example.org"
        foreign = http.get("/health", headers={"Origin": "https://example.com"}).headers
        assert "Access-Control-Allow-Origin" not in foreign


def test_a_second_signal_ends_at_once(talking: Path) -> None:
    with started(talking, "--grace", 1e6) as server, server.client() as client:
        wanted: dict[str, Any] = {"prompt": "x", "max_tokens": 250, "n": 8, "extra_body": {"ignore_eos": True}}
        with client.completions.create(model="talking", stream=True, **wanted) as stream:
            next(stream)
            server.process.send_signal(signal.SIGINT)
            assert eventually(lambda: any("stopping" in line for line in server.lines))
            assert server.process.poll() is None, "the first one lets what runs go on"
            assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
