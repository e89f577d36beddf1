"""overspill: what memory does not hold streamed past the page cache, or weights in a mapping (`job["document"]`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.disk_worker import Generate, tell


def imports() -> None:
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

    import overspill.api  # noqa: F401  (what it imports is not the model's time)


def start(job: dict[str, Any]) -> Generate:
    import torch

    import overspill
    from benchmarks.disk_decode import decode

    torch.set_num_threads(job["threads"])
    engine = overspill.load(
        job["folder"],
        job["document"],
        device="cpu",
        memory_limit_bytes=job["memory_limit_bytes"],
        max_model_len=job["context"],
    )
    placed, plan = engine.placed, engine.plan
    memory = plan.memory
    told = {"offloaded_bytes": plan.offloaded_bytes, "device_bytes": memory.device_bytes}
    tell("plan", **told, working_bytes=memory.working_bytes, notes=list(plan.notes))

    def generate(prompt: Sequence[int], arrived: Callable[[], bool]) -> None:
        with placed.running():
            decode(placed.model, prompt, arrived)
        if placed.prefetcher is not None:
            tell("stall", s=placed.prefetcher.stall_s)
        if (counts := placed.ledger.slots) is not None:
            tell("slots", hits=counts.hits, lookups=counts.lookups, s=counts.stall_s, bytes=counts.bytes)

    return generate
