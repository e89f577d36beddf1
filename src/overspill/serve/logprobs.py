"""The engine's log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable

from overspill.engine.requests import TokenLogprob
from overspill.serve.answers import ChatLogprob, ChatLogprobs, TextLogprobs, TopLogprob
from overspill.serve.token_text import TokenTexts


def chat_logprobs(tokens: Iterable[TokenLogprob], texts: TokenTexts) -> ChatLogprobs:
    def told(token_id: int, logprob: float) -> TopLogprob:
        text, raw = texts(token_id)
        return TopLogprob(token=text, logprob=logprob, bytes=list(raw))

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **told(token.token_id, token.logprob).model_dump(), top_logprobs=[told(*other) for other in token.top]
            )
            for token in tokens
        ],
        refusal=None,
    )


def text_logprobs(tokens: Iterable[TokenLogprob], texts: TokenTexts, offset: int) -> TextLogprobs:
    """`offset` is where in the answer the first token's text begins. The chosen token is among the top ones."""
    logprobs = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        chosen = _label(token.token_id, texts)
        top = {
            _label(other, texts): logprob for other, logprob in reversed(token.top)
        }  # the likelier of one text stays
        logprobs.tokens.append(chosen)
        logprobs.token_logprobs.append(token.logprob)
        logprobs.top_logprobs.append({**dict(reversed(top.items())), chosen: token.logprob})
        logprobs.text_offset.append(offset)
        offset += len(texts(token.token_id)[0])
    return logprobs


def _label(token_id: int, texts: TokenTexts) -> str:
    """A token's text; of a token that is part of a character its bytes, as OpenAI writes them."""
    text, raw = texts(token_id)
    return text if text.encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
