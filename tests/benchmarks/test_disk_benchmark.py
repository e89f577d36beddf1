"""The disk benchmark: its files hold the same weights, its ways run under a limit, none that ends early is lost."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.disk_cell import read, run  # noqa: E402
from benchmarks.disk_floor import direct_gbps, reader_gbps, regions  # noqa: E402

from benchmarks import disk, disk_models, disk_scales  # noqa: E402

TOY = disk_scales.SCALES["toy"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def sparse(cache: Path) -> disk_models.Files:
    return disk_models.made(TOY.sparse, cache)


def checkpoint_tensor(files: disk_models.Files, name: str) -> torch.Tensor:
    with safe_open(next(files.folder.glob("*.safetensors")), "pt") as opened:
        return opened.get_tensor(name)


def test_the_gguf_file_holds_the_checkpoint_s_own_weights(sparse: disk_models.Files) -> None:
    tensors = {tensor.name: tensor for tensor in GGUFReader(sparse.gguf).tensors}
    experts = tensors["blk.1.ffn_up_exps.weight"].data.view(np.uint16).reshape(8, 128, 256)
    third = checkpoint_tensor(sparse, "model.layers.1.mlp.experts.3.up_proj.weight")
    assert np.array_equal(experts[3], third.view(torch.uint16).numpy())
    norm = checkpoint_tensor(sparse, "model.norm.weight")
    assert np.array_equal(tensors["output_norm.weight"].data, norm.float().numpy())


def test_the_stacked_copy_holds_the_checkpoint_s_own_experts(sparse: disk_models.Files) -> None:
    with safe_open(sparse.fused / "model.layers.0.mlp.safetensors", "pt") as opened:
        stack = opened.get_tensor("model.layers.0.mlp.experts.gate_up_proj")[5]
    gate, up = (
        checkpoint_tensor(sparse, f"model.layers.0.mlp.experts.5.{side}_proj.weight") for side in ("gate", "up")
    )
    assert torch.equal(stack, torch.cat((gate, up)))


def test_the_least_that_is_read_is_what_memory_does_not_hold(sparse: disk_models.Files) -> None:
    files = replace(sparse, nbytes=1300, step_bytes=200, expert_bytes=1000, chosen=0.25)
    assert files.floor_bytes(1300) == 0
    assert files.floor_bytes(700) == 0.25 * 500  # what every token reads, and half of the experts, are held
    assert files.floor_bytes(100) == 100 + 0.25 * 1000
    assert replace(files, expert_bytes=0).floor_bytes(50) == 150


def test_regions_go_round_the_files() -> None:
    path = Path(__file__)
    size = path.stat().st_size // 3 + 1
    found = regions([path], 3 * size, size, seed=1)
    assert sorted(region.offset for region in found) == [0, size, 2 * size]
    assert sum(region.length for region in found) == path.stat().st_size
    assert len(regions([path], size, size, seed=2)) == 1


def test_both_readers_read_the_files_at_some_speed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16 << 20))
    try:
        assert direct_gbps([path], 8 << 20, seed=0) > 0
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")
    assert reader_gbps([path], 8 << 20, seed=0) > 0


STARTED = '{"event": "phase", "name": "start", "most_s": 1}\n{"event": "started", "s": 1.5, "read_bytes": 7}\n'
DECODING = (
    '{"event": "phase", "name": "prompt", "most_s": 1}\n{"event": "prompt", "tokens": 8, "s": 2.0, "read_bytes": 9}\n'
    '{"event": "phase", "name": "decode", "most_s": 1}\n{"event": "step", "tokens": 1, "s": 0.5, "read_bytes": 3}\n'
)


@pytest.mark.parametrize(
    ("output", "errors", "status", "outcome"),
    [
        (STARTED + DECODING, "[memlimit] status=137 limit=9 peak=9 failcnt=3 oom_kill 1", 137, "killed in decode"),
        (STARTED, "[memlimit] status=142 limit=9 peak=9 max 3 oom_kill 0", 142, "out of time in start"),
        (
            "",
            "ImportError: no such thing\n[memlimit] status=1 limit=9 peak=9",
            1,
            "fails in its first line: ImportError: ",
        ),
    ],
)
def test_what_ended_early_is_told_with_what_it_had_reached(output: str, errors: str, status: int, outcome: str) -> None:
    cell = read(output, errors, status)
    assert cell.outcome.startswith(outcome)
    assert cell.peak_bytes == 9
    assert cell.steps == ([(0.5, 3)] if "decode" in outcome else [])
    assert cell.start_s == (1.5 if output else None)


def test_a_way_without_its_program_stays_in_the_table(sparse: disk_models.Files) -> None:
    job = disk._job(TOY, sparse, 1.0, disk.LLAMA, 0) | {"gguf": "no_such_file.gguf"}
    try:
        cell = run(job, disk.limit_bytes(sparse, 1.0))
    except OSError as error:
        pytest.skip(str(error))
    row = disk._row(sparse, ("experts", 1.0, disk.LLAMA), [disk.Sample(0, cell, (1.0, 1.0), 0.0)], [])
    assert row["outcome"].startswith("fails in ")
    assert "step_s" not in row


def test_streaming_and_being_sooner_are_judged_where_the_model_is_larger_than_the_limit() -> None:
    row = {"model": "dense", "share": 0.5, "limit_bytes": 60, "weights_bytes": 100, "peak_bytes": 59}
    ours = {**row, "way": disk.OURS, "step_s": 1.0, "streamed_ratio": 0.95, "prompt_tokens/s": 8.0}
    killed = {**row, "way": disk.MAPPED}
    llama = {**row, "way": disk.LLAMA, "step_s": 1.5, "prompt_tokens/s": 4.0}
    bars = list(disk._bars([ours, {**ours, "way": disk.OURS_MAPPED}, killed, llama]))
    assert [(bar.reach, bar.met) for bar in bars] == [(1.0, True), (0.9, True), (2.0, False), (1.0, True)]
    assert len(list(disk._bars([{**ours, "limit_bytes": 100}, llama]))) == 1


def test_ways_are_run_under_limits_and_held_against_the_floor(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_configs", lambda scale: [("experts", scale.sparse)])
    ways = (disk.OURS, disk.ACCELERATE)
    pytest.importorskip("accelerate")
    try:
        report = disk.measure(replace(TOY, ways=ways, shares=(0.25,)), cache, lambda _: None)
    except OSError as error:
        pytest.skip(f"no control group, or no direct reads, here: {error}")
    rows = {(row["model"], row["way"]): row for row in report.rows}
    assert set(rows) == {("experts", way) for way in ways}
    for row in rows.values():
        assert row["outcome"] == "runs", row
        assert row["step_s"] > 0
        assert row["prompt_tokens/s"] > 0
        assert row["floor_s"] > 0
        assert 0 < row["peak_bytes"] <= row["limit_bytes"]
    (peak,) = report.bars  # the allowance is larger than the model: speed is not judged
    assert peak.met
    assert len(report.write(tmp_path, "disk")[1].read_text().splitlines()) > len(report.rows)
