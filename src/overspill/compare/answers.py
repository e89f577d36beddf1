"""How far two runs' answers to the same prompts are apart: token ids first, then the logits of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from overspill.compare.results import OBSERVED, Generation


@dataclass(frozen=True)
class AnswerDifference:
    """One prompt's answer against the reference.

    `first_difference` is the first generated position with another token, None where all ids are equal. Up to and
    including it, both sides were fed the same tokens, so those `positions` are compared; `largest` is the largest
    absolute difference of any logit there, NaN where one side has a NaN; `at` is its position; `nmse` is that of all
    logits there.
    """

    first_difference: int | None
    positions: int
    largest: float
    at: int | None
    nmse: float


@dataclass(frozen=True)
class BlockDifference:
    """A block of routed experts against the reference's, in one pass: were its inputs the same bits, and its output.

    `nmse` is that of the output, 0 only where all of it is the same.
    """

    path: str
    inputs_equal: bool
    nmse: float


def nmse(other: torch.Tensor, reference: torch.Tensor) -> float:
    """sum((other - reference)^2) / sum(reference^2), in float64; 0 only for equal tensors, infinities included."""
    left, right = other.double(), reference.double()
    apart = (left - right).masked_fill(left == right, 0.0).square().sum()
    return float(apart / right.square().sum()) if apart != 0 else 0.0


def block_difference(
    path: str, reference: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> BlockDifference:
    """What was observed of the experts at `path` (results.OBSERVED) in two runs."""
    *inputs, output = OBSERVED
    same = all(torch.equal(reference[name], other[name]) for name in inputs)
    if reference[output].shape != other[output].shape:
        return BlockDifference(path, inputs_equal=False, nmse=math.nan)
    return BlockDifference(path, same, nmse(other[output], reference[output]))


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
        return AnswerDifference(first, positions, math.nan, int(apart.isnan().any(dim=-1).nonzero()[0]), math.nan)
    largest = float(apart.max())
    at = int(apart.amax(dim=-1).argmax()) if largest > 0 else None
    return AnswerDifference(first, positions, largest, at, nmse(right, left))


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
    """A difference for people: "0.0" only where it is exactly that."""
    return "0.0" if value == 0 else f"{value:.3g}"
