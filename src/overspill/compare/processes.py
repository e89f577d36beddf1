"""A job in a fresh process: nothing of one run, no allocator, cache or kernel choice, reaches the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from overspill import errors
from overspill.compare.results import ERROR, RESULT, Failure, Job, RunResult, from_json, to_json
from overspill.errors import CapacityError, DefectError, OverspillError

_LAST_LINES = 12
_LOG = "worker.log"


def run_job(job: Job, *, name: str, deadline_s: float) -> RunResult:
    """Run `job`; its logits stay in `job.folder`. `name` tells the run in errors ("candidate, run 2 of 3").

    An OverspillError of the worker is raised as the same class. Raises CapacityError for a worker that was killed,
    DefectError for one that died, and OverspillError for one that took longer than `deadline_s` seconds.
    """
    folder = Path(job.folder)
    status = _run(to_json(job), folder / _LOG, name, deadline_s)
    if (folder / ERROR).is_file():
        failure = from_json(Failure, (folder / ERROR).read_bytes())
        raise _error_class(failure.kind)(f"{name}: {failure.message}", hint=failure.hint)
    if status != 0 or not (folder / RESULT).is_file():
        raise _died(status, folder / _LOG, name)
    return from_json(RunResult, (folder / RESULT).read_bytes())


def _run(job: bytes, log: Path, name: str, deadline_s: float) -> int:
    """The worker's exit status, as subprocess tells it: negative for a signal."""
    command = [sys.executable, "-m", "overspill.compare.worker"]
    with (
        log.open("wb") as output,
        # A session of its own, so that what the worker started goes with it, and Ctrl-C reaches only us.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            process.communicate(job, timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            raise OverspillError(
                f"{name}: not done after {deadline_s:g} seconds{_last_lines(log)}",
                hint="allow it more time, or ask for fewer prompts or tokens",
            ) from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode


def _died(status: int, log: Path, name: str) -> OverspillError:
    if status == -signal.SIGKILL:
        return CapacityError(
            f"{name}: the worker process was killed{_last_lines(log)}",
            hint="where nobody did it by hand, the system ran out of memory: see the kernel's log (dmesg)",
        )
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
    return DefectError(
        f"{name}: the worker process died {how}{_last_lines(log)}",
        hint="this is a defect of overspill, or of a library below it; please report it with these lines",
    )


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    return "; its last lines:\n  " + "\n  ".join(lines) if lines else ", and it said nothing"


def _error_class(kind: str) -> type[OverspillError]:
    found: type[OverspillError] = getattr(errors, kind)
    assert issubclass(found, OverspillError), kind
    return found
