"""The command as it is called: what it prints, its exit codes, and the memory of a real process."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import typer
from audit_logs import LOGS, text_of, under
from typer.testing import CliRunner

from overspill.audit.process import ProcessMemory, findings, measure, tightest
from overspill.audit.records import Line
from overspill.cli.audit import command
from overspill.errors import OverspillError

GIB = 1024**3

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command("audit")(command)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    error: str


def run(*arguments: object, stdin: str | bytes = "") -> Result:
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if isinstance(ended.exception, OverspillError):
        return Result(ended.exception.exit_code, ended.output, str(ended.exception))
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return Result(ended.exit_code, ended.output, "")


def log(name: str) -> str:
    return str(LOGS / f"{name}.log")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """A process with 64 MiB of its own, and a child with 32 more."""
    child = "import time; held = b'x' * (32 << 20); print('ready', flush=True); time.sleep(300)"
    program = f"""
import subprocess, sys
held = b"x" * (64 << 20)
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print("ready", flush=True)
try:
    sys.stdin.read()
finally:
    child.kill()
    child.wait()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("vllm-healthy", 0),
        ("vllm-restarted", 0),  # a note
        ("vllm-not-needed", 1),
        ("vllm-flag-ignored-v2", 1),
        ("llama-healthy", 0),
        ("llama-context-reduced", 0),
        ("llama-mmap-experts", 1),
    ],
)
def test_the_exit_code_is_1_for_warnings_and_errors(name: str, code: int) -> None:
    assert run(log(name)).code == code
    assert run(log(name), "--json").code == code


def test_a_healthy_log_says_what_was_looked_at() -> None:
    out = run(log("vllm-healthy")).out
    assert "vllm 0.33.0" in out
    assert "asked     cpu_offload_gb 20, cpu_offload_params experts" in out
    assert "model Qwen/Qwen3-30B-A3B" in out
    assert "disable_pin_memory yes" in out
    assert "happened  architecture Qwen3MoeForCausalLM, offloader UVAOffloader, host_gib_per_rank 20.25" in out
    assert "nothing wrong in what the log shows" in out


def test_a_finding_is_told_with_its_line_why_and_what_to_do() -> None:
    result = run(log("llama-mmap-experts"))
    number = next(n for n, x in enumerate(text_of("llama-mmap-experts").split("\n"), 1) if "mmap enabled" in x)
    assert f"  warning [mmap-with-cpu-experts]\n    line {number}: 0.01." in result.out
    assert "\n    why: weights that were overridden to the CPU stay in a mapping" in result.out
    assert "\n    do:  --load-mode none" in result.out
    assert "\n  1 warning\n" in result.out
    assert result.error.startswith("1 finding in ")


def test_of_several_starts_the_last_counts_and_that_is_said() -> None:
    assert "2 starts in the log; this is the last" in run(log("vllm-restarted")).out


def test_what_is_not_judged_is_said() -> None:
    assert "not judged: what was asked for" in run(log("llama-real-cpu")).out


def test_json_has_a_stable_form() -> None:
    result = run(log("vllm-not-needed"), "--json")
    told = json.loads(result.out)
    assert list(told) == ["log", "server", "engine", "version", "starts", "asked", "happened", "findings", "unjudged"]
    assert (told["server"], told["engine"], told["version"], told["starts"]) == (None, "vllm", "0.29.0", 1)
    ranks = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1.0)
    budget = {"cpu_offload_gb": 12.0, "gpu_memory_utilization": 0.9}
    assert told["asked"] == {"model": "Qwen/Qwen3-14B", **budget, **ranks}
    finding = told["findings"][0]
    assert list(finding) == ["id", "severity", "evidence", "why", "remedy"]
    assert (finding["id"], finding["severity"]) == ("offload-not-needed", "warning")
    assert finding["evidence"][0] == {"line": 11, "text": text_of("vllm-not-needed").split("\n")[10]}
    assert json.loads(run(log("vllm-truncated"), "--json").out)["happened"]["ready"] is False


def test_several_logs_are_an_object_a_line_each() -> None:
    result = run(log("vllm-healthy"), log("llama-no-gpu"), log("llama-healthy"), "--json")
    assert [json.loads(line)["engine"] for line in result.out.splitlines()] == ["vllm", "llama.cpp", "llama.cpp"]
    assert result.code == 1
    assert "llama-no-gpu" in result.error
    assert "vllm-healthy" not in result.error


def test_standard_input_is_read() -> None:
    result = run("-", stdin=text_of("llama-no-gpu"))
    assert result.code == 1
    assert "standard input: llama.cpp" in result.out
    assert "[flag-ignored]" in result.out
    assert run("-", stdin=b"\xff\x00" * 100).code == 1


def test_an_empty_log_is_not_healthy() -> None:
    result = run("-")
    assert result.code == 1
    assert "nothing-to-judge" in result.out
    assert "engine not known" in result.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ""),
        (("--pid", "x", "some.log"), ""),
        (("-", "-"), "standard input (-) was given twice"),
        (("--pid", "1", "a.log", "b.log"), "--pid 1 was given with 2 logs"),
        (("--pid", "-5", "a.log"), "--pid -5: there is no such process"),
        (("--pid", str(2**40), "a.log"), "there is no such process"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert said in result.error


def test_a_file_that_cannot_be_read_ends_with_3(tmp_path: object) -> None:
    missing = run("no-such-file.log")
    assert missing.code == 3
    assert "the log no-such-file.log cannot be read: No such file" in missing.error
    assert run(tmp_path).code == 3


def test_a_file_that_cannot_be_read_does_not_hide_the_others() -> None:
    result = run(log("vllm-healthy"), "missing.log", log("llama-no-gpu"))
    assert result.code == 3
    assert "[flag-ignored]" in result.out
    assert "missing.log cannot be read" in result.error
    assert f"1 finding in {log('llama-no-gpu')}" in result.error


@pytest.mark.parametrize("library", [gzip, lzma, bz2], ids=["gzip", "xz", "bzip2"])
def test_a_compressed_log_is_named_as_such(library: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a log.gz"
    path.write_bytes(library.compress(b"x"))
    result = run(path)
    assert result.code == 3
    assert f"the log {path} is compressed" in result.error
    assert f"cat '{path}' | overspill audit -" in result.error


def test_a_process_belongs_to_one_server(tmp_path: Path) -> None:
    path = tmp_path / "two.log"
    path.write_text(under("vllm-1  | ", text_of("vllm-healthy")) + under("llama-1  | ", text_of("llama-healthy")))
    result = run(path, "--pid", os.getpid())
    assert result.code == 2
    assert "2 servers wrote to" in result.error


def test_the_memory_of_a_process_and_its_children(server: subprocess.Popen[str]) -> None:
    memory = measure(server.pid)
    assert memory.processes == 2
    assert 96 << 20 < memory.fields["RssAnon"] < 400 << 20
    assert memory.fields["VmRSS"] >= memory.unmapped_bytes >= memory.fields["RssAnon"]
    told = json.loads(run(log("vllm-healthy"), "--pid", server.pid, "--json").out)
    assert told["happened"]["process.count"] == 2
    assert told["happened"]["process.RssAnon_bytes"] > 96 << 20
    (finding,) = [one for one in told["findings"] if one["id"] == "weights-not-in-host-memory"]
    assert finding["evidence"][0]["text"].endswith("Total CPU offloaded parameters: 20.25")
    assert finding["evidence"][1]["line"] is None
    assert f"/proc/{server.pid}/status" in finding["evidence"][1]["text"]
    shown = run(log("vllm-healthy"), "--pid", server.pid)
    assert shown.code == 1
    assert f"    now: /proc/{server.pid}/status and 1 of its processes: VmRSS" in shown.out


def test_a_process_that_is_gone_is_refused() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    result = run(log("vllm-healthy"), "--pid", gone.pid)
    assert result.code == 2
    assert result.error.startswith(f"--pid {gone.pid}: there is no such process")


def test_the_limit_of_the_control_group_is_found(tmp_path: object) -> None:
    memory = measure(os.getpid())
    if memory.limit_bytes is None:
        pytest.skip("no memory control group limits this process")
    assert memory.used_bytes is not None
    assert 0 < memory.used_bytes < memory.limit_bytes


def _held(**bytes_: int) -> ProcessMemory:
    fields = dict.fromkeys(("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin", "VmSwap"), 0) | bytes_
    return ProcessMemory(7, 1, fields, limit_bytes=100 * GIB, used_bytes=50 * GIB)


def test_memory_that_exceeds_what_the_log_counts() -> None:
    line = Line(3, "Total CPU offloaded parameters: 20.0")
    (over,) = findings(_held(VmRSS=40 * GIB, RssFile=2 * GIB), 20.0 * GIB, [line])
    assert (over.id, over.severity, over.evidence[0]) == ("host-memory-over-log", "warning", line)
    assert "counts 20.00 GiB offloaded, and the process holds 38.00 GiB" in over.why
    assert "1.90 times" in over.why
    assert not list(findings(_held(VmRSS=24 * GIB, RssFile=2 * GIB), 20.0 * GIB, [line]))
    assert not list(findings(_held(VmRSS=40 * GIB), 0.0, []))


@pytest.mark.parametrize(("held_gib", "processes", "found"), [(13, 1, 0), (14, 1, 1), (14, 2, 0)])
def test_what_a_process_takes_beside_weights_is_allowed_for(held_gib: int, processes: int, found: int) -> None:
    memory = replace(_held(VmRSS=held_gib * GIB), processes=processes)
    assert len(list(findings(memory, 10.0 * GIB, []))) == found


def test_a_limit_beyond_the_memory_of_the_machine_is_none() -> None:
    none = (9223372036854771712, 5 * GIB)
    assert tightest([none], 64 * GIB) == (None, None)
    assert tightest([none, (32 * GIB, GIB), (48 * GIB, 47 * GIB)], 64 * GIB) == (48 * GIB, 47 * GIB)


def test_swap_and_a_limit_that_is_near() -> None:
    (swapped,) = findings(_held(VmRSS=10 * GIB, VmSwap=GIB), 0.0, [])
    assert swapped.id == "swapped"
    near = ProcessMemory(7, 1, _held(VmRSS=GIB).fields, limit_bytes=100 * GIB, used_bytes=97 * GIB)
    (limit,) = findings(near, 0.0, [])
    assert limit.id == "near-memory-limit"
    assert limit.evidence[0].text == "control group of 7: 97.00 GiB of 100.00 GiB"
