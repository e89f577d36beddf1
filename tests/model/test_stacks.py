from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3Config,
    OpenAIGPTConfig,
    SiglipVisionConfig,
)

from overspill.errors import UnsupportedModelError
from overspill.model import hf
from overspill.model.stacks import Stack, find_stacks
from tiny_models import ARCHITECTURES, TINY


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_stack_of_every_tiny_model_is_found(name: str) -> None:
    skeleton = hf.build_skeleton(TINY[name].config(), torch.float32)
    assert find_stacks(skeleton) == (Stack("model.layers", 8 if name == "nemotron_h" else 6, tower=False),)


def test_a_vision_tower_is_no_decoder_though_it_has_more_layers() -> None:
    text = TINY["gemma3"].config()
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=9, num_attention_heads=1, image_size=16, patch_size=8
    )
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4)
    decoder, tower = find_stacks(hf.build_skeleton(config, torch.float32))
    assert (decoder.path, decoder.layers, decoder.tower) == ("model.language_model.layers", 6, False)
    assert (tower.layers, tower.tower) == (9, True)
    assert tower.path.startswith("model.vision_tower")


def test_an_architecture_without_marked_layers_has_its_largest_list() -> None:
    config = OpenAIGPTConfig(vocab_size=8, n_positions=8, n_embd=4, n_layer=3, n_head=1)
    assert find_stacks(hf.build_skeleton(config, torch.float32)) == (Stack("transformer.h", 3, tower=False),)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Sequential has no stack of layers"):
        find_stacks(nn.Sequential(nn.Linear(2, 2)))
