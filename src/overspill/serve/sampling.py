"""A body's fields as the engine's parameters, one set for each answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from overspill.engine.grammar import Grammar
from overspill.engine.requests import RequestParams
from overspill.serve.bodies import Sampled
from overspill.serve.errors import ApiError

_SEEDS = 2**63


def params_of(
    body: Sampled, max_tokens: int, logprobs: int | None, grammar: Grammar | None, seeds: Iterator[int]
) -> list[RequestParams]:
    """The `n` sets for one prompt. Where the body has no seed each takes one of `seeds`.

    Temperature 0 is greedy, and top-k, top-p and min-p cut nothing there.
    """
    greedy = body.temperature == 0
    params = RequestParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if greedy or body.top_p is None else body.top_p,
        top_k=0 if greedy or body.top_k is None else max(0, body.top_k),
        min_p=0.0 if greedy or body.min_p is None else body.min_p,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        grammar=grammar,
    )
    return [
        replace(params, seed=next(seeds) if body.seed is None else (body.seed + index) % _SEEDS)
        for index in range(body.n)
    ]


def max_tokens_of(body: Sampled, prompt_tokens: int, room: int, default: int | None) -> int:
    """How long an answer may be: as the body says, else `default`, else what the `room` of a request leaves.

    ApiError where prompt and answer together are more than `room`.
    """
    wanted = body.wanted_tokens
    most = room - prompt_tokens
    if most < 1 or (wanted is not None and wanted > most):
        asked = f"{prompt_tokens} of the prompt" + ("" if wanted is None else f" and {wanted} of the answer")
        raise ApiError(
            400,
            f"a request may have {room} tokens, and this one asks for more: {asked}",
            param="messages" if "messages" in type(body).model_fields else "prompt",
            code="context_length_exceeded",
        )
    if wanted is not None:
        return wanted
    return most if default is None else min(default, most)
