from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.engine.requests import Request, RequestParams, TokenLogprob
from overspill.engine.sampler import choose_token
from overspill.engine.sequences import RunningSequence

VOCABULARY = 2000  # more than the sampler looks at first
SCORES = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


def sequence(generated: tuple[int, ...] = (), prompt: tuple[int, ...] = (3,), **how: object) -> RunningSequence:
    made = RunningSequence(Request(list(prompt), RequestParams(**how), print), lambda ids: "", ())  # type: ignore[arg-type]
    for token in generated:
        made.append(TokenLogprob(token, 0.0))
    return made


def drawn(count: int, scores: torch.Tensor = SCORES, **how: object) -> set[int]:
    one = sequence(**{"temperature": 1.0, **how})
    return {choose_token(scores, one).token_id for _ in range(count)}


def allowed(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """By the definitions, one after the other, over the whole vocabulary."""
    order = scores.argsort(descending=True, stable=True)[: top_k or None]
    mass = scores[order].double().softmax(-1)
    kept = order[: int(((mass.cumsum(-1) - mass) < top_p).sum())]
    mass = scores[kept].double().softmax(-1)
    return {int(token) for token, p in zip(kept, mass, strict=True) if p >= min_p * mass.max() * (1 - 1e-6)}


@given(
    st.sampled_from([0, 1, 3, 600, VOCABULARY]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.5, 1.0, 50.0]),
)
@settings(max_examples=60)
def test_only_what_the_cuts_leave_is_drawn(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    one = sequence(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = {choose_token(SCORES, one).token_id for _ in range(40)}
    assert tokens <= allowed(SCORES / temperature, top_k, top_p * (1 + 1e-6), min_p)


def test_everything_that_the_cuts_leave_is_drawn() -> None:
    scores = torch.tensor([2.0, 1.9, 1.8, 1.7, -9.0])
    assert drawn(200, scores, top_k=3) == {0, 1, 2}
    assert drawn(200, scores, top_p=0.6) == {0, 1, 2}
    assert drawn(200, scores, min_p=0.9) == {0, 1}
    assert drawn(200, scores, min_p=0.1) == {0, 1, 2, 3}


def test_a_mass_beyond_the_likeliest_few_is_drawn_from_whole() -> None:
    """All tokens alike: nine tenths of the mass are nine tenths of the tokens, of which there are many."""
    tokens = drawn(4000, torch.zeros(VOCABULARY), top_p=0.9)
    assert 1200 < len(tokens) <= 1801


def test_frequencies_are_the_probabilities() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0])
    one = sequence(temperature=2.0)
    counts = torch.zeros(3)
    for _ in range(3000):
        counts[choose_token(scores, one).token_id] += 1
    assert torch.allclose(counts / 3000, (scores / 2).softmax(-1), atol=0.04)


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    def tokens(seed: int) -> list[int]:
        one = sequence(temperature=1.0, seed=seed)
        return [choose_token(SCORES, one).token_id for _ in range(8)]

    assert tokens(1) == tokens(1) != tokens(2)


def test_a_neighbour_does_not_change_what_is_drawn() -> None:
    alone, one, other = (sequence(temperature=1.0, seed=seed) for seed in (1, 1, 2))
    expected = [choose_token(SCORES, alone).token_id for _ in range(5)]
    crowd = []
    for _ in range(5):
        choose_token(SCORES, other)
        crowd.append(choose_token(SCORES, one).token_id)
    assert crowd == expected


@pytest.mark.parametrize("greedy", [{}, {"logprobs": 2}])
def test_greedy_takes_the_likeliest(greedy: dict[str, object]) -> None:
    assert choose_token(SCORES, sequence(**greedy)).token_id == int(SCORES.argmax())


def test_penalties_and_bias_follow_their_formulas() -> None:
    scores = torch.tensor([1.0, 0.9, 0.8, -1.0])

    def chosen(**how: object) -> int:
        return choose_token(scores, sequence((0, 0), prompt=(1,), **how)).token_id

    assert chosen() == 0
    assert chosen(presence_penalty=0.15) == 1  # 0: 0.85
    assert chosen(frequency_penalty=0.06) == 1  # 0: 1 - 2 * 0.06
    assert chosen(frequency_penalty=0.04) == 0
    assert chosen(repetition_penalty=1.3) == 2  # 0: 0.77, 1 (in the prompt): 0.69
    assert chosen(logit_bias={3: 2.5}) == 3
    negative = torch.tensor([-1.0, -1.1, -5.0])
    assert choose_token(negative, sequence((0,), prompt=(2,), repetition_penalty=1.2)).token_id == 1
    assert scores.tolist() == torch.tensor([1.0, 0.9, 0.8, -1.0]).tolist(), "the scores themselves stay as they are"


def test_logprobs_are_of_the_models_own_scores() -> None:
    scores = torch.tensor([1.0, 0.5, 0.0])
    chosen = choose_token(scores, sequence(logprobs=2, logit_bias={2: 9.0}))
    expected = scores.log_softmax(-1).tolist()
    assert (chosen.token_id, chosen.logprob) == (2, pytest.approx(expected[2]))
    assert chosen.top == ((0, pytest.approx(expected[0])), (1, pytest.approx(expected[1])))
