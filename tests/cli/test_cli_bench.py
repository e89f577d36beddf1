"""The measuring command's refusals and its table, and what a damaged measurement does to the other commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

from emulated_runs import emulated
from overspill.cli.bench import _figure
from overspill.machine import rates
from overspill.machine.observed import observations
from overspill.machine.rates import fingerprint


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(tmp_path / "machines"))


def test_a_folder_that_keeps_nothing_is_told_before_anything_is_measured(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "machines").touch()
    refused = cli("bench", "--device", "cpu", "--folder", tmp_path)
    assert refused.code == 3
    assert "cannot be kept" in refused.error
    assert "products" not in refused.err


def test_a_disk_that_cannot_be_written_is_told_before_anything_is_measured(cli: Cli, tmp_path: Path) -> None:
    refused = cli("bench", "--device", "cpu", "--folder", "/proc")
    assert refused.code == 3
    assert "/proc: the disk cannot be measured there" in refused.error
    assert "products" not in refused.err
    assert list((tmp_path / "machines").iterdir()) == []


@pytest.mark.parametrize(
    ("what", "value", "figure"),
    [
        ("weights read, one token, bfloat16", 2e9, "2.00 GB/s"),
        ("products of 256 tokens, bfloat16", 2e11, "200.0 GFLOP/s"),
        ("experts on the CPU, many tokens", 2e11, "200.0 GFLOP/s"),
        ("a layer with experts besides, cpu", 2e-3, "2.000 ms"),
        ("a step besides", 2e-3, "2.000 ms"),
        ("products beside a copy, times as long", 1.5, "1.50"),
        ("copies beside products, times as long", 1.5, "1.50"),
    ],
)
def test_figures_have_their_units(what: str, value: float, figure: str) -> None:
    assert _figure(what, value) == figure


def test_a_run_does_without_a_measurement_and_observations_that_are_damaged(
    cli: Cli, talking: Path, tmp_path: Path
) -> None:
    name = fingerprint(emulated())[0]
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / f"{name}.json").write_text('{"schema": 2, "rates"')
    (tmp_path / "machines" / f"{name}.observed.jsonl").write_bytes(b"\xff\xfe\n")
    asked = (talking, "--device", "emulated", "--max-model-len", 64)
    result = cli("run", *asked, "--prompt", "hi", "--max-tokens", 6)
    assert result.code == 0
    assert result.out
    assert "time is not forecast" in result.err
    assert "overspill bench" in result.err
    assert observations(emulated()) == []
