"""Prompts as token ids, made once, so that both sides are asked exactly the same."""

from __future__ import annotations

from collections.abc import Sequence

from overspill.checkpoint import Checkpoint
from overspill.errors import ConfigError
from overspill.model import hf
from overspill.model.gguf import tokenizer_from_gguf

Prompt = str | Sequence[int]


def encode_all(
    prompts: Sequence[Prompt], checkpoint: Checkpoint, *, trust_remote_code: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Each prompt's ids: a text as a user's message where the model has a chat template, ids as they are.

    Raises ConfigError for an empty prompt, and a text where the model has no tokenizer.
    """
    tokenizer = None
    if any(isinstance(prompt, str) for prompt in prompts):
        if checkpoint.format == "gguf":
            tokenizer = tokenizer_from_gguf(checkpoint)
        else:
            tokenizer = hf.load_tokenizer(checkpoint.folder, trust_remote_code=trust_remote_code)
        if tokenizer is None:
            raise ConfigError("this model has no tokenizer", hint="give the prompts as token ids")
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            ids = list(prompt)
        elif getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        if not ids:
            raise ConfigError(f"prompt {number} is empty", hint="give at least one token")
        encoded.append(tuple(int(i) for i in ids))
    return tuple(encoded)
