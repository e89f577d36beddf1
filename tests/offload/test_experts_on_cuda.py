"""Routed experts beside a real GPU: computed on the CPU, and streamed through slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overspill
from overspill.engine import SamplingParams
from overspill.model.hf_experts import set_experts_implementation
from tiny_models import MakeTiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NMSE_BOUND = 5e-4
WAYS: dict[str, Any] = {
    "placed": {"cpu_moe": True},
    "placed and streamed": {"n_cpu_moe": 3, "expert_cache": "64KiB"},
    "fetched": {"expert_cache": "64KiB"},
    "misses on the CPU": {"expert_cache": "64KiB", "expert_policy": "cpu"},
}
FROM_DISK = {"overspill": {"expert_stream": {"slots": 8, "tier": "disk"}}}


def logits_of(folder: Any, document: Any = None, **options: Any) -> torch.Tensor:
    engine = overspill.load(folder, document, device="cuda", device_memory_bytes=1 << 30, **options)
    if not options and document is None:
        set_experts_implementation(engine.placed.model, "eager")  # what slots are read by, one expert after the other
    scores = engine.generate([5, 17, 99, 3, 64], SamplingParams(max_tokens=4), logits=True, ignore_eos=True).logits
    assert scores is not None
    return scores


@pytest.mark.parametrize("way", [*WAYS, "from disk"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "gpt_oss", "nemotron_h"])
def test_answers_beside_a_gpu(name: str, way: str, tiny: MakeTiny) -> None:
    expected = logits_of(tiny(name))
    scores = logits_of(tiny(name), FROM_DISK) if way == "from disk" else logits_of(tiny(name), **WAYS[way])
    if way in ("fetched", "from disk"):
        assert torch.equal(scores, expected)
    difference = (scores[0].double() - expected[0].double()).square().sum()
    assert difference / expected[0].double().square().sum() < NMSE_BOUND
