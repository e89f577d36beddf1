from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from overspill.compare.sides import Contest, make_contest
from overspill.config import parse_bytes, resolve
from overspill.errors import CapacityError, CheckpointError, ConfigError
from overspill.plan import Tier, disk

NOWHERE = "/nonexistent/model.gguf"
UVA = {"uva": {"cpu_offload_gb": 3e-5}}
PROMPTS = ([5, 17, 99], [3, 64, 21, 120])


def contest(model: str | Path, baseline: Any = None, candidate: Any = UVA, **changes: Any) -> Contest:
    given = {"prompts": PROMPTS, "max_tokens": 6, "options": {"device": "emulated"}} | changes
    return make_contest(model, baseline, candidate, **given)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"candidate": None}, "offloads nothing"),
        ({"prompts": ()}, "no prompt"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"options": {"device": "cpu"}}, "own memory"),
        ({"options": {"device": "emulated", "cpu_offload_gb": 1.0}}, "flag --cpu-offload-gb"),
        ({"baseline": {"uva": {"cpu_offload": 1}}}, "unknown key"),
    ],
)
def test_settings_are_judged_before_the_model_is_looked_for(changes, told):
    with pytest.raises(ConfigError, match=told):
        contest(NOWHERE, **changes)


def test_then_the_model_is_looked_for():
    with pytest.raises(CheckpointError, match="does not exist"):
        contest(NOWHERE)


def test_memory_is_planned_for_just_what_is_asked(tiny):
    made = contest(tiny("llama"))
    assert made.baseline is not None
    assert made.candidate.plan.context_tokens == made.baseline.plan.context_tokens == 4 + 6
    assert made.notes == ()
    longer = contest(tiny("llama"), options={"device": "emulated", "max_model_len": 40})
    assert longer.candidate.plan.context_tokens == 40
    with pytest.raises(ConfigError, match="max_model_len is 9, but the longest prompt and its answer take 10"):
        contest(tiny("llama"), options={"device": "emulated", "max_model_len": 9})


def test_flags_are_the_candidates_and_engine_settings_both_sides(tiny):
    options = {"device": "emulated", "link_bandwidth": "1GB/s", "offload_group_size": 2}
    made = contest(tiny("llama"), candidate=None, options=options)
    assert made.baseline is not None
    assert (made.baseline.plan.backend, made.candidate.plan.backend) == (None, "prefetch")
    assert made.baseline.job.document == {"overspill": {"placement": {"fit": False}}}
    for side in (made.baseline, made.candidate):
        settings = resolve(side.job.document, None, side.job.engine)
        assert settings.engine.link_bandwidth == 1e9
        assert settings.engine.max_model_len == 10
        assert settings.offload.resolved_backend == side.plan.backend


def test_a_baseline_that_does_not_fit_the_emulated_device_gets_just_what_it_needs(tiny):
    asked = 400_000
    made = contest(
        tiny("llama"),
        candidate={"uva": {"cpu_offload_gb": 3e-4}},
        options={"device": "emulated", "device_memory_bytes": asked},
    )
    assert made.baseline is not None
    assert made.candidate.plan.memory.available_device_bytes == asked
    enlarged = made.baseline.plan.memory
    assert enlarged.device_bytes <= enlarged.available_device_bytes < enlarged.device_bytes + (20 << 20)
    assert len(made.notes) == 1
    assert "the baseline does not fit" in made.notes[0]


def test_a_candidate_that_does_not_fit_is_refused(tiny):
    with pytest.raises(CapacityError):
        contest(tiny("llama"), options={"device": "emulated", "device_memory_bytes": 100_000})


def test_a_placement_that_has_nothing_to_do_is_refused_with_the_reason(tiny):
    with pytest.raises(ConfigError, match=r"moves nothing.*resolves to the engine's own device \(cpu\)") as refused:
        contest(tiny("qwen3_moe"), candidate=None, options={"device": "cpu", "cpu_moe": True})
    assert "--device emulated" in (refused.value.hint or "")


PREFETCH = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}


@pytest.fixture
def _no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model: what reading takes for itself is a thousand times what it has."""
    monkeypatch.setattr(disk, "READER_BYTES", 0)


def stated_limit(hint: str | None) -> int:
    found = re.search(r"--memory-limit (\d+(?:MiB|KiB|B)),", hint or "")
    assert found is not None, hint
    return parse_bytes(found[1])


@pytest.mark.usefixtures("_no_reader")
@pytest.mark.parametrize(("device", "document"), [("cpu", None), ("emulated", PREFETCH)])
def test_a_memory_limit_is_the_candidates_and_must_leave_something_on_disk(tiny, device, document):
    def limited(nbytes: int) -> Contest:
        options = {"device": device, "memory_limit_bytes": nbytes}
        return contest(tiny("llama"), document, document, options=options)

    with pytest.raises(ConfigError, match="leaves nothing on disk, so there is nothing to compare") as refused:
        limited(1 << 30)
    most = stated_limit(refused.value.hint)
    made = limited(most)
    assert made.baseline is not None
    assert made.candidate.plan.on(Tier.DISK)
    assert not made.baseline.plan.on(Tier.DISK)
    assert made.candidate.job.engine["memory_limit_bytes"] == most
    assert "memory_limit_bytes" not in made.baseline.job.engine
    with pytest.raises(ConfigError, match="leaves nothing on disk"):
        limited(most + 1024)


def test_a_limit_of_host_memory_that_nothing_uses_is_refused(tiny):
    with pytest.raises(ConfigError, match="a memory limit is of host memory, and no weight is there"):
        contest(tiny("llama"), candidate=None, options={"device": "emulated", "memory_limit_bytes": 1 << 30})


def test_both_sides_observe_the_first_experts_that_either_may_compute_otherwise(tiny):
    def observed(baseline: Any, candidate: Any) -> set[str | None]:
        made = contest(tiny("deepseek_v2"), baseline, candidate)
        assert made.baseline is not None
        return {made.baseline.job.observe, made.candidate.job.observe}

    placed = {"overspill": {"placement": {"overrides": [{"pattern": r"blk\.[34]\.ffn_.*_exps", "device": "cpu"}]}}}
    assert observed(None, placed) == {"model.layers.3.mlp.experts"}
    assert observed(placed, {"overspill": {"expert_stream": {"slots": 4, "policy": "cpu"}}}) == {
        "model.layers.1.mlp.experts"
    }
    assert observed(None, {"overspill": {"expert_stream": {"slots": 4}}}) == {None}


def test_a_text_needs_a_tokenizer(tiny):
    with pytest.raises(ConfigError, match="no tokenizer"):
        contest(tiny("llama"), prompts=("hello",))
