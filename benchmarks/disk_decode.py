"""The loop that every way over a transformers model decodes with: one prompt, then the likeliest token each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


@torch.no_grad()
def decode(model: Any, prompt: Sequence[int], arrived: Callable[[], bool]) -> None:
    inputs, cache = torch.tensor([list(prompt)]), None
    while True:
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        inputs.item()
        if arrived():
            return
