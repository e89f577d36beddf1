"""What two seeded tiny models answer, on any machine: a change of the arithmetic, anywhere, shows here.

Bits differ between CPUs, so token ids are held exactly, with a margin to the second likeliest that no rounding crosses,
and logits to 3e-4. `python tests/offload/test_golden.py` writes the file anew, for a change that is meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated_runs import PROMPT, forward, gib, placed
from overspill.offload.placed import PlacedModel
from tiny_models import MakeTiny

FILE = Path(__file__).with_name("golden.json")
GOLDEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
STEPS = 16
MARGIN = 1e-3
WAYS: dict[str, dict[str, Any] | None] = {
    "resident": None,
    "uva": {"uva": {"cpu_offload_gb": gib(150_000)}},
    "prefetch": {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}},
}


def answer(model: PlacedModel) -> tuple[list[int], list[list[float]]]:
    """Greedy token ids, and of each step's logits every tenth."""
    ids: list[int] = []
    samples = []
    logits, cache, _ = forward(model, PROMPT)
    for _ in range(STEPS):
        last = logits[0, -1]
        first, second = last.topk(2).values.tolist()
        assert first - second > MARGIN, f"step {len(ids)}: a near tie ({first} and {second}); take another seed"
        ids.append(int(last.argmax()))
        samples.append(last[::10].tolist())
        logits, cache, _ = forward(model, ids[-1:], cache)
    return ids, samples


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_seeded_models_answer_as_ever(name: str, way: str, tiny: MakeTiny) -> None:
    ids, samples = answer(placed(tiny(name), WAYS[way]))
    assert len(set(ids)) > 4  # a model that repeats itself would hide much
    assert ids == GOLDEN[name]["token_ids"]
    assert torch.allclose(torch.tensor(samples), torch.tensor(GOLDEN[name]["logits"]), rtol=0, atol=3e-4)


def _write() -> None:
    import tempfile

    from tiny_models import maker

    with tempfile.TemporaryDirectory() as folder:
        make = maker(Path(folder))
        golden = {}
        for name in ("llama", "qwen3_moe"):
            ids, samples = answer(placed(make(name)))
            golden[name] = {"token_ids": ids, "logits": [[round(v, 4) for v in step] for step in samples]}
    FILE.write_text(json.dumps(golden).replace("], ", "],\n") + "\n")


if __name__ == "__main__":
    _write()
