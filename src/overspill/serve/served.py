"""What the endpoints share: the engine behind them, the names it goes by, and its tokenizer, one text at a time."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from jinja2 import TemplateError

from overspill.engine.engine import Engine
from overspill.engine.grammar import Grammar
from overspill.engine.service import EngineService
from overspill.errors import ConfigError
from overspill.serve.bodies import ResponseFormat
from overspill.serve.errors import ApiError
from overspill.serve.limits import Limits
from overspill.serve.metrics import Metrics
from overspill.serve.token_text import TokenTexts

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """One model being served. Used from the event loop; texts are tokenized beside it."""

    engine: Engine
    service: EngineService
    names: tuple[str, ...]
    limits: Limits
    metrics: Metrics
    seeds: Iterator[int]
    texts: TokenTexts
    created: int = field(default_factory=lambda: int(time.time()))
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"))

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def name_of(self, asked: str | None) -> str:
        """The name that an answer carries. ApiError for a model that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ApiError(
                404,
                f'the model "{asked[:200]}" is not served here; served is: {", ".join(self.names)}',
                param="model",
                code="model_not_found",
            )
        return asked

    async def encode(self, prompt: str | list[int], *, special_tokens: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            self.refuse_unknown(prompt, "prompt")
            return prompt
        self._tokenizer("prompt")
        self._refuse_long(len(prompt), "prompt")
        return _not_empty(await self._beside(self._encode, prompt, special_tokens), "prompt")

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Through the model's own chat template, which may refuse the messages."""
        tokenizer = self._tokenizer("messages")
        self._refuse_long(sum(len(message["content"]) for message in messages), "messages")
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(
                400, "this model has no chat template; POST /v1/completions continues a text", param="messages"
            )
        own = variables or {}
        for name in own:
            if name == "self" or name in inspect.signature(tokenizer.apply_chat_template).parameters:
                raise ApiError(
                    400, f'"{name}" is not a variable of the chat template', param=f"chat_template_kwargs.{name}"
                )
        return _not_empty(await self._beside(self._encode_chat, messages, generation_prompt, own), "messages")

    async def decode(self, ids: Sequence[int]) -> str:
        self._tokenizer("tokens")
        self.refuse_unknown(ids, "tokens")
        return await self._beside(self.engine.decode, ids)

    async def grammar(self, asked: ResponseFormat | None) -> Grammar | None:
        """What a response format allows; None for free text."""
        schema = asked.schema_of_answer if asked is not None else None
        if schema is None:
            return None
        self._tokenizer("response_format")
        try:
            return await self._beside(lambda: self.engine.grammars.json(schema))
        except ConfigError as error:
            raise ApiError(400, error.message, param="response_format") from error

    def refuse_unknown(self, ids: Iterable[int], field_name: str) -> None:
        vocabulary = self.engine.plan.model.config.get_text_config(decoder=True).vocab_size
        unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise ApiError(
                400, f"token id {unknown} is not in the model's vocabulary of {vocabulary}", param=field_name
            )

    def _refuse_long(self, characters: int, field_name: str) -> None:
        """ApiError for a text that no tokenizer makes short enough: that is told without keeping it busy."""
        room = self.service.max_request_tokens
        if characters > room * self.longest_token:
            raise ApiError(
                400,
                f"{characters} characters are more than the {room} tokens that a request may have",
                param=field_name,
                code="context_length_exceeded",
            )

    @cached_property
    def longest_token(self) -> int:
        """Characters, or bytes, of the longest token that there is."""
        return max(map(len, self._tokenizer("prompt").get_vocab()))

    def token_names(self, ids: Sequence[int]) -> list[str]:
        return [str(name) for name in self._tokenizer("prompt").convert_ids_to_tokens(list(ids))]

    def _tokenizer(self, field_name: str) -> Any:
        if self.engine.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; give the prompt as token ids", param=field_name)
        return self.engine.tokenizer

    async def _beside(self, work: Callable[..., T], *arguments: Any) -> T:
        """In the one thread for it: a tokenizer may not be used by two threads at once."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, partial(work, *arguments))

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        return list(self.engine.tokenizer(text, add_special_tokens=special_tokens)["input_ids"])

    def _encode_chat(
        self, messages: Sequence[Mapping[str, str]], generation_prompt: bool, variables: Mapping[str, Any]
    ) -> list[int]:
        try:
            encoded = self.engine.tokenizer.apply_chat_template(
                messages, add_generation_prompt=generation_prompt, return_dict=True, **variables
            )
        except TemplateError as error:
            raise ApiError(400, f"the model's chat template refuses the messages: {error}", param="messages") from error
        except Exception as error:  # the template is the model's code, and what it is run on is the client's
            raise ApiError(400, "the model's chat template fails on these messages", param="messages") from error
        return list(encoded["input_ids"])


def seeds_from(seed: int | None) -> Iterator[int]:
    """Seeds for requests without one; those from a `seed` come in the same order every time."""
    source = random.Random(seed)
    while True:
        yield source.getrandbits(63)


def _not_empty(ids: list[int], field_name: str) -> list[int]:
    if not ids:
        raise ApiError(400, f'"{field_name}" is empty: there is no token to begin with', param=field_name)
    return ids
