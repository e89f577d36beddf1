"""Requests in a crowd, driven step by step in the test's own thread, with the scores that each of them saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from emulated_runs import emulated, mapped, settings_for
from overspill.engine import Engine
from overspill.engine.batching import Batching, Slice
from overspill.engine.choose import choose_batching
from overspill.engine.requests import Output, Request, RequestParams
from overspill.engine.scheduler import Scheduler
from overspill.engine.sequences import RunningSequence
from overspill.offload.placed import place
from overspill.plan import make_plan

CONTEXT = 48
SEQUENCES = 5
BATCH_TOKENS = 24


def engine_of(folder: Path, document: Any = None, *, context: int = CONTEXT, **how: Any) -> Engine:
    """Planned as a server plans, on the emulated accelerator with every access checked."""
    settings = settings_for(
        document, max_num_seqs=SEQUENCES, max_num_batched_tokens=BATCH_TOKENS, max_model_len=context, **how
    )
    device = emulated()
    placed = place(
        make_plan(mapped(folder, tokens=context), settings, device, context_tokens=context), device, debug=True
    )
    return Engine(placed, None, GenerationConfig(eos_token_id=None, pad_token_id=0))


def batching_of(engine: Engine, *, sequences: int = SEQUENCES, batch_tokens: int = BATCH_TOKENS) -> Batching:
    return choose_batching(engine.placed, max_num_seqs=sequences, max_batch_tokens=batch_tokens)


class Crowd:
    """A scheduler that remembers what each request saw."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.scheduler = Scheduler(batching)
        self.scores: dict[Request, list[torch.Tensor]] = {}
        self.outputs: dict[Request, list[Output]] = {}
        self._forward = batching.forward
        batching.forward = self._remember  # type: ignore[method-assign]
        self.mixed = 0
        self.steps = 0

    def leave(self) -> None:
        self.batching.forward = self._forward  # type: ignore[method-assign]

    def _remember(self, slices: list[Slice]) -> torch.Tensor:
        scores = self._forward(slices)
        ending = [s.sequence.request for s in slices if s.ends]
        assert len(ending) == len(scores)
        for request, row in zip(ending, scores, strict=True):
            self.scores[request].append(row.clone())
        self.steps += 1
        self.mixed += any(s.tokens == 1 for s in slices) and any(s.tokens > 1 for s in slices)
        return scores

    def ask(self, prompt: Sequence[int], max_tokens: int, **how: Any) -> Request:
        outputs: list[Output] = []
        request = Request(list(prompt), RequestParams(max_tokens=max_tokens, **how), outputs.append)
        self.scores[request], self.outputs[request] = [], outputs
        self.scheduler.waiting.append(RunningSequence(request, lambda ids: "", ()))
        return request

    def cancel(self, request: Request) -> None:
        scheduler = self.scheduler
        lines = [*scheduler.running, *scheduler.waiting]
        scheduler.end([s for s in lines if s.request is request], "abort")  # type: ignore[arg-type]

    def run(self) -> None:
        while self.scheduler.step() is not None:
            pass

    def tokens(self, request: Request) -> list[int]:
        return [token for output in self.outputs[request] for token in output.token_ids]
