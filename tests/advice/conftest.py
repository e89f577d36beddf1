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
