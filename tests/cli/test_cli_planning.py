"""Plans for machines that are not here, ways side by side, and the measuring command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Cli
from transformers import LlamaConfig

from overspill.machine import measure, rates
from tiny_models import save_headers


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(tmp_path / "machines"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 70 B parameters, headers alone."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    save_headers(folder, config)
    return folder


def test_a_purchase_is_planned_for_a_gpu_by_name(dense: Path, cli: Cli) -> None:
    asked = ("plan", dense, "--gpu", "L40S", "--link", "pcie4x16", "--host-memory", "192GiB")
    plan = json.loads(cli(*asked, "--json").out)
    assert plan["device"]["name"] == "L40S (named, not here)"
    assert plan["memory"]["device"]["total_bytes"] <= plan["memory"]["device"]["available_bytes"] < 48 << 30
    assert plan["memory"]["host"]["available_bytes"] == 192 << 30
    assert any(note.startswith("fit: ") for note in plan["notes"])
    decode = plan["forecast"]["decode"]
    assert decode[0]["limit"] == "link"
    assert 3 < decode[0]["seconds"] < 8  # 90 GiB over 27 GB/s
    assert "L40S by its data sheet" in plan["forecast"]["rates"]
    shown = cli(*asked).out
    assert "Time forecast: L40S by its data sheet" in shown
    assert "decode, 256 sequences" in shown


def test_a_host_that_is_too_small_is_refused_or_its_layers_stay_on_disk(dense: Path, cli: Cli) -> None:
    plan = json.loads(cli("plan", dense, "--gpu", "L40S", "--host-memory", "64GiB", "--json").out)
    assert plan["ring"]["on_disk"]
    assert plan["forecast"]["decode"][0]["limit"] == "disk"
    refused = cli("plan", dense, "--gpu", "L40S", "--host-memory", "64GiB", "--no-fit")
    assert refused.code == 3
    assert "need" in refused.error


def test_ways_are_compared_side_by_side_and_one_is_picked(dense: Path, cli: Cli) -> None:
    asked = ("plan", dense, "--gpu", "L40S", "--host-memory", "192GiB", "--compare")
    found = json.loads(cli(*asked, "--json").out)
    rows = found["alternatives"]
    by_way = {row["what"]: row for row in rows}
    assert not by_way["nothing offloaded"]["fits"]
    assert by_way["declaration order, as vLLM"]["fits"]
    fitting = [row for row in rows if row["fits"]]
    assert rows[found["pick"]]["decode_s"] == min(row["decode_s"] for row in fitting)
    assert all(row["device_bytes"] and row["decode_limit"] for row in fitting)
    table = cli(*asked).out
    assert "→" in table
    assert "does not fit" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--link", "pcie4x16"), "--link without --gpu"),
        (("--host-memory", "1GiB"), "--host-memory without --gpu"),
        (("--gpu", "L40S", "--device", "cpu"), "--gpu stands for the device"),
        (("--gpu", "B9000"), '"gpu" is "B9000"'),
        (("--gpu", "L40S", "--link", "usb"), '"link" is "usb"'),
        (("--compare", "--emit", "vllm"), "two answers"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: tuple[str, ...], message: str, dense: Path, cli: Cli) -> None:
    refused = cli("plan", dense, *options)
    assert refused.code == 2
    assert message in refused.error


def test_bench_measures_prints_and_keeps(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "BEYOND_CACHES_BYTES", 32 << 20)
    result = cli("bench", "--device", "cpu", "--folder", tmp_path)
    assert result.code == 0
    assert "experts on the CPU, one token" in result.out
    assert "memory node" in result.out
    assert "kept in" in result.err
    (kept,) = (tmp_path / "machines").iterdir()
    assert json.loads(kept.read_text())["device_kind"] == "cpu"
    kept.unlink()
    report = json.loads(cli("bench", "--device", "cpu", "--folder", tmp_path, "--no-keep", "--json").out)
    assert report["rates"]["layer_s"] > 0
    assert not list((tmp_path / "machines").iterdir())


def test_bench_without_a_folder_is_refused(cli: Cli) -> None:
    refused = cli("bench", "--device", "cpu", "--folder", "/no/such/folder")
    assert refused.code == 3
    assert "is no folder" in refused.error
