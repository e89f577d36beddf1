"""Tensor parallelism as vLLM 0.33 has it: how many ranks a model can have, and what each of them holds."""

from __future__ import annotations

import math
from typing import Any

from overspill.advice.facts import main_dtype
from overspill.errors import ConfigError
from overspill.model.weights import Role, Weight
from overspill.plan import Plan

_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa", "indexer", "shared_expert_gate"}
"""Matrices that vLLM makes with `disable_tp`, or as ReplicatedLinear."""


def rank_bytes(weight: Weight, ranks: int) -> int:
    """What one of `ranks` holds: its share of a matrix; norms, routers and what multi-head latents need, whole."""
    whole = weight.role in (Role.NORM, Role.ROUTER) or not _WHOLE.isdisjoint(weight.full.split("."))
    return weight.nbytes if whole else -(-weight.nbytes // ranks)


def refuse_ranks(config: Any, ranks: int) -> None:
    """ConfigError for ranks that vLLM refuses: heads must be whole on a rank, KV heads or copies of one."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "intermediate_size", None)
    if not isinstance(heads, int):
        return
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    possible = [n for n in range(1, heads + 1) if _divides(heads, kv_heads, n)]
    if ranks not in possible:
        what = "attention heads" if getattr(text, "num_attention_heads", None) else "inner channels"
        keys = f" and {kv_heads} KV heads" if kv_heads != heads else ""
        raise ConfigError(
            f'"ranks" is {ranks}, and vLLM cannot divide {heads} {what}{keys} by it',
            hint=f"for example {max(n for n in possible if n < ranks)}",
        )


def _divides(heads: int, kv_heads: int, ranks: int) -> bool:
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def cache_bytes(plan: Plan, ranks: int) -> int:
    """What a rank's KV cache takes for the plan's tokens. vLLM keeps latents as they are, whole on each rank."""
    text: Any = plan.model.config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        a_token = plan.model.decoder.layers * (latent + text.qk_rope_head_dim) * main_dtype(plan).itemsize
        return int(a_token) * plan.context_tokens * plan.sequences
    kv_heads = getattr(text, "num_key_value_heads", None) or ranks
    return math.ceil((plan.memory.kv_cache_bytes or 0) / min(ranks, kv_heads))
