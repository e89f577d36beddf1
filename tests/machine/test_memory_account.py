from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from overspill.errors import DeviceOutOfMemoryError
from overspill.machine import memory
from overspill.machine.memory import MemoryAccount, host_available_bytes

BUDGET = 100
purposes = st.sampled_from(["weights", "kv_cache", "working"])
sizes = st.integers(0, BUDGET)

WORDS = {"working": "working memory", "kv_cache": "KV cache", "buffer_pool": "buffer pool"}


class AccountBesideAModel(RuleBasedStateMachine):
    """Every operation on an account, held against two dictionaries that say what it should come to."""

    def __init__(self) -> None:
        super().__init__()
        self.account = MemoryAccount(BUDGET)
        self.held: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.peak = 0

    @staticmethod
    def total(held: dict[str, int], reserved: dict[str, int]) -> int:
        return sum(max(held.get(p, 0), reserved.get(p, 0)) for p in held.keys() | reserved.keys())

    def expect(self, held: dict[str, int], reserved: dict[str, int]) -> bool:
        """Whether the budget allows this; then it is what the account should come to."""
        if self.total(held, reserved) > BUDGET:
            return False
        self.held, self.reserved = held, reserved
        self.peak = max(self.peak, self.total(held, reserved))
        return True

    @rule(purpose=purposes, nbytes=sizes)
    def take(self, purpose: str, nbytes: int) -> None:
        grown = {**self.held, purpose: self.held.get(purpose, 0) + nbytes}
        if self.expect(grown, self.reserved):
            self.account.take(purpose, nbytes)
        else:
            with pytest.raises(DeviceOutOfMemoryError, match=WORDS.get(purpose, purpose)):
                self.account.take(purpose, nbytes)

    @rule(purpose=purposes, share=st.floats(0, 1))
    def give(self, purpose: str, share: float) -> None:
        nbytes = int(self.held.get(purpose, 0) * share)
        self.held = {**self.held, purpose: self.held.get(purpose, 0) - nbytes}
        self.account.give(purpose, nbytes)

    @rule(purpose=purposes, nbytes=sizes)
    def reserve(self, purpose: str, nbytes: int) -> None:
        if self.expect(self.held, {**self.reserved, purpose: nbytes}):
            self.account.reserve(purpose, nbytes)
        else:
            with pytest.raises(DeviceOutOfMemoryError, match=WORDS.get(purpose, purpose)):
                self.account.reserve(purpose, nbytes)

    @rule(source=purposes, destination=purposes, share=st.floats(0, 1))
    def move(self, source: str, destination: str, share: float) -> None:
        nbytes = int(self.held.get(source, 0) * share)
        moved = {**self.held, source: self.held.get(source, 0) - nbytes}
        moved[destination] = moved.get(destination, 0) + nbytes
        if self.expect(moved, self.reserved):
            self.account.move(nbytes, source, destination)
        else:
            with pytest.raises(DeviceOutOfMemoryError):
                self.account.move(nbytes, source, destination)

    @rule()
    def reset_peak(self) -> None:
        self.account.reset_peak()
        self.peak = self.total(self.held, self.reserved)

    @invariant()
    def agrees(self) -> None:
        assert {p: n for p, n in self.account.held.items() if n} == {p: n for p, n in self.held.items() if n}
        assert self.account.total_bytes == self.total(self.held, self.reserved) <= BUDGET
        assert self.account.peak_bytes == self.peak


AccountBesideAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
TestAccountBesideAModel = AccountBesideAModel.TestCase


def test_refusal_names_the_purpose_what_is_free_and_what_is_held() -> None:
    account = MemoryAccount(3 << 20)
    account.take("weights", 2 << 20)
    with pytest.raises(DeviceOutOfMemoryError) as refusal:
        account.take("buffer_pool", 2 << 20)
    assert "buffer pool needs 2.00 MiB" in refusal.value.message
    assert "1.00 MiB of 3.00 MiB are free" in refusal.value.message
    assert "weights 2.00 MiB" in refusal.value.message
    assert refusal.value.hint


def test_a_reservation_is_filled_before_it_adds_to_the_total() -> None:
    account = MemoryAccount(100)
    account.reserve("kv_cache", 60)
    account.take("kv_cache", 50)
    assert account.total_bytes == 60
    account.take("kv_cache", 20)
    assert account.total_bytes == 70


def test_a_reservation_of_what_is_held_already_asks_only_for_the_rest() -> None:
    account = MemoryAccount(100)
    account.take("kv_cache", 50)
    account.reserve("kv_cache", 90)
    assert account.total_bytes == account.peak_bytes == 90


def test_giving_back_what_is_not_held_is_our_defect() -> None:
    with pytest.raises(AssertionError, match="weights"):
        MemoryAccount(10).give("weights", 1)


class FakeSystem:
    """A /proc and a /sys under a folder, put in the place of the machine's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def member_of(self, *lines: str) -> None:
        self.write("/proc/self/cgroup", "\n".join(lines) + "\n")

    def write(self, path: str, text: str) -> None:
        file = self(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    fake = FakeSystem(tmp_path)
    monkeypatch.setattr(memory, "Path", fake)
    return fake


def test_without_control_groups_the_machine_s_memory_counts(system: FakeSystem) -> None:
    assert 0 < host_available_bytes() <= psutil.virtual_memory().total


def test_v2_limit_less_what_is_used_and_cannot_be_dropped(system: FakeSystem) -> None:
    system.member_of("0::/user/job")
    system.write("/sys/fs/cgroup/user/job/memory.max", "1000\n")
    system.write("/sys/fs/cgroup/user/job/memory.current", "700\n")
    system.write("/sys/fs/cgroup/user/job/memory.stat", "anon 400\ninactive_file 200\nactive_file 50\n")
    assert host_available_bytes() == 1000 - (700 - 250)


def test_v2_the_tightest_group_above_the_process_counts(system: FakeSystem) -> None:
    system.member_of("0::/user/job")
    system.write("/sys/fs/cgroup/user/job/memory.max", "max\n")
    system.write("/sys/fs/cgroup/user/job/memory.current", "10\n")
    system.write("/sys/fs/cgroup/user/job/memory.stat", "anon 10\n")
    system.write("/sys/fs/cgroup/user/memory.max", "500\n")
    system.write("/sys/fs/cgroup/user/memory.current", "100\n")
    system.write("/sys/fs/cgroup/user/memory.stat", "anon 100\n")
    assert host_available_bytes() == 400


def test_v1_limit_is_read_beside_other_controllers(system: FakeSystem) -> None:
    system.member_of("12:cpuset:/elsewhere", "5:memory:/job", "0::/")
    system.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000\n")
    system.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "600\n")
    system.write(
        "/sys/fs/cgroup/memory/job/memory.stat",
        "inactive_file 1\nactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n",
    )
    assert host_available_bytes() == 1000 - (600 - 150)


def test_group_whose_own_folder_is_not_mounted_falls_back_to_the_root(system: FakeSystem) -> None:
    """A container without a control-group namespace: the path is the machine's, the mount the container's own."""
    system.member_of("5:memory:/docker/0123abcd")
    system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n")
    system.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "250\n")
    system.write("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 50\n")
    assert host_available_bytes() == 800


def test_a_group_over_its_limit_has_nothing_left(system: FakeSystem) -> None:
    system.member_of("0::/job")
    system.write("/sys/fs/cgroup/job/memory.max", "1000\n")
    system.write("/sys/fs/cgroup/job/memory.current", "1200\n")
    system.write("/sys/fs/cgroup/job/memory.stat", "anon 1200\n")
    assert host_available_bytes() == 0
