"""What several engines must be told of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

import torch

from overspill.config import Settings
from overspill.config.environment import DISABLE_PIN_MEMORY, DISABLE_UVA
from overspill.model.sources import Conversion
from overspill.model.weights import Weight
from overspill.plan import Access, Placement, Plan, Tier


def off_device(plan: Plan) -> list[Placement]:
    """What the plan keeps elsewhere than in the device's memory, in declaration order."""
    return [p for p in plan.placements if p.tier is not Tier.DEVICE]


def unified(plan: Plan) -> bool:
    """Whether the device computes in host memory, so that nothing is moved, but at most left on disk."""
    return plan.memory.unified


def total_bytes(weights: Sequence[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


def stored_bytes(weight: Weight) -> int:
    """Its bytes as they lie in the checkpoint, packed or not; of a tensor that several are made of, its part."""
    if not isinstance(weight.source, Conversion):
        return weight.nbytes
    records = weight.source.records
    elements, stored = weight.nbytes // weight.dtype.itemsize, sum(record.elements for record in records)
    return sum(record.nbytes for record in records) * min(elements, stored) // stored


def main_dtype(plan: Plan) -> torch.dtype:
    """What most bytes of the plan are computed in."""
    total: Counter[torch.dtype] = Counter()
    for weight in plan.model:
        total[weight.dtype] += weight.nbytes
    return total.most_common(1)[0][0]


def dtype_name(plan: Plan) -> str:
    return str(main_dtype(plan)).removeprefix("torch.")


def is_gguf(plan: Plan) -> bool:
    return plan.model.checkpoint is not None and plan.model.checkpoint.format == "gguf"


def is_packed(plan: Plan) -> bool:
    """Whether the checkpoint holds weights in less than the plan computes with."""
    return is_gguf(plan) or getattr(plan.model.config, "quantization_config", None) is not None


def gguf_file(plan: Plan, model_name: str) -> str:
    """The (first) file of a GGUF checkpoint, as the user names it where the user names the file."""
    assert plan.model.checkpoint is not None
    file = plan.model.checkpoint.files[0]
    return model_name if PurePath(model_name).name == file.name else str(file)


def by_access(plan: Plan, access: Access) -> list[Weight]:
    """Weights off the device that are used in this way."""
    return [p.weight for p in off_device(plan) if p.access is access]


def environment_of(settings: Settings) -> dict[str, str]:
    """vLLM's variables that are set, which all three engines but llama.cpp read."""
    asked = settings.environment
    switches = ((DISABLE_PIN_MEMORY, asked.disable_pin_memory), (DISABLE_UVA, asked.disable_uva))
    return {name: "1" for name, on in switches if on}


def few(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
