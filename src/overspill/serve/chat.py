"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from overspill.engine.requests import TokenLogprob
from overspill.serve.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Usage,
)
from overspill.serve.bodies import ChatBody
from overspill.serve.completing import Header, completing, finish, json_answer, refuse_many, stream_documented, usage_of
from overspill.serve.errors import BODY_ERRORS, documented
from overspill.serve.events import EventStream
from overspill.serve.generation import Generation, unless_gone
from overspill.serve.logprobs import chat_logprobs
from overspill.serve.sampling import max_tokens_of, params_of
from overspill.serve.served import Served


def chat_router(served: Served) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={**documented(*BODY_ERRORS, 429, 503), **stream_documented(ChatChunk)},
    )
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, whole or streamed."""
        header = Header.new("chatcmpl", served.name_of(body.model))
        refuse_many(served, body.n)
        ids = await served.encode_chat(
            [message.for_template() for message in body.messages], variables=body.chat_template_kwargs
        )
        max_tokens = max_tokens_of(body, len(ids), served.service.max_request_tokens, None)
        grammar = await served.grammar(body.response_format)
        params = params_of(body, max_tokens, body.wanted_logprobs, grammar, served.seeds)
        generation = completing(served, body, [(ids, each) for each in params])
        if body.stream:
            return EventStream(generation, _chunks(served, body, header, generation, len(ids)))
        with generation:
            choices = await unless_gone(request.receive, generation.choices())
        return json_answer(
            ChatCompletion(
                object="chat.completion",
                **header.fields(),
                choices=[
                    ChatChoice(
                        index=index,
                        message=AssistantMessage(role="assistant", content=choice.text, refusal=None),
                        logprobs=_logprobs(served, body, choice.logprobs),
                        finish_reason=finish(choice.finish_reason),
                    )
                    for index, choice in enumerate(choices)
                ],
                usage=usage_of(len(ids), generation.generated),
            )
        )

    return router


async def _chunks(
    served: Served, body: ChatBody, header: Header, generation: Generation, prompt_tokens: int
) -> AsyncIterator[ChatChunk]:
    def chunk(*choices: ChatChunkChoice, usage: Usage | None = None) -> ChatChunk:
        with_usage: dict[str, Any] = {"usage": usage} if body.include_usage else {}
        return ChatChunk(object="chat.completion.chunk", **header.fields(), choices=list(choices), **with_usage)

    for index in range(body.n):
        role = Delta(role="assistant", content="")
        yield chunk(ChatChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None))
    async for index, output in generation.outputs():
        if output.text or output.logprobs:
            logprobs = _logprobs(served, body, output.logprobs)
            delta = Delta(content=output.text)
            yield chunk(ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None))
        if output.finish_reason is not None:
            reason = finish(output.finish_reason)
            yield chunk(ChatChunkChoice(index=index, delta=Delta(), logprobs=None, finish_reason=reason))
    if body.include_usage:
        yield chunk(usage=usage_of(prompt_tokens, generation.generated))


def _logprobs(served: Served, body: ChatBody, tokens: Iterable[TokenLogprob]) -> ChatLogprobs | None:
    return chat_logprobs(tokens, served.texts) if body.logprobs else None
