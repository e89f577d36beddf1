"""Which aligned requests read a set of extents: neighbours merged, small gaps read through, long ones cut.

Sizes and offsets are bytes. Everything a disk is asked for lies on a grid of ALIGNMENT, as O_DIRECT demands.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from overspill.checkpoint.records import Extent

ALIGNMENT = 4096
# A gap is read through where skipping it would cost a request of its own.
GAP_BYTES = 64 << 10
# Less is not worth the requests for the edges that do not lie on the grid.
MIN_IN_PLACE_BYTES = 64 << 10


class Piece(NamedTuple):
    """An extent and where it goes: `view`, writable bytes at `address`."""

    extent: Extent
    view: memoryview
    address: int


class Part(NamedTuple):
    """Bytes `begin` to `end` of the file, which lie in `piece`."""

    begin: int
    end: int
    piece: Piece


@dataclass(slots=True)
class Request:
    """The bytes from `offset` to at least `wanted_end` of a file, to be read in one go.

    With a `target` they land there; else in a staging buffer, from which the parts are to be copied.
    """

    path: Path
    offset: int
    wanted_end: int
    parts: list[Part] = field(default_factory=list)
    target: memoryview | None = None

    @property
    def length(self) -> int:
        """What is asked for: aligned, so it may reach beyond what is wanted, and beyond the file's end."""
        return round_up(self.wanted_end) - self.offset

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.wanted_end = max(self.wanted_end, part.end)


def plan_requests(path: Path, pieces: Sequence[tuple[Extent, memoryview]], size: int) -> Iterator[Request]:
    """Requests of at most `size` bytes, a multiple of ALIGNMENT, that fill all `pieces` of `path`.

    Where a view's address and its extent's offset have the same remainder by ALIGNMENT, its inside is read in
    place and only its edges are staged. Bytes that several pieces want may be read more than once.
    """
    gathered = Request(path, 0, 0)
    for extent, view in sorted(pieces, key=lambda piece: piece[0].offset):
        piece = Piece(extent, view.cast("B"), address_of(view))
        for begin, end, in_place in _split(piece):
            if in_place:
                yield from _in_place(path, piece, begin, end, size)
                continue
            while begin < end:
                reach = min(gathered.offset + size, gathered.wanted_end + GAP_BYTES)
                if not gathered.parts or not gathered.offset <= begin < reach:
                    if gathered.parts:
                        yield gathered
                    gathered = Request(path, round_down(begin), begin)
                stop = min(end, gathered.offset + size)
                gathered.add(Part(begin, stop, piece))
                begin = stop
    if gathered.parts:
        yield gathered


def most_bytes(extents: Iterable[Extent]) -> int:
    """The most that the requests of one read of `extents`, of which no two overlap, bring: edges and gaps included."""
    total = 0
    before: Extent | None = None
    for extent in sorted(extents, key=lambda e: (e.file, e.offset)):
        start = round_down(extent.offset)
        if before is not None and before.file == extent.file:
            before_end = before.offset + before.length
            start = round_up(before_end) if extent.offset - before_end < GAP_BYTES else start
        total += max(0, round_up(extent.offset + extent.length) - start)
        before = extent
    return total


def address_of(view: memoryview) -> int:
    """Where the writable, contiguous and not empty memory of `view` begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def round_up(offset: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def round_down(offset: int) -> int:
    """The last multiple of ALIGNMENT."""
    return offset // ALIGNMENT * ALIGNMENT


def _split(piece: Piece) -> list[tuple[int, int, bool]]:
    """The ranges (begin, end, in place?) of the file that make up `piece`."""
    begin, end = piece.extent.offset, piece.extent.offset + piece.extent.length
    inner, inner_end = round_up(begin), round_down(end)
    if (piece.address - begin) % ALIGNMENT or inner_end - inner < MIN_IN_PLACE_BYTES:
        return [(begin, end, False)]
    return [(begin, inner, False), (inner, inner_end, True), (inner_end, end, False)]


def _in_place(path: Path, piece: Piece, begin: int, end: int, size: int) -> Iterator[Request]:
    start = piece.extent.offset
    for offset in range(begin, end, size):
        part = Part(offset, min(offset + size, end), piece)
        yield Request(path, offset, part.end, [part], piece.view[part.begin - start : part.end - start])
