from __future__ import annotations

import pytest

from overspill.plan.ring import buffer_of, next_index

PASSES = 3


@pytest.mark.parametrize(
    ("count", "step", "targets"),
    [
        (3, 1, [1, 2, 0]),
        (3, 2, [2, 1, 0]),
        (4, 2, [2, 3, 0, 1]),
        (5, 2, [2, 3, 4, 1, 0]),
        (3, 3, [0, 1, 2]),
        (3, 4, [1, 2, 0]),
        (8, 3, [3, 4, 5, 6, 7, 2, 0, 1]),
    ],
)
def test_targets_are_vllms(count: int, step: int, targets: list[int]) -> None:
    assert [next_index(index, step, count) for index in range(count)] == targets


@pytest.mark.parametrize("step", range(1, 65))
def test_no_buffer_is_overwritten_before_its_reader_is_done(step: int) -> None:
    """Every number of layers from 1 to 64: each layer finds its own bytes, and each is copied once a pass."""
    for count in range(1, 65):
        holds: list[int | None] = [None] * step
        unread = [False] * step
        for index in range(min(step, count)):
            holds[buffer_of(index, step)] = index
            unread[buffer_of(index, step)] = True
        for _ in range(PASSES):
            copied = [0] * count
            for index in range(count):
                own = buffer_of(index, step)
                assert holds[own] == index
                unread[own] = False
                following = next_index(index, step, count)
                target = buffer_of(following, step)
                copied[following] += 1
                if holds[target] != following:
                    assert not unread[target], f"{count} layers, step {step}: {following} overwrites {holds[target]}"
                    assert step < count, "with a buffer for each layer nothing is ever replaced"
                    holds[target] = following
                unread[target] = True
            assert copied == [1] * count
