"""The names that a user of the package sees."""

from __future__ import annotations

import subprocess
import sys

import overspill

PUBLIC = {
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DefectError",
    "DeviceOutOfMemoryError",
    "Engine",
    "LinkDefect",
    "ModelError",
    "OffloadConfig",
    "OverspillError",
    "OverspillWarning",
    "PlacementDefect",
    "Plan",
    "SamplingParams",
    "UnsupportedModelError",
    "VerdictError",
    "compare",
    "load",
    "offload",
    "plan",
}


def test_public_names_are_these() -> None:
    assert set(overspill.__all__) == PUBLIC
    assert all(getattr(overspill, name) is not None for name in PUBLIC)


def test_functions_are_not_hidden_by_the_rooms_of_the_same_name() -> None:
    code = (
        "from overspill.plan import Plan; from overspill.compare import Report; import overspill.plan.ring\n"
        "import overspill; overspill.load\n"
        "assert callable(overspill.plan) and callable(overspill.compare), (overspill.plan, overspill.compare)\n"
        "assert overspill.plan.__name__ == 'plan' and overspill.compare.__name__ == 'compare'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_error_tells_its_exit_code_and_way_out() -> None:
    codes = {
        overspill.ConfigError: 2,
        overspill.CheckpointError: 3,
        overspill.UnsupportedModelError: 3,
        overspill.CapacityError: 3,
        overspill.DeviceOutOfMemoryError: 3,
        overspill.VerdictError: 1,
        overspill.PlacementDefect: 4,
        overspill.LinkDefect: 4,
    }
    for error, code in codes.items():
        assert error.exit_code == code
        assert str(error("what", hint="how")) == "what\nhint: how"
