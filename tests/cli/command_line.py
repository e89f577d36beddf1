"""What a command of the command line did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """From "error:" on; what stands before are notes and warnings."""
        return self.err[self.err.index("error: ") :]


Cli = Callable[..., Result]
