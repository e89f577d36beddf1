"""What is measured of a machine, kept and found again; and what is known by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import overspill
from overspill.api import rates_of
from overspill.bench import measure_machine
from overspill.errors import CheckpointError, ConfigError
from overspill.machine import measure, rates
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.machine.named import NamedDevice
from overspill.machine.rates import MachineReport, Rates, fingerprint, load_report, save_report
from overspill.machine.specs import GPUS, LINKS, gpu_named, gpu_of_device, link_named, named_rates
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


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 2}', '{"schema": 2, "rates": {"origin": 1}}'])
def test_a_damaged_measurement_is_told_with_the_way_out(content: str, emulated_report: MachineReport) -> None:
    path = save_report(emulated_report)
    path.write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read") as told:
        load_report(EmulatedDevice(1 << 20, Link(5e9, 1e-5, measured=False)))
    assert "overspill bench" in (told.value.hint or "")


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


def test_named_gpus_and_links() -> None:
    gpu = gpu_named("l40s")
    assert (gpu.name, gpu.memory_gib, gpu.link) == ("L40S", 48, "pcie4x16")
    assert all(spec.link in LINKS and spec.source for spec in GPUS.values())
    assert gpu_of_device("NVIDIA L40S") == gpu
    assert gpu_of_device("NVIDIA GeForce RTX 4090") == GPUS["RTX-4090"]
    assert gpu_of_device("NVIDIA L4") == GPUS["L4"]
    assert gpu_of_device("a GPU of next year") is None
    assert 20e9 < link_named("PCIe4x16").bandwidth < 31.5e9
    assert "not measured" in named_rates(gpu).origin
    with pytest.raises(ConfigError, match=re.escape('"gpu" is "L40X"')) as told:
        gpu_named("L40X")
    assert "L40S" in (told.value.hint or "")
    with pytest.raises(ConfigError, match="pcie9"):
        link_named("pcie9")


def test_a_named_gpu_is_planned_for_and_not_run_on(tiny: MakeTiny) -> None:
    device = NamedDevice(gpu_named("T4"), link_named("pcie3x16"), None)
    assert 15 << 30 < device.memory_bytes < 16 << 30
    with pytest.raises(AssertionError, match="can be planned for"):
        device.allocate(1, "weights")
    assert rates_of(device) == named_rates(device.gpu)
