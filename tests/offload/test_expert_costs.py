"""Who takes a missing expert: the link or the CPU."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_modules import block_of, make_experts, stacked
from overspill.machine.device import Link
from overspill.offload.expert_costs import ExpertCosts, measure_costs, split
from overspill.offload.in_place import cpu_kernel

COSTS = ExpertCosts(fetch_s=3.0, cpu_s=((1, 1.0), (8, 2.0), (64, 10.0)))


def test_between_measured_counts_costs_lie_on_a_line_and_beyond_in_proportion() -> None:
    assert [COSTS.computed_s(tokens) for tokens in (1, 8, 64)] == [1.0, 2.0, 10.0]
    assert COSTS.computed_s(36) == 6.0
    assert COSTS.computed_s(128) == 20.0


def test_what_is_dear_to_compute_is_fetched() -> None:
    assert split([(0, 1)], COSTS) == {0}
    assert split([(0, 64)], COSTS) == set()
    assert split([(expert, 1) for expert in range(8)], COSTS) == {0, 1, 3, 4, 5, 7}, "both are busy for six seconds"
    assert split([], COSTS) == set()


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 200), max_size=12))
def test_no_single_change_would_be_done_sooner(tokens: dict[int, int]) -> None:
    def done(computed: set[int]) -> float:
        cpu = sum(COSTS.computed_s(tokens[expert]) for expert in computed)
        return max(cpu, COSTS.fetch_s * (len(tokens) - len(computed)))

    chosen = split(list(tokens.items()), COSTS)
    assert chosen <= tokens.keys()
    longest = max((max(COSTS.computed_s(n), COSTS.fetch_s) for n in tokens.values()), default=0.0)
    every = [set(), set(tokens)]
    assert done(chosen) <= min(map(done, every)) + longest


def test_costs_are_measured_on_the_experts_themselves() -> None:
    experts = make_experts("mixtral.MixtralExperts")
    block = block_of(experts)
    kernel = cpu_kernel(experts, {name: parameter.data for name, parameter in stacked(experts)})
    link = Link(bandwidth=block.expert_bytes / 2, latency_s=0.25, measured=False)
    costs = measure_costs(block, kernel, torch.float32, link)
    assert costs.fetch_s == 2.5, "the bytes of one expert, and a transfer for each of its two matrices"
    assert [tokens for tokens, _ in costs.cpu_s] == [1, 8, 64]
    assert all(seconds > 0 for _, seconds in costs.cpu_s)
