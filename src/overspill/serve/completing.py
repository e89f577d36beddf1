"""What chat and text completions share beside their fields."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel
from starlette.responses import Response

from overspill.engine.requests import FinishReason, RequestParams
from overspill.serve.answers import Usage
from overspill.serve.bodies import Sampled
from overspill.serve.errors import ApiError
from overspill.serve.generation import Generation
from overspill.serve.served import Served


@dataclass(frozen=True)
class Header:
    """What every part of an answer begins with."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Header:
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model}


def completing(served: Served, body: Sampled, sequences: list[tuple[list[int], RequestParams]]) -> Generation:
    """Submits them all. ApiError where they name tokens that there are not."""
    served.refuse_unknown(body.stop_token_ids or (), "stop_token_ids")
    served.refuse_unknown(map(int, body.logit_bias or ()), "logit_bias")
    return Generation(served.service, sequences, served.metrics.on_output)


def refuse_many(served: Served, answers: int) -> None:
    """ApiError for more answers than could ever wait together; judged before anything is made for each of them."""
    if answers > served.limits.max_waiting:
        raise ApiError(
            400, f"{answers} answers are asked for at once; the queue holds {served.limits.max_waiting}", param="n"
        )


def finish(reason: FinishReason | None) -> Literal["stop", "length"]:
    """Only these two end an answer: `Generation` raises where another one does."""
    assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    return cast(Literal["stop", "length"], reason.value)


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def json_answer(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


def stream_documented(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: with `stream` the answer is events."""
    schema = {"type": "string", "description": f"Events whose data are each a {chunk.__name__}; the last is [DONE]."}
    return {200: {"description": "The answer.", "content": {"text/event-stream": {"schema": schema}}}}
