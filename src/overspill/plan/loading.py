"""What loading takes at its most: what lies in its place already, and the conversion that is under way."""

from __future__ import annotations

from collections.abc import Iterable

from overspill.model.sources import Conversion, Extents
from overspill.model.weights import Role, Weight

CAST_BYTES = 2 * (64 << 20)
"""Casts are read and made in batches of 64 MiB, one while the one before is placed."""

DECODE_BYTES = 32 << 20
"""What decoders of packed blocks take besides, all threads together."""


def loading_peak(weights: Iterable[Weight]) -> int:
    """Bytes that filling `weights` takes at its most, where their memory is taken up as it is filled.

    The loader begins with the largest conversion, while little is in its place.
    """
    placed = cast = 0
    conversions: dict[int, tuple[Conversion, list[Weight]]] = {}
    for weight in weights:
        source = weight.source
        if isinstance(source, Conversion):
            conversions.setdefault(id(source), (source, []))[1].append(weight)
            continue
        placed += weight.nbytes
        if isinstance(source, Extents) and source.dtype != weight.dtype:
            cast += sum(extent.length for extent in source.extents) + weight.nbytes
    peak = 0
    for source, results in sorted(conversions.values(), key=lambda found: conversion_bytes(found[0]), reverse=True):
        placed += sum(weight.nbytes for weight in results)
        peak = max(peak, placed + _scratch_bytes(source, results) + DECODE_BYTES)
    return max(peak, placed + min(cast, CAST_BYTES))


def conversion_bytes(source: Conversion) -> int:
    """Bytes that a conversion reads."""
    return sum(record.nbytes for record in source.records)


def _scratch_bytes(source: Conversion, results: list[Weight]) -> int:
    """What is read, twice since the next is read meanwhile, and the result: in float32 where it was packed."""
    packed = any(record.encoding.packed for record in source.records)
    elements = sum(record.elements for record in source.records)
    made = 4 * elements if packed else conversion_bytes(source)
    if any(weight.dtype.itemsize != 4 for weight in results) or (
        source.why.endswith("rearranged") and any(weight.role is not Role.EMBEDDING for weight in results)
    ):
        made *= 2
    return 2 * conversion_bytes(source) + made
