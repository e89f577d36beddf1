"""How large the models of the disk benchmark are, and how long a way may take."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from benchmarks import disk_models
from benchmarks.disk_worker import WAYS


@dataclass(frozen=True)
class Scale:
    """Models, and what one way may take. A prompt of `later_prompt` tokens is enough once prompts have been measured.

    `most_s` is for all: the ways of a model and a limit are not run once more where that would pass it. A long prompt
    is left out where the short one takes a third of `prompt_s`, which is what any prompt may take. Decoding ends after
    `tokens` or `decode_s`; one step may take `step_s`.
    """

    dense: PretrainedConfig
    sparse: PretrainedConfig
    rounds: int
    prompt: int
    long_prompt: int
    later_prompt: int
    tokens: int
    start_s: float
    prompt_s: float
    decode_s: float
    step_s: float
    direct_bytes: int
    most_s: float
    ways: tuple[str, ...] = tuple(WAYS)
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)


def _scale(size: str) -> Scale:
    if size == "full":
        return Scale(
            dense=disk_models.dense(18, hidden=2560, intermediate=9728, heads=32, kv_heads=8, vocabulary=32000),
            sparse=disk_models.sparse(
                5, hidden=2048, experts=128, intermediate=768, top_k=8, heads=32, kv_heads=4, vocabulary=32000
            ),
            rounds=2,
            prompt=64,
            long_prompt=512,
            later_prompt=4,
            tokens=25,
            start_s=60,
            prompt_s=20,
            decode_s=6,
            step_s=20,
            direct_bytes=512 << 20,
            most_s=1140,
        )
    if size == "quick":
        return Scale(
            dense=disk_models.dense(6, hidden=1024, intermediate=3072, heads=16, kv_heads=8, vocabulary=8000),
            sparse=disk_models.sparse(
                3, hidden=1024, experts=64, intermediate=256, top_k=8, heads=16, kv_heads=4, vocabulary=8000
            ),
            rounds=1,
            prompt=32,
            long_prompt=128,
            later_prompt=4,
            tokens=9,
            start_s=30,
            prompt_s=15,
            decode_s=3,
            step_s=10,
            direct_bytes=64 << 20,
            most_s=300,
            shares=(1.0, 0.25),
        )
    return Scale(
        dense=disk_models.dense(4, hidden=256, intermediate=512, heads=2, kv_heads=1, vocabulary=512),
        sparse=disk_models.sparse(
            2, hidden=256, experts=8, intermediate=128, top_k=2, heads=2, kv_heads=1, vocabulary=512
        ),
        rounds=1,
        prompt=8,
        long_prompt=16,
        later_prompt=2,
        tokens=3,
        start_s=60,
        prompt_s=20,
        decode_s=5,
        step_s=10,
        direct_bytes=4 << 20,
        most_s=300,
    )


SCALES = {size: _scale(size) for size in ("full", "quick", "toy")}
