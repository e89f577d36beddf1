from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli

from hub_server import MODEL, hub_of
from talking_model import SPECIAL, byte_tokenizer
from tiny_models import Tiny

EMULATED = ("--device", "emulated", "--max-model-len", 64)
SHORT = (*EMULATED, "--max-tokens", 6)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with routed experts that talks."""
    options = {
        "vocab_size": len(SPECIAL) + 256,
        "intermediate_size": 45,
        "moe_intermediate_size": 11,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    }
    folder = tmp_path_factory.mktemp("sparse")
    Tiny("Qwen3MoeConfig", options).save(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_json_is_the_answer_with_its_proof_and_nothing_else(cli: Cli, talking: Path) -> None:
    result = cli("run", talking, *SHORT, "--cpu-offload-gb", "100KiB", "--prompt", "Grüße", "--json")
    assert result.code == 0
    answer = json.loads(result.out)
    assert set(answer) == {"text", "finish_reason", "prompt_ids", "token_ids", "steps", "plan", "ledger", "experts"}
    assert answer["experts"] is None
    assert len(answer["steps"]) == len(answer["token_ids"])
    assert set(answer["steps"][0]) == {"tokens", "seconds", "link_bytes", "stall_s"}
    assert answer["steps"][0]["tokens"] == len(answer["prompt_ids"])
    assert answer["steps"][1]["link_bytes"] == answer["plan"]["step"]["link_bytes"] > 0
    hosted = sum(entry["bytes"] for entry in answer["ledger"]["entries"] if entry["tier"] == "host")
    assert hosted == answer["plan"]["offloaded_bytes"] > 0
    assert "Total CPU offloaded parameters: " in result.err
    assert "Model loading took " in result.err


def test_the_answer_is_all_that_stdout_gets(cli: Cli, talking: Path) -> None:
    options = (talking, *SHORT, "--offload-group-size", 2, "--prompt", "hi")
    answer = json.loads(cli("run", *options, "--json").out)
    result = cli("run", *options)
    assert (result.code, result.out) == (0, answer["text"] + "\n")
    assert "Offloader set to PrefetchOffloader" in result.err
    lines = result.err.splitlines()
    assert lines[-1].startswith(f"prompt: {len(answer['prompt_ids'])} tokens in ")
    assert "answer: 6 tokens, " in lines[-1]
    assert lines[-1].endswith("over the link per token; emulated: no GPU time")


def test_a_terminal_that_does_not_know_a_character_still_gets_the_answer(
    cli: Cli, talking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (talking, *SHORT, "--prompt", "hi", "--temperature", 1.5, "--seed", 1)
    text = json.loads(cli("run", *options, "--json").out)["text"]
    assert not text.isascii()
    ascii_only = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(ascii_only, encoding="ascii"))
    assert cli("run", *options).code == 0
    assert ascii_only.getvalue().decode() == text.encode("ascii", "replace").decode() + "\n"


def test_the_whole_plan_is_shown_when_asked_for(cli: Cli, talking: Path) -> None:
    result = cli("run", talking, *SHORT, "--prompt", "hi", "--verbose")
    assert result.code == 0
    assert "Where the weights go" in result.err
    assert "Where the weights go" not in result.out
    assert "Where the weights go" not in cli("run", talking, *SHORT, "--prompt", "hi").err


def test_a_prompt_from_standard_input_is_the_same_without_its_line_end(cli: Cli, talking: Path) -> None:
    def ids(*prompt: str, stdin: str = "") -> list[int]:
        return json.loads(cli("run", talking, *SHORT, "--max-tokens", 1, *prompt, "--json", stdin=stdin).out)[
            "prompt_ids"
        ]

    given = ids("--prompt", "two\nlines")
    assert ids(stdin="two\nlines\n") == ids("--prompt", "-", stdin="two\nlines") == given
    assert ids("--prompt", "two\nlines", "--raw") != given


def test_no_prompt_at_all_is_refused(cli: Cli, talking: Path) -> None:
    result = cli("run", talking, *SHORT)
    assert result.code == 2
    assert result.error.startswith("error: the prompt is empty\nhint: --prompt")


def test_a_prompt_that_is_no_text_is_refused(cli: Cli, talking: Path) -> None:
    result = cli("run", talking, *SHORT, "--prompt", "caf\udce9")  # as Python hands on what is not UTF-8
    assert result.code == 2
    assert result.error.startswith("error: the prompt is not text")


def test_a_prompt_that_is_too_long_is_refused_before_a_weight_is_read(cli: Cli, talking: Path) -> None:
    result = cli("run", talking, *SHORT, "--prompt", "x" * 60)
    assert result.code == 2
    assert "and 6 to generate are " in result.error
    assert "more than the 64 that memory is planned for\nhint: --max-model-len " in result.error
    assert "Model loading took" not in result.err


def test_an_answer_takes_what_the_context_leaves_when_no_length_is_asked_for(cli: Cli, talking: Path) -> None:
    result = cli("run", talking, *EMULATED, "--prompt", "x" * 40, "--json", "--seed", 1, "--temperature", 1)
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    assert len(answer["prompt_ids"]) + len(answer["token_ids"]) == 64 or answer["finish_reason"] == "stop"
    too_long = cli("run", talking, *EMULATED, "--prompt", "x" * 64)
    assert too_long.code == 2
    assert "and 1 to generate" in too_long.error


def test_sampling_follows_the_seed(cli: Cli, talking: Path) -> None:
    def ids(seed: int) -> list[int]:
        options = ("--temperature", 1.5, "--top-p", 0.95, "--seed", seed, "--json")
        return json.loads(cli("run", talking, *SHORT, "--prompt", "hi", *options).out)["token_ids"]

    assert ids(1) == ids(1)
    assert len({tuple(ids(seed)) for seed in (1, 2, 3)}) > 1


def test_memory_that_runs_out_is_told_with_a_way_out(cli: Cli, talking: Path) -> None:
    needed = json.loads(cli("plan", talking, *EMULATED, "--json").out)["memory"]["device"]
    resident = needed["total_bytes"] - needed["working_bytes"]
    result = cli("run", talking, *SHORT, "--no-fit", "--device-memory", f"{resident + 512}B", "--prompt", "x" * 30)
    assert result.code == 3
    assert "out of device memory: " in result.error
    assert "hint: offload more weights" in result.error


def test_a_process_answers_a_pipe(talking: Path) -> None:
    command = [sys.executable, "-m", "overspill", "run", str(talking), *map(str, SHORT)]
    process = subprocess.run(command, input="hi\n", capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("\n")
    assert len(process.stdout) > 1
    assert "Model loading took" in process.stderr
    assert "Traceback" not in process.stderr
    assert "deprecated" not in process.stderr, "transformers' own warnings are not ours to show"


STREAM_LINE = re.compile(
    r"\[expert-stream\] steps=(\d+) hits=(\d+) misses=(\d+) evictions=(\d+) fills=(\d+) bytes=(\d+) exhausted=0"
)


def test_streamed_experts_are_told_once_and_add_up(cli: Cli, sparse: Path) -> None:
    options = (sparse, *SHORT, "--prompt", "hi", "--expert-cache", "48KiB", "--n-cpu-moe", 2)
    result = cli("run", *options, "--json")
    assert result.code == 0, result.err
    (line,) = [line for line in result.err.splitlines() if STREAM_LINE.fullmatch(line)]
    found = STREAM_LINE.fullmatch(line)
    assert found is not None
    steps, hits, misses, evictions, fills, nbytes = map(int, found.groups())
    answer = json.loads(result.out)
    slots, layers = answer["experts"]["slots"], answer["experts"]["layers"]
    assert steps == len(answer["steps"])
    assert (hits, misses, evictions, fills, nbytes) == tuple(
        slots[name] for name in ("hits", "misses", "evictions", "fills", "bytes")
    )
    assert hits + misses == slots["lookups"] > 0
    assert fills - evictions == slots["held"] <= slots["count"]
    assert [layer["access"] for layer in layers] == ["in_place"] * 2 + ["stream"] * 4
    assert {layer["calls"] for layer in layers} == {steps}

    told = cli("run", *options).err.splitlines()
    assert STREAM_LINE.fullmatch(told[-1])
    assert sum(line.startswith("[expert-stream] steps=") for line in told) == 1
    assert told[-2].startswith(f"expert slots: hits {hits / (hits + misses):.0%} of {hits + misses}; misses ")
    assert told[-3].startswith(f"experts on the CPU: 2 layers, {2 * steps} calls, ")


def test_experts_on_the_cpu_alone_have_no_slots_to_tell_of(cli: Cli, sparse: Path) -> None:
    result = cli("run", sparse, *SHORT, "--prompt", "hi", "--cpu-moe", "--json")
    answer = json.loads(result.out)
    assert answer["experts"]["slots"] is None
    assert {(layer["access"], layer["calls"]) for layer in answer["experts"]["layers"]} == {("in_place", 6)}
    assert "[expert-stream]" not in result.err


def test_a_model_on_the_hub_is_planned_from_headers_and_then_downloaded(
    talking: Path, cli: Cli, tmp_path: Path
) -> None:
    question = ["--prompt", "hello", "--max-tokens", "3", "--json"]
    with hub_of(talking) as hub:
        environment = {**os.environ, **hub.environment, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}

        def overspill(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "overspill", *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

        refused = overspill("run", MODEL, *question, "--max-model-len", "9")
        assert "than the 9 that memory is planned for" in refused.stderr
        weights_bytes = (talking / "model.safetensors").stat().st_size
        assert hub.given["model.safetensors"] < weights_bytes, "refused, and downloaded all the same"
        answered = overspill("run", MODEL, *question)
        assert hub.given["model.safetensors"] > weights_bytes
    assert answered.returncode == 0, answered.stderr
    local = json.loads(cli("run", talking, *question).out)
    assert json.loads(answered.stdout)["token_ids"] == local["token_ids"]
