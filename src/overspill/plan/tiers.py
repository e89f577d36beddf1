"""Where a weight lives, and how a layer gets it."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where a weight lives."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Access(StrEnum):
    """How a layer gets a weight.

    It is there, is read across the link at each use, is copied ahead, is used where it lies (experts that the CPU
    computes, whatever is mapped from disk), or comes through slots that hold the experts in demand.
    """

    RESIDENT = "resident"
    ZERO_COPY = "zero_copy"
    PREFETCH = "prefetch"
    IN_PLACE = "in_place"
    STREAM = "stream"
