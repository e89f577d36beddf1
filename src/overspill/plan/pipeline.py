"""The time of a pass whose layers run one after the other while a ring copies others ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.plan.ring import Ring, buffer_of, next_index

_PASSES = 4  # the first finds full buffers; after two or three each takes the same


@dataclass(frozen=True)
class Turn:
    """A layer's turn: the seconds that it computes, and its place in the ring, None where it is in none."""

    seconds: float
    ring_index: int | None = None


@dataclass(frozen=True)
class Copy:
    """How a layer of the ring comes: over `channel` ("link", "disk"), which it takes for `seconds`.

    For the first `busy_s` of them computing beside it takes `slowed` times as long.
    """

    channel: str
    seconds: float
    busy_s: float = 0.0
    slowed: float = 1.0


def pass_seconds(turns: Sequence[Turn], ring: Ring | None, copies: Sequence[Copy]) -> float:
    """Seconds of a pass among many like it; `copies[i]` is of the ring's layer i.

    A layer's copy is ordered when the layer before it in its buffer has run, as offload/prefetch.py does; copies of
    one channel follow each other.
    """
    if ring is None:
        return sum(turn.seconds for turn in turns)
    now = begun = 0.0
    free_at: dict[str, float] = {}
    holds: dict[int, int] = {}
    ready: dict[int, float] = {}
    windows: list[tuple[float, float, float]] = []

    def order(index: int) -> None:
        buffer, copy = buffer_of(index, ring.step), copies[index]
        if holds.get(buffer) == index:
            return
        begin = max(now, free_at.get(copy.channel, 0.0))
        free_at[copy.channel] = ready[index] = begin + copy.seconds
        holds[buffer] = index
        if copy.slowed > 1 and copy.busy_s:
            windows.append((begin, begin + copy.busy_s, copy.slowed))

    for _ in range(_PASSES):
        begun = now
        for turn in turns:
            if (index := turn.ring_index) is not None:
                order(index)
                now = max(now, ready[index])
            windows = [window for window in windows if window[1] > now]
            now = _after(now, turn.seconds, windows)
            if index is None:
                continue
            if ring.look_ahead:
                order(next_index(index, ring.step, len(ring.layers)))
            else:
                holds.clear()
    return now - begun


def _after(now: float, work_s: float, windows: Sequence[tuple[float, float, float]]) -> float:
    """When work that takes `work_s` alone is done; `windows` are (begin, end, how much slower it is meanwhile)."""
    for begin, end, slowed in windows:
        if end <= now:
            continue
        alone = max(0.0, begin - now)
        if work_s <= alone:
            break
        work_s, now = work_s - alone, max(now, begin)
        if work_s * slowed <= end - now:
            return now + work_s * slowed
        work_s, now = work_s - (end - now) / slowed, end
    return now + work_s
