from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from serving import CONTEXT, MAX_BODY_BYTES, MAX_WAITING, Server, started

from talking_model import save_talking_model


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    return save_talking_model(tmp_path_factory.mktemp("served") / "talking")


@pytest.fixture(scope="session")
def server(talking: Path) -> Iterator[Server]:
    """One for most tests: offloaded on the emulated device, four sequences at once, a short queue, small bodies."""
    memory = ("--cpu-offload-gb", "100KiB", "--max-model-len", CONTEXT, "--max-num-seqs", 4)
    with started(talking, *memory, "--max-waiting", MAX_WAITING, "--max-body-bytes", MAX_BODY_BYTES) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client
