from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from overspill.engine.tokens import TextStream, encode, refuse_length
from overspill.errors import ConfigError
from talking_model import byte_tokenizer

BYTES = byte_tokenizer()


def sentence_pieces() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with ▁, and what is not in the vocabulary falls back to bytes."""
    words = ["▁the", "▁", "s", "▁cat", ".", "a", "t", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(("<unk>", *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


PIECES = sentence_pieces()


def streamed(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> tuple[list[str], str]:
    """What a stream gives for `ids` one by one, and all at once."""

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    stream = TextStream(decode)
    return [*(stream.feed([token]) for token in ids), stream.finish()], decode(ids)


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=40))
def test_pieces_of_any_bytes_join_to_the_whole_text(ids: list[int]) -> None:
    pieces, text = streamed(BYTES, ids)
    assert "".join(pieces) == text


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_no_piece_cuts_a_character(text: str) -> None:
    pieces, whole = streamed(BYTES, BYTES(text)["input_ids"])
    assert "".join(pieces) == whole == text
    assert pieces[-1] == "" or "�" in text, "every character was given as soon as its last byte came"
    assert all("�" not in piece for piece in pieces) or "�" in text


def test_a_character_comes_with_its_last_byte() -> None:
    pieces, _ = streamed(BYTES, BYTES("a😀b")["input_ids"])
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_is_given_at_the_end() -> None:
    pieces, _ = streamed(BYTES, BYTES("é")["input_ids"][:1])
    assert pieces == ["", "�"]


@given(st.lists(st.sampled_from(["▁the", "▁cat", "s", ".", "▁", "a", "<end>", "😀", "ß"]), max_size=20))
def test_pieces_join_where_a_token_s_space_hangs_on_its_neighbour(words: list[str]) -> None:
    ids: list[int] = []
    for word in words:
        number = PIECES.convert_tokens_to_ids(word)
        in_bytes = [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in word.encode()]
        ids += in_bytes if number == PIECES.unk_token_id else [number]
    pieces, text = streamed(PIECES, ids)
    assert "".join(pieces) == text


def test_a_stream_decodes_only_the_last_pieces() -> None:
    lengths = []

    def decode(tokens):
        lengths.append(len(tokens))
        return "x" * len(tokens)

    stream = TextStream(decode)
    for _ in range(100):
        assert stream.feed([1]) == "x"
    assert max(lengths) == 2


def test_a_text_is_a_message_where_there_is_a_chat_template() -> None:
    ids = encode(BYTES, "hi")
    assert BYTES.decode(ids) == "<s>[user] hi\n"
    assert BYTES.decode(encode(BYTES, "hi", chat=False)) == "hi"
    plain = byte_tokenizer()
    plain.chat_template = None
    assert encode(plain, "hi") == encode(BYTES, "hi", chat=False)


def test_token_ids_pass_through() -> None:
    assert encode(None, (3, 4)) == [3, 4]


def test_a_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\nhint: "):
        encode(None, "hi")


@pytest.mark.parametrize("prompt", ["", []])
def test_a_prompt_of_no_tokens_is_refused(prompt) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        encode(BYTES, prompt, chat=False)


def test_the_length_is_judged_to_the_token() -> None:
    refuse_length(20, 12, 32)
    with pytest.raises(ConfigError, match=r"20 prompt tokens and 13 .* 33, more than the 32 .*\n.*--max-model-len 33"):
        refuse_length(20, 13, 32)
