"""An application on a socket, until it is told to stop: then it finishes what it has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from overspill.engine.service import EngineService
from overspill.serve.limits import Limits
from overspill.serve.protocol import timed_protocol

_BACKLOG = 2048
_LAST_BYTES_S = 5  # for the ends of answers to be read, after the engine has finished them


def run(
    app: FastAPI,
    service: EngineService,
    listener: socket.socket,
    *,
    limits: Limits,
    grace_s: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT. New work is then refused, and what runs may take `grace_s`.

    A second signal ends the process at once.
    """
    config = uvicorn.Config(
        app,
        http=timed_protocol(limits.header_timeout_s),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        timeout_graceful_shutdown=_LAST_BYTES_S,
    )
    asyncio.run(_Server(config, service, grace_s, on_ready).serve([listener]))


class _Server(uvicorn.Server):
    """uvicorn with signals that drain the engine first."""

    def __init__(
        self, config: uvicorn.Config, service: EngineService, grace_s: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._grace_s = grace_s
        self._on_ready = on_ready
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signalled = False

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal signalled
            if signalled:
                os._exit(128 + number)
            signalled = True
            loop.call_soon_threadsafe(self._begin_to_stop)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin_to_stop(self) -> None:
        self._stopping = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        print(f"stopping: what runs may take {self._grace_s:g} s more", file=sys.stderr, flush=True)
        await asyncio.to_thread(self._service.drain, self._grace_s)
        self.should_exit = True
