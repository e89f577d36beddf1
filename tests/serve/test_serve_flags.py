from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command_from_info
from typer.models import CommandInfo

from overspill.cli import serve
from overspill.errors import CapacityError, ConfigError
from overspill.serve.vllm_flags import UNHONOURED, without_vllm_flags

MISSING = "/no/such/model"

REFUSED: list[tuple[list[str], str]] = [
    ([], "serve has no model"),
    ([MISSING, "--model", "another"], "--model says 'another'"),
    ([MISSING, "--no-such-flag"], "No such option: --no-such-flag"),
    ([MISSING, "--tensor-parallel-size", "2"], "--tensor-parallel-size is vLLM's, and cannot be honoured: one device"),
    ([MISSING, "--tensor_parallel_size=2"], "--tensor_parallel_size is vLLM's"),
    ([MISSING, "-tp", "2"], "-tp is vLLM's"),
    ([MISSING, "--enable-lora"], "adapters are not loaded"),
    ([MISSING, "--no-enable-chunked-prefill"], "prompts are computed in chunks"),
    ([MISSING, "--speculative-config.method", "ngram"], "tokens are not guessed ahead"),
    ([MISSING, "--quantization", "awq"], "as the checkpoint has them"),
    ([MISSING, "--host", "0.0.0.0"], "others than this machine can reach"),
    ([MISSING, "--host", "no.such.host.invalid", "--api-key", "k"], "has no address"),
    ([MISSING, "--api-key", ""], "--api-key is empty"),
    ([MISSING, "--api-key", "key\n"], "spaces around it"),
    ([MISSING, "--grace", "nan"], "--grace is nan"),
    ([MISSING, "--grace", "-1"], "--grace is -1"),
    ([MISSING, "--port", "70000"], "--port"),
    ([MISSING, "--allowed-origins", "[1]"], "--allowed-origins is"),
    ([MISSING, "--allowed-origins", "example.org"], "--allowed-origins is"),
    ([MISSING, "--served-model-name", ""], "--served-model-name"),
    ([MISSING, "--max-body-bytes", "0"], "no request would pass"),
    ([MISSING, "--max-num-batched-tokens", "31"], "less than --max-num-seqs 32"),
    ([MISSING, "--kv-cache-memory-bytes", "lots"], '"kv_cache_memory_bytes" is "lots"'),
    ([MISSING, "--kv-cache-memory-bytes", "0"], '"kv_cache_memory_bytes" is 0'),
    ([MISSING, "--max-num-batched-tokens", "-1"], "--max-num-batched-tokens is -1"),
    ([MISSING, "--max-num-seqs", "0"], '"max_num_seqs" is 0'),
    ([MISSING, "--cpu-offload-gb", "3Gb"], '"cpu_offload_gb" is "3Gb"'),
    ([MISSING, "--device", "cpu", "--gpu-memory-utilization", "0.5"], "the cpu has no memory of its own"),
    ([MISSING, "--device", "cuda", "--device-memory", "2", "--gpu-memory-utilization", "0.5"], "both say how much"),
    ([MISSING, "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization is 1.5"),
]

IN_ONE_PROCESS = """
import contextlib, io, json, sys
from overspill.cli import main
told = []
for arguments in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            main(["serve", *arguments])
        except SystemExit as end:
            told.append([end.code, err.getvalue()])
print(json.dumps({"told": told, "imported": sorted({"torch", "transformers", "fastapi"} & set(sys.modules))}))
"""


def _command() -> Any:
    info = CommandInfo(name="serve", cls=serve.ServeCommand, callback=serve.command)
    return get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode=None)


def test_what_cannot_be_is_refused_before_torch_is_imported() -> None:
    process = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        input=json.dumps([arguments for arguments, _ in REFUSED]),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(process.stdout)
    for (arguments, message), (code, err) in zip(REFUSED, answer["told"], strict=True):
        assert code == 2, (arguments, err)
        error = err[err.index("error: ") :]
        assert message in error
        assert "\nhint: " in error
    assert answer["imported"] == []


def test_vllms_flags_are_none_of_ours() -> None:
    ours = {option for parameter in _command().params for option in parameter.opts}
    assert {"--host", "--model", "--max-model-len", "--cpu-offload-gb"} <= ours
    assert not ours & set(UNHONOURED)
    assert len(UNHONOURED) >= 40


@pytest.mark.parametrize("name", UNHONOURED)
def test_each_flag_of_vllms_is_refused_by_name_or_changes_nothing(name: str) -> None:
    flag = UNHONOURED[name]
    for value in flag.same:
        spelled = [f"{name}={value}"]
        kept, notes = without_vllm_flags(["MODEL", *spelled, "--port", "1"])
        assert kept == ["MODEL", "--port", "1"]
        assert notes == [f"{name} changes nothing: {flag.why}"]
    with pytest.raises(ConfigError) as told:
        without_vllm_flags([f"{name}=another", "MODEL"])
    assert name in told.value.message
    assert told.value.hint == flag.way_out


def test_switches_take_no_value_and_others_the_next_one() -> None:
    same = ["--enforce-eager", "MODEL", "-tp", "1", "--no-enable-prefix-caching", "--disable_log_requests"]
    kept, notes = without_vllm_flags(same)
    assert kept == ["MODEL"]
    assert len(notes) == 4
    assert without_vllm_flags(["--", "--enforce-eager"]) == (["--", "--enforce-eager"], [])


def test_a_share_of_the_device_is_a_size(talking: Path) -> None:
    share = ["--device-memory", "200KiB", "--gpu-memory-utilization", "0.5"]
    with pytest.raises(CapacityError, match=r"100\.00 KiB"):
        _command().main([str(talking), "--port", "0", "--device", "emulated", *share], standalone_mode=False)
