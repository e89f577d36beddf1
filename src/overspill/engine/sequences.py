"""A request on its way through the engine: its tokens, how far they are computed, its text and how it ends."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from overspill.engine.requests import FinishReason, Output, Request, TokenLogprob
from overspill.engine.tokens import TextStream


class RunningSequence:
    """`tokens` are the prompt and what was generated; keys and values of the first `computed` of them are held.

    `held` is what the batching keeps for it (pages, a row, a cache).
    """

    def __init__(self, request: Request, decode: Callable[[Sequence[int]], str], eos: Collection[int]) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.computed = 0
        self.held: Any = None
        self.cancelled = False
        self.generator = torch.Generator().manual_seed(request.params.seed)
        self.counts: Counter[int] = Counter()  # of generated tokens
        self.grammar = request.params.grammar.start() if request.params.grammar is not None else None
        self._unshown: deque[tuple[TokenLogprob, int, int]] = deque()  # with where their texts begin and end
        self._text = _AnswerText(decode, request.params.stop)
        self._ends = frozenset(request.params.stop_token_ids) | (
            frozenset() if request.params.ignore_eos else frozenset(eos)
        )

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one is known."""
        return len(self.tokens) - self.computed

    @property
    def final_length(self) -> int:
        """The most positions that it can come to hold; the last token generated is never computed."""
        return len(self.request.prompt_ids) + self.request.params.max_tokens - 1

    def append(self, chosen: TokenLogprob) -> Output:
        """Take a generated token; the result says what it adds to the answer and whether that ends with it."""
        token = chosen.token_id
        self.tokens.append(token)
        self.counts[token] += 1
        self.request.generated += 1
        complete = self.grammar is not None and self.grammar.take(token)
        ended = token in self._ends
        full = self.request.generated >= self.request.params.max_tokens
        start = self._text.length
        text = self._text.feed([] if ended else [token], last=ended or complete or full)
        reason = FinishReason.STOP if ended or complete or self._text.stopped else FinishReason.LENGTH if full else None
        if reason is not None:
            self.request.times["finished"] = time.monotonic()
        self._unshown.append((chosen, start, self._text.length))
        return Output(text, (token,), self._shown(last=reason is not None), reason)

    def _shown(self, *, last: bool) -> tuple[TokenLogprob, ...]:
        """The tokens whose text has been given, of those that were not shown before; none where nobody asked.

        Of an answer that a stop text ended, those that begin before it.
        """
        shown = []
        while self._unshown:
            chosen, start, end = self._unshown[0]
            if not (start < self._text.given if self._text.stopped else last or end <= self._text.given):
                break
            self._unshown.popleft()
            shown.append(chosen)
        return tuple(shown) if self.request.params.logprobs is not None else ()


class _AnswerText:
    """The answer's text as it comes, up to the first stop text; what may become one is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...]) -> None:
        self._stream = TextStream(decode)
        self._stop = stop
        self._pending = ""
        self.length = self.given = 0  # characters that were generated, and of those that were given
        self.stopped = False

    def feed(self, tokens: Sequence[int], *, last: bool) -> str:
        before = len(self._pending)
        self._pending += self._stream.feed(tokens) if tokens else ""
        if last:
            self._pending += self._stream.finish()
        self.length += len(self._pending) - before
        text = self._next(last=last)
        self.given += len(text)
        return text

    def _next(self, *, last: bool) -> str:
        at = min((found for text in self._stop if (found := self._pending.find(text)) >= 0), default=math.inf)
        if at < math.inf:
            self.stopped = True
            return self._pending[: int(at)]
        kept = 0 if last else max((_overlap(self._pending, text) for text in self._stop), default=0)
        given, self._pending = self._pending[: len(self._pending) - kept], self._pending[len(self._pending) - kept :]
        return given


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
