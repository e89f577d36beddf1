"""The least memory that a plan could start with, found by planning again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def least_bytes(fits: Callable[[int], bool], short_bytes: int, enough_bytes: int) -> int | None:
    """The least bytes that fit, in whole MiB (KiB or bytes where there are few); None where `enough_bytes` do not.

    `short_bytes` do not fit. One unit less than what is returned does not fit either.
    """
    unit, _ = _unit_of(enough_bytes)
    counts = range(short_bytes // unit, -(-enough_bytes // unit) + 1)
    found = bisect_left(counts, True, key=lambda count: fits(count * unit))
    return None if found == len(counts) else counts[found] * unit


def written(nbytes: int) -> str:
    """`nbytes`, rounded up to whole MiB (KiB or bytes where there are few), as options and control groups take it."""
    unit, name = _unit_of(nbytes) if nbytes % (1 << 20) else _UNITS[0]
    return f"{-(-nbytes // unit)}{name}"


def next_less(nbytes: int) -> int:
    """The most that is less than `nbytes`, in whole MiB (KiB or bytes where there are few)."""
    unit, _ = _unit_of(nbytes)
    return (nbytes - 1) // unit * unit


def _unit_of(nbytes: int) -> tuple[int, str]:
    return next((unit, name) for unit, name in _UNITS if nbytes >= 100 * unit or unit == 1)
