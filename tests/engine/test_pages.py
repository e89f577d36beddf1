from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.engine.pages import PAGE_TOKENS, ZERO_PAGE, PagePool, PageTable

Steps = list[tuple[int, int]]
STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3 * PAGE_TOKENS)), max_size=60)


@given(STEPS, st.none() | st.integers(1, 50))
def test_no_page_is_lost_or_shared(steps: Steps, window: int | None) -> None:
    """Five sequences grow by random chunks, slide and end; whoever finds no page ends."""
    pool = PagePool(12)
    tables = [PageTable(pool, window) for _ in range(5)]
    lengths = [0] * 5
    for which, tokens in steps:
        table = tables[which]
        table.forget_before(lengths[which])
        if tokens == 0 or table.missing(lengths[which] + tokens) > pool.free:
            table.release()
            lengths[which] = 0
        else:
            lengths[which] += tokens
            table.grow(lengths[which])
            assert table.room - lengths[which] < PAGE_TOKENS
            attended = 0 if window is None else max(0, lengths[which] - tokens - window + 1)
            assert table.first <= attended < table.first + PAGE_TOKENS or window is None
        pool.check()
        held = [slot for t, n in zip(tables, lengths, strict=True) for slot in t.slots(t.first, n).tolist()]
        assert len(held) == len(set(held))
        assert all(slot // PAGE_TOKENS != ZERO_PAGE for slot in held)
        assert all(slot < (pool.pages + 1) * PAGE_TOKENS for slot in held)
    for table in tables:
        table.release()
    pool.check()
    assert (pool.held, pool.free) == (0, 12)


def test_an_undisturbed_sequence_lies_side_by_side() -> None:
    pool = PagePool(4)
    table = PageTable(pool, None)
    table.grow(40)
    slots = table.slots(3, 40).tolist()
    assert slots == list(range(slots[0], slots[0] + 37))
    table.release()
    assert pool.take() == 1


def test_positions_that_a_window_has_left_are_given_back() -> None:
    pool = PagePool(10)
    table = PageTable(pool, window=20)
    table.grow(70)
    before = table.slots(48, 70).tolist()
    table.forget_before(70)  # attends to 51 and later
    assert table.first == 48
    assert pool.held == 2
    assert table.slots(48, 70).tolist() == before
    with pytest.raises(AssertionError):
        table.slots(40, 70)


def test_a_page_is_given_back_once() -> None:
    pool = PagePool(2)
    page = pool.take()
    pool.give([page])
    with pytest.raises(AssertionError):
        pool.give([page])
