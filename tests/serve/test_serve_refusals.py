from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from serving import CONTEXT, MAX_BODY_BYTES, MAX_WAITING, Server, eventually

CHAT: list[Any] = [{"role": "user", "content": "hi"}]

# (path, fields, the field that is to blame, part of the message)
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "calls no tools"),
    ("chat/completions", {"tool_choice": "auto"}, "tool_choice", "calls no tools"),
    ("chat/completions", {"functions": [{}]}, "functions", "calls no tools"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}},
        "response_format",
        "Invalid type: nope",
    ),
    ("chat/completions", {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "JSON ends"),
    ("completions", {"guided_regex": "a+"}, "guided_regex", "response_format"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities", "only text"),
    ("chat/completions", {"audio": {"voice": "x"}}, "audio", "only text"),
    ("chat/completions", {"prediction": {}}, "prediction", "not built"),
    ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort", "cannot be honoured"),
    ("chat/completions", {"service_tier": "flex"}, "service_tier", "one tier"),
    ("chat/completions", {"store": True}, "store", "nothing is stored"),
    ("chat/completions", {"temprature": 1}, "temprature", 'did you mean "temperature"?'),
    ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options", '"stream" is not true'),
    ("chat/completions", {"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "is unknown"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs", '"logprobs" is not true'),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "two names"),
    ("chat/completions", {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize", "variable"),
    ("chat/completions", {"messages": []}, "messages", "at least 1"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "only text",
    ),
    (
        "chat/completions",
        {"messages": [*CHAT, {"role": "tool", "content": "", "tool_call_id": "1"}]},
        "messages[1].tool_call_id",
        "tools",
    ),
    ("completions", {"suffix": "x"}, "suffix", "fill one in"),
    ("completions", {"best_of": 3, "n": 2}, "best_of", "n is 2"),
    ("completions", {"echo": True, "logprobs": 1}, "echo", "logprobs"),
    ("completions", {"logprobs": True}, "logprobs", "valid integer"),
    ("completions", {"prompt": []}, "prompt", "at least 1"),
    ("completions", {"prompt": ""}, "prompt", "empty"),
    ("completions", {"prompt": ["a", 1]}, "prompt[1]", "valid string"),
    ("completions", {"prompt": [[1], [-1]]}, "prompt[1][0]", "greater than or equal to 0"),
    ("completions", {"prompt": [100000]}, "prompt", "token id 100000"),
    ("completions", {"stop_token_ids": [100000]}, "stop_token_ids", "token id 100000"),
    ("completions", {"logit_bias": {"100000": 1}}, "logit_bias", "token id 100000"),
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ("completions", {"stop": ["x"] * 17}, "stop", "at most 16"),
    ("completions", {"stop": ""}, "stop", "at least 1"),
    ("completions", {"temperature": -1}, "temperature", "greater than or equal to 0"),
    ("completions", {"temperature": 1e-5}, "temperature", "from 0.001"),
    ("completions", {"top_p": 0}, "top_p", "greater than"),
    ("completions", {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ("completions", {"prompt": [[5]] * 2049}, "prompt", "at most 2048"),
    ("completions", {"prompt": [[5]] * (MAX_WAITING + 1)}, "n", f"the queue holds {MAX_WAITING}"),
    ("completions", {"prompt": "x" * 5000}, "prompt", "5000 characters are more than"),
    ("completions", {"x" * 3000: 1}, "x" * 64, "is unknown"),
    ("completions", {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024"),
    ("completions", {"n": MAX_WAITING + 1}, "n", f"the queue holds {MAX_WAITING}"),
    ("completions", {"max_tokens": "3"}, "max_tokens", "valid integer"),
]


@pytest.mark.parametrize(("path", "fields", "param", "message"), REFUSED, ids=[f"{r[0]} {r[2]}" for r in REFUSED])
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(
    path: str, fields: dict[str, Any], param: str, message: str, server: Server
) -> None:
    body = {"messages": CHAT} if path == "chat/completions" else {"prompt": "x"}
    with server.http() as http:
        answer = http.post(f"/v1/{path}", json={**body, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]


def test_a_prompt_over_the_context_has_its_own_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="talking", prompt="x" * 300)
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="talking", messages=CHAT, max_tokens=CONTEXT)
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "messages")
    assert str(CONTEXT) in told.value.message


def test_an_unknown_model_is_a_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as told:
        client.chat.completions.create(model="gpt-5", messages=CHAT)
    assert (told.value.code, told.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b'{"prompt": ', "application/json", 400, "invalid_json"),
        (b"\xff\xfe", "application/json", 400, "invalid_json"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "application/json", 400, "invalid_json"),
        (b"[" * 60000, "application/json", 400, "invalid_json"),
        (b'{"prompt": "x"}', "text/plain", 415, "not_announced_as_json"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, None),
        (b'{"prompt": "x", "\\ud800": 1}', "application/json", 400, None),
        (b'{"prompt": "x", "stream_options": {"\\udfff": 1}}', "application/json", 400, None),
        (b'{"prompt": "x", "metadata": {"\\ud800": "x"}}', "application/json", 200, None),
        (
            b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}',
            "application/json",
            400,
            None,
        ),
        (b'{"prompt": "x", "top_p": NaN}', "application/json", 400, None),
        (b"[]", "application/json", 400, None),
        (b"null", "application/json", 400, None),
    ],
)
def test_a_body_that_is_none(content: bytes, kind: str, status: int, code: str | None, server: Server) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert answer.json().get("error", {}).get("code") == code


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_a_body_over_the_limit_is_a_413(announced: bool, server: Server) -> None:
    body = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()
    content = body if announced else (body[at : at + 1000] for at in range(0, len(body), 1000))
    with server.http() as http:
        answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_that_waits_to_be_asked_for_is_refused_unread(server: Server) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {10**12}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_headers_over_the_limit_are_refused(server: Server) -> None:
    with server.http() as http:
        assert http.get("/health", headers={"X-Long": "x" * 100_000}).status_code in (400, 431)


def test_where_there_is_nothing_and_what_is_no_method(server: Server) -> None:
    with server.http() as http:
        nothing, no_method = http.get("/v2"), http.get("/v1/chat/completions")
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "not_found")
    assert (no_method.status_code, no_method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert no_method.headers["Allow"] == "POST"


def test_a_full_queue_says_when_to_come_back(server: Server, client: OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "talking", "prompt": "x", "n": MAX_WAITING}
    with client.completions.create(
        stream=True, max_tokens=CONTEXT - 8, extra_body={"ignore_eos": True}, **wanted
    ) as stream:
        next(stream)
        with pytest.raises(openai.RateLimitError) as told:
            client.completions.create(**wanted)
    assert told.value.code == "queue_full"
    assert int(told.value.response.headers["Retry-After"]) >= 1
    assert eventually(lambda: server.metric("vllm:num_requests_running") == 0)


def test_a_host_that_is_not_this_machine_is_refused(server: Server) -> None:
    with server.http() as http:
        for host in ("localhost:80", "[::1]:8000", "127.0.0.1", "LOCALHOST"):
            assert http.get("/health", headers={"Host": host}).status_code == 200
        for host in (
            "evil.example",
            "127.0.0.1%evil.example",
            "[::1]evil.example",
            "localhost.evil.example",
            "a@localhost",
        ):
            assert http.get("/health", headers={"Host": host}).status_code == 403
        assert http.head("/health").status_code == 200


def test_no_web_page_may_read_the_answers(server: Server) -> None:
    answer = httpx.get(f"{server.address}/v1/models", headers={"Origin": "https://example.org"})
    assert "access-control-allow-origin" not in answer.headers
