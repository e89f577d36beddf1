from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_results import generation

from overspill.compare.answers import block_difference, difference, format_logit, largest_of, nmse, one_token_repeated
from overspill.compare.results import OBSERVED

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def logits_for(ids: list[int]) -> torch.Tensor:
    """Float32 [tokens, 4], each row decided by the tokens before it, as a model's would be."""
    rows = []
    for at in range(len(ids)):
        generator = torch.Generator().manual_seed(hash(tuple(ids[:at])) % 2**31)
        rows.append(torch.randn(4, generator=generator))
    return torch.stack(rows)


@given(IDS, IDS)
def test_compared_up_to_and_including_the_first_other_token(left, right):
    found = difference(generation(ids=tuple(left)), logits_for(left), generation(ids=tuple(right)), logits_for(right))
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if left == right:
        assert (found.first_difference, found.positions) == (None, len(left))
    elif common is None:  # one answer goes on where the other stopped
        assert found.first_difference == found.positions == min(len(left), len(right))
    else:
        assert (found.first_difference, found.positions) == (common, common + 1)
    assert (found.largest, found.at) == (0.0, None)  # the rows compared were all fed the same tokens


@given(IDS, st.data())
def test_one_changed_logit_is_found(ids, data):
    reference = logits_for(ids)
    row, column = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.integers(0, 3))
    changed = reference.clone()
    changed[row, column] += 0.25
    answer = generation(ids=tuple(ids))
    found = difference(answer, reference, answer, changed)
    assert found.at == row
    assert found.largest == pytest.approx(0.25, abs=1e-6)


def test_equal_infinities_are_equal_and_a_nan_is_not():
    answer = generation(ids=(1, 2))
    masked = torch.tensor([[0.0, -math.inf], [1.0, -math.inf]])
    assert difference(answer, masked, answer, masked).largest == 0.0
    broken = masked.clone()
    broken[1, 0] = math.nan
    found = difference(answer, broken, answer, broken)
    assert math.isnan(found.largest)
    assert found.at == 1
    other = masked.clone()
    other[0, 1] = 3.0
    assert difference(answer, masked, answer, other).largest == math.inf


def test_nmse_is_relative_and_zero_only_for_equal_tensors():
    reference = torch.tensor([3.0, 4.0])
    assert nmse(reference, reference.clone()) == 0.0
    assert nmse(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.25 / 25)
    assert nmse(10 * torch.tensor([3.0, 4.5]), 10 * reference) == pytest.approx(0.25 / 25)
    smallest = torch.tensor([0.0, 2.0**-149])
    assert nmse(torch.cat([reference, smallest]), torch.cat([reference, torch.zeros(2)])) > 0.0
    assert nmse(torch.ones(1), torch.zeros(1)) == math.inf
    assert math.isnan(nmse(torch.tensor([math.nan]), torch.ones(1)))


def test_a_block_is_compared_by_its_inputs_and_its_output():
    seen = {name: torch.arange(6.0).view(2, 3) for name in OBSERVED}
    alike = block_difference("p", seen, dict(seen))
    assert (alike.path, alike.inputs_equal, alike.nmse) == ("p", True, 0)
    for name in OBSERVED:
        other = dict(seen)
        other[name] = seen[name] + torch.eye(2, 3)
        found = block_difference("p", seen, other)
        assert found.inputs_equal is (name == OBSERVED[-1])
        assert (found.nmse > 0) is (name == OBSERVED[-1])
    cut = block_difference("p", seen, {name: tensor[:1] for name, tensor in seen.items()})
    assert not cut.inputs_equal
    assert math.isnan(cut.nmse)


def test_nan_is_the_largest_of_all():
    answer = generation(ids=(1,))
    plain = difference(answer, torch.zeros(1, 2), answer, torch.ones(1, 2))
    broken = difference(answer, torch.zeros(1, 2), answer, torch.full((1, 2), math.nan))
    assert largest_of([plain, plain]) == 1.0
    assert math.isnan(largest_of([broken, plain]))
    assert largest_of([]) == 0.0


def test_one_token_repeated():
    assert one_token_repeated([(5, 5, 5), (7,)])
    assert not one_token_repeated([(5, 5, 5), (7, 8)])


def test_only_zero_is_written_as_zero():
    assert format_logit(0.0) == "0.0"
    assert format_logit(1e-30) == "1e-30"
    assert format_logit(math.nan) == "nan"
