"""What an engine that throws does to its clients. In this process, so that it can be made to throw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import overspill
from overspill.engine.engine import Engine
from overspill.engine.service import EngineService
from overspill.serve.app import create_app
from overspill.serve.guards import SizeGuard, Unexpected
from overspill.serve.limits import Limits

SECRET = "/secret/place/of/weights.bin"
ASKED: dict[str, Any] = {"prompt": "x", "max_tokens": 4}


class Throwing:
    """A hook before the model runs; throws `error` as long as there is one."""

    error: Exception | None = None

    def __call__(self, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def engine(talking: Path) -> Engine:
    return overspill.load(talking, device="emulated", max_num_seqs=2)


@pytest.fixture
def throwing(engine: Engine) -> Iterator[Throwing]:
    throwing = Throwing()
    hook = engine.placed.model.register_forward_pre_hook(throwing)
    yield throwing
    hook.remove()


@pytest.fixture
def service(engine: Engine) -> Iterator[EngineService]:
    service = EngineService(engine, max_num_seqs=2, max_waiting=4, max_batch_tokens=64)
    service.start()
    yield service
    service.drain(0.0)


@pytest.fixture
def app(engine: Engine, service: EngineService) -> FastAPI:
    return create_app(service, engine, model_names=["talking"])


def ask(app: Any, method: str, path: str, **given: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await client.request(method, path, **given)

    return asyncio.run(send())


def test_a_step_that_throws_is_a_500_that_tells_no_path(
    app: FastAPI, throwing: Throwing, caplog: pytest.LogCaptureFixture
) -> None:
    throwing.error = RuntimeError(f"cannot read {SECRET}")
    answer = ask(app, "POST", "/v1/completions", json=ASKED)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert SECRET not in answer.text
    assert SECRET in caplog.text
    throwing.error = None
    assert ask(app, "POST", "/v1/completions", json=ASKED).status_code == 200, "it fails only its own requests"
    assert ask(app, "GET", "/health").status_code == 200


def test_a_step_that_throws_ends_a_stream_with_an_error(app: FastAPI, throwing: Throwing) -> None:
    throwing.error = RuntimeError(f"cannot read {SECRET}")
    answer = ask(
        app, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    assert answer.status_code == 200
    *_, error, done, end = answer.text.split("\n\n")
    assert error.startswith('event: error\ndata: {"error":{"message":')
    assert (done, end) == ("data: [DONE]", "")
    assert SECRET not in answer.text


def test_an_engine_that_cannot_go_on_says_why(app: FastAPI, service: EngineService, throwing: Throwing) -> None:
    throwing.error = overspill.DefectError(f"an access to {SECRET}")
    assert ask(app, "POST", "/v1/completions", json=ASKED).status_code in (500, 503)
    health = ask(app, "GET", "/health")
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "engine_failed"
    assert "DefectError" in health.json()["error"]["message"]
    assert SECRET not in health.text
    assert ask(app, "POST", "/v1/completions", json=ASKED).status_code == 503


def test_what_nobody_expected_is_told_by_an_id_that_the_log_has_too(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError(SECRET)

    answer = ask(Unexpected(broken), "GET", "/")
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert SECRET not in message
    assert message.split()[-1] in caplog.text
    assert SECRET in caplog.text


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def unreached(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the body was not whole")

    answer = ask(SizeGuard(unreached, Limits(body_timeout_s=0.05)), "POST", "/", content=slow())
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "body_timeout"


def test_a_model_without_a_chat_template_says_what_it_can(
    app: FastAPI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    refused = ask(app, "POST", "/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "roles must alternate" in refused.json()["error"]["message"]
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    none = ask(app, "POST", "/v1/chat/completions", json=chat)
    assert (none.status_code, none.json()["error"]["param"]) == (400, "messages")
    assert "/v1/completions" in none.json()["error"]["message"]


def test_a_model_without_a_tokenizer_takes_and_counts_token_ids(
    app: FastAPI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "tokenizer", None)
    assert ask(app, "POST", "/v1/completions", json=ASKED).status_code == 400
    answer = ask(app, "POST", "/v1/completions", json={"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3
