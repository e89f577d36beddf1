"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.engine.requests import TokenLogprob
from overspill.serve.answers import TextChoice, TextCompletion, TextLogprobs, Usage
from overspill.serve.bodies import COMPLETION_TOKENS, CompletionBody
from overspill.serve.completing import Header, completing, finish, json_answer, refuse_many, stream_documented, usage_of
from overspill.serve.errors import BODY_ERRORS, documented
from overspill.serve.events import EventStream
from overspill.serve.generation import Generation, unless_gone
from overspill.serve.logprobs import text_logprobs
from overspill.serve.sampling import max_tokens_of, params_of
from overspill.serve.served import Served


def completions_router(served: Served) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses={**documented(*BODY_ERRORS, 429, 503), **stream_documented(TextCompletion)},
    )
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue texts or token ids, whole or streamed. Answers to one prompt stand side by side."""
        header = Header.new("cmpl", served.name_of(body.model))
        refuse_many(served, len(body.prompts) * body.n)
        prompts = [await served.encode(prompt, special_tokens=body.add_special_tokens) for prompt in body.prompts]
        room = served.service.max_request_tokens
        grammar = await served.grammar(body.response_format)
        generation = completing(
            served,
            body,
            [
                (ids, params)
                for ids in prompts
                for params in params_of(
                    body, max_tokens_of(body, len(ids), room, COMPLETION_TOKENS), body.logprobs, grammar, served.seeds
                )
            ],
        )
        prompt_tokens = sum(map(len, prompts))
        echoed = [_echo(served, body, prompt) for prompt in body.prompts for _ in range(body.n)]
        if body.stream:
            return EventStream(generation, _chunks(served, body, header, generation, echoed, prompt_tokens))
        with generation:
            choices = await unless_gone(request.receive, generation.choices())
        return json_answer(
            TextCompletion(
                object="text_completion",
                **header.fields(),
                choices=[
                    TextChoice(
                        index=index,
                        text=echo + choice.text,
                        logprobs=_logprobs(served, body, choice.logprobs, 0),
                        finish_reason=finish(choice.finish_reason),
                    )
                    for index, (echo, choice) in enumerate(zip(echoed, choices, strict=True))
                ],
                usage=usage_of(prompt_tokens, generation.generated),
            )
        )

    return router


async def _chunks(
    served: Served, body: CompletionBody, header: Header, generation: Generation, echoed: list[str], prompt_tokens: int
) -> AsyncIterator[TextCompletion]:
    def chunk(*choices: TextChoice, usage: Usage | None = None) -> TextCompletion:
        with_usage: dict[str, Any] = {"usage": usage} if body.include_usage else {}
        return TextCompletion(object="text_completion", **header.fields(), choices=list(choices), **with_usage)

    offsets = [0] * len(echoed)
    for index, echo in enumerate(echoed):
        if echo:
            yield chunk(TextChoice(index=index, text=echo, logprobs=None, finish_reason=None))
    async for index, output in generation.outputs():
        logprobs = _logprobs(served, body, output.logprobs, offsets[index])
        offsets[index] += sum(len(served.texts(token.token_id)[0]) for token in output.logprobs)
        if output.text or output.logprobs or output.finish_reason is not None:
            reason = None if output.finish_reason is None else finish(output.finish_reason)
            yield chunk(TextChoice(index=index, text=output.text, logprobs=logprobs, finish_reason=reason))
    if body.include_usage:
        yield chunk(usage=usage_of(prompt_tokens, generation.generated))


def _echo(served: Served, body: CompletionBody, prompt: str | list[int]) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else served.engine.decode(prompt)


def _logprobs(served: Served, body: CompletionBody, tokens: Iterable[TokenLogprob], offset: int) -> TextLogprobs | None:
    return None if body.logprobs is None else text_logprobs(tokens, served.texts, offset)
