"""How fast a machine does what a pass is made of; measured on it, or taken from a named specification."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated

import psutil
import torch
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from overspill.errors import CheckpointError
from overspill.machine.device import Device

SCHEMA = 2
FOLDER_VARIABLE = "OVERSPILL_MACHINE_DIR"

# What can be of a machine; a kept report that says anything else is damaged.
Rate = Annotated[float, Field(ge=1, le=1e18, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Times = Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)]
Correction = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
RateByDtype = Annotated[Mapping[str, Rate], Field(min_length=1)]

OTHER_WAYS = "*"


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
    long a copy takes beside computing. `corrections`: how many times
    as long as all this says steps took, and in which runs, by the way that weights off the device were used; under
    OTHER_WAYS those of all other ways. Nothing that is measured has any: `--calibrate` adds them.
    """

    origin: str
    read_bytes_s: RateByDtype
    flops: RateByDtype
    layer_s: Seconds
    expert_bytes_s: Rate
    expert_flops: Rate
    expert_layer_s: Mapping[str, Seconds] = field(default_factory=dict)
    step_s: Seconds = 0.0
    disk_bytes_s: Rate | None = None
    asynchronous: bool = False
    copy_bytes_s: Rate | None = None
    beside_copies: Times = 1.0
    copies_beside: Times = 1.0
    beside_reads: Times = 1.0
    corrections: Mapping[str, tuple[Correction, str]] = field(default_factory=dict)

    def reading(self, dtype: str) -> float:
        """Of weights of `dtype`; where it was not measured, the least of those that were."""
        return self.read_bytes_s.get(dtype, min(self.read_bytes_s.values()))

    def correction(self, way: str) -> tuple[float, str]:
        """(how many times as long, in which runs) for plans that use weights this way."""
        return self.corrections.get(way, self.corrections.get(OTHER_WAYS, (1.0, "")))

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


@cache
def versions() -> dict[str, str]:
    """Of what measured figures hang on."""
    from overspill import __version__

    return {"overspill": __version__, **{package: metadata.version(package) for package in ("torch", "transformers")}}


def refuse_folder() -> None:
    """CheckpointError where no measurement could be kept, told before anything is measured."""
    probe = _path(f".probe.{os.getpid()}")
    _keep(probe, "")
    probe.unlink(missing_ok=True)


def save_report(report: MachineReport) -> Path:
    """Keep it for planning. Raises CheckpointError where the folder cannot be written."""
    path = _path(report.fingerprint)
    _keep(path, json.dumps(asdict(report), indent=1))
    return path


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the measurement cannot be kept ({error.strerror})",
            hint=f"{FOLDER_VARIABLE} names another folder",
        ) from error


def load_report(device: Device) -> MachineReport | None:
    """What was measured on this machine for `device`; None where nothing was, or in another form than ours.

    Where it was measured with other versions than those here, `rates.origin` says so. Raises CheckpointError where
    the file is damaged, or is of another machine or device.
    """
    name = fingerprint(device)[0]
    path = _path(name)
    try:
        text = path.read_bytes()
        content = from_json(text)
        if isinstance(content, dict) and content.get("schema", SCHEMA) != SCHEMA:
            return None
        report = _REPORT.validate_json(text, strict=True)
        if (report.fingerprint, report.device_kind) != (name, device.kind):
            raise ValueError(f"it is of {report.device_kind}, {report.fingerprint}; this is {device.kind}, {name}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: what was measured of this machine cannot be read ({_why(error)})",
            hint="delete the file, and run `overspill bench` again",
        ) from error
    return replace(report, rates=replace(report.rates, origin=report.rates.origin + _other_versions(report)))


_REPORT = TypeAdapter(MachineReport)


def _why(error: OSError | ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"


def _other_versions(report: MachineReport) -> str:
    here = versions()
    others = [f"{name} {was}" for name, was in report.versions.items() if here.get(name, was) != was]
    return f", with {', '.join(others)}: `overspill bench` measures again" if others else ""


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
