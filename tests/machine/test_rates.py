"""What is measured of a machine, kept and found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import overspill
from overspill.api import rates_of
from overspill.bench import measure_machine
from overspill.errors import CheckpointError, OverspillWarning
from overspill.machine import measure, rates
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.machine.rates import MachineReport, Rates, fingerprint, load_report, save_report, versions
from tiny_models import MakeTiny


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(tmp_path / "machines"))


@pytest.fixture(scope="module")
def emulated_report(tmp_path_factory: pytest.TempPathFactory) -> MachineReport:
    """A real measurement with little memory and few rounds."""
    told: list[str] = []
    device = EmulatedDevice(1 << 30, Link(5e9, 1e-5, measured=False))
    with pytest.MonkeyPatch.context() as little:
        little.setattr(measure, "ROUNDS", 1)
        little.setattr(measure, "BEYOND_CACHES_BYTES", 32 << 20)
        report = measure_machine(device, tmp_path_factory.mktemp("disk"), told.append)
    assert len(told) == 6
    return report


def test_everything_is_measured_and_kept_for_this_machine(emulated_report: MachineReport) -> None:
    found = emulated_report.rates
    assert {"float32", "bfloat16", "float16"} == found.read_bytes_s.keys() == found.flops.keys()
    figures = (*found.read_bytes_s.values(), *found.flops.values(), found.layer_s, found.expert_bytes_s)
    assert all(figure > 0 for figure in (*figures, found.expert_flops, found.disk_bytes_s or 0))
    assert set(emulated_report.figures["link"]) == {  # type: ignore[call-overload]
        f"{way} the device, {kind}" for way in ("to", "from") for kind in ("pinned", "pageable")
    }
    assert found.expert_layer_s.keys() == {"device", "cpu", "slots"}
    assert all(seconds > 0 for seconds in found.expert_layer_s.values())
    assert min(found.beside_copies, found.copies_beside, found.beside_reads) >= 1
    assert (found.copy_bytes_s or 0) > 0
    by_size = emulated_report.figures["disk by request size"]
    assert found.disk_bytes_s == max(by_size.values()) > min(by_size.values())  # type: ignore[attr-defined]
    nodes = {int(path.name.removeprefix("node")) for path in Path("/sys/devices/system/node").glob("node[0-9]*")}
    assert {node["node"] for node in emulated_report.machine["numa_nodes"]} == nodes  # type: ignore[attr-defined]
    assert {"torch", "transformers", "overspill"} == emulated_report.versions.keys()
    device = EmulatedDevice(1 << 20, Link(5e9, 1e-5, measured=False))
    assert load_report(device) is None
    path = save_report(emulated_report)
    assert load_report(device) == MachineReport(
        **{**json.loads(path.read_text()), "rates": Rates(**json.loads(path.read_text())["rates"])}
    )
    assert rates_of(device) == load_report(device).rates  # type: ignore[union-attr]
    assert load_report(CpuDevice()) is None, "another device of the same machine"
    assert fingerprint(device)[0] != fingerprint(CpuDevice())[0]


def test_plans_use_what_was_measured(emulated_report: MachineReport, tiny: MakeTiny) -> None:
    assert overspill.plan(tiny("llama"), device="emulated", max_model_len=32).rates is None
    save_report(emulated_report)
    found = overspill.plan(tiny("llama"), device="emulated", max_model_len=32).rates
    assert found is not None
    assert found.origin.startswith("measured on this machine, 20")


def emulated() -> EmulatedDevice:
    return EmulatedDevice(1 << 30, Link(5e9, 1e-5, measured=False))


def made_up(**changed: object) -> MachineReport:
    figures = {"bfloat16": 1e9, "float32": 4e9}
    found = Rates("measured on this machine", figures, figures, 1e-3, 1e9, 1e9)
    report = MachineReport(fingerprint(emulated())[0], "emulated", "", "", versions(), {}, {}, found)
    return replace(report, **changed)  # type: ignore[arg-type]


DAMAGED = (
    {"layer_s": float("nan")},
    {"layer_s": None},
    {"flops": {}},
    {"flops": [1.0]},
    {"flops": {"bfloat16": 0.0}},
    {"read_bytes_s": "much"},
    {"read_bytes_s": {"bfloat16": float("inf")}},
    {"expert_bytes_s": 0.0},
    {"expert_bytes_s": "1e9"},
    {"expert_flops": 1e-320},
    {"disk_bytes_s": -1.0},
    {"beside_copies": 0.5},
    {"layer_s": -1e-3},
    {"corrections": {"uva": [0.0, "1 run"]}},
)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "[" * 100_000, "\xff", '{"schema": 2}', '{"schema": 2, "rates": {"origin": 1}}', *DAMAGED],
    ids=lambda content: str(content)[:30],
)
def test_a_damaged_measurement_is_told_with_the_way_out(content: str | dict[str, object]) -> None:
    path = save_report(made_up())
    if isinstance(content, dict):
        kept = json.loads(path.read_text())
        content = json.dumps({**kept, "rates": {**kept["rates"], **content}})
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match="cannot be read") as told:
        load_report(emulated())
    assert "overspill bench" in (told.value.hint or "")


@pytest.mark.parametrize("changed", [{"fingerprint": "0123456789abcdef"}, {"device_kind": "cuda"}])
def test_a_measurement_of_another_machine_or_device_is_no_measurement(changed: dict[str, str]) -> None:
    path = save_report(made_up())
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(CheckpointError, match=next(iter(changed.values()))):
        load_report(emulated())


def test_a_measurement_with_other_versions_is_used_and_says_so() -> None:
    save_report(made_up(versions={**versions(), "torch": "2.12.0"}))
    origin = "measured on this machine, with torch 2.12.0: `overspill bench` measures again"
    assert rates_of(emulated()) == replace(made_up().rates, origin=origin)
    save_report(made_up())
    assert rates_of(emulated()) == made_up().rates


def test_a_damaged_measurement_costs_a_plan_its_forecast_and_a_run_nothing(tiny: MakeTiny) -> None:
    path = save_report(made_up())
    path.write_text(path.read_text()[:100])
    planned = overspill.plan(tiny("llama"), device="emulated", max_model_len=32)
    assert planned.rates is None
    (told,) = planned.warnings
    assert "time is not forecast" in told
    assert str(path) in told
    assert "overspill bench" in told
    with pytest.warns(OverspillWarning, match="time is not forecast"):
        overspill.load(tiny("llama"), device="emulated", max_model_len=32)


def test_a_dtype_that_was_not_measured_goes_at_the_slowest_pace() -> None:
    found = made_up().rates
    assert (found.reading("float32"), found.reading("float16")) == (4e9, 1e9)
    assert (found.computing("float32"), found.computing("float16")) == (4e9, 1e9)


def test_a_measurement_of_another_version_counts_as_none(emulated_report: MachineReport) -> None:
    save_report(replace(emulated_report, schema=emulated_report.schema + 1))
    assert load_report(EmulatedDevice(1 << 20, Link(5e9, 1e-5, measured=False))) is None


def test_a_folder_that_cannot_be_written_is_told(
    emulated_report: MachineReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be kept"):
        save_report(emulated_report)
