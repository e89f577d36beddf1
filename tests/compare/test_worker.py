from __future__ import annotations

import pytest
import torch

from overspill.compare.answers import block_difference, difference
from overspill.compare.results import OBSERVED, Job, RunResult, from_json, to_json
from overspill.compare.verdicts import Evidence, Outcome, judge
from overspill.compare.worker import measure
from overspill.machine import EmulatedDevice
from overspill.machine.observed import observations
from overspill.machine.rates import FOLDER_VARIABLE, MachineReport, Rates, fingerprint, save_report
from overspill.machine.reads import FileReader
from overspill.plan import disk

PROMPTS = ((5, 17, 99, 3), (64, 21, 120, 7, 40, 11))


FIRST_EXPERTS = "model.layers.0.mlp.experts"


def job(folder, document=None, *, observe=None, **engine) -> Job:
    settings = {"device": "emulated", "debug": True, "max_model_len": 12, **engine}
    return Job(str(folder), document or {}, settings, PROMPTS, 6, "", observe)


def streaming(**stream):
    return {"overspill": {"expert_stream": stream}}


@pytest.fixture(scope="module")
def resident(tiny):
    return {
        "llama": measure(job(tiny("llama"))),
        "qwen3_moe": measure(job(tiny("qwen3_moe"), observe=FIRST_EXPERTS)),
    }


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


def test_steps_are_held_against_the_forecast_where_the_machine_is_known(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    device = EmulatedDevice()
    assert measure(job(tiny("llama")))[0].plan.times is None
    figures = {"float32": 1e9}
    rates = Rates("made up", figures, figures, layer_s=1e-3, expert_bytes_s=1e9, expert_flops=1e9)
    name = fingerprint(device)[0]
    save_report(MachineReport(name, device.kind, device.name, "2026-11-30", {}, {}, {}, rates))
    result, _ = measure(job(tiny("llama")))
    times = result.plan.times
    assert times is not None
    assert times.origin == "made up"
    assert [batch.tokens for batch in times.batches] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert times.step_s == pytest.approx(times.batches[0].seconds, rel=0.05)
    (kept,) = observations(device)
    assert (kept.forecast_s, kept.measured_s, kept.way) == (times.step_s, result.decode_median_s, "")
    assert from_json(RunResult, to_json(result)) == result


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
        ("qwen3_moe", {"overspill": {"placement": {"cpu_moe": True}}}),
        ("qwen3_moe", {"uva": {"cpu_offload_gb": 3e-5}, "overspill": {"placement": {"n_cpu_moe": 2}}}),
        ("qwen3_moe", streaming(slots=8)),
        ("qwen3_moe", streaming(slots=30)),
        ("qwen3_moe", {"prefetch": {"offload_group_size": 2}, **streaming(slots=8)}),
        ("qwen3_moe", streaming(slots=8, policy="cpu")),
        ("qwen3_moe", streaming(slots=8, policy="auto")),
        ("qwen3_moe", streaming(slots=8, tier="disk")),
    ],
)
def test_every_verdict_passes(tiny, resident, model, document):
    baseline, reference = resident[model]
    candidate, logits = measure(job(tiny(model), document, observe=FIRST_EXPERTS if model == "qwen3_moe" else None))
    apart = tuple(
        difference(a, reference[str(i)], b, logits[str(i)])
        for i, (a, b) in enumerate(zip(baseline.generations, candidate.generations, strict=True))
    )
    blocks = (block_difference(FIRST_EXPERTS, reference, logits),) if model == "qwen3_moe" else ()
    found = Evidence((baseline,), (candidate,), (), (apart,), candidate_blocks=blocks)
    verdicts = judge(found, max_slowdown=1000)
    assert {v.name: v.outcome for v in verdicts} == dict.fromkeys((v.name for v in verdicts), Outcome.PASS), verdicts
    by_cpu = candidate.plan.placed or candidate.plan.policy in ("cpu", "auto")
    assert (verdicts[2].headline == "identical") is not bool(by_cpu)
    assert bool(candidate.experts) is bool(candidate.plan.placed or candidate.plan.streamed)
    assert [c.outcome for v in verdicts[:3] for c in v.checks].count(Outcome.FAIL) == 0
    moved = verdicts[0]
    assert any("over the link" in check.text for check in moved.checks)


def test_what_streams_from_disk_is_read_where_the_cpu_computes(tiny):
    baseline, reference = measure(job(tiny("qwen3_moe"), device="cpu"))
    candidate, logits = measure(job(tiny("qwen3_moe"), streaming(slots=8, tier="disk"), device="cpu"))
    apart = tuple(
        difference(a, reference[str(i)], b, logits[str(i)])
        for i, (a, b) in enumerate(zip(baseline.generations, candidate.generations, strict=True))
    )
    moved, memory, answer, _ = judge(Evidence((baseline,), (candidate,), (), (apart,)))
    assert [v.outcome for v in (moved, memory, answer)] == [Outcome.PASS] * 3
    assert "on disk" in moved.reason
    assert candidate.slot_counts is not None
    read_bytes = sum(generation.read_bytes for generation in candidate.generations)
    assert read_bytes >= candidate.slot_counts.bytes > 0
    assert sum(generation.link_bytes for generation in candidate.generations) == 0


PREFETCH = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}


@pytest.mark.parametrize(("device", "document", "share"), [("cpu", {}, 0.7), ("emulated", PREFETCH, 0.9)])
def test_layers_on_disk_are_read_as_often_as_planned(tiny, monkeypatch, device, document, share):
    monkeypatch.setattr(disk, "READER_BYTES", 0)  # a thousand times what a tiny model has
    baseline, reference = measure(job(tiny("llama"), document, device=device))
    plan = baseline.plan
    whole = plan.host_bytes if document else plan.weights_bytes + (plan.kv_cache_bytes or 0)
    limited = job(tiny("llama"), document, device=device, memory_limit_bytes=int(whole * share))
    candidate, logits = measure(limited)
    apart = tuple(
        difference(a, reference[str(i)], b, logits[str(i)])
        for i, (a, b) in enumerate(zip(baseline.generations, candidate.generations, strict=True))
    )
    moved, _, answer, _ = judge(Evidence((baseline,), (candidate,), (), (apart,)))
    assert (moved.outcome, answer.outcome) == (Outcome.PASS, Outcome.PASS), moved
    assert any("of layers each from disk, as planned" in check.text for check in moved.checks)
    assert candidate.plan.disk_bytes > 0
    assert all(g.layers_read_bytes >= len(g.passes) * candidate.plan.disk_bytes for g in candidate.generations)

    read = FileReader.read

    def twice(reader: FileReader, *pieces: object) -> None:
        read(reader, *pieces)
        read(reader, *pieces)

    monkeypatch.setattr(FileReader, "read", twice)
    moved, *_ = judge(Evidence((baseline,), (measure(limited)[0],), (), (apart,)))
    assert moved.outcome is Outcome.FAIL
    assert "bytes were read from disk for layers in" in moved.reason


def test_what_is_observed_is_the_first_prompts_pass_as_it_is(resident):
    _, logits = resident["qwen3_moe"]
    hidden, index, weights, output = (logits[name] for name in OBSERVED)
    assert hidden.shape == output.shape == (len(PROMPTS[0]), 35)
    assert index.shape == weights.shape == (len(PROMPTS[0]), 2)
    assert not index.is_floating_point()
    assert output.abs().max() > 0


def test_a_result_survives_its_journey(tiny):
    document = {"overspill": {"placement": {"n_cpu_moe": 2}, "expert_stream": {"slots": 8}}}
    result, _ = measure(job(tiny("qwen3_moe"), document))
    assert {use.access for use in result.experts} == {"in_place", "stream"}
    assert result.slots is not None
    assert result.generations[0].slots is not None
    assert from_json(RunResult, to_json(result)) == result
