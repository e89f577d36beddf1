"""Text to token ids, and token ids to text piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from overspill.checkpoint import Checkpoint
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.model.gguf import tokenizer_from_gguf
from overspill.model.hf import load_tokenizer
from overspill.model.weights import ModelMap

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for the first bytes of a character


def tokenizer_of(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that comes with the weights; None where there is none."""
    if checkpoint.format == "gguf":
        return tokenizer_from_gguf(checkpoint)
    return load_tokenizer(checkpoint.folder, trust_remote_code=trust_remote_code)


def encode(tokenizer: Any, prompt: str | Sequence[int], *, chat: bool = True) -> list[int]:
    """Token ids of `prompt`, as a user's message in the chat template where there is one and `chat` is True.

    Raises ConfigError for text without a tokenizer, and for a prompt without a token.
    """
    if not isinstance(prompt, str):
        ids = list(prompt)
    elif tokenizer is None:
        raise ConfigError("this model has no tokenizer", hint="give the prompt as token ids, from Python")
    elif chat and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        ids = list(encoded["input_ids"])
    else:
        ids = list(tokenizer(prompt)["input_ids"])
    if not ids:
        raise ConfigError("the prompt is empty", hint="give at least one token")
    return ids


def refuse_length(prompt_tokens: int, max_tokens: int, context_tokens: int) -> None:
    """ConfigError where prompt and answer together exceed the context that memory was planned for."""
    if prompt_tokens + max_tokens > context_tokens:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate are {prompt_tokens + max_tokens}, "
            f"more than the {context_tokens} that memory is planned for",
            hint=f"--max-model-len {prompt_tokens + max_tokens} plans for them, or a smaller --max-tokens",
        )


def refuse_no_text(model: ModelMap, *, by_steps: str | None = None) -> None:
    """UnsupportedModelError where a prompt of text is nothing that the model goes on from.

    `by_steps`: a command that takes each pass for a prompt or a token of one sequence, which an encoder is no part of.
    """
    in_python = "in Python `placed = overspill.load(…).placed` has the model, and placed.model.generate(…) takes it"
    if not model.takes_text:
        taken = model.skeleton.main_input_name
        raise UnsupportedModelError(
            f"{model.architecture} is given {taken}, and no text", hint=f"{in_python} inside `with placed.running():`"
        )
    if by_steps is not None and model.encodes:
        raise UnsupportedModelError(
            f"{model.architecture} reads a prompt with an encoder, which is no step of those that `{by_steps}` knows",
            hint=f"`overspill run`; {in_python} inside `with placed.running():`",
        )


class TextStream:
    """The text of tokens as they come.

    The pieces join to the text of all tokens, and no character is cut: one whose bytes are spread over tokens waits
    for the last of them. Each piece is decoded beside the one before it, since a token's text may hang on its left
    neighbour; what is older is not decoded again.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._window = 0  # where the decoded window starts
        self._given = 0  # tokens whose text was given

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete; "" where they end inside a character."""
        self._tokens += tokens
        return self._next(unfinished=False)

    def finish(self) -> str:
        """What is left, whole or not."""
        return self._next(unfinished=True)

    def _next(self, *, unfinished: bool) -> str:
        text = self._decode(self._tokens[self._window :])
        if text.endswith(_UNFINISHED) and not unfinished:
            return ""
        piece = text[len(self._decode(self._tokens[self._window : self._given])) :]
        if piece:
            self._window = self._given
        self._given = len(self._tokens)
        return piece
