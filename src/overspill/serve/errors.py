"""What a client is told when something is refused or fails: OpenAI's shape, and nothing of this machine."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from overspill.engine.grammar import GrammarError
from overspill.engine.requests import DrainingError, EngineFailedError, QueueFullError
from overspill.errors import CapacityError, ConfigError, OverspillError

logger = logging.getLogger(__name__)

QUEUE_RETRY_S, DRAINING_RETRY_S = 1, 10
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PATH = re.compile(r"(?<![\w/])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@%-]+){2,}")


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error."""

    error: ErrorDetails


class ApiError(Exception):
    """An answer that is an error. `param` names the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        named = None if param is None else _encodable(param)
        self.body = ErrorBody(error=ErrorDetails(message=_encodable(message), type=kind, param=named, code=code))

    def response(self) -> JSONResponse:
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def told(error: OverspillError) -> ApiError:
    """What a client sees of an error of ours."""
    text = error.message if error.hint is None else f"{error.message}; {error.hint}"
    if isinstance(error, QueueFullError):
        return ApiError(429, text, code="queue_full", headers={"Retry-After": str(QUEUE_RETRY_S)})
    if isinstance(error, DrainingError):
        return ApiError(503, text, code="draining", headers={"Retry-After": str(DRAINING_RETRY_S)})
    if isinstance(error, EngineFailedError):
        return ApiError(503, without_paths(text), code="engine_failed")
    if isinstance(error, ConfigError | GrammarError):
        return ApiError(400, without_paths(text))
    if isinstance(error, CapacityError):
        return ApiError(500, without_paths(text), code="out_of_memory")
    return unexpected(error)


def unexpected(error: BaseException) -> ApiError:
    """An error whose text is for the log only; the client's answer has the id under which it stands there."""
    number = secrets.token_hex(6)
    logger.error("error %s: %s", number, error, exc_info=error)
    return ApiError(500, f"the server failed to answer; its log says why under the id {number}", code="internal_error")


def without_paths(text: str) -> str:
    """`text` without the paths of this machine that it may hold."""
    return _PATH.sub("(a path)", text)


def _encodable(text: str) -> str:
    """JSON may hold half a character (\\ud800), which no answer can repeat."""
    return text.encode(errors="replace").decode()


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of an endpoint, for the OpenAPI document. Those that any request may get are added."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in (*statuses, *_ANYWHERE)}


_ANYWHERE = (401, 403, 431, 500)
_MEANINGS = {
    400: "A field is wrong, cannot be honoured, or the prompt is too long.",
    401: "The API key is missing or wrong.",
    403: "The Host header is not this server's.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is over the limit.",
    431: "The headers are over the limit.",
    415: "The body is not announced as application/json.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The server failed; nothing is wrong with the request.",
    503: "The server is shutting down, or its engine has failed.",
}
BODY_ERRORS = (400, 404, 408, 413, 415)
