"""The steps of the batching engine: choose what to compute, run a pass, choose tokens, tell those who asked."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from overspill.engine.batching import Batching, Slice
from overspill.engine.requests import FinishReason, Output, Request
from overspill.engine.sampler import choose_token
from overspill.engine.sequences import RunningSequence
from overspill.errors import OverspillError

logger = logging.getLogger("overspill")


@dataclass(frozen=True)
class StepReport:
    """One step: the tokens it computed in how many seconds, and the requests that it ended."""

    tokens: int
    seconds: float
    ended: list[Request]


class Scheduler:
    """Requests in two lines, waiting and running. Used by one thread."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self.finished: Counter[str] = Counter()
        self.steps = self.prompt_tokens = self.generation_tokens = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def step(self) -> StepReport | None:
        """One pass over the model; None where there is nothing to do.

        What the pass raises is raised here, after `fail` has told the requests that were part of it.
        """
        slices = self.batching.compose(self.running, self.waiting)
        if not slices:
            assert self.idle, "where a request waits or runs there is something to compute"
            return None
        begun = time.monotonic()
        for s in slices:
            s.sequence.request.times.setdefault("started", begun)
        try:
            ended = self._pass(slices)
        except Exception as error:
            self.fail((s.sequence for s in slices), error)
            raise
        self.steps += 1
        return StepReport(sum(s.tokens for s in slices), time.monotonic() - begun, ended)

    def _pass(self, slices: list[Slice]) -> list[Request]:
        ending = [s.sequence for s in slices if s.ends]
        scores = self.batching.forward(slices)
        for s in slices:
            known = len(s.sequence.request.prompt_ids)
            self.prompt_tokens += max(0, min(known, s.sequence.computed + s.tokens) - s.sequence.computed)
            s.sequence.computed += s.tokens
        now = time.monotonic()
        ended = []
        for sequence, row in zip(ending, scores, strict=True):
            try:
                output = sequence.append(choose_token(row, sequence))
            except Exception as error:  # one request's own settings (a grammar that ends nowhere) are no one else's
                logger.error("choosing a token failed: %s: %s", type(error).__name__, error, exc_info=error)
                self.fail([sequence], error)
                ended.append(sequence.request)
                continue
            sequence.request.times.setdefault("first", now)
            self.generation_tokens += 1
            if output.finish_reason is not None:
                self._remove(sequence, output.finish_reason)
                ended.append(sequence.request)
            sequence.request.emit(output)
        return ended

    def end(
        self, sequences: Iterable[RunningSequence], reason: FinishReason, error: OverspillError | None = None
    ) -> None:
        """End those of `sequences` that have not ended before they are done, and tell who asked."""
        for sequence in list(sequences):
            if sequence in self.running or sequence in self.waiting:
                self._remove(sequence, reason)
                sequence.request.times["finished"] = time.monotonic()
                sequence.request.emit(Output("", (), (), reason, error))

    def fail(self, sequences: Iterable[RunningSequence], error: Exception) -> None:
        """End `sequences` with an error that tells nothing of this machine."""
        if not isinstance(error, OverspillError):
            told = OverspillError(f"the step that computed this request failed ({type(error).__name__})")
            told.__cause__ = error
            error = told
        self.end(sequences, FinishReason.ERROR, error)

    def _remove(self, sequence: RunningSequence, reason: FinishReason) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.batching.release(sequence)
        self.finished[reason] += 1
