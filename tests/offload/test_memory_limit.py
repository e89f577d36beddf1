"""A model twice as large as a limit that is enforced from outside: it runs, with the same answers, and stays under."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sized_models import llama_config, save_random

MEMLIMIT = Path(__file__).parent.parent / "memlimit"
LIMIT_BYTES = 900 << 20
NO_GROUP = 99
ANSWER = """
import hashlib, sys
import torch
torch.set_num_threads(1)
import overspill
from overspill.engine import SamplingParams
mmap = {"overspill": {"mmap": {"enabled": sys.argv[2] == "mapped"}}}
engine = overspill.load(sys.argv[1], mmap, device="cpu", max_model_len=64)
completion = engine.generate(list(range(3, 40)), SamplingParams(max_tokens=3), logits=True, ignore_eos=True)
digest = hashlib.sha256(completion.logits.numpy().tobytes()).hexdigest()
memory = engine.plan.memory
print(completion.token_ids, digest, engine.plan.offloaded_bytes - memory.mapped_bytes, memory.device_bytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "llama"
    nbytes = save_random(folder, llama_config(19, hidden=2048, intermediate=5504))
    assert nbytes > 2 * LIMIT_BYTES
    return folder


def answer(model: Path, *command: str, mapped: bool = False) -> tuple[list[str], str]:
    """What ANSWER prints in a process of its own, and what it wrote to stderr."""
    done = subprocess.run(
        [*command, sys.executable, "-c", ANSWER, str(model), "mapped" if mapped else "read"],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    if done.returncode == NO_GROUP:
        pytest.skip("no memory control group can be made here")
    assert done.returncode == 0, done.stderr
    *same, offloaded, needed = done.stdout.rsplit(maxsplit=3)
    return [*same, offloaded, needed], done.stderr


@pytest.fixture(scope="module")
def unlimited(large: Path) -> list[str]:
    found, _ = answer(large)
    return found


@pytest.mark.parametrize("mapped", [False, True])
def test_a_model_of_twice_the_limit_runs_under_it_with_the_same_answer(
    mapped: bool, large: Path, unlimited: list[str]
) -> None:
    ids, digest, offloaded, _ = unlimited
    assert offloaded == "0", "without a limit all of it is in memory"
    limited, told = answer(large, str(MEMLIMIT), str(LIMIT_BYTES), mapped=mapped)
    limited_ids, limited_digest, limited_offloaded, needed = limited
    assert (limited_ids, limited_digest) == (ids, digest)
    assert int(limited_offloaded) > LIMIT_BYTES, "most of it stayed on disk"
    assert int(needed) < LIMIT_BYTES
    peak = int(re.search(r"peak=(\d+)", told)[1])  # type: ignore[index]
    assert peak <= LIMIT_BYTES
    assert re.search(r"oom_kill[ =]0", told), told
