"""How much a client may ask of the server at once, and how long it may take to say it."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2


@dataclass(frozen=True)
class Limits:
    """`max_waiting` is the engine's queue: more answers than that cannot be asked for in one request."""

    max_waiting: int = 1024
    max_body_bytes: int = 4 * MIB
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
