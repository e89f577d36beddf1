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
from overspill.engine.unpacked import CachedModel, JoinedBatching, SingleBatching, cache_bytes
from overspill.errors import CapacityError
from overspill.model.hf_joined import why_not_joinable
from overspill.model.hf_packed import layer_shapes
from overspill.offload.placed import PlacedModel

logger = logging.getLogger("overspill")

NMSE_BOUND = {torch.float32: 1e-8, torch.float16: 1e-3, torch.bfloat16: 5e-2}
"""How far logits in a crowd may be from those alone: mean squared difference over variance, by the dtype computed in.

Rounding: a float32 product of other height differs by 1e-4 at the most, and by 1e-6 of its size as a rule.
"""

_PROMPTS = (7, 4)
_DECODED = (5, 3)
"""Tokens of the two probes. In any order of prompts and decoding both decode together for a while, the shorter one
padded, and one goes on when the other has left."""

_TURNING = ("dynamic", "longrope")


def choose_batching(placed: PlacedModel, *, max_num_seqs: int, max_batch_tokens: int) -> Batching:
    """The first of packed, joined and single that answers as requests alone do.

    Takes the KV cache's memory. CapacityError where that does not hold one request of the planned context.
    """
    context = placed.plan.context_tokens
    if (single := _not_shared(placed)) is not None:
        return single
    if context < max(map(sum, zip(_PROMPTS, _DECODED, strict=True))):
        return SingleBatching(placed, why=f"a context of {context} tokens")
    probes = _probes(placed)
    alone = [_alone(placed, ids, prompt) for ids, prompt in zip(probes, _PROMPTS, strict=True)]
    cache = alone[0].cache
    shapes = layer_shapes(placed.model, cache)
    not_joinable = why_not_joinable(cache)
    token_bytes = max(0, cache_bytes(cache) - cache_bytes(alone[1].cache)) // (len(probes[0]) - len(probes[1]))
    row_bytes = max(0, cache_bytes(cache) - len(probes[0]) * token_bytes)
    reasons: list[str] = []
    for way in (PackedBatching, JoinedBatching):
        reason = (shapes if isinstance(shapes, str) else None) if way is PackedBatching else not_joinable
        if reason is None:
            batching: Batching
            if way is PackedBatching:
                assert not isinstance(shapes, str)
                batching = PackedBatching(placed, shapes, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens)
            else:
                batching = JoinedBatching(
                    placed, max_num_seqs=max_num_seqs, row_bytes=row_bytes, token_bytes=token_bytes
                )
            reason = _difference(batching, probes, alone, placed)
            if reason is None:
                batching.description += f" ({'; '.join(reasons)})" if reasons else ""
                return batching
            del batching
        reasons.append(f"not {way.name}: {reason}")
    return SingleBatching(placed, why="; ".join(reasons))


def _not_shared(placed: PlacedModel) -> SingleBatching | None:
    """What hangs on the longest sequence of a pass, and so would make neighbours change each other's answers.

    No probe of a few tokens can see it; the configuration says it. Only for contexts in which it can happen.
    """
    config = placed.plan.model.config.get_text_config(decoder=True)
    context = placed.plan.context_tokens
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [p for p in parameters.values() if isinstance(p, dict)] or [parameters]:
        kind = rope.get("rope_type")
        original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings or 0)
        if kind in _TURNING and context > original:
            why = f"its rotary frequencies ({kind}) change for a whole pass when a sequence exceeds {original} tokens"
            return SingleBatching(placed, why=why, turns_at=original if kind == "longrope" else None)
    if getattr(config, "attn_temperature_tuning", False) and context > config.floor_scale:
        why = f"its attention is scaled by the length of the whole pass from {config.floor_scale} tokens on"
        return SingleBatching(placed, why=why)
    if context > (window := getattr(config, "keep_window_size", None) or context):
        why = f"beyond {window} tokens its attention keeps the best of all positions of a pass, padded ones among them"
        return SingleBatching(placed, why=why)
    return None


def _probes(placed: PlacedModel) -> list[list[int]]:
    vocabulary = placed.plan.model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    lengths = map(sum, zip(_PROMPTS, _DECODED, strict=True))
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class _Alone:
    """Logits after the prompt and after each decoded token, by the architecture's own cache."""

    logits: list[torch.Tensor]
    cache: Any


def _alone(placed: PlacedModel, ids: list[int], prompt: int) -> _Alone:
    model = CachedModel(placed)
    scores, cache = model([ids[:prompt]], None, [0])
    logits = [scores[0]]
    for at in range(prompt, len(ids)):
        start = at if cache is not None else 0
        scores, cache = model([ids[start : at + 1]], cache, [start])
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
    waiting = deque(
        RunningSequence(
            Request(ids[:prompt], RequestParams(max_tokens=1 + len(ids) - prompt), lambda output: None),
            lambda ids: "",
            (),
        )
        for ids, prompt in zip(probes, _PROMPTS, strict=True)
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
                if len(logits[sequence]) == sequence.request.params.max_tokens:
                    running.remove(sequence)
                    batching.release(sequence)
                else:
                    sequence.tokens.append(tokens[sequence][len(sequence.tokens)])
    return list(logits.values())
