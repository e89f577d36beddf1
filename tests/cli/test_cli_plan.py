from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Cli

import overspill
from overspill.plan.report import plan_as_json

EMULATED = ("--device", "emulated", "--max-model-len", 64)


def test_json_is_the_plan_and_nothing_else(cli: Cli, talking: Path) -> None:
    result = cli("plan", talking, *EMULATED, "--cpu-offload-gb", "100KiB", "--json")
    assert result.code == 0
    plan = json.loads(result.out)
    assert set(plan) == {
        "schema",
        "model",
        "device",
        "backend",
        "order",
        "context_tokens",
        "sequences",
        "offloaded_bytes",
        "saved_bytes",
        "memory",
        "step",
        "fit",
        "forecast",
        "ring",
        "placed",
        "slots",
        "weights",
        "notes",
        "warnings",
    }
    assert plan["schema"] == 1
    assert (plan["backend"], plan["order"], plan["context_tokens"]) == ("uva", "traffic", 64)
    expected = plan_as_json(overspill.plan(talking, cpu_offload_gb=100 / 1024**2, device="emulated", max_model_len=64))
    for either in (plan, expected):
        del either["memory"]["host"]["available_bytes"]  # changes from moment to moment
    assert plan == json.loads(json.dumps(expected))


@pytest.mark.parametrize(("text", "nbytes"), [("2", 2 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000)])
def test_the_device_s_memory_is_what_was_asked_for(text: str, nbytes: int, cli: Cli, talking: Path) -> None:
    plan = json.loads(cli("plan", talking, *EMULATED, "--device-memory", text, "--json").out)
    assert plan["memory"]["device"]["available_bytes"] == nbytes


def test_vllm_s_spellings_mean_the_same(cli: Cli, talking: Path, tmp_path: Path) -> None:
    document = tmp_path / "offload.json"
    document.write_text('{"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp", "self_attn"]}}')

    def hosted(*options: object) -> list[str]:
        plan = json.loads(cli("plan", talking, *EMULATED, *options, "--json").out)
        return [weight["name"] for weight in plan["weights"] if weight["tier"] == "host"]

    expected = hosted("--offload-config", f"@{document}")
    assert expected
    assert all(".mlp." in name or ".self_attn." in name for name in expected)
    assert hosted("--cpu-offload-gb", 1, "--cpu-offload-params", "mlp", "self_attn") == expected
    assert hosted("--cpu_offload_gb", 1, "--cpu_offload_params", "mlp", "self_attn") == expected
    assert hosted("--cpu_offload_gb=1", "--cpu-offload-params=mlp", "--cpu-offload-params=self_attn") == expected
    prefetched = hosted("--offload_group_size", 2, "--offload-params=mlp")
    assert prefetched
    assert all(".mlp." in name for name in prefetched)


def test_a_person_reads_where_weights_go_what_it_takes_and_what_moves(cli: Cli, talking: Path) -> None:
    result = cli("plan", talking, *EMULATED, "--offload-group-size", 2)
    assert (result.code, result.err) == (0, "")
    for text in (
        "LlamaForCausalLM",
        "backend prefetch",
        "Where the weights go",
        "group rule: layer mod 2 >= 1",
        "Memory forecast",
        "buffer pool",
        "KV cache, 1 x 64 tokens",
        "emulated: no GPU time",
    ):
        assert text in result.out


def test_a_sentence_is_one_line_however_long(cli: Cli, talking: Path) -> None:
    result = cli("plan", talking, *EMULATED, "--cpu-offload-gb", "100KiB", "--max-num-seqs", 2)
    notes = [line for line in result.out.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(
        json.loads(cli("plan", talking, *EMULATED, "--cpu-offload-gb", "100KiB", "--json").out)["notes"]
    )
    moved = next(line for line in result.out.splitlines() if "across the link" in line)
    assert moved.endswith("no GPU time)")


def test_a_selector_that_matches_nothing_shows_the_closest_names(cli: Cli, talking: Path) -> None:
    result = cli("plan", talking, *EMULATED, "--cpu-offload-gb", 1, "--cpu-offload-params", "mpl.down_proj")
    assert result.code == 2
    assert "'mpl.down_proj' matches no weight of this model\nhint: the closest names are " in result.error


def test_a_device_that_is_too_small_is_refused_with_a_budget_that_does(cli: Cli, talking: Path) -> None:
    result = cli("plan", talking, *EMULATED, "--device-memory", "200KiB", "--no-fit")
    assert result.code == 3
    assert "weights, buffer pool and KV cache need" in result.error
    assert "--cpu-offload-gb" in result.error.partition("hint: ")[2]
