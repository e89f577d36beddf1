"""vLLM's nearest way of moving the weights that a plan moves: a budget read in place, or prefetched groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Decimal

from overspill.advice.facts import off_device
from overspill.advice.vllm_tensors import (
    VllmTensor,
    pool_bytes,
    selectors_for,
    taken_by_prefetch,
    taken_by_uva,
    vllm_tensors,
)
from overspill.config import GIB, OffloadConfig, Settings, UVAOffloadConfig
from overspill.plan import Plan

EXPERTS = ("experts",)
"""vLLM's selector of routed experts and nothing else."""

STEP = "--offload-prefetch-step"


@dataclass(frozen=True)
class Way:
    """vLLM's `flags`, the tensors that it then moves, and those that hold weights which the plan moves.

    `budget_bytes` are all ranks', 0 where there is no budget. `whole`: a step brings every moved byte, since it is
    copied and not read in place.
    """

    flags: tuple[str, ...]
    taken: tuple[VllmTensor, ...]
    wanted: tuple[VllmTensor, ...]
    tensors: tuple[VllmTensor, ...]
    selectors: tuple[str, ...] = ()
    budget_bytes: int = 0
    whole: bool = False

    def pool_bytes(self, ranks: int) -> int:
        """Static buffers of all ranks for what is prefetched."""
        return pool_bytes(self.taken, int(self.flags[self.flags.index(STEP) + 1]), ranks) if STEP in self.flags else 0

    def step_bytes(self, tokens: int, ranks: int, taken: Sequence[VllmTensor] | None = None) -> float:
        """What a step over `tokens` tokens brings to all ranks."""
        total = 0.0
        for tensor in self.taken if taken is None else taken:
            held = ranks * tensor.rank_bytes(ranks)
            total += held if self.whole else tensor.step_bytes(tokens) * held / tensor.nbytes
        return total


def nearest_way(plan: Plan, settings: Settings, ranks: int) -> Way:
    """Prefetch for a plan that does nothing else, uva for every other that moves weights."""
    tensors = vllm_tensors(plan.model)
    moved = {p.weight.full for p in off_device(plan)}
    wanted = tuple(t for t in tensors if any(weight.full in moved for weight in t.weights))
    if plan.backend == "prefetch" and not plan.placed and plan.slots is None:
        return _prefetch(plan.offload, tensors, wanted)
    budget = plan.offloaded_bytes if plan.backend == "uva" and plan.slots is None else plan.saved_bytes
    if budget <= 0:
        return Way((), (), wanted, tensors)
    apart = plan.placed or plan.slots is not None
    selectors = _selectors(wanted or tuple(t for t in tensors if t.routed), tensors)
    if apart and any(t.routed for t in tensors):
        selectors = _experts_first(tensors, budget)
    copied = settings.environment.disable_uva
    return _uva(plan.offload.uva, Way((), (), wanted, tensors, selectors, budget, whole=copied), ranks)


def _prefetch(offload: OffloadConfig, tensors: tuple[VllmTensor, ...], wanted: tuple[VllmTensor, ...]) -> Way:
    asked = offload.prefetch
    size, number = asked.offload_group_size, asked.offload_num_in_group
    selectors = _selectors(wanted, taken_by_prefetch(tensors, size, number))
    flags = ["--offload-group-size", str(size), "--offload-num-in-group", str(number)]
    flags += [STEP, str(asked.offload_prefetch_step)]
    if selectors:
        flags += ["--offload-params", *selectors]
    return Way(
        tuple(flags), taken_by_prefetch(tensors, size, number, selectors), wanted, tensors, selectors, whole=True
    )


def _uva(asked: UVAOffloadConfig, way: Way, ranks: int) -> Way:
    """`way` with the flags of its budget and selectors, and what they take."""
    taken = taken_by_uva(way.tensors, way.budget_bytes, way.selectors)
    stated = asked.cpu_offload_gb
    same = stated > 0 and ranks == 1 and taken_by_uva(way.tensors, asked.budget_bytes, way.selectors) == taken
    flags = ["--cpu-offload-gb", _plain(stated) if same else budget_gib(taken, ranks)]
    if way.selectors:
        flags += ["--cpu-offload-params", *way.selectors]
    return replace(way, flags=tuple(flags), taken=taken)


def _experts_first(tensors: tuple[VllmTensor, ...], budget: int) -> tuple[str, ...]:
    """Selectors of all routed experts and, where those are fewer bytes than the budget, of the largest others."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.name] += tensor.nbytes
    chosen = {tensor.name for tensor in tensors if tensor.routed}
    for name, _ in sizes.most_common():
        if sum(sizes[each] for each in chosen) < budget:
            chosen.add(name)
    return _selectors([tensor for tensor in tensors if tensor.name in chosen], tensors)


def _selectors(wanted: Collection[VllmTensor], among: Collection[VllmTensor]) -> tuple[str, ...]:
    return selectors_for(
        {tensor.name for tensor in wanted},
        {tensor.name for tensor in among},
        {tensor.name for tensor in among if tensor.routed},
    )


def budget_gib(taken: Sequence[VllmTensor], ranks: int = 1) -> str:
    """The shortest figure of GiB with which the budget of each of vLLM's ranks ends with the last of `taken`."""
    sizes = [tensor.rank_bytes(ranks) for tensor in taken]
    total, least = sum(sizes), sum(sizes[:-1])
    exact = Decimal(total) / Decimal(GIB)
    for digits in range(1, 18):
        figure = exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_FLOOR)
        if least < int(float(figure) * GIB) <= total:
            return f"{figure:f}".removesuffix(".0")
    return _plain(total / GIB)  # exact: a float holds whole bytes


def _plain(number: float) -> str:
    """Without an exponent, and read back as the same number."""
    return f"{Decimal(repr(number)):f}".removesuffix(".0")
