"""Bookkeeping of slots: whatever is asked for in whatever order, slots are not lost and counts add up."""

from __future__ import annotations

from collections import Counter, OrderedDict
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from overspill.offload.expert_slots import HALF_LIFE, ExpertSlots, Key

KEYS = [(block, expert) for block in range(3) for expert in range(4)]
keys = st.sampled_from(KEYS)


class Slots(RuleBasedStateMachine):
    """Held against a plain model: a dictionary of scores, each use halved every HALF_LIFE passes."""

    @initialize(count=st.integers(1, 8))
    def start(self, count: int) -> None:
        self.slots = ExpertSlots(count)
        self.uses: dict[Key, list[int]] = {}
        self.held: dict[Key, int] = {}
        self.now = 0

    def score(self, key: Key) -> float:
        return sum(2.0 ** ((then - self.now) / HALF_LIFE) for then in self.uses.get(key, ()))

    @rule()
    def next_pass(self) -> None:
        self.slots.next_pass()
        self.now += 1

    @rule(key=keys)
    def use(self, key: Key) -> None:
        self.uses.setdefault(key, []).append(self.now)
        assert self.slots.use(key) is (key in self.held)

    @rule(key=keys, keep=st.sets(keys, max_size=4), better=st.booleans(), ahead=st.booleans())
    def admit(self, key: Key, keep: set[Key], better: bool, ahead: bool) -> None:
        if key in self.held:
            return
        if ahead:
            admission = self.slots.prefetch(key, keep)
        else:
            admission = self.slots.admit(key, keep, only_if_better=better)
            self.slots.counts.fetched += admission is not None
        candidates = [other for other in self.held if other not in keep]
        full = len(self.held) == self.slots.count
        least = min(map(self.score, candidates), default=0.0)
        if full and not candidates:
            assert admission is None
        elif full and better and not ahead and abs(least - self.score(key)) > 1e-9:
            assert (admission is None) is (least > self.score(key))
        if admission is None:
            assert full
            return
        assert (admission.evicted is not None) is full
        if admission.evicted is not None:
            assert admission.evicted in candidates
            assert self.score(admission.evicted) <= least + 1e-9, "the least score goes"
            assert self.held.pop(admission.evicted) == admission.slot
        assert admission.slot not in self.held.values()
        self.held[key] = admission.slot

    @rule(key=keys)
    def load(self, key: Key) -> None:
        if key not in self.held and len(self.held) < self.slots.count:
            self.held[key] = self.slots.load(key)

    @rule(key=keys)
    def forget(self, key: Key) -> None:
        if key in self.held:
            self.slots.forget(key)
            del self.held[key]

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check()
            assert {key: self.slots.slot(key) for key in self.slots} == self.held
            assert self.slots.free == self.slots.count - len(self.held)


TestSlots = Slots.TestCase


@given(st.lists(keys, max_size=40))
def test_what_is_used_once_more_is_kept_longer(order: list[Key]) -> None:
    """With one slot per key nothing is ever evicted."""
    slots = ExpertSlots(len(KEYS))
    for key in order:
        slots.next_pass()
        if not slots.use(key):
            slots.admit(key, ())
            slots.counts.fetched += 1
    assert slots.counts.evictions == 0
    assert slots.counts.misses == len(set(order))
    assert slots.counts.hits == len(order) - len(set(order))


def test_counts_of_a_span_are_a_difference() -> None:
    slots = ExpertSlots(2)
    slots.use((0, 0))
    before = slots.counts.copy()
    slots.admit((0, 0), ())
    slots.counts.fetched += 1
    slots.use((0, 0))
    since = slots.counts - before
    assert (since.hits, since.fetched, since.lookups, since.fills) == (1, 1, 2, 1)


def test_frequency_and_recency_beat_recency_alone() -> None:
    """Experts in demand as routers have them (a few hot, a long tail): more hits than with least-recently-used."""
    random = Random(5)
    experts = list(range(64))
    weights = [1 / (rank + 1) for rank in experts]
    slots, recent = ExpertSlots(16), OrderedDict[int, None]()
    hits: Counter[str] = Counter()
    for _ in range(2000):
        slots.next_pass()
        chosen = set(random.choices(experts, weights, k=4))
        keep = {(0, expert) for expert in chosen}
        for expert in sorted(chosen):
            if slots.use((0, expert)):
                hits["lrfu"] += 1
            else:
                slots.admit((0, expert), keep)
                slots.counts.fetched += 1
            if expert in recent:
                hits["lru"] += 1
                recent.move_to_end(expert)
            else:
                recent[expert] = None
                if len(recent) > 16:
                    recent.popitem(last=False)
    slots.check()
    assert hits["lrfu"] > hits["lru"] * 1.05
