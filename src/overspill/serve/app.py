"""The application: every endpoint behind its guards, and one voice for every error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import overspill
from overspill.engine.engine import Engine
from overspill.engine.service import EngineService
from overspill.errors import OverspillError
from overspill.serve import live
from overspill.serve.chat import chat_router
from overspill.serve.completions import completions_router
from overspill.serve.errors import ApiError, told
from overspill.serve.fields import mistake
from overspill.serve.generation import ClientGoneError
from overspill.serve.guards import HostGuard, KeyGuard, SizeGuard, Unexpected
from overspill.serve.limits import Limits
from overspill.serve.metrics import Metrics
from overspill.serve.served import Served, seeds_from
from overspill.serve.status import status_router
from overspill.serve.token_text import TokenTexts
from overspill.serve.tokenization import tokenization_router

_CLIENT_GONE = 499  # nginx's; nobody reads it


def create_app(
    service: EngineService,
    engine: Engine,
    *,
    model_names: Sequence[str],
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    loopback_only: bool = False,
    limits: Limits | None = None,
    seed: int | None = None,
) -> FastAPI:
    """Serve `engine` through `service`, which the caller starts and drains.

    `loopback_only` refuses requests whose Host header is not this machine's own name. Requests without a seed get
    theirs from `seed`; None draws them at random.
    """
    limits = limits or Limits()
    names = tuple(model_names)
    metrics = Metrics(engine, service, names[0])
    served = Served(
        engine, service, names, limits, metrics, seeds_from(seed), TokenTexts(engine.tokenizer, engine.decode)
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.close()

    app = FastAPI(
        title="overspill",
        description="An OpenAI-compatible server for a model whose weights do not fit its device.",
        version=overspill.__version__,
        docs_url=None,  # a page with foreign scripts
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(HTTPBearer(auto_error=False))] if api_key is not None else [],  # for the document
    )
    for router in (status_router, chat_router, completions_router, tokenization_router):
        app.include_router(router(served))
    live.mount(app, service, engine)
    _handle_errors(app)
    _guard(app, api_key, cors_origins, loopback_only, limits)
    return app


def _guard(app: FastAPI, api_key: str | None, cors_origins: Sequence[str], loopback_only: bool, limits: Limits) -> None:
    app.add_middleware(SizeGuard, limits=limits)  # the one added last is passed first
    if api_key is not None:
        app.add_middleware(KeyGuard, key=api_key)
    if loopback_only and api_key is None:
        app.add_middleware(HostGuard)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(Unexpected)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(OverspillError)
    async def ours(request: Request, error: OverspillError) -> Response:
        return told(error).response()

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(UnicodeEncodeError)
    async def half_a_character(request: Request, error: UnicodeEncodeError) -> Response:
        return ApiError(400, "the body holds half a character (as \\ud800 alone), which is no text").response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(request, list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def by_starlette(request: Request, error: HTTPException) -> Response:
        message = {
            400: "the body is not JSON that can be read",
            404: f"there is nothing at {request.method} {request.url.path[:200]}",
            405: f"{request.method} is not a method of {request.url.path[:200]}",
        }.get(error.status_code, error.detail)
        code = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()


def _invalid(request: Request, errors: list[Any]) -> ApiError:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json" and not kind.endswith("+json"):
        return ApiError(
            415, f'the body is announced as "{kind[:80]}", and must be application/json', code="not_announced_as_json"
        )
    if errors[0]["type"] == "json_invalid":
        return ApiError(
            400,
            f"the body is not JSON: {errors[0]['ctx']['error']} at character {errors[0]['loc'][-1]}",
            code="invalid_json",
        )
    message, param = mistake(errors)
    return ApiError(400, message, param=param)
