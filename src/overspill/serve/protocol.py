"""HTTP as uvicorn speaks it, with an end to waiting for the rest of a request's head."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def timed_protocol(header_timeout_s: float) -> type[asyncio.Protocol]:
    """For uvicorn's `http`. Between requests its own keep-alive timeout holds."""

    class Protocol(H11Protocol):
        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._time_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._time_head()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._head is not None:
                self._head.cancel()

        def _time_head(self) -> None:
            """The clock runs from a head's first bytes (or from the connection) until it is whole."""
            if self.conn.their_state is not h11.IDLE:
                if self._head is not None:
                    self._head.cancel()
                self._head = None
            elif self._head is None:
                self._head = self.loop.call_later(header_timeout_s, self.transport.close)

    return Protocol
