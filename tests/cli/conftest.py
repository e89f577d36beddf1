from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from command_line import Cli, Result

from overspill.cli import main
from talking_model import save_talking_model


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """The command line in this process: cli("plan", model, …, stdin=text) gives its exit code and what it wrote."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("overspill")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate

    def run(*arguments: object, stdin: str | TextIO = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            with pytest.raises(SystemExit) as end:
                main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Result(end.value.code, out, err)

    yield run
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    return save_talking_model(tmp_path_factory.mktemp("talking"))
