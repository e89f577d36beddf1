"""What an expert costs that is in no slot: fetched over the link, or computed on the CPU. Measured, not guessed."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overspill.machine.cpu_experts import CpuExperts
from overspill.machine.device import Link
from overspill.model.experts import ExpertBlock

_TOKENS = (1, 8, 64)
_ROUNDS = 5


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds for one expert: to fetch it, and to compute `tokens` tokens of it on the CPU, measured at some counts."""

    fetch_s: float
    cpu_s: tuple[tuple[int, float], ...]

    def computed_s(self, tokens: int) -> float:
        """Between the counts measured by a straight line, beyond them in proportion to the last."""
        counts = [count for count, _ in self.cpu_s]
        at = bisect_left(counts, tokens)
        if at == len(counts):
            last, seconds = self.cpu_s[-1]
            return seconds * tokens / last
        if at == 0:
            return self.cpu_s[0][1]
        (low, low_s), (high, high_s) = self.cpu_s[at - 1], self.cpu_s[at]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)


def measure_costs(block: ExpertBlock, kernel: CpuExperts, dtype: torch.dtype, link: Link) -> ExpertCosts:
    """Run `kernel` on experts of `block`, each round another one, so that none is in a cache; medians."""
    measured = []
    for tokens in _TOKENS:
        hidden = torch.zeros(tokens, block.hidden_size, dtype=dtype)
        weights = torch.ones(tokens, 1)
        out = torch.empty_like(hidden)
        seconds = []
        for number in range(_ROUNDS + 1):
            index = torch.full((tokens, 1), number % block.experts)
            begun = time.perf_counter()
            kernel(hidden, index, weights, out)
            seconds.append(time.perf_counter() - begun)
        measured.append((tokens, statistics.median(seconds[1:])))
    return ExpertCosts(link.seconds(block.expert_bytes, len(block.weights)), tuple(measured))


def split(missed: Sequence[tuple[int, int]], costs: ExpertCosts) -> set[int]:
    """Of (expert, tokens) those that the CPU computes, so that link and CPU, which work side by side, are done soonest.

    Longest first, each to whichever would be done with it earlier; the link wins a draw, since what it brings stays.
    """
    link_s = cpu_s = 0.0
    computed = set()
    for expert, tokens in sorted(missed, key=lambda item: (-item[1], item[0])):
        fetched_by, computed_by = link_s + costs.fetch_s, cpu_s + costs.computed_s(tokens)
        if computed_by < fetched_by:
            computed.add(expert)
            cpu_s = computed_by
        else:
            link_s = fetched_by
    return computed
