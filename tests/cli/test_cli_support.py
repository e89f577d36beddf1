from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Cli

from architectures import tiny
from overspill.support import load_matrix


def test_the_matrix_is_printed_and_is_json(cli: Cli) -> None:
    rows = json.loads(cli("support", "--json").out)
    assert len(rows) == len(load_matrix().rows)
    assert all({"architecture", "model_type", "status", "backends", "reason"} <= row.keys() for row in rows)
    table = cli("support")
    assert table.code == 0
    assert "LlamaForCausalLM" in table.out
    assert f"supported {sum(row['status'] == 'supported' for row in rows)}" in table.err


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "mixtral"])
def test_one_architecture_by_class_or_model_type(name: str, cli: Cli) -> None:
    (row,) = json.loads(cli("support", "--arch", name, "--json").out)
    assert (row["architecture"], row["status"], row["reason"]) == ("MixtralForCausalLM", "supported", None)
    assert row["backends"] == ["uva", "prefetch", "disk", "placement", "expert_stream"]
    told = cli("support", "--arch", name).out
    assert "MixtralForCausalLM (mixtral): supported" in told
    assert "expert_stream: routed experts through slots" in told


def test_what_is_refused_says_why(cli: Cli) -> None:
    assert "not placement: DbrxForCausalLM computes" in cli("support", "--arch", "dbrx").out
    (row,) = json.loads(cli("support", "--arch", "gemma4_assistant", "--json").out)
    assert (row["status"], row["backends"]) == ("refused", [])
    assert "does not run alone" in row["reason"]
    assert row["reason"] in cli("support", "--arch", "gemma4_assistant").out


def test_an_unknown_architecture_is_refused_with_the_closest(cli: Cli) -> None:
    refused = cli("support", "--arch", "LamaForCausalLM")
    assert refused.code == 2
    assert '"LamaForCausalLM" is no architecture of the support matrix' in refused.error
    assert "LlamaForCausalLM" in refused.error


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_command_for_text_refuses_a_model_of_sound(command: str, cli: Cli, tmp_path: Path) -> None:
    tiny("whisper (sound)").model().save_pretrained(tmp_path)
    options = ["--prompt", "x"] if command == "run" else ["--port", "0"]
    refused = cli(command, str(tmp_path), "--device", "emulated", *options)
    assert refused.code == 3
    assert "WhisperForConditionalGeneration is given input_features, and no text" in refused.error
    assert "placed.model.generate" in refused.error
