from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.engine.requests import FinishReason, Output, Request, RequestParams, TokenLogprob
from overspill.engine.sequences import RunningSequence
from overspill.errors import ConfigError
from talking_model import byte_tokenizer

EOS = 2
TOKENIZER = byte_tokenizer()


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def answer(text: str, *, end: bool = True, **how: object) -> tuple[list[Output], RunningSequence]:
    """The outputs of a sequence that generates `text`, byte by byte, and then the end token."""
    params = RequestParams(**{"max_tokens": 1000, **how})  # type: ignore[arg-type]
    sequence = RunningSequence(Request([5, 6], params, print), decode, [EOS])
    outputs = []
    for token in [*TOKENIZER(text)["input_ids"], *([EOS] if end else [])]:
        outputs.append(sequence.append(TokenLogprob(token, -1.0)))
        if outputs[-1].finish_reason is not None:
            break
    return outputs, sequence


def joined(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3, unique=True))
def test_an_answer_ends_before_its_first_stop_text(text: str, stop: list[str]) -> None:
    outputs, _ = answer(text, stop=tuple(stop))
    expected = text
    for length in range(len(text) + 1):  # the first moment at which there is a stop text in the answer
        if found := [at for s in stop if (at := text.find(s, 0, length)) >= 0]:
            expected = text[: min(found)]
            break
    assert joined(outputs) == expected
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert all(output.finish_reason is None for output in outputs[:-1])


def test_what_may_become_a_stop_text_is_held_back_and_given_when_it_does_not() -> None:
    outputs, _ = answer("ab<enough>c", stop=("<end>",))
    texts = [output.text for output in outputs]
    assert texts[2:6] == ["", "", "", "<eno"]
    assert joined(outputs) == "ab<enough>c"
    assert joined(answer("ab<end>c", stop=("<end>",))[0]) == "ab"


def test_text_that_is_held_back_at_the_last_token_is_given() -> None:
    outputs, _ = answer("ab<en", end=False, stop=("<end>",), max_tokens=5)
    assert joined(outputs) == "ab<en"
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_no_character_is_cut() -> None:
    outputs, _ = answer("é€")
    assert [output.text for output in outputs] == ["", "é", "", "", "€", ""]


@pytest.mark.parametrize(("how", "tokens"), [({}, 2), ({"stop_token_ids": (TOKENIZER("b")["input_ids"][0],)}, 2)])
def test_an_end_token_ends_and_adds_no_text(how: dict[str, object], tokens: int) -> None:
    outputs, sequence = answer("a" if not how else "abc", **how)
    assert len(outputs) == tokens
    assert outputs[-1].text == ""
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert sequence.request.generated == tokens
    assert joined(outputs) == "a"


def test_an_end_token_may_be_ignored() -> None:
    outputs, _ = answer("a", ignore_eos=True, max_tokens=2)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_logprobs_are_given_where_they_were_asked_for() -> None:
    assert answer("a")[0][0].logprobs == ()
    assert answer("a", logprobs=0)[0][0].logprobs[0].logprob == -1.0


def test_logprobs_go_as_far_as_the_text() -> None:
    """Held back with it, and cut with it; a token that the stop text begins in is part of it."""
    outputs, _ = answer("ab<enough>c", logprobs=0, stop=("<end>",))
    assert [len(output.logprobs) for output in outputs[:7]] == [1, 1, 0, 0, 0, 4, 1]
    assert sum(len(output.logprobs) for output in outputs) == len("ab<enough>c") + 1
    outputs, _ = answer("ab<end>c", logprobs=0, stop=("<end>",))
    assert sum(len(output.logprobs) for output in outputs) == len("ab")
    assert len(answer("é€", logprobs=0)[0][0].logprobs) == 1


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"stop": ("",)}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RequestParams(**wrong)  # type: ignore[arg-type]
