"""What a single token stands for, as text and as bytes: what log-probabilities are told with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Each token is decoded once, behind another one: some decoders drop the space that begins a text."""

    def __init__(self, tokenizer: Any, decode: Callable[[Sequence[int]], str]) -> None:
        self._tokenizer = tokenizer
        self._decode = decode
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        if token_id not in self._known:
            self._known[token_id] = self._decoded(token_id)
        return self._known[token_id]

    def _decoded(self, token_id: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            text = f"token_id:{token_id}"
            return text, text.encode()
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:  # an id that the model has and its tokenizer does not
            return "", b""
        if token_id in self._tokenizer.all_special_ids:
            return name, name.encode()
        before, anchor = self._anchor
        text = self._decode([anchor, token_id]).removeprefix(before)
        if _UNFINISHED not in text:
            return text, text.encode()
        return text, self._raw(name) or text.encode()

    def _raw(self, name: str) -> bytes:
        """The bytes of a token that is part of a character: <0xE2> in sentencepiece, GPT-2's letters in byte BPE."""
        if match := _BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        if all(letter in _BYTE_OF for letter in name):
            return bytes(_BYTE_OF[letter] for letter in name)
        return b""

    @cached_property
    def _anchor(self) -> tuple[str, int]:
        token_id = int(self._tokenizer("a", add_special_tokens=False)["input_ids"][-1])
        return self._decode([token_id]), token_id


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints, one from 256 on where it does not."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_letters()
