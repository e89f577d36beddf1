"""Server-sent events: an answer on its way while it is made."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from overspill.errors import OverspillError
from overspill.serve.errors import told, unexpected
from overspill.serve.generation import ClientGoneError, Generation, unless_gone

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter: nginx passes each event on


class EventStream(Response):
    """Sends `chunks` as they come, and ends `generation` with the client or with the last chunk."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncIterator[BaseModel]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation, contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send(_part(_event(chunk)))
        except OverspillError as error:
            await send(_part(b"event: error\n" + _event(told(error).body)))
        except Exception as error:  # the status is out already: the stream is where it can be told
            await send(_part(b"event: error\n" + _event(unexpected(error).body)))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _event(value: BaseModel) -> bytes:
    return b"data: " + value.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def _part(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}
