"""Which way of batching an architecture allows, found by trying: each way must give the logits of requests run alone.

The probe is two short sequences. Alone each runs through the cache that the architecture makes itself; then together,
in chunks and with decoding tokens in the same pass. An architecture that looks across rows, keeps a state of its own
or attends in a way of its own shows in the difference, or refuses.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overspill.engine.batching import Batching
from overspill.engine.packed import PackedBatching
from overspill.engine.requests import Request, RequestParams
from overspill.engine.sequences import RunningSequence
from overspill.engine.unpacked import CachedModel, JoinedBatching, SingleBatching, cache_token_bytes
from overspill.errors import CapacityError
from overspill.model.hf_joined import why_not_joinable
from overspill.model.hf_packed import layer_shapes
from overspill.offload.placed import PlacedModel

logger = logging.getLogger("overspill")

NMSE_BOUND = {torch.float32: 1e-8, torch.float16: 1e-3, torch.bfloat16: 5e-2}
"""How far logits in a crowd may be from those alone: mean squared difference over variance, by the dtype computed in.

Rounding: a float32 product of other height differs by 1e-4 at the most, and by 1e-6 of its size as a rule.
"""

_LENGTHS = (7, 4)
_DECODED = 1
_TURNING = ("dynamic", "longrope")


def choose_batching(placed: PlacedModel, *, max_num_seqs: int, max_batch_tokens: int) -> Batching:
    """The first of packed, joined and single that answers as requests alone do.

    Takes the KV cache's memory. CapacityError where that does not hold one request of the planned context.
    """
    context = placed.plan.context_tokens
    if (turning := _turning_rope(placed)) is not None:
        return SingleBatching(placed, context_tokens=context, why=turning)
    if context < _LENGTHS[0] + _DECODED:
        return SingleBatching(placed, context_tokens=context, why=f"a context of {context} tokens")
    probes = _probes(placed)
    alone = [_alone(placed, ids) for ids in probes]
    cache = alone[0].cache
    shapes = layer_shapes(placed.model, cache)
    not_joinable = why_not_joinable(cache)
    token_bytes = cache_token_bytes(cache, len(probes[0]))
    reasons: list[str] = []
    for way in (PackedBatching, JoinedBatching):
        reason = (shapes if isinstance(shapes, str) else None) if way is PackedBatching else not_joinable
        if reason is None:
            batching: Batching
            if way is PackedBatching:
                assert not isinstance(shapes, str)
                batching = PackedBatching(placed, shapes, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens)
            else:
                batching = JoinedBatching(placed, max_num_seqs=max_num_seqs, token_bytes=token_bytes)
            reason = _difference(batching, probes, alone, placed)
            if reason is None:
                batching.description += f" ({'; '.join(reasons)})" if reasons else ""
                return batching
            del batching
        reasons.append(f"not {way.name}: {reason}")
    return SingleBatching(placed, context_tokens=context, why="; ".join(reasons))


def _turning_rope(placed: PlacedModel) -> str | None:
    """Why neighbours would change each other's positions: rotary frequencies that depend on the longest of a pass."""
    config = placed.plan.model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    for rope in nested:
        original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings or 0)
        if rope.get("rope_type") in _TURNING and placed.plan.context_tokens > original:
            return (
                f"its rotary frequencies ({rope['rope_type']}) change for a whole pass when one of its sequences is "
                f"longer than {original} tokens"
            )
    return None


def _probes(placed: PlacedModel) -> list[list[int]]:
    vocabulary = placed.plan.model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (n + _DECODED,), generator=generator).tolist() for n in _LENGTHS]


@dataclass(frozen=True)
class _Alone:
    """Logits after the prompt and after each decoded token, by the architecture's own cache."""

    logits: list[torch.Tensor]
    cache: Any


def _alone(placed: PlacedModel, ids: list[int]) -> _Alone:
    model = CachedModel(placed)
    prompt = len(ids) - _DECODED
    scores, cache = model([ids[:prompt]])
    logits = [scores[0]]
    for at in range(prompt, len(ids)):
        scores, cache = model([ids[at : at + 1] if cache is not None else ids[: at + 1]], cache)
        logits.append(scores[0])
    return _Alone(logits, cache)


def _difference(
    batching: Batching, probes: Sequence[list[int]], alone: Sequence[_Alone], placed: PlacedModel
) -> str | None:
    """Run the probes together; what is wrong with the result, None where nothing is."""
    bound = max(NMSE_BOUND.get(weight.dtype, 0.0) for weight in placed.plan.model)
    try:
        together = _together(batching, probes)
    except CapacityError:
        raise
    except Exception as error:  # an architecture's own code, in a way that it was not written for, may do anything
        logger.debug("batching probe", exc_info=error)
        return f"{type(error).__name__}: {error}".splitlines()[0][:400]
    worst = max(
        float(((expected - got) ** 2).mean()) / (float(expected.var()) or 1.0)
        for one, other in zip(alone, together, strict=True)
        for expected, got in zip(one.logits, other, strict=True)
    )
    return None if worst <= bound else f"logits differ from those of a request alone (NMSE {worst:.1e})"


def _together(batching: Batching, probes: Sequence[list[int]]) -> list[list[torch.Tensor]]:
    """The same logits with the probes in one batch, in chunks that are no multiple of anything."""
    params = RequestParams(max_tokens=_DECODED + 1)
    waiting = deque(
        RunningSequence(Request(ids[: len(ids) - _DECODED], params, lambda output: None), lambda ids: "", ())
        for ids in probes
    )
    logits: dict[RunningSequence, list[torch.Tensor]] = {sequence: [] for sequence in waiting}
    tokens = dict(zip(waiting, probes, strict=True))
    running: list[RunningSequence] = []
    with batching.in_small_passes():
        while running or waiting:
            slices = batching.compose(running, waiting)
            ended = [s.sequence for s in slices if s.ends]
            scores = batching.forward(slices)
            for s in slices:
                s.sequence.computed += s.tokens
            for sequence, row in zip(ended, scores, strict=True):
                logits[sequence].append(row)
                if len(logits[sequence]) > _DECODED:
                    running.remove(sequence)
                    batching.release(sequence)
                else:
                    sequence.tokens.append(tokens[sequence][len(sequence.tokens)])
    return list(logits.values())
