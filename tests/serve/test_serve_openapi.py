"""Requests made from the OpenAPI document, right and wrong ones: none may break the server."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import BaseSchema, Case, GenerationMode, checks
from serving import Server

EXAMPLES = 12
# Left out: positive_data_acceptance, since what ties one field to another, and which token ids there are, is no part of
# a JSON schema; the checks of keys, of which this server has none; those of resources that are made and deleted.
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.allow_header_conformance,
    checks.unsupported_method,
    checks.negative_data_rejection,
    checks.missing_required_header,
]


READ = (
    "/health",
    "/live/map",
    "/live/stats",
    "/metrics",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/offload",
    "/version",
)
ASKED = ("/detokenize", "/tokenize", "/v1/chat/completions", "/v1/completions")
WRONG_AND_RIGHT = [*((path, GenerationMode.POSITIVE) for path in READ), *itertools.product(ASKED, GenerationMode)]


@pytest.fixture(scope="module")
def document(server: Server) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{server.address}/openapi.json")


def test_every_endpoint_is_documented(document: BaseSchema) -> None:
    assert sorted(document) == sorted((*READ, *ASKED))


@pytest.mark.parametrize(("path", "mode"), WRONG_AND_RIGHT)
def test_no_request_breaks_the_server(path: str, mode: GenerationMode, document: BaseSchema) -> None:
    statuses: set[int] = set()
    for method in document[path]:
        operation = document[path][method]

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))
        def judged(case: Case) -> None:
            statuses.add(case.call_and_validate(checks=CHECKS, timeout=60).status_code)

        judged()
    assert (200 in statuses) == (mode is GenerationMode.POSITIVE) or path == "/v1/models/{model}"
