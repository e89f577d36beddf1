"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator

from overspill.serve.bodies import Message
from overspill.serve.errors import BODY_ERRORS, documented
from overspill.serve.fields import Body, Text, TokenId, refuse
from overspill.serve.served import Served


class TokenizeBody(Body):
    """A `prompt`, or the `messages` of a chat."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = Field(default=True, description="Of a prompt; a chat's are in its template.")
    add_generation_prompt: bool = Field(default=True, description="Of messages: end where the answer begins.")
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("or messages must be given, and not both", "prompt")
        return self


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(BaseModel):
    prompt: str


def tokenization_router(served: Served) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", responses=documented(*BODY_ERRORS))
    async def tokenize(body: TokenizeBody) -> TokenizeAnswer:
        """The token ids of a text, or of a chat in the model's template."""
        served.name_of(body.model)
        if body.prompt is not None:
            ids = await served.encode(body.prompt, special_tokens=body.add_special_tokens)
        else:
            ids = await served.encode_chat(
                [message.for_template() for message in body.messages or ()],
                generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
            )
        return TokenizeAnswer(
            count=len(ids),
            max_model_len=served.service.max_request_tokens,
            tokens=ids,
            token_strs=served.token_names(ids) if body.return_token_strs else None,
        )

    @router.post("/detokenize", responses=documented(*BODY_ERRORS))
    async def detokenize(body: DetokenizeBody) -> DetokenizeAnswer:
        """The text of token ids."""
        served.name_of(body.model)
        return DetokenizeAnswer(prompt=await served.decode(body.tokens))

    return router
