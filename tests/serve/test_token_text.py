from __future__ import annotations

from functools import partial

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from overspill.serve.token_text import TokenTexts
from talking_model import byte_tokenizer


def texts_of(tokenizer: PreTrainedTokenizerFast) -> TokenTexts:
    return TokenTexts(tokenizer, partial(tokenizer.decode, skip_special_tokens=True))


def test_bytes_of_characters_join_to_them() -> None:
    tokenizer = byte_tokenizer()
    texts = texts_of(tokenizer)
    ids = tokenizer("a ß 😀\n")["input_ids"]
    assert b"".join(texts(token)[1] for token in ids).decode() == "a ß 😀\n"
    assert [texts(token)[0] for token in ids[:2]] == ["a", " "]
    assert texts(tokenizer.eos_token_id) == ("</s>", b"</s>")
    assert texts(100_000) == ("", b"")


def test_sentencepiece_keeps_its_spaces_and_names_its_bytes() -> None:
    vocabulary = {token: number for number, token in enumerate(("<unk>", "a", "▁", "▁a", "<0xE2>"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    texts = texts_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert texts(3) == (" a", b" a")
    assert texts(4) == ("\N{REPLACEMENT CHARACTER}", b"\xe2")


def test_without_a_tokenizer_the_id_is_told() -> None:
    assert TokenTexts(None, lambda ids: "")(7) == ("token_id:7", b"token_id:7")
