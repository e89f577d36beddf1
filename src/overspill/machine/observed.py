"""What runs took beside what was forecast of them, kept by machine and device, for later forecasts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from overspill.errors import CheckpointError
from overspill.machine.device import Device
from overspill.machine.rates import OTHER_WAYS, fingerprint, machine_folder

KEPT = 200

StepSeconds = Annotated[float, Field(ge=1e-12, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True)
class Observed:
    """A decode step: `way` is how weights off the device were used ("uva", "" for nothing offloaded)."""

    architecture: str
    way: str
    forecast_s: StepSeconds
    measured_s: StepSeconds
    at: str

    @property
    def ratio(self) -> float:
        return self.measured_s / self.forecast_s


_OBSERVED = TypeAdapter(Observed)


def remember(device: Device, architecture: str, way: str, *, forecast_s: float, measured_s: float) -> Observed:
    """Keep one more; the oldest go. Raises CheckpointError where the folder cannot be written."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    observed = Observed(architecture, way, forecast_s, measured_s, now)
    path = _path(device)
    lines = [json.dumps(asdict(found)) for found in (*observations(device), observed)][-KEPT:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text("\n".join(lines) + "\n")
        part.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: what a run took cannot be kept ({error.strerror})") from error
    return observed


def observations(device: Device) -> list[Observed]:
    """What was kept of this machine and device, the oldest first. Lines that cannot be read, and steps that
    took no time or no number of seconds, are passed over."""
    try:
        lines = _path(device).read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(_OBSERVED.validate_json(line, strict=True))
        except ValidationError:
            continue
    return found


def correction(found: Sequence[Observed], architecture: str, way: str) -> tuple[float, str] | None:
    """(how many times longer than forecast steps took, from which runs): the nearest kind of runs there are.

    Of this architecture and way, else of this way, else of any; None without one.
    """
    for what, some in (
        (f"of {architecture} this way", [o for o in found if (o.architecture, o.way) == (architecture, way)]),
        ("this way", [o for o in found if o.way == way]),
        ("of other ways", list(found)),
    ):
        if some:
            return median(o.ratio for o in some), f"{len(some)} run{'s' * (len(some) != 1)} {what}"
    return None


def corrections(found: Sequence[Observed], architecture: str) -> dict[str, tuple[float, str]]:
    """`correction` for each way that was run, and for all others; empty without a run."""
    ways = {*(o.way for o in found), *([OTHER_WAYS] if found else [])}
    return {way: told for way in ways if (told := correction(found, architecture, way)) is not None}


def _path(device: Device) -> Path:
    return machine_folder() / f"{fingerprint(device)[0]}.observed.jsonl"
