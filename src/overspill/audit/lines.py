"""A log, line by line, in constant memory, whatever it is made of."""

from __future__ import annotations

import codecs
import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from overspill.audit.records import Line
from overspill.audit.sources import unwrapped
from overspill.errors import CheckpointError

LONGEST_LINE = 1 << 16
"""Characters that are looked at; vLLM's line with its configuration has some 5000."""

_ANSI = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")
_COMPRESSED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"\xfd7zX": "xzcat", b"BZh": "bzcat"}
_USERS_TEXT = ("Received request", "Generated response", "prompt_token_ids", '"messages"', '"prompt":')


@contextmanager
def opened(name: str) -> Iterator[IO[str]]:
    """The log `name` as text, "-" for stdin. CheckpointError where it cannot be read, or is compressed."""
    if name == "-":
        raw = getattr(sys.stdin, "buffer", None)
        if raw is None:  # replaced by something that is text already
            yield sys.stdin
            return
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="replace", newline="\n")
        yield text
        text.detach()
        return
    try:
        with Path(name).open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise CheckpointError(
            f"the log {name} cannot be read: {error.strerror}", hint="give a log file, or - for standard input"
        ) from error
    reader = next((tool for magic, tool in _COMPRESSED.items() if head.startswith(magic)), None)
    if reader is not None:
        raise CheckpointError(f"the log {name} is compressed", hint=f"{reader} {shlex.quote(name)} | overspill audit -")
    encoding = "utf-16" if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
    with Path(name).open(encoding=encoding, errors="replace", newline="\n") as opened_text:  # PowerShell: UTF-16
        yield opened_text


def lines_of(text: IO[str]) -> Iterator[Line]:
    """Lines without colours; redraws of a progress bar are lines of the same number. What users wrote is left out."""
    number = 0
    while piece := text.readline(LONGEST_LINE):
        number += 1
        whole = piece
        while not whole.endswith("\n") and (whole := text.readline(LONGEST_LINE)):
            pass  # the rest of an overlong line
        if "\x1b" in piece:
            piece = _ANSI.sub("", piece)
        source, content = unwrapped(piece.rstrip("\r\n"))
        if "\x1b" in content:  # escaped in JSON
            content = _ANSI.sub("", content)
        for part in content.split("\r"):
            if part and not any(mark in part for mark in _USERS_TEXT):
                yield Line(number, part, source)
