"""The demo's second half: what it calls wrong. `make demo` runs it on the demo model."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "under_a_limit.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("under_a_limit", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_two_runs_are_held_against_what_is_claimed(example: Any) -> None:
    free = example.Run(None, None, 500, 0, 900, [1, 2], "yes")
    limited = example.Run(300, 750, 200, 300, 680, [1, 2], "yes")
    assert example.wrong(free, limited) == []
    faults = {
        "other answers": {"token_ids": [1, 3]},
        "the limit is not smaller": {"limit_bytes": 500},
        "nothing stayed on disk": {"weights_bytes": 500, "disk_bytes": 0},
        "the peak is over": {"peak_bytes": 751},
        "the limit saved nothing": {"peak_bytes": 900, "group_bytes": 1000},
    }
    for told, changed in faults.items():
        (fault,) = example.wrong(free, replace(limited, **changed))
        assert fault.startswith(told)


def test_a_run_that_is_refused_ends_the_demo_with_what_it_said(example: Any, tmp_path: Path) -> None:
    with pytest.raises((SystemExit, example.NoControlGroup)) as ended:
        example.run(tmp_path / "nowhere")
    if ended.type is SystemExit:
        assert "nowhere" in str(ended.value)
