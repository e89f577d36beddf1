"""Which aligned requests read a set of extents: neighbours merged, small gaps read through, large runs cut.

Sizes and offsets are bytes. Everything a disk is asked for lies on a grid of ALIGNMENT, as O_DIRECT demands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from overspill.checkpoint.records import Extent

ALIGNMENT = 4096
# A gap is read through where skipping it would cost a request of its own.
GAP_BYTES = 64 << 10


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
    """`length` bytes at `offset` of a file, read in one go.

    With a `target` they land there; else in a staging buffer, from which the parts are to be copied.
    """

    path: Path
    offset: int
    length: int
    parts: list[Part] = field(default_factory=list)
    target: memoryview | None = None

    @property
    def wanted_end(self) -> int:
        """The end of what anyone needs of it: a file may end before the request does."""
        return max(part.end for part in self.parts)


def plan_requests(path: Path, pieces: list[Piece], size: int) -> list[Request]:
    """Requests of at most `size` bytes, a multiple of ALIGNMENT, that read all `pieces` of `path`, by offset.

    Where a piece's address and offset have the same remainder by ALIGNMENT, its inside is read in place and
    only its edges are staged.
    """
    requests: list[Request] = []
    staged: list[Part] = []
    for piece in pieces:
        begin, end = piece.extent.offset, piece.extent.offset + piece.extent.length
        inner, inner_end = round_up(begin), round_down(end)
        if (piece.address - begin) % ALIGNMENT or inner_end - inner < GAP_BYTES:
            staged.append(Part(begin, end, piece))
            continue
        for offset in range(inner, inner_end, size):
            part = Part(offset, min(offset + size, inner_end), piece)
            target = piece.view[part.begin - begin : part.end - begin]
            requests.append(Request(path, offset, part.end - offset, [part], target))
        staged.extend(Part(*edge, piece) for edge in ((begin, inner), (inner_end, end)) if edge[0] < edge[1])
    for run in _runs(sorted(staged, key=attrgetter("begin"))):
        requests.extend(_staged_requests(path, run, size))
    requests.sort(key=attrgetter("offset"))
    return requests


def round_up(offset: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def round_down(offset: int) -> int:
    """The last multiple of ALIGNMENT."""
    return offset // ALIGNMENT * ALIGNMENT


def _runs(parts: list[Part]) -> Iterator[list[Part]]:
    """Groups `parts`, ordered by where they begin, into those worth reading without a break."""
    run: list[Part] = []
    run_end = 0
    for part in parts:
        if run and part.begin > run_end + GAP_BYTES:
            yield run
            run = []
        run.append(part)
        run_end = max(run_end, part.end)
    if run:
        yield run


def _staged_requests(path: Path, run: list[Part], size: int) -> list[Request]:
    base, end = round_down(run[0].begin), round_up(max(part.end for part in run))
    requests = [Request(path, offset, min(size, end - offset)) for offset in range(base, end, size)]
    for part in run:
        for request in requests[(part.begin - base) // size : -(-(part.end - base) // size)]:
            begin = max(part.begin, request.offset)
            request.parts.append(Part(begin, min(part.end, request.offset + request.length), part.piece))
    return [request for request in requests if request.parts]
