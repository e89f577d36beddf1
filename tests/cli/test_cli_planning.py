"""Plans for machines that are not here, ways side by side, and the measuring command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli
from transformers import LlamaConfig

from emulated_runs import emulated
from overspill import advice
from overspill.cli.plan import ENGINES
from overspill.machine import measure, rates
from overspill.machine.named import NamedDevice
from overspill.machine.observed import KEPT, correction, observations, remember
from overspill.machine.rates import MachineReport, Rates, fingerprint, save_report
from overspill.machine.specs import gpu_named, link_named
from tiny_models import save_headers


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rates.FOLDER_VARIABLE, str(tmp_path / "machines"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 70 B parameters in a few large layers, headers alone."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    config = LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=57344, num_hidden_layers=20, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    save_headers(folder, config)
    return folder


def test_a_purchase_is_planned_for_a_gpu_by_name(dense: Path, cli: Cli) -> None:
    asked = ("plan", dense, "--gpu", "L40S", "--link", "pcie4x16", "--host-memory", "192GiB")
    plan = json.loads(cli(*asked, "--json").out)
    assert plan["device"]["name"] == "L40S (named, not here)"
    assert plan["memory"]["device"]["total_bytes"] <= plan["memory"]["device"]["available_bytes"] < 48 << 30
    assert plan["memory"]["host"]["available_bytes"] == 192 << 30
    assert any(note.startswith("fit: ") for note in plan["notes"])
    decode = plan["forecast"]["decode"]
    assert decode[0]["limit"] == "link"
    assert 3 < decode[0]["seconds"] < 8  # 90 GiB over 27 GB/s
    assert "L40S by its data sheet" in plan["forecast"]["rates"]
    shown = cli(*asked).out
    assert "Time forecast: L40S by its data sheet" in shown
    assert "decode, 256 sequences" in shown


def test_a_host_that_is_too_small_is_refused_or_its_layers_stay_on_disk(dense: Path, cli: Cli) -> None:
    plan = json.loads(cli("plan", dense, "--gpu", "L40S", "--host-memory", "64GiB", "--json").out)
    assert plan["ring"]["on_disk"]
    assert plan["forecast"]["decode"][0]["limit"] == "disk"
    refused = cli("plan", dense, "--gpu", "L40S", "--host-memory", "64GiB", "--no-fit")
    assert refused.code == 3
    assert "need" in refused.error


def test_ways_are_compared_side_by_side_and_one_is_picked(dense: Path, cli: Cli) -> None:
    asked = ("plan", dense, "--gpu", "L40S", "--host-memory", "192GiB", "--compare")
    found = json.loads(cli(*asked, "--json").out)
    rows = found["alternatives"]
    by_way = {row["what"]: row for row in rows}
    assert not by_way["nothing offloaded"]["fits"]
    assert by_way["declaration order, as vLLM"]["fits"]
    assert by_way["as fit would"]["fits"]
    fitting = [row for row in rows if row["fits"]]
    assert rows[found["pick"]]["decode_s"] <= 1.01 * min(row["decode_s"] for row in fitting)
    assert all(row["device_bytes"] and row["decode_limit"] for row in fitting)
    table = cli(*asked).out
    assert "→" in table
    assert "does not fit" in table


def test_ways_are_held_to_the_weight_budget_and_shown_where_nothing_fits(dense: Path, cli: Cli) -> None:
    budget = '{"overspill": {"device_fit": {"weight_budget_bytes": 30000000000}}}'
    asked = ("plan", dense, "--gpu", "H200", "--host-memory", "512GiB", "--offload-config", budget)
    found = json.loads(cli(*asked, "--compare", "--json").out)
    assert found["alternatives"][found["pick"]]["device_bytes"] < 34 << 30
    assert not {row["what"]: row for row in found["alternatives"]}["nothing offloaded"]["fits"]
    stated = ("plan", dense, "--gpu", "L40S", "--host-memory", "512GiB", "--no-fit")
    assert cli(*stated).code == 3
    shown = cli(*stated, "--compare")
    assert shown.code == 0
    assert "does not fit" in shown.out
    assert "--offload-config '{" in json.dumps(json.loads(cli(*stated, "--compare", "--json").out)["alternatives"])
    unstated = cli("plan", dense, "--gpu", "L40S")
    assert "not stated" in unstated.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--link", ""), "--link without --gpu"),
        (("--gpu", "L40S", "--link", ""), '"link" is ""'),
        (("--link", "pcie4x16"), "--link without --gpu"),
        (("--host-memory", "1GiB"), "--host-memory without --gpu"),
        (("--gpu", "L40S", "--device", "cpu"), "--gpu stands for the device"),
        (("--gpu", "B9000"), '"gpu" is "B9000"'),
        (("--gpu", "L40S", "--link", "usb"), '"link" is "usb"'),
        (("--compare", "--emit", "vllm"), "two answers"),
        (("--ranks", "2"), "--ranks without --emit vllm"),
        (("--ranks", "2", "--emit", "llama.cpp"), "--ranks without --emit vllm"),
        (("--gpu", "L40S", "--ranks", "3", "--emit", "vllm"), "64 attention heads and 8 KV heads"),
        (("--emit", "sglang"), "sglang"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: tuple[str, ...], message: str, dense: Path, cli: Cli) -> None:
    refused = cli("plan", dense, *options)
    assert refused.code == 2
    assert message in refused.error


def test_the_same_is_written_for_other_engines(dense: Path, cli: Cli) -> None:
    assert ENGINES == advice.ENGINES
    asked = ("plan", dense, "--gpu", "L40S", "--host-memory", "512GiB", "--max-model-len", 8192, "--emit")
    vllm = cli(*asked, "vllm", "--ranks", 2).out
    assert vllm.startswith(f"vllm serve {dense} ")
    assert "--cpu-offload-gb" in vllm
    assert "--tensor-parallel-size 2" in vllm
    assert "--gpu-memory-utilization 0.98" in vllm
    assert "over 2 ranks" in vllm
    assert "offload" not in cli(*asked, "vllm", "--ranks", 4).out.splitlines()[0], "130 GiB over four cards"
    assert "power of two" in vllm
    assert cli(*asked, "llama.cpp").out.startswith("llama-server -m ")
    found = json.loads(cli(*asked, "overspill", "--json").out)
    assert found["command"][:2] == ["overspill", "serve"]


def test_bench_measures_prints_and_keeps(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "BEYOND_CACHES_BYTES", 32 << 20)
    result = cli("bench", "--device", "cpu", "--folder", tmp_path)
    assert result.code == 0
    assert "experts on the CPU, one token" in result.out
    assert "memory node" in result.out
    assert "kept in" in result.err
    (kept,) = (tmp_path / "machines").iterdir()
    assert json.loads(kept.read_text())["device_kind"] == "cpu"
    kept.unlink()
    report = json.loads(cli("bench", "--device", "cpu", "--folder", tmp_path, "--no-keep", "--json").out)
    assert report["rates"]["layer_s"] > 0
    assert not list((tmp_path / "machines").iterdir())


def test_bench_without_a_folder_is_refused(cli: Cli) -> None:
    refused = cli("bench", "--device", "cpu", "--folder", "/no/such/folder")
    assert refused.code == 3
    assert "is no folder" in refused.error


def test_runs_are_held_against_their_forecast_and_correct_the_next(cli: Cli, talking: Path, tmp_path: Path) -> None:
    asked = (talking, "--device", "emulated", "--max-model-len", 64)
    without = cli("plan", *asked, "--calibrate")
    assert without.code == 2
    assert "no forecast to correct" in without.error
    assert "was forecast" not in cli("run", *asked, "--prompt", "hi", "--max-tokens", 6).err
    report = replace(known(), fingerprint=fingerprint(emulated())[0])
    save_report(report)
    assert "no run to correct by" in cli("plan", *asked, "--calibrate").error
    told = cli("run", *asked, "--prompt", "hi", "--max-tokens", 6).err
    assert "a decode step was forecast at 0.0 ms and took" in told
    (observed,) = observations(emulated())
    before = json.loads(cli("plan", *asked, "--json").out)["forecast"]
    after = json.loads(cli("plan", *asked, "--calibrate", "--json").out)["forecast"]
    assert after["decode"][0]["seconds"] == pytest.approx(before["decode"][0]["seconds"] * observed.ratio)
    assert "1 run of LlamaForCausalLM this way" in after["rates"]


def test_a_way_that_took_longer_here_is_chosen_no_more(cli: Cli, dense: Path) -> None:
    """Each way is corrected by its own runs, in the choice and in what is told of it."""
    asked = ("plan", dense, "--gpu", "L40S", "--host-memory", "192GiB", "--json")
    gpu = gpu_named("L40S")
    device = NamedDevice(gpu, link_named(gpu.link), None)
    before = json.loads(cli(*asked).out)
    chosen, ways = before["fit"]["chosen"], before["fit"]["ways"]
    assert chosen == ways[0]["settings"]
    way = before["backend"]
    remember(device, "LlamaForCausalLM", way, forecast_s=1.0, measured_s=100.0)
    other = {"uva": "prefetch", "prefetch": "uva"}[way]
    remember(device, "LlamaForCausalLM", other, forecast_s=1.0, measured_s=1.0)
    after = json.loads(cli(*asked, "--calibrate").out)
    assert after["backend"] == other
    assert "corrected by 1.00" in after["forecast"]["rates"]
    found = {way["settings"]: way["decode_s"] for way in after["fit"]["ways"]}
    assert found[chosen] == pytest.approx(100 * ways[0]["decode_s"])
    rows = json.loads(cli(*asked, "--calibrate", "--compare").out)
    assert rows["pick"] == 0


def test_an_answer_stands_where_what_it_took_cannot_be_kept(
    cli: Cli, talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_report(replace(known(), fingerprint=fingerprint(emulated())[0]))
    kept = tmp_path / "machines" / f"{fingerprint(emulated())[0]}.observed.part"
    kept.mkdir()  # where the file would be written
    result = cli("run", talking, "--device", "emulated", "--max-model-len", 64, "--prompt", "hi", "--max-tokens", 6)
    assert result.code == 0
    assert result.out
    assert "warning: " in result.err
    assert "cannot be kept" in result.err


def known() -> MachineReport:
    """A machine that takes no time for anything, next to."""
    figures = dict.fromkeys(("float32", "bfloat16", "float16"), 1e15)
    rates_ = Rates("made up", figures, figures, layer_s=1e-9, expert_bytes_s=1e15, expert_flops=1e15, disk_bytes_s=1e15)
    return MachineReport("", "emulated", "", "", {}, {}, {}, rates_)


def test_what_was_observed_is_of_the_nearest_kind_and_the_oldest_go() -> None:
    device = emulated()
    for number in range(KEPT + 5):
        remember(device, "A", "uva", forecast_s=1.0, measured_s=float(number))
    found = observations(device)
    assert [found[0].measured_s, len(found)] == [5.0, KEPT]
    remember(device, "B", "prefetch", forecast_s=2.0, measured_s=3.0)
    found = observations(device)
    assert correction(found, "B", "prefetch") == (1.5, "1 run of B this way")
    assert correction(found, "A", "prefetch") == (1.5, "1 run this way")
    times, runs = correction(found, "A", "slots") or (0, "")
    assert (times > 50, runs) == (True, f"{KEPT} runs of other ways")
    assert correction([], "A", "uva") is None
