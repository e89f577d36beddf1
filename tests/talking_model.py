"""A tiny random model with a byte-level tokenizer and a chat template: it talks, and talks nonsense."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tiny_models import Tiny

SPECIAL = ("<pad>", "<s>", "</s>")
CHAT_TEMPLATE = "<s>{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
TALKING = Tiny(
    "LlamaConfig", {"vocab_size": len(SPECIAL) + 256, "intermediate_size": 45, "max_position_embeddings": 256}
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters beyond ASCII are several tokens. Ids 0 to 2 are special."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *sorted(ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


def save_talking_model(folder: Path) -> Path:
    """Write the model with its tokenizer into `folder`, which is returned."""
    TALKING.save(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
