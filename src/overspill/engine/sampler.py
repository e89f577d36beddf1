"""From scores to a token, each request by its own settings and its own random numbers."""

from __future__ import annotations

import torch

from overspill.engine.requests import RequestParams, TokenLogprob
from overspill.engine.sequences import RunningSequence

_LIKELY = 512  # so many of the likeliest tokens nearly always hold the mass of top_p


def choose_token(scores: torch.Tensor, sequence: RunningSequence) -> TokenLogprob:
    """The next token of `sequence` from the model's `scores`, float32 [vocabulary] on the CPU.

    Nothing of another request enters: the same scores give the same token in any batch.
    """
    params = sequence.request.params
    adjusted = _adjusted(scores, sequence)
    if params.temperature == 0.0:
        token = int(adjusted.argmax())
    else:
        token = _sample(adjusted / params.temperature, params, sequence.generator)
    if params.logprobs is None:
        return TokenLogprob(token, 0.0)
    logprobs = scores.log_softmax(-1)
    values, ids = logprobs.topk(min(params.logprobs, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _adjusted(scores: torch.Tensor, sequence: RunningSequence) -> torch.Tensor:
    """`scores` after bias, penalties and grammar; they themselves stay as they are."""
    params = sequence.request.params
    if params.logit_bias:
        scores = scores.clone()
        scores[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1.0:
        scores = scores.clone()
        seen = torch.tensor(sorted(set(sequence.tokens)))
        factor = params.repetition_penalty
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
    if sequence.counts and (params.frequency_penalty or params.presence_penalty):
        scores = scores.clone()
        ids = torch.tensor(list(sequence.counts))
        counts = torch.tensor(list(sequence.counts.values()), dtype=scores.dtype)
        scores[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return scores if sequence.grammar is None else sequence.grammar.allowed(scores)


def _sample(scores: torch.Tensor, params: RequestParams, generator: torch.Generator) -> int:
    likeliest = min(params.top_k or len(scores), len(scores))
    if params.top_p < 1.0:
        probabilities = scores.softmax(-1)
        few = min(_LIKELY, likeliest)
        kept, ids = probabilities.topk(few)
        if few < likeliest and float(kept.sum()) < params.top_p:
            kept, ids = probabilities.sort(descending=True)
            kept, ids = kept[:likeliest], ids[:likeliest]
        if params.top_k:  # the mass of top_p is of what top_k leaves
            total = probabilities.topk(likeliest)[0].sum() if few < likeliest else kept.sum()
            kept = kept / total
        before = kept.cumsum(-1) - kept
        kept = torch.where(before < params.top_p, kept, 0.0)
    elif params.top_k:
        values, ids = scores.topk(likeliest)
        kept = values.softmax(-1)
    else:
        kept, ids = scores.softmax(-1), None
    if params.min_p > 0.0:
        kept = torch.where(kept >= params.min_p * kept.max(), kept, 0.0)
    place = int(torch.multinomial(kept, 1, generator=generator))
    return place if ids is None else int(ids[place])
