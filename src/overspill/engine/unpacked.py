"""Passes over the cache that an architecture makes itself: requests joined by row, or one at a time."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from overspill.engine.batching import Batching, Slice
from overspill.engine.sequences import RunningSequence
from overspill.model.hf import cache_argument, cache_of, forget_longest, tensors_in
from overspill.model.hf_joined import attends, join, select
from overspill.offload.placed import PlacedModel


class CachedModel:
    """Runs `placed` over rows of equally many tokens, with the cache that it makes for itself."""

    def __init__(self, placed: PlacedModel) -> None:
        self.placed = placed
        parameters = inspect.signature(placed.model.forward).parameters
        self._cache_argument = cache_argument(placed.model)
        self._takes_positions = "position_ids" in parameters
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def __call__(
        self, ids: Sequence[Sequence[int]], cache: Any, lengths: Sequence[int], padded: int | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Scores after the last token of each row of `ids`, float32 [rows, vocabulary] on the CPU, and the cache.

        Row i follows on `lengths[i]` positions. Those of a `cache` of `padded` positions are the last ones of them.
        """
        device = self.placed.device
        given: dict[str, Any] = dict(self._extra)
        if cache is not None:
            given[self._cache_argument] = cache
        if padded is not None and attends(cache):
            mask = [[0] * (padded - n) + [1] * (n + len(row)) for n, row in zip(lengths, ids, strict=True)]
            given["attention_mask"] = device.to_device(torch.tensor(mask))
        if self._takes_positions:
            positions = [list(range(n, n + len(row))) for n, row in zip(lengths, ids, strict=True)]
            given["position_ids"] = device.to_device(torch.tensor(positions))
        with self.placed.running():
            output = self.placed.model(input_ids=device.to_device(torch.tensor(ids)), use_cache=True, **given)
            return output.logits[:, -1].float().cpu(), cache_of(output)


class JoinedBatching(Batching):
    """Requests decode together, one row each of a joined cache; a prompt is a pass of its own, at its full length.

    A request is let in when the cache's memory would hold it and all others at their longest: each takes `row_bytes`
    for its states and `token_bytes` for each position of the longest.
    """

    name = "joined by row"

    def __init__(self, placed: PlacedModel, *, max_num_seqs: int, row_bytes: int, token_bytes: int) -> None:
        self.model = CachedModel(placed)
        self.max_num_seqs = max_num_seqs
        self.max_request_tokens = placed.plan.context_tokens
        self._row_bytes, self._token_bytes = row_bytes, token_bytes
        budget_bytes = placed.plan.memory.kv_cache_bytes
        self._budget_bytes = (
            self._bytes(max_num_seqs, self.max_request_tokens) if budget_bytes is None else budget_bytes
        )
        self._rows: list[RunningSequence | None] = []  # None where one has gone and its row is still there
        self._cache: Any = None
        self._padded = 0
        self._decodes_next = False
        self.description = (
            f"joined by row: up to {max_num_seqs} requests decode together, each prompt is a pass of its own"
        )

    @property
    def usage(self) -> float:
        return min(1.0, self._bytes(len(self._rows), self._padded) / max(1, self._budget_bytes))

    def _bytes(self, rows: int, longest: int) -> int:
        return rows * (self._row_bytes + longest * self._token_bytes)

    def compose(self, running: list[RunningSequence], waiting: deque[RunningSequence]) -> list[Slice]:
        fits = waiting and len(running) < self.max_num_seqs and self._fits([*running, waiting[0]])
        if fits and not (self._decodes_next and running):
            self._decodes_next = True  # prompts and decoding take turns
            sequence = waiting.popleft()
            running.append(sequence)
            return [Slice(sequence, sequence.remaining)]
        self._decodes_next = False
        return [Slice(sequence, 1) for sequence in running]

    def _fits(self, sequences: list[RunningSequence]) -> bool:
        longest = max(s.final_length for s in sequences)
        return len(sequences) == 1 or self._bytes(len(sequences), longest) <= self._budget_bytes

    def forward(self, slices: list[Slice]) -> torch.Tensor:
        first = slices[0].sequence
        if first.computed == 0:
            scores, first.held = self.model([first.tokens], None, [0])
            return scores
        members = [s.sequence for s in slices]
        with self.model.placed.running():
            self._arrange(members)
        lengths = [sequence.computed for sequence in members]
        self._cache, before = None, self._cache
        scores, self._cache = self.model([s.tokens[-1:] for s in members], before, lengths, self._padded)
        self._padded += 1
        return scores

    def _arrange(self, members: list[RunningSequence]) -> None:
        """Make the joined cache that of `members`: drop rows that have gone, join those that are new."""
        if members == self._rows:
            return
        places = {sequence: row for row, sequence in enumerate(self._rows) if sequence is not None}
        kept = [sequence for sequence in members if sequence in places]
        caches, lengths = [], []
        if kept:
            longest = max(sequence.computed for sequence in kept)
            rows = [places[sequence] for sequence in kept]
            caches.append(select(self._cache, rows, self._padded, longest))
            lengths.append(longest)
        new = [sequence for sequence in members if sequence not in places]
        for sequence in new:
            caches.append(sequence.held)
            lengths.append(sequence.computed)
            sequence.held = None
        self._cache = join(caches, lengths)
        self._padded = max(lengths)
        assert kept + new == members, "new sequences run behind those that ran before"
        self._rows = list(members)

    def release(self, sequence: RunningSequence) -> None:
        sequence.held = None
        self._rows = [None if row is sequence else row for row in self._rows]
        if not any(self._rows):
            self._rows, self._cache, self._padded = [], None, 0


class SingleBatching(Batching):
    """One request at a time, to its end.

    `turns_at`: a cache made for up to so many tokens does not hold for more; the first pass beyond computes it anew.
    """

    name = "single"

    def __init__(self, placed: PlacedModel, *, why: str, turns_at: int | None = None) -> None:
        self.model = CachedModel(placed)
        self.max_request_tokens = placed.plan.context_tokens
        self._turns_at = turns_at
        self._held: RunningSequence | None = None
        self.description = f"one request at a time: {why}"

    @property
    def usage(self) -> float:
        return self._held.computed / self.max_request_tokens if self._held is not None else 0.0

    def compose(self, running: list[RunningSequence], waiting: deque[RunningSequence]) -> list[Slice]:
        if not running and waiting:
            running.append(waiting.popleft())
        return [Slice(sequence, sequence.remaining) for sequence in running]

    def forward(self, slices: list[Slice]) -> torch.Tensor:
        sequence = slices[0].sequence
        if self._turns_at is not None and sequence.computed <= self._turns_at < len(sequence.tokens):
            sequence.held = None
        if sequence.computed == 0:
            with self.model.placed.running():
                forget_longest(self.model.placed.model)
        start = sequence.computed if sequence.held is not None else 0
        self._held = sequence
        scores, sequence.held = self.model([sequence.tokens[start:]], sequence.held, [start])
        return scores

    def release(self, sequence: RunningSequence) -> None:
        sequence.held = None
        if self._held is sequence:
            self._held = None


def cache_bytes(cache: Any) -> int:
    """What the tensors of a cache hold; spare room in their storages is not counted."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(cache))
