"""Plain memory mapping: transformers' own loading, which leaves safetensors mapped where nothing is converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.disk_worker import Generate


def imports() -> None:
    from transformers import AutoModelForCausalLM  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401


def start(job: dict[str, Any]) -> Generate:
    import torch

    from benchmarks.disk_decode import decode

    torch.set_num_threads(job["threads"])
    model = load(job)

    def generate(prompt: Sequence[int], arrived: Callable[[], bool]) -> None:
        decode(model, prompt, arrived)

    return generate


def load(job: dict[str, Any], **options: Any) -> Any:
    """The model in the checkpoint's dtype; a loop over the chosen experts, since torch's grouped product reads all."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        job["fused"], dtype="auto", experts_implementation="eager" if job["experts"] else None, **options
    ).eval()
