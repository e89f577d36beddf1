from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from overspill.compare.processes import run_job
from overspill.compare.results import Job
from overspill.errors import CapacityError, CheckpointError, DefectError, OverspillError


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job whose model does not exist."""
    folder = tmp_path / "run"
    folder.mkdir()
    return Job(str(tmp_path / "nowhere.gguf"), {}, {"device": "emulated"}, ((1, 2),), 2, str(folder))


def workers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and "overspill.compare.worker" in p.cmdline()]


def test_an_error_of_the_worker_is_raised_as_what_it_was(job):
    with pytest.raises(CheckpointError, match=r"candidate, run 1 of 3: .*nowhere") as caught:
        run_job(job, name="candidate, run 1 of 3", deadline_s=300)
    assert caught.value.hint is not None
    assert caught.value.exit_code == 3


def test_a_worker_that_is_killed_is_reported_by_name(job):
    def kill() -> None:
        for _ in range(1000):
            for process in workers():
                os.kill(process.pid, signal.SIGKILL)
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(CapacityError, match="baseline, run 2 of 3: the worker process was killed"):
        run_job(job, name="baseline, run 2 of 3", deadline_s=60)
    killer.join()


def test_a_worker_that_dies_is_reported_with_its_last_lines(job, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")  # no interpreter starts with this
    with pytest.raises(DefectError, match=r"(?s)run 1: the worker process died with exit status 1.*encodings"):
        run_job(job, name="run 1", deadline_s=60)


def test_a_worker_that_takes_too_long_is_ended(job):
    with pytest.raises(OverspillError, match=r"run 1: not done after 0\.2 seconds"):
        run_job(job, name="run 1", deadline_s=0.2)
    assert not workers()
