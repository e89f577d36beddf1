"""Checkpoints of real sizes with random weights, written piece by piece: the writer needs little memory."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

_TILE_BYTES = 8 << 20


def llama_config(layers: int, *, hidden: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=2048,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def save_random(folder: Path, config: Any, *, shift: int = 8) -> int:
    """Write `config` and bfloat16 weights under the model's own names (llama's); returns the weights' bytes.

    The first of them lies `shift` bytes behind a multiple of 64, as any header may have it.

    A tile of normal values is repeated, from another place for each weight. The file is out of the page cache then.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(_TILE_BYTES // 2, generator=generator)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * ((shift - 8 - len(text)) % 64)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, tensor in enumerate(model.state_dict().values()):
            scale, shift = (0.1, 1.0) if tensor.dim() < 2 else (tensor.shape[-1] ** -0.5, 0.0)
            values = (tile.roll(977 * number) * scale + shift).to(torch.bfloat16).view(torch.uint8).numpy()
            left = tensor.numel() * 2
            while left:
                left -= file.write(values[:left].data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return end
