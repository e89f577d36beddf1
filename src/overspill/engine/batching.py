"""How the tokens of several requests are put into passes over the model; three ways, one interface.

- packed (packed.py): prompt chunks and decoding tokens of all requests share one pass. For architectures that only
  attention makes look at other tokens.
- joined (joined.py): requests decode together, their caches joined by row; a prompt is a pass of its own. For layers
  with a state (linear attention, state space).
- single (single.py): one request at a time. For everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from overspill.engine.sequences import RunningSequence


@dataclass(frozen=True)
class Slice:
    """The next `tokens` tokens of a sequence, computed in one pass."""

    sequence: RunningSequence
    tokens: int

    @property
    def ends(self) -> bool:
        """Whether the pass computes everything that is known, so that the next token can be chosen."""
        return self.tokens == self.sequence.remaining


class Batching(ABC):
    """Decides what a pass computes, runs it, and keeps what must be held in between."""

    name: str
    description: str
    max_request_tokens: int
    preemptions = 0

    @property
    @abstractmethod
    def usage(self) -> float:
        """The share of the KV cache's memory that is held, from 0 to 1."""

    @abstractmethod
    def compose(self, running: list[RunningSequence], waiting: deque[RunningSequence]) -> list[Slice]:
        """What the next pass computes; empty only when nothing is to be done.

        Moves sequences from `waiting` to `running` as there is room, and back where others need the room more.
        """

    @abstractmethod
    def forward(self, slices: list[Slice]) -> torch.Tensor:
        """Run a pass. The scores after each slice that `ends`, in order: float32 [.., vocabulary] on the CPU."""

    @abstractmethod
    def release(self, sequence: RunningSequence) -> None:
        """Free what is held for a sequence, at whatever point it is."""

    @contextmanager
    def in_small_passes(self) -> Iterator[None]:
        """Within this, prompts are computed in chunks of a few tokens, where the way of batching knows chunks."""
        yield
