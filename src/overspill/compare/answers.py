"""How far two runs' answers to the same prompts are apart: token ids first, then the logits of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overspill.compare.results import Generation


@dataclass(frozen=True)
class AnswerDifference:
    """One prompt's answer against the reference.

    `first_difference` is the first generated position with another token, None where all ids are equal. Up to and
    including it, both sides were fed the same tokens, so those `positions` are compared; `largest` is the largest
    absolute difference of any logit there, NaN where one side has a NaN; `at` is its position.
    """

    first_difference: int | None
    positions: int
    largest: float
    at: int | None


def difference(
    reference: Generation, reference_logits: torch.Tensor, other: Generation, other_logits: torch.Tensor
) -> AnswerDifference:
    """`other` against `reference`; logits are float32 [generated tokens, vocabulary]."""
    first = _first_difference(reference.token_ids, other.token_ids)
    positions = min(len(reference.token_ids), len(other.token_ids))
    if first is not None:
        positions = min(positions, first + 1)
    left, right = reference_logits[:positions], other_logits[:positions]
    assert left.shape == right.shape, f"logits of {tuple(left.shape)} and {tuple(right.shape)}"
    apart = (left - right).abs().masked_fill(left == right, 0.0)  # equal infinities are no difference
    if apart.isnan().any():
        return AnswerDifference(first, positions, math.nan, int(apart.isnan().any(dim=-1).nonzero()[0]))
    largest = float(apart.max())
    at = int(apart.amax(dim=-1).argmax()) if largest > 0 else None
    return AnswerDifference(first, positions, largest, at)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def largest_of(differences: Sequence[AnswerDifference]) -> float:
    """The largest of all; NaN wins."""
    values = [d.largest for d in differences]
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def ids_equal(differences: Sequence[AnswerDifference]) -> bool:
    return all(d.first_difference is None for d in differences)


def one_token_repeated(answers: Sequence[Sequence[int]]) -> bool:
    """Whether every answer is one token over and over, so that equal ids say nothing."""
    return all(len(set(ids)) <= 1 for ids in answers)


def format_logit(value: float) -> str:
    """A logit difference for people: "0.0" only where it is exactly that."""
    return "0.0" if value == 0 else f"{value:.3g}"
