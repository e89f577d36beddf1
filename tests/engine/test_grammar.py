from __future__ import annotations

import contextlib
import json

import pytest
import torch

from overspill.engine.grammar import GrammarCompiler, GrammarError
from overspill.engine.requests import FinishReason, Request, RequestParams
from overspill.engine.sampler import choose_token
from overspill.engine.sequences import RunningSequence
from overspill.errors import ConfigError
from talking_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER) + 13  # a model's vocabulary may be larger than its tokenizer's
EOS = 2
SCHEMA = {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 2, "maxItems": 3}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCABULARY, [EOS])


def answer(compiler: GrammarCompiler, seed: int, **how: object) -> tuple[str, list[int], FinishReason]:
    """What random scores give under SCHEMA."""
    params = RequestParams(**{"max_tokens": 40, "grammar": compiler.json(SCHEMA), "seed": seed, **how})  # type: ignore[arg-type]
    sequence = RunningSequence(Request([5], params, print), TOKENIZER.decode, [EOS])
    generator = torch.Generator().manual_seed(seed)
    text, tokens = "", []
    while True:
        output = sequence.append(choose_token(torch.randn(VOCABULARY, generator=generator), sequence))
        text += output.text
        tokens += output.token_ids
        if output.finish_reason is not None:
            return text, tokens, output.finish_reason


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("how", [{}, {"temperature": 5.0}, {"temperature": 1.0, "top_k": 1}, {"presence_penalty": 2.0}])
def test_whatever_the_scores_the_answer_follows_the_schema(
    compiler: GrammarCompiler, seed: int, how: dict[str, object]
) -> None:
    text, tokens, reason = answer(compiler, seed, **how)
    found = json.loads(text)
    assert 2 <= len(found) <= 3
    assert set(found) <= {"a", "bb"}
    assert reason is FinishReason.STOP
    assert all(token < VOCABULARY for token in tokens)


def test_a_bias_does_not_get_around_it(compiler: GrammarCompiler) -> None:
    text, _, _ = answer(compiler, 0, logit_bias={TOKENIZER("z")["input_ids"][0]: 100.0})
    assert "z" not in text


def test_states_are_each_answers_own(compiler: GrammarCompiler) -> None:
    grammar = compiler.json(SCHEMA)
    one, other = grammar.start(), grammar.start()
    scores = torch.zeros(VOCABULARY)
    before = other.allowed(scores)
    one.take(int(one.allowed(scores).argmax()))
    assert torch.equal(other.allowed(scores), before)
    assert not torch.equal(one.allowed(scores), before)
    assert scores.eq(0).all()


HOSTILE = (
    {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "string", "pattern": "^(a?){5000}a{5000}$"},
    {"allOf": [{"type": "string"}, {"type": "number"}]},
)


@pytest.mark.parametrize("schema", HOSTILE)
def test_a_schema_that_cannot_be_followed_ends_its_own_answer_alone(
    compiler: GrammarCompiler, schema: dict[str, object]
) -> None:
    """Refused at once, or told when it shows; never anything but an error of ours."""
    with contextlib.suppress(ConfigError, GrammarError):
        state = compiler.json(schema).start()
        for _ in range(200):
            state.take(int(state.allowed(torch.randn(VOCABULARY)).argmax()))


@pytest.mark.parametrize(
    "schema",
    [{"type": "nope"}, {"minItems": "x"}, {"$ref": "https://example.org/s.json"}, {"x-guidance": {"lenient": True}}],
)
def test_what_is_no_schema_is_refused(compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="JSON schema"):
        compiler.json(schema)
