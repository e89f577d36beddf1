"""What a measurement was taken with: a figure without it cannot be compared with another."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy")
ROOT = Path(__file__).resolve().parent.parent
BUSY_SHARE = 0.10

_begun = (0.0, 0.0, 0.0)


def conditions() -> dict[str, Any]:
    """Versions, hardware, date, command, and the load average before; `finish` adds what there was meanwhile."""
    global _begun
    _begun = _counters()
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": _command(),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
        found["driver"] = _driver()
    return found


def finish(found: dict[str, Any]) -> bool:
    """Add the load average after, and the share of all cores that other processes had since `conditions`.

    True where that share is above BUSY_SHARE.
    """
    wall_s, busy_s, own_s = (now - then for now, then in zip(_counters(), _begun, strict=True))
    found["load_after"] = os.getloadavg()[0]
    share = max(0.0, busy_s - own_s) / max(wall_s * (os.cpu_count() or 1), 1e-9)
    found["others_share"] = share
    return share > BUSY_SHARE


def _counters() -> tuple[float, float, float]:
    """Seconds: of the clock, of all cores in use, of those in use by this process and its children that ended."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted twice by the kernel
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(times) - idle_s - guests_s, sum(u.ru_utime + u.ru_stime for u in used)


def _command() -> str:
    """The command without this machine's paths."""
    first = Path(sys.argv[0])
    name = f"python -m {first.parent.name}" if first.name == "__main__.py" else f"python benchmarks/{first.name}"
    return shlex.join([*name.split(), *(_last(argument) for argument in sys.argv[1:])])


def _last(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def _commit() -> str | None:
    """The commit of the working tree, "+" where it has changes; None outside one."""
    try:
        run = [
            subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "src", "benchmarks"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return run[0].strip() + "+" * bool(run[1].strip())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None
    return text.removeprefix("NVRM version:").strip()
