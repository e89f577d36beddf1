"""Where a plan computes with other kernels than a resident model does: bits may differ there, and must not by much."""

from __future__ import annotations

from collections.abc import Iterator

from overspill.model.experts import ExpertBlock
from overspill.plan import Plan


def other_kernels(plan: Plan) -> str | None:
    """In words, which routed experts of `plan` kernels of another kind may compute; None where none do."""
    return "; ".join(words for _, words in _others(plan)) or None


def first_with_other_kernels(*plans: Plan) -> str | None:
    """The first module of routed experts that may come out otherwise: all before it is computed alike in `plans`."""
    blocks = [block for plan in plans for found, _ in _others(plan) for block in found]
    return min(blocks, key=lambda block: block.layer).path if blocks else None


def _others(plan: Plan) -> Iterator[tuple[tuple[ExpertBlock, ...], str]]:
    if plan.placed:
        layers = f"{len(plan.placed)} layer{'s' * (len(plan.placed) > 1)}"
        yield plan.placed, f"the CPU computes the routed experts of {layers}"
    if plan.slots is None:
        return
    if plan.slots.policy != "fetch":
        yield plan.slots.blocks, f"the CPU may compute experts that are in no slot (policy {plan.slots.policy})"
    elif plan.device_kind == "cuda":
        yield plan.slots.blocks, "streamed experts are computed one by one, resident ones in one grouped product"
