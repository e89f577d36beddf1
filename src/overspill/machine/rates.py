"""How fast a machine does what a pass is made of; measured on it, or taken from a named specification."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from overspill.errors import CheckpointError
from overspill.machine.device import Device

SCHEMA = 2
FOLDER_VARIABLE = "OVERSPILL_MACHINE_DIR"


@dataclass(frozen=True)
class Rates:
    """Bytes, operations and layers a second of one device and the host beside it. `origin` says where they are from.

    `read_bytes_s` is what products of one token reach in reading weights, `flops` what products of many tokens reach,
    each by dtype ("bfloat16"). `layer_s` is what a decoder layer of a transformers model takes besides (launches,
    Python), `expert_layer_s` the same of a layer with routed experts by where they are computed ("device", "cpu",
    "slots"), `step_s` what a step takes besides its layers. `expert_bytes_s` and `expert_flops` are reading and
    computing of experts that the CPU computes. `disk_bytes_s` is None where no disk was measured. `asynchronous`:
    launching runs beside computing, as on a GPU. `copy_bytes_s` is the most that copies to the device reach whatever
    the link carries, None where nothing but the link bounds them. `beside_copies` and `beside_reads`: how many times as
    long computing takes beside a copy to the device, and beside a read from disk; `copies_beside`: how many times as
    long a copy takes beside computing. `link_times`: how many times longer than its bandwidth says the device's link
    takes.
    """

    origin: str
    read_bytes_s: Mapping[str, float]
    flops: Mapping[str, float]
    layer_s: float
    expert_bytes_s: float
    expert_flops: float
    expert_layer_s: Mapping[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    disk_bytes_s: float | None = None
    asynchronous: bool = False
    copy_bytes_s: float | None = None
    beside_copies: float = 1.0
    copies_beside: float = 1.0
    beside_reads: float = 1.0
    link_times: float = 1.0

    def reading(self, dtype: str) -> float:
        """Of weights of `dtype`; where it was not measured, the least of those that were."""
        return self.read_bytes_s.get(dtype, min(self.read_bytes_s.values()))

    def slower(self, times: float, why: str) -> Rates:
        """Rates under which everything takes so many times as long."""
        return replace(
            self,
            origin=f"{self.origin}, {why}",
            read_bytes_s={name: rate / times for name, rate in self.read_bytes_s.items()},
            flops={name: rate / times for name, rate in self.flops.items()},
            layer_s=self.layer_s * times,
            expert_layer_s={where: seconds * times for where, seconds in self.expert_layer_s.items()},
            step_s=self.step_s * times,
            expert_bytes_s=self.expert_bytes_s / times,
            expert_flops=self.expert_flops / times,
            disk_bytes_s=self.disk_bytes_s and self.disk_bytes_s / times,
            copy_bytes_s=self.copy_bytes_s and self.copy_bytes_s / times,
            link_times=self.link_times * times,
        )

    def computing(self, dtype: str) -> float:
        return self.flops.get(dtype, min(self.flops.values()))


@dataclass(frozen=True)
class MachineReport:
    """What `overspill bench` found of one machine and one of its devices. `rates` is what planning uses.

    `figures` are all of them, by what they are of; `memory` is bytes, of the machine as it was then.
    """

    fingerprint: str
    device_kind: str
    device_name: str
    measured_at: str
    versions: Mapping[str, str]
    machine: Mapping[str, object]
    figures: Mapping[str, object]
    rates: Rates
    schema: int = field(default=SCHEMA)


def fingerprint(device: Device) -> tuple[str, dict[str, object]]:
    """(a name for this machine and device, what it is made of): processor, usable cores, memory, device, threads."""
    facts: dict[str, object] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "device": device.kind if device.kind != "cuda" else device.name,
        "threads": torch.get_num_threads(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16], facts


def save_report(report: MachineReport) -> Path:
    """Keep it for planning. Raises CheckpointError where the folder cannot be written."""
    path = _path(report.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(report), indent=1))
        part.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the measurement cannot be kept ({error.strerror})",
            hint=f"{FOLDER_VARIABLE} names another folder",
        ) from error
    return path


def load_report(device: Device) -> MachineReport | None:
    """What was measured on this machine for `device`; None where nothing was, or by another version of ours."""
    path = _path(fingerprint(device)[0])
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content.get("schema") != SCHEMA:
            return None
        return MachineReport(**{**content, "rates": Rates(**content["rates"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: what was measured of this machine cannot be read ({error})",
            hint="delete the file, and run `overspill bench` again",
        ) from error


def machine_folder() -> Path:
    """Where what is known of this machine lies."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "~/.cache/overspill/machines").expanduser().absolute()


def _path(name: str) -> Path:
    return machine_folder() / f"{name}.json"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model", "CPU part")):
            return line.partition(":")[2].strip()
    return "not known"
