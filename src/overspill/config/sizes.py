"""Sizes, bandwidths and durations as people write them, and sizes as they are printed.

KiB MiB GiB TiB are powers of 1024, KB MB GB TB powers of 1000. No exponents, no signs, no bits.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from overspill.errors import ConfigError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_BYTE_UNITS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
# Mixed case such as "Gb" stays out: it is how gigabits are written.
_BYTE_SPELLINGS = {
    spelling: factor for unit, factor in _BYTE_UNITS.items() for spelling in (unit, unit.lower(), unit.upper())
}
_SECOND_UNITS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
}
_QUANTITY = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([A-Za-zµ/]*)\s*")


def parse_bytes(value: str | float, *, bare: Literal["B", "GiB"] = "B", field: str = "size") -> int:
    """Bytes of "2GiB", "16GB", "512 MiB"; a number without a unit counts in `bare`.

    A fraction of a byte is cut off. Raises ConfigError, naming `field`, for anything else: nan, inf, a
    negative number, an unknown unit, or a size above zero that is less than one byte.
    """
    hint = f'write it like "2GiB", "512MiB" or "16GB"; a number without a unit is in {bare}'
    number, unit = _quantity(value, field, "a size", hint)
    factor = _BYTE_SPELLINGS.get(unit or bare)
    if factor is None:
        raise ConfigError(f'"{field}" is {_shown(value)}: "{unit}" is not a unit of bytes', hint=hint)
    nbytes = int(number * factor)
    if number and not nbytes:
        raise ConfigError(f'"{field}" is {_shown(value)}: less than one byte', hint=hint)
    return nbytes


def parse_bandwidth(value: str | float, *, field: str = "bandwidth") -> float:
    """Bytes per second of "16GB/s" or "1.5GiB/s"; a number that is no text is bytes per second already.

    Raises ConfigError, naming `field`, for anything else, and for zero.
    """
    hint = 'write it in bytes per second with its unit, like "16GB/s" or "900MiB/s"'
    number, unit = _quantity(value, field, "a bandwidth", hint)
    factor = _BYTE_SPELLINGS.get(unit.removesuffix("/s")) if unit.endswith("/s") else None
    if isinstance(value, str) and factor is None:
        raise ConfigError(f'"{field}" is {_shown(value)}: {_not_a_unit(unit)} of bandwidth', hint=hint)
    if not number:
        raise ConfigError(f'"{field}" is {_shown(value)}: a link that moves nothing', hint=hint)
    return float(number * (factor or 1))


def parse_duration(value: str | float, *, field: str = "duration") -> float:
    """Seconds of "10us", "1ms" or "0.5s"; a number that is no text is seconds already.

    Raises ConfigError, naming `field`, for anything else.
    """
    hint = 'write it with its unit, like "10us", "1ms" or "0.5s"'
    number, unit = _quantity(value, field, "a duration", hint)
    factor = _SECOND_UNITS.get(unit)
    if isinstance(value, str) and factor is None:
        raise ConfigError(f'"{field}" is {_shown(value)}: {_not_a_unit(unit)} of time', hint=hint)
    return float(number * (factor or 1))


def format_gib(nbytes: int) -> str:
    """vLLM's figure: GiB rounded to two places, without the unit ("8.02", and "0.0" for little)."""
    return str(round(nbytes / GIB, 2))


def format_bytes(nbytes: int) -> str:
    """A size for people: "4.50 GiB", "512.00 MiB", "1.50 KiB", "12 B"; the sign is kept."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"


def _quantity(value: str | float, field: str, kind: str, hint: str) -> tuple[Fraction, str]:
    """The exact number and its unit ("" for none)."""
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is not None:
            return Fraction(match[1]), match[2]
    elif not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return Fraction(value), ""
    raise ConfigError(f'"{field}" is {_shown(value)}, which is not {kind}', hint=hint)


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _not_a_unit(unit: str) -> str:
    return f'"{unit}" is not a unit' if unit else "it has no unit"
