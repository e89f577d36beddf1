"""Which expert is in which slot: replacement by recency and frequency, and an account that must add up.

LRFU (Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used
Policies", IEEE Trans. Computers 50(12), 2001): an expert's score is the sum of its uses, each halved every HALF_LIFE
passes. All scores fade alike, so they are kept as logarithms that only change when an expert is used.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

Key = tuple[int, int]
"""(block, expert)."""

HALF_LIFE = 32.0
"""Passes after which a use counts half."""


@dataclass
class SlotCounts:
    """What happened so far. `check` holds what must add up.

    A pass looks up each expert that it chose of a block once: `hits` were in a slot or on their way to one. Of the
    misses `fetched` came into a slot, `streamed` passed through without staying, `computed` were computed on the CPU.
    `prefetched` came before they were asked for: `prefetch_used` were then chosen, `prefetch_wasted` evicted before
    that. `promoted` came after the CPU had computed them, `loaded` before the first pass. `bytes` are all that came;
    for `stall_s` computing waited.
    """

    hits: int = 0
    fetched: int = 0
    streamed: int = 0
    computed: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    prefetch_wasted: int = 0
    promoted: int = 0
    loaded: int = 0
    evictions: int = 0
    bytes: int = 0
    stall_s: float = 0.0

    @property
    def misses(self) -> int:
        return self.fetched + self.streamed + self.computed

    @property
    def lookups(self) -> int:
        return self.hits + self.misses

    @property
    def fills(self) -> int:
        """How often an expert came into a slot of the cache."""
        return self.fetched + self.prefetched + self.promoted + self.loaded

    def copy(self) -> SlotCounts:
        return SlotCounts(**{f.name: getattr(self, f.name) for f in fields(self)})

    def __sub__(self, earlier: SlotCounts) -> SlotCounts:
        return SlotCounts(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


class Admission(NamedTuple):
    """The slot that an expert got, and the one that had to go for it."""

    slot: int
    evicted: Key | None


class ExpertSlots:
    """Bookkeeping of `count` slots; no memory is touched. One thread uses it."""

    def __init__(self, count: int) -> None:
        assert count > 0, count
        self.count = count
        self.counts = SlotCounts()
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: dict[Key, int] = {}
        self._score: dict[Key, float] = {}  # log2 of the score as it would be at pass 0
        self._unused: set[Key] = set()  # prefetched, and not asked for yet
        self._by_score: list[tuple[float, Key]] = []  # a heap; entries that are no longer true are passed over
        self._pass = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._slot_of

    def __iter__(self) -> Iterator[Key]:
        return iter(self._slot_of)

    @property
    def free(self) -> int:
        return len(self._free)

    def slot(self, key: Key) -> int:
        return self._slot_of[key]

    def next_pass(self) -> None:
        """Time passes: scores fade."""
        self._pass += 1

    def use(self, key: Key) -> bool:
        """A pass chose `key`: whether it is in a slot. A hit is counted; what becomes of a miss its caller counts."""
        now = self._pass / HALF_LIFE
        before = self._score.get(key)
        if before is None:
            self._score[key] = now
        else:
            high, low = max(before, now), min(before, now)
            self._score[key] = high + math.log2(1 + 2.0 ** (low - high))
        if key not in self._slot_of:
            return False
        self._push(key)
        self.counts.hits += 1
        if key in self._unused:
            self._unused.remove(key)
            self.counts.prefetch_used += 1
        return True

    def admit(self, key: Key, keep: Collection[Key], *, only_if_better: bool = False) -> Admission | None:
        """A slot for `key`, which is in none; what it held is evicted. None where every slot holds one of `keep`.

        With `only_if_better` also None where whatever would have to go has the higher score.
        """
        assert key not in self._slot_of, f"{key} is in a slot already"
        victim = None
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._lowest(keep)
            if victim is None:
                return None
            if only_if_better and self._score.get(victim, -math.inf) >= self._score.get(key, -math.inf):
                self._push(victim)
                return None
            slot = self._slot_of.pop(victim)
            self.counts.evictions += 1
            if victim in self._unused:
                self._unused.remove(victim)
                self.counts.prefetch_wasted += 1
        self._slot_of[key] = slot
        self._push(key)
        return Admission(slot, victim)

    def load(self, key: Key) -> int:
        """A free slot for `key`, before the first pass."""
        admission = self.admit(key, ())
        assert admission is not None
        assert admission.evicted is None, "more is loaded than there are slots"
        self.counts.loaded += 1
        return admission.slot

    def prefetch(self, key: Key, keep: Collection[Key]) -> Admission | None:
        """`admit`, for an expert that nobody asked for yet."""
        admission = self.admit(key, keep)
        if admission is not None:
            self._unused.add(key)
            self.counts.prefetched += 1
        return admission

    def forget(self, key: Key) -> None:
        """What should have come into `key`'s slot did not; the slot is free again."""
        self._free.append(self._slot_of.pop(key))
        self.counts.evictions += 1
        if key in self._unused:
            self._unused.remove(key)
            self.counts.prefetch_wasted += 1

    def check(self) -> None:
        """Slots free and held make all of them, and the counts add up."""
        counts = self.counts
        assert len(self._free) + len(self._slot_of) == self.count, "slots were lost"
        assert len({*self._free, *self._slot_of.values()}) == self.count, "two experts share a slot"
        assert counts.fills - counts.evictions == len(self._slot_of), "fills less evictions are not what is held"
        assert counts.prefetched == counts.prefetch_used + counts.prefetch_wasted + len(self._unused)

    def _push(self, key: Key) -> None:
        heapq.heappush(self._by_score, (self._score.get(key, -math.inf), key))
        if len(self._by_score) > 8 * self.count + 64:
            self._by_score = [(self._score.get(k, -math.inf), k) for k in self._slot_of]
            heapq.heapify(self._by_score)

    def _lowest(self, keep: Collection[Key]) -> Key | None:
        """The key in a slot with the least score that is not to be kept; its entry is taken from the heap."""
        kept: list[tuple[float, Key]] = []
        found = None
        while self._by_score:
            entry = heapq.heappop(self._by_score)
            score, key = entry
            if key not in self._slot_of or score != self._score.get(key, -math.inf):
                continue
            if key not in keep:
                found = key
                break
            kept.append(entry)
        for entry in kept:
            heapq.heappush(self._by_score, entry)
        return found
