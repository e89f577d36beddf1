"""What a request passes before it reaches an endpoint: whose it is, and how much of it there is.

Plain ASGI, outermost first: `Unexpected`, `HostGuard`, `KeyGuard`, `SizeGuard`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overspill.serve.address import is_loopback
from overspill.serve.errors import ApiError, unexpected
from overspill.serve.limits import Limits

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:%\[\]]+))(?::\d+)?")
_DISCARDED = 8  # times the limit is read of a body that is over it, so that its sender comes to read the refusal
_CHALLENGES = {True: 'Basic realm="overspill"', False: "Bearer"}


class Unexpected:
    """The last edge: what nobody caught is logged under an id, and the client is told that id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            answer = unexpected(error)
            if started or scope["type"] != "http":
                raise
            await answer.response()(scope, receive, send)


class HostGuard:
    """Only requests that name this machine itself, so that no web page reaches it under a name of its own making.

    That is DNS rebinding: a foreign page's host name is made to resolve to the loopback address.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_loopback(_host_name(Headers(scope=scope).get("host", ""))):
            refusal = ApiError(
                403,
                "without an API key this server answers only to localhost, 127.0.0.1 and [::1] in the Host header; "
                "a proxy in front of it sets that header, or --api-key is given",
                code="host_not_allowed",
            )
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class KeyGuard:
    """The key, as a bearer token or as the password that a browser asks for, on everything but /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._knows(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "the API key is missing or wrong; it is expected as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": _CHALLENGES[scope["path"] == "/"]},
        )
        await refusal.response()(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, given = header.partition(b" ")
        given = given.strip()
        if scheme.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given, self._key)


class SizeGuard:
    """Reads the body before anything else does: not more of it than the limit, and not for longer.

    Headers have been read by then; their parser limits only what of them arrives in pieces.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._header_limit = limits.max_header_bytes
        self._limit = limits.max_body_bytes
        self._timeout_s = limits.body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._header_limit:
            refusal = ApiError(
                431, f"the headers are over the limit of {self._header_limit} bytes", code="headers_too_large"
            )
            await refusal.response()(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            refusal = ApiError(408, f"the body did not arrive within {self._timeout_s:g} s", code="body_timeout")
            await refusal.response()(scope, receive, send)
        except ApiError as refusal:
            refusal.headers = {"Connection": "close"}
            await refusal.response()(scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replayed(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """None where the client went away meanwhile."""
        announced = int(headers.get("content-length", "0"))  # h11 lets nothing but digits through
        if announced > self._limit and headers.get("expect", "").lower() == "100-continue":
            raise self._too_large()
        body = bytearray()
        received = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            received += len(part)
            if received <= self._limit:
                body += part
            elif received > _DISCARDED * self._limit:
                raise self._too_large()
            if not message.get("more_body", False):
                break
        if received > self._limit:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is over the limit of {self._limit} bytes", code="body_too_large")


def _host_name(header: str) -> str:
    """The host of a Host header, without its port and an address's brackets; "" for what is no such header."""
    found = _HOST.fullmatch(header)
    return (found[1] or found[2]) if found is not None else ""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body first, in one piece; then what comes after it."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
