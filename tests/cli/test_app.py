from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from overspill.cli.options import SHARED
from overspill.offload import placed

MISSING = "/no/such/model"

# What needs no device to be judged: neither torch nor transformers is imported, and no model is looked for.
REFUSED_UNSEEN: list[tuple[list[str], str]] = [
    (["--offload-config", "{"], "malformed JSON"),
    (["--offload-config", '{"uva": {"cpu_gb": 1}}'], 'unknown key "uva.cpu_gb"'),
    (["--offload-config", "[1]"], "must be a JSON object"),
    (["--offload-config", "@/no/such/document"], 'cannot read the file "/no/such/document"'),
    (["--offload-config", '{"uva": {"cpu_offload_gb": 2}}', "--cpu-offload-gb", "3"], "the flag --cpu-offload-gb"),
    (["--offload-backend", "uva"], '"uva.cpu_offload_gb" is 0: nothing would move'),
    (["--offload-backend", "cpu"], "'auto', 'uva' or 'prefetch'"),
    (["--offload-group-size", "2", "--offload-num-in-group", "3"], "offload_num_in_group (3) must be <= "),
    (["--offload-group-size", "2", "--offload-prefetch-step", "0"], "offload_prefetch_step (0) must be >= 1"),
    (["--cpu-offload-gb", "1", "--cpu-offload-params", "*.experts"], '"*.experts"'),
    (["--cpu-offload-params", "experts"], '"uva.cpu_offload_gb" is 0: nothing would move'),
    (["--cpu-offload-gb", "3Gb"], '"cpu_offload_gb" is "3Gb"'),
    (["--cpu-offload-gb", "-1"], '"uva.cpu_offload_gb" is "-1"'),
    (["--device", "emulated", "--device-memory", "plenty"], '"device_memory" is "plenty"'),
    (["--device", "emulated", "--device-memory", "0"], '"device_memory_bytes" is 0'),
    (["--device", "cpu", "--device-memory", "2"], "the cpu has no memory of its own"),
    (["--device", "tpu"], '"device" is "tpu"'),
    (["--link-bandwidth", "16GB/s"], "only the emulated link can be set"),
    (["--device", "emulated", "--link-bandwidth", "16"], '"link_bandwidth" is "16"'),
    (["--device", "emulated", "--link-latency", "soon"], '"link_latency_s" is "soon"'),
    (["--dtype", "int8"], '"dtype" is "int8"'),
    (["--max-model-len", "0"], '"max_model_len" is 0'),
    (["--max-num-seqs", "0"], '"max_num_seqs" is 0'),
    (["--seed", "-1"], '"seed" is -1'),
    (["--offload-config", '{"vllm_cpp": {"placement": {"cpu_moe": false}}}', "--cpu-moe"], "the flag --cpu-moe says"),
    (["--n-cpu-moe", "-1"], '"overspill.placement.n_cpu_moe" must not be negative (got -1)'),
    (["--n-cpu-moe", "5000"], "above the bound of 4096"),
    (["-ot", "exps=CPU", "-ot", "attn=CUDA0"], 'cannot host a placed group on "cuda"'),
    (["-ot=x(?=y),z=npu"], '"npu", which is not a device'),
    (["--override-tensor", "exps"], '"override_tensor" has the entry "exps" without a "="'),
    (["--override_tensor=(=cpu"], "is not a valid regex"),
    (["--expert-cache", "3Gb"], '"expert_cache" is "3Gb"'),
    (["--expert-policy", "gpu"], "'fetch', 'cpu' or 'auto'"),
    (
        ["--expert-cache", "1", "--offload-config", '{"vllm_cpp": {"expert_stream": {"slots": 4}}}'],
        '"vllm_cpp.expert_stream.cache_bytes" (1073741824) cannot be combined with "slots" (4)',
    ),
    (["--offload-config", '{"overspill": {}, "vllm_cpp": {}}'], "two names of one object"),
    (["--offload-params"], "--offload-params names no weight"),
    (["--no-such-option"], "No such option: --no-such-option"),
    (["--offload-group-size", "two"], "--offload-group-size"),
    (["another"], "unexpected extra argument"),
]
OWN_REFUSED_UNSEEN: list[tuple[str, list[str], str]] = [
    ("run", ["--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
    ("run", ["--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
    ("run", ["--prompt", "x", "--top-p", "0.9"], "temperature 0 always takes the likeliest token"),
    ("run", ["--prompt", ""], "the prompt is empty"),
    ("run", ["--prompt", "x", "--cpu-offload-gb", "3Gb"], '"cpu_offload_gb" is "3Gb"'),
    ("compare", ["--candidate", "{"], "malformed JSON"),
    ("compare", ["--baseline", '{"uvx": 1}'], 'unknown key "uvx"'),
    ("compare", ["--candidate", "{}", "--offload-config", "{}"], "--candidate and --offload-config"),
]
# What needs to know the device.
REFUSED: list[tuple[list[str], str]] = [
    (["--device", "cpu", "--cpu-offload-gb", "1"], "host memory is this device's own memory"),
    (["--device", "cpu", "--offload-group-size", "2"], "host memory is this device's own memory"),
]

IN_ONE_PROCESS = """
import contextlib, io, json, sys
from overspill.cli import main
told = []
for arguments in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    told.append([code, err.getvalue()])
print(json.dumps({"told": told, "imported": sorted({"torch", "transformers"} & set(sys.modules))}))
"""


def assert_refused(code: int, err: str, message: str) -> None:
    assert code == 2
    error = err[err.index("error: ") :]
    assert message in error
    assert "\nhint: " in error
    assert MISSING not in error, "the model was looked for"
    assert "Traceback" not in err


def test_settings_are_refused_before_torch_is_imported() -> None:
    cases = [(["plan", MISSING, *options], message) for options, message in REFUSED_UNSEEN]
    cases += [([command, MISSING, *options], message) for command, options, message in OWN_REFUSED_UNSEEN]
    process = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        input=json.dumps([arguments for arguments, _ in cases]),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(process.stdout)
    for (_, message), (code, err) in zip(cases, answer["told"], strict=True):
        assert_refused(code, err, message)
    assert answer["imported"] == []


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_settings_are_refused_before_the_model_is_looked_for(options: list[str], message: str, cli: Cli) -> None:
    result = cli("plan", MISSING, *options)
    assert_refused(result.code, result.err, message)
    assert result.out == ""


def test_a_gpu_that_is_not_there_is_refused(cli: Cli) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = cli("plan", MISSING, "--device", "cuda")
    assert_refused(result.code, result.err, 'device is "cuda", but torch')
    result = cli("plan", MISSING, "--device-memory", "2")
    assert_refused(result.code, result.err, "there is no GPU")


@pytest.mark.parametrize(
    "options",
    [
        ["--cpu-offload-gb", "1"],
        ["--cpu-moe", "--n-cpu-moe", "2", "-ot", "a,b=CPU", "--override-tensor=x(?=y)=cpu"],
        [
            "--expert-cache",
            "512MiB",
            "--expert-policy",
            "cpu",
            "--offload-config",
            '{"vllm_cpp": {"order": "traffic"}}',
        ],
    ],
)
def test_a_missing_model_under_good_settings_is_no_settings_error(options: list[str], cli: Cli) -> None:
    result = cli("plan", MISSING, "--device", "emulated", *options)
    assert result.code == 3
    assert result.err.startswith(f"error: {MISSING} does not exist\nhint: ")


def test_a_warning_is_told_once_and_refuses_nothing(cli: Cli) -> None:
    result = cli("plan", MISSING, "--device", "emulated", "--cpu-offload-gb", 1, "--offload-group-size", 2)
    assert result.code == 3
    assert result.err.count("warning: Both UVA and prefetch offload fields are set") == 1


def test_the_model_stands_before_a_list(cli: Cli) -> None:
    result = cli("plan", "--offload-params", "mlp", MISSING)
    assert result.code == 2
    assert "MODEL stands before it" in result.error
    assert "MODEL stands before it" not in cli("plan").error


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "run", "compare"])
def test_help_shows_every_option_in_its_group(command: str, cli: Cli) -> None:
    result = cli(command, "--help")
    assert (result.code, result.err) == (0, "")
    groups: dict[str, set[str]] = {}
    for line in result.out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            groups[line.rstrip(":")] = set()
        elif line.startswith("  -"):
            groups[list(groups)[-1]].add(next(word for word in line.split() if word.startswith("--")))
    for name, (annotation, _) in SHARED.items():
        option = "--json" if name == "json_output" else f"--{name.replace('_', '-')}"
        assert option in groups[annotation.__metadata__[0].rich_help_panel]
    assert list(groups)[-2:] == ["Output", "Options"]
    assert len(groups["OffloadConfig"]) == 14


def test_without_a_command_there_is_help(cli: Cli) -> None:
    result = cli()
    assert result.code == 0
    assert all(f"\n  {command} " in result.out for command in ("plan", "run", "compare"))
    assert "..." not in result.out.partition("Commands:")[2], "a summary is cut"


def test_the_versions_are_told(cli: Cli) -> None:
    result = cli("--version")
    assert result.code == 0
    assert result.out.startswith("overspill 0.1.0 (torch " + metadata.version("torch"))


# -- how it ends -----------------------------------------------------------------------------------------------------


class Raising(io.StringIO):
    """Standard input that fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def read(self, size: int | None = -1) -> str:
        raise self.error


def test_an_interrupt_ends_with_130(cli: Cli) -> None:
    result = cli("run", MISSING, "--prompt", "-", stdin=Raising(KeyboardInterrupt()))
    assert (result.code, result.err) == (130, "\ninterrupted\n")


def test_what_nobody_expected_is_told_as_our_defect(cli: Cli) -> None:
    broken = Raising(ZeroDivisionError("by us"))
    result = cli("run", MISSING, "--prompt", "-", stdin=broken)
    assert result.code == 4
    assert result.err.startswith("error: ZeroDivisionError: by us\nhint: this is a defect")
    result = cli("run", MISSING, "--prompt", "-", "--debug", stdin=broken)
    assert result.code == 4
    assert "Traceback" in result.err
    assert "in read" in result.err


def test_a_misplaced_weight_ends_with_4(cli: Cli, talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_ledger = placed.take_ledger

    def misplaced(model: Any, *arguments: Any, **how: Any) -> Any:
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        return take_ledger(model, *arguments, **how)

    monkeypatch.setattr(placed, "take_ledger", misplaced)
    result = cli("run", talking, "--device", "emulated", "--prompt", "x", "--max-tokens", 1)
    assert result.code == 4
    assert "memory is not what the plan says:\n  lm_head.weight: not in the device's weight block\nhint: " in result.err
    assert result.out == ""


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_that_has_gone_is_neither_success_nor_verdict(
    form: tuple[str, ...], cli: Cli, talking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb"), write_through=True) as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        result = cli("plan", talking, "--device", "emulated", *form)
        monkeypatch.undo()
    assert result.code == 141
    assert "error" not in result.err


def test_a_reader_that_has_gone_is_no_noise_at_exit() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "overspill", "--help"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")
