"""Ranks that vLLM can have, and an offload that is chosen for what each of them holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from advised import fitted, line_with, made, uva, value_of
from transformers import LlamaConfig, MambaConfig

from overspill.advice.refit import Held, fitted_again
from overspill.advice.vllm_ranks import cache_bytes, rank_bytes, refuse_ranks
from overspill.advice.vllm_tensors import pool_bytes, taken_by_prefetch, vllm_tensors
from overspill.errors import ConfigError
from overspill.model.weights import Role, Weight
from tiny_models import MakeTiny


@pytest.mark.parametrize(
    ("config", "ranks", "nearest"),
    [
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=8), 3, 2),
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=8), 100_000, 32),
        (LlamaConfig(hidden_size=768, num_attention_heads=24, num_key_value_heads=8), 12, 8),
        (MambaConfig(intermediate_size=64), 5, 4),
    ],
)
def test_ranks_that_do_not_divide_the_heads_are_refused_with_some_that_do(
    config: Any, ranks: int, nearest: int
) -> None:
    with pytest.raises(ConfigError, match=f'"ranks" is {ranks}') as refused:
        refuse_ranks(config, ranks)
    assert refused.value.hint == f"for example {nearest}"
    refuse_ranks(config, nearest)


def test_the_door_refuses_them(even: Path) -> None:
    with pytest.raises(ConfigError, match="4 attention heads and 2 KV heads"):
        made(even).told("vllm", ranks=3)
    made(even).told("vllm", ranks=4)


def test_a_ranks_cache_is_its_heads_and_a_latent_is_on_each(even: Path, tiny: MakeTiny) -> None:
    plan = made(even).plan
    whole = plan.memory.kv_cache_bytes
    assert whole is not None
    assert cache_bytes(plan, 2) == cache_bytes(plan, 4) == whole // 2, "two KV heads, of which four ranks have copies"
    latent = 6 * 32 * (10 + 16) * 4  # layers, tokens, latent and rotary, float32
    assert cache_bytes(made(tiny("deepseek_v2")).plan, 5) == latent


def test_what_fits_over_the_ranks_is_not_offloaded(even: Path) -> None:
    made_, device = fitted(even, 0.8)
    assert made_.plan.offloads
    assert "--offload-group-size" in made_.told("vllm", device=device).command
    advice = made_.told("vllm", ranks=2, device=device)
    assert not [word for word in advice.command if "offload" in word]
    assert advice.host_bytes == 0
    line_with(advice.notes, "over 2 ranks", "fits without offload")


def test_what_does_not_is_chosen_again_for_a_ranks_share(even: Path) -> None:
    made_, device = fitted(even, 0.55)
    advice = made_.told("vllm", ranks=2, device=device)
    line_with(advice.notes, "over 2 ranks", "was chosen")
    plan = made_.plan
    size, number, step = (
        int(value_of(advice, f"--offload-{what}")) for what in ("group-size", "num-in-group", "prefetch-step")
    )
    taken = taken_by_prefetch(vllm_tensors(plan.model), size, number)
    moved = sum(tensor.rank_bytes(2) for tensor in taken)
    kept = sum(rank_bytes(weight, 2) for weight in plan.model) - moved + pool_bytes(taken, step, 2) // 2
    needed = kept + cache_bytes(plan, 2) + (plan.memory.working_bytes or 0) + plan.buffers_bytes
    assert needed <= device.memory_bytes
    assert 0 < moved < plan.offloaded_bytes / 2, "less than a half of what one device would have to move"


@pytest.mark.parametrize("share", [0.5, 0.6])
def test_what_is_chosen_again_fits_though_weights_are_held_in_different_shares(share: float, tiny: MakeTiny) -> None:
    """Experts, which leave first, are small there, so that the first choice falls short."""
    made_, device = fitted(tiny("qwen3_moe"), share)

    def held(weight: Weight) -> int:
        return weight.nbytes // 4 if weight.role is Role.ROUTED_EXPERT else weight.nbytes

    uneven = Held("uneven", held, made_.plan.memory.kv_cache_bytes or 0)
    again = fitted_again(made_.plan, made_.settings, device, uneven)
    line_with(again.notes, "uneven: ", "was chosen")
    assert uneven.short_bytes(again) <= 0


def test_a_stated_budget_is_kept_over_ranks(even: Path) -> None:
    made_ = made(even, uva(60_000))
    _, device = fitted(even, 2)
    advice = made_.told("vllm", ranks=2, device=device)
    assert "--cpu-offload-gb" in advice.command
    assert advice.command == made_.told("vllm", ranks=2).command
