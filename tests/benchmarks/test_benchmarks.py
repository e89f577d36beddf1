"""Each benchmark runs at toy size and says what it promises. No figure is held against anything."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.limits import cached_share, evict, memmove_gbps  # noqa: E402
from benchmarks.report import Bar, Report, console  # noqa: E402
from benchmarks.ring_floor import ring_seconds  # noqa: E402

from benchmarks import cuda, experts, forecast, kernels, load, scale, step  # noqa: E402
from overspill.machine import measure  # noqa: E402


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_load_holds_loaders_against_the_direct_read_and_each_other(tmp_path: Path) -> None:
    (case,) = load.cases(tmp_path, None, "toy")
    report = load.measure([replace(case, peers=("transformers",), devices=("cpu",))], 1, lambda _: None)
    rows = {(row["loader"], row["device"]): row for row in report.rows}
    assert set(rows) == {("direct read", ""), ("overspill", "cpu"), ("transformers", "cpu")}
    assert all(row["outcome"] in ("loads", "the limit") for row in rows.values()), rows
    assert rows["overspill", "cpu"]["peak_over_bar_ratio"] > 0
    assert rows["overspill", "cpu"]["over_read_ratio"] > 0
    assert rows["transformers", "cpu"]["over_ours_ratio"] > 0
    assert {bar.reach for bar in report.bars} == {1.0, 1.15}
    written(report, tmp_path / "out")


def test_a_loader_that_fails_has_its_reason_in_the_table(tmp_path: Path) -> None:
    (case,) = load.cases(tmp_path, None, "toy")
    job = load.Way("overspill", "cpu").job(case.path(), [])
    assert "no_such_folder" in load.run({**job, "path": str(tmp_path / "no_such_folder")})["error"]


def test_step_has_every_way_with_the_resident_model_s_logits(tmp_path: Path) -> None:
    report = step.measure(step.SCALES["toy"], lambda _: None)  # it compares the logits itself
    ways = {row["way"]: row for row in report.rows}
    assert {"resident", "uva", step.PLAIN, *step.PREFETCH} <= set(ways)
    for way in ("uva", *step.PREFETCH):
        assert ways[way]["over_floor_ratio"] > 0
        assert ways[way]["moved_bytes"] > 0
    assert ways["uva"]["floor_ms"] == pytest.approx(ways["uva"]["computing_ms"] + ways["uva"]["link_ms"])
    written(report, tmp_path)


def test_cuda_runs_on_the_emulated_accelerator_and_says_so(tmp_path: Path) -> None:
    """Through the command itself, as it is started on a machine with a GPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda.py"), "--device", "emulated", "--toy"]
    done = subprocess.run(
        [*command, "--only", "pinned", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (document,) = tmp_path.glob("cuda-emulated-accelerator-*.json")
    found = json.loads(document.read_text())
    assert found["emulated"]
    assert [section["outcome"] for section in found["sections"]] == ["done"]
    assert "EMULATED, no GPU" in document.with_suffix(".md").read_text().splitlines()[0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


@pytest.mark.parametrize("section", ["correctness", "links", "overlap", "step"])
def test_a_section_of_cuda_keeps_its_rows(section: str, tmp_path: Path) -> None:
    path = tmp_path / "section.json"
    assert cuda.measure(section, "emulated", "toy", 60.0, path) == 0
    report = Report.from_json(json.loads(path.read_text()))
    assert report.rows
    assert report.bars
    assert not [note for note in report.notes if "left out" in note]
    if section == "correctness":
        assert all(row["identical"] for row in report.rows), report.rows
        assert report.bars[0].met
    written(report, tmp_path / "out")


def test_a_section_without_time_says_what_it_left_out(tmp_path: Path) -> None:
    path = tmp_path / "section.json"
    cuda.measure("links", "emulated", "toy", 0.0, path)
    report = Report.from_json(json.loads(path.read_text()))
    assert report.rows == []
    assert sum("left out for lack of time" in note for note in report.notes) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would not fail")
def test_a_section_that_fails_leaves_its_reason(tmp_path: Path) -> None:
    report, outcome = cuda._section("links", "cuda", "toy", 60.0, tmp_path)
    assert report.rows == []
    assert outcome.startswith("FAILED with exit status 1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layers", "group", "step_", "link_s", "expected"),
    [
        (8, 1, 2, 0.5, 1.0),  # hidden
        (8, 1, 2, 1.0, 1.0),  # just hidden
        (8, 1, 2, 3.0, 3.0),  # the link is the limit, and never rests
        (8, 1, 1, 1.0, 2.0),  # one buffer: computing and copying take turns
        (8, 4, 1, 1.0, 1.25),  # the one buffer's copy rests while its own layer runs, a quarter of the time
        (8, 4, 1, 0.5, 1.0),
    ],
)
def test_the_ring_s_own_floor(layers: int, group: int, step_: int, link_s: float, expected: float) -> None:
    assert ring_seconds(layers, group, step_, 1.0, link_s) == pytest.approx(expected)


def test_eviction_empties_the_page_cache_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (8 << 20))
    assert path.read_bytes()
    assert cached_share([path]) == 1.0
    assert evict([path]) < 0.01


def test_a_bar_is_missed_on_its_wrong_side() -> None:
    assert Bar("at most", 1.1, 1.1).met
    assert not Bar("at most", 1.2, 1.1).met
    assert Bar("at least", 10.0, 10.0, at_least=True).met
    slow = Bar("at least", 9.0, 10.0, at_least=True)
    assert (slow.verdict(busy=False), str(slow)) == ("MISSED", "at least: 9.00 (reach ≥ 10)")
    assert "not judged" in slow.verdict(busy=True)
    assert Bar("bytes", 1.2, 1.1, timed=False).verdict(busy=True) == "MISSED"


def test_memory_is_copied_at_some_speed() -> None:
    assert memmove_gbps(1 << 20, repeats=3) > 0


def written(report: Report, folder: Path) -> None:
    """Table, Markdown and JSON have every row; JSON is read back as the same report."""
    document, page = report.write(folder, report.name)
    found: dict[str, Any] = json.loads(document.read_text())
    assert len(found["rows"]) == len(report.rows)
    assert Report.from_json(found).as_json() == report.as_json()
    lines = page.read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 1 + len(report.rows)
    assert sum(line.startswith(("- reached", "- MISSED", "- not judged")) for line in lines) == len(report.bars)
    terminal = console()
    with terminal.capture() as capture:
        terminal.print(report.render())
    assert report.title in capture.get()


def test_ways_of_offloading_experts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = experts.ways
    some = ("experts only", "placed on the CPU")  # each is two processes
    monkeypatch.setattr(experts, "ways", lambda *given: {way: every(*given)[way] for way in some})
    report = experts.measure(experts.SCALES["toy"], tmp_path / "models", lambda _: None)
    ways = {row["way"]: row for row in report.rows}
    assert set(ways) == {experts.RESIDENT, *some}
    assert {row.get("verdicts") for way, row in ways.items() if way != experts.RESIDENT} == {"pass"}
    assert 0 < ways["placed on the CPU"]["step_bytes"] < ways["experts only"]["step_bytes"] / 4
    assert ways["placed on the CPU"]["host_ms"] > 0
    assert all(bar.met for bar in report.bars)
    written(report, tmp_path / "out")


def test_kernels_are_held_against_memory_and_torch(tmp_path: Path) -> None:
    rows = kernels.rows(kernels.SCALES["toy"], lambda _: None)
    wanted = {(weights, tokens) for weights in ("bfloat16", "float32") for tokens in (1, 8)}
    assert {(row["weights"], row["tokens"]) for row in rows} == wanted
    assert all(row["of_read_ratio"] > 0 and row["over_torch_ratio"] > 0 for row in rows)


def test_a_checkpoint_of_headers_alone_is_planned_in_a_process_of_its_own(tmp_path: Path) -> None:
    report = scale.measure(scale.SCALES["toy"], tmp_path, lambda _: None)
    for row in report.rows:
        assert row["imported_bytes"] <= row["peak_bytes"] < row["imported_bytes"] + 200e6
        (run,) = row["samples"]["runs"]
        assert run["model_bytes"] == pytest.approx(2e9 * row["parameters_b"], rel=1e-4)  # and buffers
        assert row["tensors"] > 3 * 32 * 2  # experts one by one, in the two layers that have some
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) > 100 * sum(512 * file.stat().st_blocks for file in files)


def test_forecasts_are_held_against_what_happened_on_each_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "BEYOND_CACHES_BYTES", 32 << 20)
    report = forecast.measure(forecast.SCALES["toy"], tmp_path, lambda _: None)
    ways = [row["way"] for row in report.rows]
    assert any("uva" in way for way in ways)
    assert any("prefetch" in way for way in ways)
    assert any("experts" in way for way in ways)
    assert {"CPU", "resident, emulated"} <= set(ways)
    for row in report.rows:
        assert row["time_ratio"] == pytest.approx(row["measured_ms"] / row["forecast_ms"])
        assert row["forecast_bytes"] > 0
        assert row["limited_by"]
    assert [bar.reach for bar in report.bars] == [forecast.TIME_REACH, forecast.MEMORY_REACH]
    written(report, tmp_path / "out")
