"""What the server says of itself: its models, its health, its counters, and where the weights are."""

from __future__ import annotations

import json
from typing import Any, Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

import overspill
from overspill.plan.report import plan_as_json
from overspill.serve.errors import ApiError, documented, without_paths
from overspill.serve.served import Served


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "overspill"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class Offload(BaseModel):
    """The plan as `overspill plan --json` prints it, and what came of it; without memory addresses."""

    plan: dict[str, Any]
    ledger: dict[str, Any]


def status_router(served: Served) -> APIRouter:
    router = APIRouter()

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=served.created, max_model_len=served.service.max_request_tokens)

    @router.get("/v1/models", responses=documented())
    async def list_models() -> ModelList:
        """The names that the model goes by."""
        return ModelList(data=[card(name) for name in served.names])

    @router.get("/v1/models/{model:path}", responses=documented(404))
    async def retrieve_model(model: str) -> ModelCard:
        """One of them."""
        return card(served.name_of(model))

    @router.head("/health", include_in_schema=False)
    @router.get(
        "/health", response_class=PlainTextResponse, responses={503: documented(503)[503], 403: documented(403)[403]}
    )
    async def health() -> Response:
        """Whether the engine works. Asks for no key."""
        if served.service.failure is not None:
            raise ApiError(503, without_paths(served.service.failure), code="engine_failed")
        return PlainTextResponse("")

    @router.get("/version", responses=documented())
    async def version() -> Version:
        """The server's version."""
        return Version(version=overspill.__version__)

    @router.get("/metrics", response_class=PlainTextResponse, responses=documented())
    def metrics() -> Response:
        """Counters for Prometheus; vLLM's names where the meaning is the same."""
        return Response(generate_latest(served.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    offloaded = json.dumps({"plan": plan_as_json(served.engine.plan), "ledger": _ledger(served)}).encode()

    @router.get("/v1/offload", response_model=Offload, responses=documented())
    async def offload() -> Response:
        """The plan and its ledger: what was to be where, and what is."""
        return Response(offloaded, media_type="application/json")

    return router


def _ledger(served: Served) -> dict[str, Any]:
    """Addresses are for the proof in the process, and nobody else's business."""
    ledger = served.engine.ledger.as_json()
    ledger["entries"] = [
        {key: value for key, value in entry.items() if not key.endswith("address")} for entry in ledger["entries"]
    ]
    return ledger
