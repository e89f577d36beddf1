from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_models import TINY


@pytest.fixture(scope="session")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose experts can be used in the mapped file: one tensor a layer, in bfloat16."""
    folder = tmp_path_factory.mktemp("fused")
    replace(TINY["mixtral_fused"], dtype=torch.bfloat16).save(folder)
    return folder


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of four heads and two KV heads, which ranks can share."""
    folder = tmp_path_factory.mktemp("even")
    tiny = TINY["llama"]
    heads = {"hidden_size": 36, "num_attention_heads": 4, "num_key_value_heads": 2}
    replace(tiny, options={**tiny.options, **heads}).save(folder)
    return folder
