"""What was kept of runs, as it may be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.machine.cpu import CpuDevice
from overspill.machine.observed import correction, observations, remember
from overspill.machine.rates import FOLDER_VARIABLE, fingerprint


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path / f"{fingerprint(CpuDevice())[0]}.observed.jsonl"


@pytest.mark.parametrize("value", ["0", "-1.0", "NaN", '"1"', "null", "Infinity", "1e-320", "true", "1" * 400, "[1]"])
@pytest.mark.parametrize("field", ["forecast_s", "measured_s"])
def test_steps_of_no_time_correct_no_forecast(field: str, value: str, kept: Path) -> None:
    good = {"architecture": '"A"', "way": '""', "forecast_s": "1.0", "measured_s": "2.0", "at": '""'}
    lines = ("{" + ", ".join(f'"{name}": {text}' for name, text in some.items()) + "}" for some in
             ({**good, field: value}, good))  # fmt: skip
    kept.write_text("\n".join(lines))
    found = observations(CpuDevice())
    assert correction(found, "A", "") == (2.0, "1 run of A this way")


@pytest.mark.parametrize("line", ["", "[]", "{}", "[" * 100_000, '{"architecture": 1}', "\xff\xfe"])
def test_lines_that_cannot_be_read_are_passed_over_and_go(line: str, kept: Path) -> None:
    kept.write_text(f"{line}\n", encoding="latin-1")
    assert observations(CpuDevice()) == []
    observed = remember(CpuDevice(), "A", "", forecast_s=1.0, measured_s=2.0)
    assert observations(CpuDevice()) == [observed]
    assert len(kept.read_text().splitlines()) == 1
