from __future__ import annotations

import pytest
import torch

from overspill.compare.answers import difference
from overspill.compare.results import Job, RunResult, from_json, to_json
from overspill.compare.verdicts import Evidence, Outcome, judge
from overspill.compare.worker import measure

PROMPTS = ((5, 17, 99, 3), (64, 21, 120, 7, 40, 11))


def job(folder, document=None, **engine) -> Job:
    settings = {"device": "emulated", "debug": True, "max_model_len": 12, **engine}
    return Job(str(folder), document or {}, settings, PROMPTS, 6, "")


@pytest.fixture(scope="module")
def resident(tiny):
    return {name: measure(job(tiny(name))) for name in ("llama", "qwen3_moe")}


def test_what_is_measured_agrees_with_itself(resident):
    result, logits = resident["llama"]
    assert [g.prompt_ids for g in result.generations] == list(PROMPTS)
    for number, generation in enumerate(result.generations):
        assert len(generation.passes) == len(generation.token_ids) > 1
        assert generation.passes[0].tokens == len(generation.prompt_ids)
        assert {p.tokens for p in generation.decode} == {1}
        assert generation.link_bytes == 0
        kept = logits[str(number)]
        assert kept.dtype == torch.float32
        assert kept.argmax(dim=-1).tolist() == list(generation.token_ids)
    assert sum(weight.bytes for weight in result.weights) == result.plan.weights_bytes - padding(result)
    assert result.memory.peak_bytes > result.weights_and_pool_bytes
    assert result.memory.kv_cache_peak_bytes > 0
    assert result.read_bytes > 0


def padding(result: RunResult) -> int:
    """What alignment and rebuilt buffers add to the weights' own bytes."""
    return next(b.requested_bytes for b in result.blocks if b.purpose == "weights") - sum(
        weight.bytes for weight in result.weights
    )


@pytest.mark.parametrize(
    ("model", "document"),
    [
        ("llama", {"uva": {"cpu_offload_gb": 3e-5}}),
        ("qwen3_moe", {"uva": {"cpu_offload_gb": 5e-5}}),
        ("qwen3_moe", {"prefetch": {"offload_group_size": 2, "offload_prefetch_step": 2}}),
    ],
)
def test_every_verdict_passes(tiny, resident, model, document):
    baseline, reference = resident[model]
    candidate, logits = measure(job(tiny(model), document))
    apart = tuple(
        difference(a, reference[str(i)], b, logits[str(i)])
        for i, (a, b) in enumerate(zip(baseline.generations, candidate.generations, strict=True))
    )
    verdicts = judge(Evidence((baseline,), (candidate,), (), (apart,)), max_slowdown=1000)
    assert {v.name: v.outcome for v in verdicts} == dict.fromkeys((v.name for v in verdicts), Outcome.PASS), verdicts
    assert [c.outcome for v in verdicts[:3] for c in v.checks].count(Outcome.FAIL) == 0
    moved = verdicts[0]
    assert any("over the link" in check.text for check in moved.checks)


def test_a_result_survives_its_journey(resident):
    result, _ = resident["qwen3_moe"]
    assert from_json(RunResult, to_json(result)) == result
