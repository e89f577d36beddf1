"""An answer of the server, streamed or whole, chat or text, taken apart the same way."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Choice:
    """One of an answer's `n`; `tokens` and their log-probabilities only where they were asked for."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, given: Mapping[str, Any]) -> None:
        """A choice of a chunk or of a whole answer."""
        message = given.get("delta") or given.get("message") or {}
        self.text += given.get("text") or message.get("content") or ""
        if given["finish_reason"] is not None:
            self.finish_reasons.append(given["finish_reason"])
        found = given.get("logprobs") or {}
        for token in found.get("content") or ():
            self._add(token["token"], token["logprob"], [other["logprob"] for other in token["top_logprobs"]])
        for token in zip(*(found.get(key, ()) for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
            self._add(token[0], token[1], list(token[2].values()))

    def _add(self, text: str, logprob: float, likeliest: list[float]) -> None:
        """The margin is between the two likeliest, 0 where fewer were given."""
        self.tokens.append(text)
        self.logprobs.append(logprob)
        first, second, *_ = sorted([*likeliest, logprob, logprob], reverse=True)
        self.margins.append(first - second if len(likeliest) > 1 else 0.0)


@dataclass
class Answer:
    """`ended` says how: "whole", "closed" (by us, on purpose), or "refused" (a status other than 200)."""

    status: int
    headers: httpx.Headers
    ended: str = "whole"
    choices: dict[int, Choice] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    usages: list[dict[str, int]] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    after_done: int = 0
    done: bool = False
    seconds: float = 0.0

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error; empty where there is none."""
        found = self.errors[0].get("error") if self.errors and isinstance(self.errors[0], dict) else None
        return found if isinstance(found, dict) else {}

    def add(self, part: Mapping[str, Any]) -> None:
        """A chunk, or a whole answer."""
        if "error" in part:
            self.errors.append(part)
            return
        self.ids.add(part["id"])
        for choice in part["choices"]:
            self.choices.setdefault(choice["index"], Choice()).add(choice)
        if part.get("usage") is not None:
            self.usages.append(part["usage"])


async def ask(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | bytes, *, close_after: int | None = None
) -> Answer:
    """Post `body` and read the answer to its end, or leave it after `close_after` events."""
    begun = time.monotonic()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", path, content=content, headers=headers) as response:
        answer = Answer(response.status_code, response.headers)
        if response.status_code != 200:
            answer.ended = "refused"
            answer.errors.append(_json(await response.aread()))
        elif response.headers["content-type"].startswith("text/event-stream"):
            await _events(response, answer, close_after)
        else:
            answer.add(json.loads(await response.aread()))
            answer.done = True
    answer.seconds = time.monotonic() - begun
    return answer


async def _events(response: httpx.Response, answer: Answer, close_after: int | None) -> None:
    events = 0
    if close_after == 0:
        answer.ended = "closed"
        return
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        answer.after_done += answer.done
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.done = True
            continue
        answer.add(json.loads(data))
        events += 1
        if events == close_after:
            answer.ended = "closed"
            return


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content[:200].decode(errors="replace")
