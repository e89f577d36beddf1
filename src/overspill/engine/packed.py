"""Continuous batching over pages: prompt chunks and decoding tokens of all requests in one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from overspill.config import format_bytes
from overspill.engine.batching import Batching, Slice
from overspill.engine.pages import PAGE_TOKENS, ZERO_PAGE, PagePool, PageTable
from overspill.engine.sequences import RunningSequence
from overspill.errors import CapacityError
from overspill.machine.arena import Arena
from overspill.model.hf_packed import Group, LayerShape, PackedModel
from overspill.offload.placed import PlacedModel

_ALIKE = 2  # sequences are attended together while the longest is at most so many times the shortest
_SHORT = 64  # below which lengths do not matter

Tables = dict[int | None, PageTable]


@dataclass(frozen=True)
class PoolSizes:
    """Pages per window, of `bytes_per_page[window]` bytes each; one more is the page of zeros."""

    pages: dict[int | None, int]
    bytes_per_page: dict[int | None, int]

    @property
    def nbytes(self) -> int:
        return sum((self.pages[window] + 1) * nbytes for window, nbytes in self.bytes_per_page.items())


def size_pools(
    shapes: Sequence[LayerShape | None],
    budget_bytes: int | None,
    *,
    max_num_seqs: int,
    max_batch_tokens: int,
    context_tokens: int,
) -> PoolSizes:
    """Divide `budget_bytes` among the layers that attend to everything and those that attend to a window.

    A windowed layer never holds more of a sequence than its window, a page on each side and what a pass computes, so
    its pool is sized by sequences, and for fewer where memory is short; what is left is for the others. Without a
    budget (an architecture that could not be traced) there is room for one sequence. CapacityError where the budget
    does not hold a single sequence of `context_tokens`.
    """
    windows = dict.fromkeys(shape.window for shape in shapes if shape is not None)
    per_page = {
        window: PAGE_TOKENS * sum(s.token_bytes for s in shapes if s is not None and s.window == window)
        for window in windows
    }
    whole, chunk = _pages(context_tokens), _pages(max_batch_tokens)
    for requests in range(max_num_seqs if budget_bytes is not None else 1, 0, -1):
        pages = {
            window: whole if window is None else min(whole * requests, (_pages(window) + 2) * requests + chunk)
            for window in windows
        }
        sizes = PoolSizes(pages, per_page)
        if budget_bytes is None:
            return sizes
        if sizes.nbytes <= budget_bytes:
            if None in pages:
                more = (budget_bytes - sizes.nbytes) // per_page[None]
                pages[None] = min(whole + more, whole * max_num_seqs)
            return sizes
    raise CapacityError(
        f"the KV cache has {format_bytes(budget_bytes or 0)}, and one sequence of {context_tokens} tokens takes "
        f"{format_bytes(sizes.nbytes)}",
        hint="a smaller --max-model-len, or a larger --kv-cache-memory-bytes",
    )


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class PackedBatching(Batching):
    """Sequences hold pages; a pass computes at most `max_batch_tokens` tokens, decoding ones first.

    Where pages run out the sequence that came last gives its own back, and is computed again when there is room.
    """

    name = "packed"

    def __init__(
        self,
        placed: PlacedModel,
        shapes: Sequence[LayerShape | None],
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
    ) -> None:
        self.placed = placed
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        sizes = size_pools(
            shapes,
            placed.plan.memory.kv_cache_bytes,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            context_tokens=placed.plan.context_tokens,
        )
        self.pools = {window: PagePool(pages) for window, pages in sizes.pages.items()}
        self.max_request_tokens = placed.plan.context_tokens
        arena = Arena(placed.device.allocate(sizes.nbytes, "kv_cache"))
        arena.block.data.zero_()  # no value of an earlier life of this memory enters through padding
        self.block = arena.block
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for shape in shapes:
            if shape is None:
                pairs.append(None)
                continue
            slots = (sizes.pages[shape.window] + 1) * PAGE_TOKENS
            keys = arena.take((slots, shape.heads, shape.key_size), shape.dtype)
            pairs.append((keys, arena.take((slots, shape.heads, shape.value_size), shape.dtype)))
        self.model = PackedModel(placed.model, pairs)
        tokens = self.pools.get(None, next(iter(self.pools.values()))).pages * PAGE_TOKENS
        self.description = (
            f"packed: prompt chunks and decoding tokens of up to {max_num_seqs} requests share a pass of up to "
            f"{max_batch_tokens} tokens; the KV cache holds {tokens} tokens in pages of {PAGE_TOKENS}"
        )

    @property
    def usage(self) -> float:
        return max((pool.held / pool.pages for pool in self.pools.values() if pool.pages), default=0.0)

    @contextmanager
    def in_small_passes(self) -> Iterator[None]:
        usual, self.max_batch_tokens = self.max_batch_tokens, 5
        try:
            yield
        finally:
            self.max_batch_tokens = usual

    def compose(self, running: list[RunningSequence], waiting: deque[RunningSequence]) -> list[Slice]:
        slices: list[Slice] = []
        left = self.max_batch_tokens
        decoding = [s for s in running if s.remaining == 1]
        for sequence in decoding + [s for s in running if s.remaining > 1]:
            if left > 0 and sequence in running:
                tokens = self._grant(sequence, min(sequence.remaining, left), running, waiting)
                left -= self._add(slices, sequence, tokens)
        while waiting and left > 0 and len(running) < self.max_num_seqs and self._admits(waiting[0]):
            sequence = waiting.popleft()
            running.append(sequence)
            sequence.held = {window: PageTable(pool, window) for window, pool in self.pools.items()}
            tokens = self._grant(sequence, min(sequence.remaining, left), running, waiting)
            left -= self._add(slices, sequence, tokens)
        return [s for s in slices if s.sequence in running]

    @staticmethod
    def _add(slices: list[Slice], sequence: RunningSequence, tokens: int) -> int:
        if tokens:
            slices.append(Slice(sequence, tokens))
        return tokens

    def _admits(self, sequence: RunningSequence) -> bool:
        """There are pages for all that is known of it, so that it need not be sent back at once."""
        return all(
            _pages(len(sequence.tokens) if window is None else min(len(sequence.tokens), window + 2 * PAGE_TOKENS))
            <= pool.free
            for window, pool in self.pools.items()
        )

    def _grant(
        self, sequence: RunningSequence, tokens: int, running: list[RunningSequence], waiting: deque[RunningSequence]
    ) -> int:
        """Pages for up to `tokens` more tokens, taken from who came last where not one is left; how many it is.

        0 where `sequence` itself came last and had to give its own back.
        """
        tables: Tables = sequence.held
        for table in tables.values():
            table.forget_before(sequence.computed)
        while (room := min(t.room + t.pool.free * PAGE_TOKENS for t in tables.values()) - sequence.computed) < 1:
            victim = running.pop()
            self.release(victim)
            victim.computed = 0
            waiting.appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return 0
        tokens = min(tokens, room)
        for table in tables.values():
            table.grow(sequence.computed + tokens)
        return tokens

    def forward(self, slices: list[Slice]) -> torch.Tensor:
        decoding = sorted((s for s in slices if s.tokens == 1), key=lambda s: s.sequence.computed)
        order = decoding + [s for s in slices if s.tokens > 1]
        groups = [self._group(members) for members in _alike(decoding)]
        groups += [self._group([s]) for s in order[len(decoding) :]]
        ids = [t for s in order for t in s.sequence.tokens[s.sequence.computed : s.sequence.computed + s.tokens]]
        positions = [p for s in order for p in range(s.sequence.computed, s.sequence.computed + s.tokens)]
        write = {window: np.concatenate([_table(s, window).slots(*_span(s)) for s in order]) for window in self.pools}
        ends = {}
        row = 0
        for s in order:
            row += s.tokens
            if s.ends:
                ends[s.sequence] = row - 1
        wanted = [ends[s.sequence] for s in slices if s.ends]
        tensor, to_device = torch.tensor, self.placed.device.to_device
        with self.placed.running():
            logits = self.model(
                to_device(tensor([ids])),
                to_device(tensor([positions])),
                to_device(tensor(wanted or [row - 1])),
                groups,
                {window: to_device(torch.from_numpy(slots)) for window, slots in write.items()},
            )
            scores = logits.float().cpu()
        return scores[: len(wanted)]

    def _group(self, members: Sequence[Slice]) -> Group:
        """Attend `members` together; all compute the same number of tokens."""
        group = Group(len(members), members[0].tokens, {}, {}, {})
        to_device = self.placed.device.to_device
        for window in self.pools:
            held = [_table(s, window).slots(_table(s, window).first, _span(s)[1]) for s in members]
            longest = group.longest[window] = max(map(len, held))
            first = int(held[0][0])
            if len(held) == 1 and (np.diff(held[0]) == 1).all():
                group.read[window] = slice(first, first + longest)
                group.padding[window] = None
                continue
            read = np.full((len(held), longest), ZERO_PAGE, dtype=np.int64)
            kept = np.zeros((len(held), longest), dtype=np.bool_)
            for row, slots in enumerate(held):
                read[row, longest - len(slots) :] = slots
                kept[row, longest - len(slots) :] = True
            group.read[window] = to_device(torch.from_numpy(read))
            group.padding[window] = None if kept.all() else to_device(torch.from_numpy(kept))
        return group

    def release(self, sequence: RunningSequence) -> None:
        for table in (sequence.held or {}).values():
            table.release()
        sequence.held = None


def _table(s: Slice, window: int | None) -> PageTable:
    table: PageTable = s.sequence.held[window]
    return table


def _span(s: Slice) -> tuple[int, int]:
    return s.sequence.computed, s.sequence.computed + s.tokens


def _alike(decoding: Sequence[Slice]) -> list[list[Slice]]:
    """Neighbours, in order of length, whose lengths are alike enough to be padded to the longest."""
    groups: list[list[Slice]] = []
    for s in decoding:
        if groups and s.sequence.computed <= _ALIKE * max(groups[-1][0].sequence.computed, _SHORT):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups
