"""Answers that must follow a grammar: a JSON object, or one that a JSON schema describes. llguidance knows the rest.

A grammar says before each token which ones may come next; the scores of all others are taken away. What an answer
then is, is the likeliest text that the grammar allows, which a small model may still leave unfinished at its last
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher
from llguidance import numpy as bitmasks

from overspill.errors import ConfigError, OverspillError

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models write it themselves; free whitespace is where a small one loses its way."""
_LONGEST_REASON = 300  # it may repeat the schema


class GrammarError(OverspillError):
    """An answer cannot go on as its grammar wants it to."""


class GrammarCompiler:
    """Grammars over one tokenizer's tokens; `eos` are the tokens that end an answer. Making one takes a moment."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Sequence[int]) -> None:
        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos) or None)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"this model's tokenizer cannot be used with a grammar: {error}", hint="ask for free text"
            ) from error
        self._vocabulary = vocabulary

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that `schema` describes. ConfigError where that is no JSON schema, or more than can be followed."""
        if "x-guidance" in schema:
            raise ConfigError('the JSON schema holds "x-guidance", which is not JSON Schema', hint="leave it out")
        try:
            text = LLMatcher.grammar_from_json_schema(dict(schema), defaults=_LAYOUT)
        except ValueError as error:
            reason = str(error)[:_LONGEST_REASON]
            raise ConfigError(f"the JSON schema cannot be read: {reason}", hint="a schema of JSON Schema") from error
        wrong = LLMatcher.validate_grammar(text, self._tokens)
        grammar = Grammar(text, self._tokens, self._vocabulary)
        try:
            if not wrong and not grammar.start().allowed(torch.zeros(self._vocabulary)).isfinite().any():
                wrong = "no answer at all follows it"
        except GrammarError as error:
            wrong = error.message
        if wrong:
            raise ConfigError(
                f"the JSON schema cannot be followed: {wrong.splitlines()[0][:_LONGEST_REASON]}",
                hint="a simpler schema",
            )
        return grammar


@dataclass(frozen=True)
class Grammar:
    """A grammar that was checked; each answer starts its own GrammarState."""

    text: str
    tokens: Any
    vocabulary: int

    def start(self) -> GrammarState:
        return GrammarState(self)


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = LLMatcher(grammar.tokens, grammar.text)
        self._bits = bitmasks.allocate_token_bitmask(1, grammar.vocabulary)
        self._vocabulary = grammar.vocabulary

    def allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """`scores`, float32 [vocabulary], with minus infinity where a token may not come next."""
        bitmasks.fill_next_token_bitmask(self._matcher, self._bits, 0)
        self._refuse_lost()
        allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: self._vocabulary].view(np.bool_)
        return scores.masked_fill(~torch.from_numpy(allowed), float("-inf"))

    def take(self, token: int) -> bool:
        """Go on by a token that was allowed; whether the answer is complete, and nothing may follow."""
        self._matcher.consume_token(token)
        self._refuse_lost()
        return bool(self._matcher.is_stopped())

    def _refuse_lost(self) -> None:
        if wrong := self._matcher.get_error():
            raise GrammarError(
                f"the answer's schema is more than can be followed: {wrong.splitlines()[0][:_LONGEST_REASON]}",
                hint="a simpler schema",
            )
