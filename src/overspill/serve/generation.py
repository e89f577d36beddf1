"""From the engine's thread to the event loop: one HTTP request's sequences, and a client that may go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from overspill.engine.requests import EngineFailedError, FinishReason, Output, Request, RequestParams, TokenLogprob
from overspill.engine.service import EngineService

T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclass
class Choice:
    """One answer, complete."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, output: Output) -> None:
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason


class Generation:
    """Sequences that were submitted together. Made in the event loop, where their outputs arrive in order.

    Outputs wait here for as long as their reader takes, so a slow one holds nobody else. Leaving the `with` block
    cancels what has not ended.
    """

    def __init__(
        self,
        service: EngineService,
        sequences: Sequence[tuple[list[int], RequestParams]],
        on_output: Callable[[Request, Output], None],
    ) -> None:
        """Raises what `EngineService.submit` does. `on_output` hears each output in the engine's thread."""
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._on_output = on_output
        self._requests = [
            Request(ids, params, emit=partial(self._emit, index)) for index, (ids, params) in enumerate(sequences)
        ]
        self._open = set(range(len(sequences)))
        self.generated = 0
        service.submit(self._requests)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        if self._open:
            self._service.cancel([self._requests[index] for index in sorted(self._open)])
            self._open.clear()

    def _emit(self, index: int, output: Output) -> None:
        self._on_output(self._requests[index], output)
        with contextlib.suppress(RuntimeError):  # the loop has ended before the engine: nobody listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, output))

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Each output with the number of its sequence, until all have ended. Raises the error that one ended with."""
        while self._open:
            index, output = await self._queue.get()
            self.generated += len(output.token_ids)
            if output.finish_reason is not None:
                self._open.discard(index)
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise output.error or EngineFailedError("the engine gave the request up")
            yield index, output

    async def choices(self) -> list[Choice]:
        """All answers, complete."""
        choices = [Choice() for _ in self._requests]
        async for index, output in self.outputs():
            choices[index].add(output)
        return choices


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. It is given up when the client goes away, with ClientGoneError."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientGoneError
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
