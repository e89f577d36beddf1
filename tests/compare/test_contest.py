"""The comparison end to end, in real processes: the rest of the room is tested without them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hub_server import MODEL, hub_of
from overspill.compare import Outcome, Planned, RunFinished, RunStarted, compare
from overspill.compare.contest import run_contest
from overspill.compare.sides import make_contest
from overspill.compare.verdicts import judge
from overspill.errors import ConfigError

PROMPTS = ([5, 17, 99, 3], [64, 21, 120, 7, 40, 11])


def with_one_weight_changed(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.5." in name and name.endswith("down_proj.weight"))
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    return target


@pytest.fixture
def one_thread(monkeypatch):
    """Two workers of one thread each leave a busy machine some room."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("one_thread")
def test_prefetch_passes_every_verdict(tiny, tmp_path):
    heard = []
    report = compare(
        tiny("llama"),
        candidate={"prefetch": {"offload_group_size": 2}},
        prompts=PROMPTS,
        max_tokens=5,
        repeat=1,
        output_dir=tmp_path / "out",
        progress=heard.append,
        max_slowdown=1000,
        device="emulated",
        debug=True,
    )
    assert [(v.name, v.outcome) for v in report.verdicts] == [
        ("bytes moved", Outcome.PASS),
        ("device memory", Outcome.PASS),
        ("same answer", Outcome.PASS),
        ("time per token", Outcome.PASS),
    ]
    assert not report.failed
    assert [type(event) for event in heard] == [Planned, *[RunStarted, RunFinished] * 2]
    assert [event.side for event in heard[1:]] == ["baseline", "baseline", "candidate", "candidate"]
    assert heard[1].total == 2
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["failed"] == []
    assert written["candidate"]["runs"][0]["plan"]["backend"] == "prefetch"
    assert written["prompts"] == ["token ids 5 17 99 3", "token ids 64 21 120 7 40 11"]
    assert "same answer" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.usefixtures("one_thread")
def test_experts_on_the_cpu_and_from_disk_pass_within_the_bound(tiny, tmp_path):
    report = compare(
        tiny("qwen3_moe"),
        candidate={"overspill": {"expert_stream": {"slots": 8, "tier": "disk"}}},
        prompts=PROMPTS,
        max_tokens=5,
        repeat=1,
        output_dir=tmp_path,
        device="emulated",
        debug=True,
        n_cpu_moe=2,
    )
    assert [v.outcome for v in report.verdicts] == [Outcome.PASS] * 3 + [Outcome.NOT_JUDGED]
    assert report.verdicts[2].headline.startswith("NMSE ") or report.verdicts[2].headline == "same bits"
    assert "model.layers.0.mlp.experts, was given the same bits" in report.verdicts[2].reason
    page = report.files[1].read_text()
    assert "Routed experts" in page
    assert "disk, stream: " in page
    assert "host, in-place: " in page


@pytest.mark.usefixtures("one_thread")
def test_the_same_experts_from_another_tier_are_the_same_bits(tiny):
    report = compare(
        tiny("qwen3_moe"),
        {"overspill": {"expert_stream": {"slots": 8}}},
        {"overspill": {"expert_stream": {"slots": 12, "tier": "disk"}}},
        prompts=PROMPTS,
        max_tokens=5,
        repeat=1,
        device="emulated",
        debug=True,
    )
    assert [v.outcome for v in report.verdicts] == [Outcome.PASS] * 3 + [Outcome.NOT_JUDGED]
    assert report.verdicts[2].headline == "identical"


@pytest.mark.usefixtures("one_thread")
def test_a_candidate_with_another_weight_fails_same_answer_and_nothing_else(tiny, tmp_path):
    contest = make_contest(
        tiny("qwen3_moe"),
        None,
        {"uva": {"cpu_offload_gb": 5e-5}},
        prompts=PROMPTS,
        max_tokens=5,
        options={"device": "emulated", "debug": True},
    )
    corrupted = with_one_weight_changed(tiny("qwen3_moe"), tmp_path / "corrupted")
    side = contest.candidate
    contest = replace(contest, candidate=replace(side, job=replace(side.job, model=str(corrupted))))
    evidence = run_contest(contest, repeat=1, deadline_s=300, progress=lambda event: None)
    outcomes = {v.name: v.outcome for v in judge(evidence)}
    assert outcomes == {
        "bytes moved": Outcome.PASS,
        "device memory": Outcome.PASS,
        "same answer": Outcome.FAIL,
        "time per token": Outcome.NOT_JUDGED,
    }


@pytest.mark.parametrize("wrong", [{"repeat": 0}, {"max_slowdown": -1.0}, {"deadline_s": 0}])
def test_numbers_are_judged_before_the_model_is_looked_for(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        compare("/nonexistent/model.gguf", candidate={"uva": {"cpu_offload_gb": 1}}, prompts=PROMPTS, **wrong)


FROM_HUB = """
import json, sys
from overspill.compare import Planned, RunStarted, compare

files = []

def hear(event):
    if isinstance(event, Planned):
        files.extend(event.candidate.model.checkpoint.files)
        print(json.dumps([file.exists() for file in files]))
    if isinstance(event, RunStarted):
        print(json.dumps([file.exists() for file in files]))
        raise SystemExit

compare(sys.argv[1], candidate={"uva": {"cpu_offload_gb": 1}}, prompts=[[1, 2]], device="emulated", progress=hear)
"""


def test_a_model_on_the_hub_is_downloaded_before_any_run_starts(tiny, tmp_path):
    """A run's deadline is for running."""
    with hub_of(tiny("llama")) as hub:
        environment = {**os.environ, **hub.environment, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", FROM_HUB, MODEL]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[False], [True]], done.stderr
