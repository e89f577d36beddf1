"""Memory of a KV cache in pages: who holds which.

Page 0 is nobody's and stays zero: what pads a shorter sequence beside a longer one is read from there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

PAGE_TOKENS = 16
ZERO_PAGE = 0


class PagePool:
    """Hands out page numbers from 1 to `pages`, runs of neighbours where there are any."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages, ZERO_PAGE, -1))  # the next one is last
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return len(self._held)

    def take(self) -> int:
        """A page; the caller has seen that one is free."""
        page = self._free.pop()
        self._held.add(page)
        return page

    def give(self, pages: Iterable[int]) -> None:
        returned = list(pages)
        assert self._held.issuperset(returned), "a page is given back by who holds it, once"
        self._held.difference_update(returned)
        self._free += sorted(returned, reverse=True)
        if not self._held:
            self._free.sort(reverse=True)

    def check(self) -> None:
        """Free and held pages are all pages, each once."""
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert sorted([*self._free, *self._held]) == list(range(1, self.pages + 1)), "a page is lost or held twice"


class PageTable:
    """The pages of one sequence in one pool: of positions from `first` on, which is a multiple of the page.

    With a `window`, pages that no later position attends to are given back: a position sees itself and the
    `window - 1` before it.
    """

    def __init__(self, pool: PagePool, window: int | None) -> None:
        self.pool = pool
        self.window = window
        self.first = 0
        self.pages: list[int] = []

    @property
    def room(self) -> int:
        """Positions that have a page, from position 0 on."""
        return self.first + len(self.pages) * PAGE_TOKENS

    def missing(self, length: int) -> int:
        """Pages to take before `length` positions have one."""
        return max(0, -(-(length - self.room) // PAGE_TOKENS))

    def grow(self, length: int) -> None:
        for _ in range(self.missing(length)):
            self.pages.append(self.pool.take())

    def forget_before(self, position: int) -> None:
        """Give back what the position `position` and later ones do not attend to."""
        if self.window is None:
            return
        unseen = max(0, position - self.window + 1 - self.first) // PAGE_TOKENS
        self.pool.give(self.pages[:unseen])
        del self.pages[:unseen]
        self.first += unseen * PAGE_TOKENS

    def slots(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Where in the pool's memory, in tokens, the positions from `start` to `end` lie."""
        assert self.first <= start <= end <= self.room
        at = start - self.first
        pages = np.asarray(self.pages[at // PAGE_TOKENS : -(-(end - self.first) // PAGE_TOKENS)], dtype=np.int64)
        slots = (pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
        at %= PAGE_TOKENS
        return slots[at : at + end - start]

    def release(self) -> None:
        self.pool.give(self.pages)
        self.pages = []
        self.first = 0
