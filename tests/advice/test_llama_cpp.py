"""The command line for llama.cpp, read as llama.cpp reads it: the tensors on the CPU are the plan's and no others."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from advised import Made, fitted, line_with, made, model_of, uva, value_of, with_host
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_runs import gib, settings_for
from gguf_files import save_gguf
from overspill.advice import Advice, advise, llama_rules
from overspill.advice.facts import stored_bytes
from overspill.advice.gguf_names import gguf_names, name_map
from overspill.advice.llama_rules import cpu_flags
from overspill.config import format_bytes
from overspill.machine.cpu import CpuDevice
from overspill.model.weights import ModelMap
from overspill.plan import disk, make_plan
from tiny_models import MakeTiny

# transformers' name within a layer, and llama.cpp's: written once more, from its own sources
_OURS_TO_GGUF = {
    "self_attn.q_proj": ["attn_q"],
    "self_attn.k_proj": ["attn_k"],
    "self_attn.v_proj": ["attn_v"],
    "self_attn.o_proj": ["attn_output"],
    "self_attn.q_norm": ["attn_q_norm"],
    "self_attn.k_norm": ["attn_k_norm"],
    "self_attn.sinks": ["attn_sinks"],
    "self_attn.q_a_proj": ["attn_q_a"],
    "self_attn.q_b_proj": ["attn_q_b"],
    "self_attn.kv_a_proj_with_mqa": ["attn_kv_a_mqa"],
    "self_attn.kv_b_proj": ["attn_kv_b", "attn_k_b", "attn_v_b"],
    "self_attn.q_a_layernorm": ["attn_q_a_norm"],
    "self_attn.kv_a_layernorm": ["attn_kv_a_norm"],
    "mlp.gate_proj": ["ffn_gate"],
    "mlp.up_proj": ["ffn_up"],
    "mlp.down_proj": ["ffn_down"],
    "mlp.gate": ["ffn_gate_inp"],
    "mlp.router": ["ffn_gate_inp"],
    "mlp.shared_experts.gate_proj": ["ffn_gate_shexp"],
    "mlp.shared_experts.up_proj": ["ffn_up_shexp"],
    "mlp.shared_experts.down_proj": ["ffn_down_shexp"],
    "mlp.experts.gate_up_proj": ["ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"],
    "mlp.experts.down_proj": ["ffn_down_exps"],
    "input_layernorm": ["attn_norm"],
    "post_attention_layernorm": ["ffn_norm"],
}
_OUTSIDE = {"lm_head.weight": "output.weight", "model.norm.weight": "output_norm.weight"}


def gguf(full: str) -> list[str]:
    """What a GGUF file calls our weight; token_embd is not asked for, since it always lies on the CPU."""
    if full in _OUTSIDE:
        return [_OUTSIDE[full]]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full)
    if layer is None:
        return []
    stem, kind = layer[2], "weight"
    if stem.endswith(("_proj_bias", ".bias")):
        stem, kind = stem.removesuffix("_bias").removesuffix(".bias"), "bias"
    stem = stem.removesuffix(".weight")
    return [f"blk.{layer[1]}.{name}.{kind}" for name in _OURS_TO_GGUF[stem]]


def cpu_rules(advice: Advice) -> list[str]:
    """Patterns that lead to the CPU, in order, as llama.cpp's argument parser makes them."""
    patterns: list[str] = []
    words = list(advice.command)
    experts = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    for at, word in enumerate(words):
        if word == "--cpu-moe":
            patterns.append(experts)
        elif word == "--n-cpu-moe":
            patterns += [rf"blk\.{layer}{experts}" for layer in range(int(words[at + 1]))]
        elif word == "-ot":
            for entry in words[at + 1].split(","):
                pattern, _, device = entry.partition("=")
                assert device == "CPU"
                patterns.append(pattern)
    return patterns


def on_cpu(advice: Advice, name: str) -> bool:
    return any(re.search(p, name) for p in cpu_rules(advice))


def assert_exact(made_: Made) -> Advice:
    advice = made_.told("llama.cpp")
    assert value_of(advice, "-ngl") == "999", "all layers and the output, whatever the file has of further ones"
    for weight in made_.plan.model:
        for name in gguf(weight.full):
            assert on_cpu(advice, name) == (weight.full in made_.moved), (name, advice.shell)
    return advice


def placing(*patterns: str, **placement: Any) -> dict[str, Any]:
    overrides = [{"pattern": pattern, "device": "cpu"} for pattern in patterns]
    return {"overspill": {"placement": {**({"overrides": overrides} if overrides else {}), **placement}}}


@pytest.mark.parametrize(
    ("name", "document", "flags"),
    [
        ("qwen3_moe", placing(cpu_moe=True), ["--cpu-moe"]),
        ("gpt_oss", placing(cpu_moe=True), ["--cpu-moe"]),
        ("qwen3_moe", placing(n_cpu_moe=2), ["--n-cpu-moe", "2"]),
        ("gpt_oss", placing(r"blk\.[01]\..*exps"), ["--n-cpu-moe", "2"]),
        ("deepseek_v2", placing(n_cpu_moe=3), ["--n-cpu-moe", "3"]),
        ("deepseek_v2", placing(n_cpu_moe=6), ["--cpu-moe"]),
        (
            "qwen3_moe",
            placing(r"blk\.(3|5)\..*exps"),
            ["-ot", r"blk\.(3|5)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"],
        ),
        ("qwen3_moe", placing(r"blk\.5\..*exps"), ["-ot", r"blk\.5\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"]),
    ],
)
def test_experts_on_the_cpu(name: str, document: dict[str, Any], flags: list[str], tiny: MakeTiny) -> None:
    advice = assert_exact(made(tiny(name), document))
    assert advice.command[-len(flags) - 1 :] == (*flags, "--no-mmap")
    assert not advice.cannot


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("order", ["traffic", "declaration"])
@settings(max_examples=25)
@given(budget=st.integers(1, 400_000))
def test_a_budget_of_any_weights_is_matched_tensor_by_tensor(
    name: str, order: str, budget: int, tiny: MakeTiny
) -> None:
    document = {"uva": {"cpu_offload_gb": gib(budget)}, "overspill": {"order": order}}
    advice = assert_exact(made(tiny(name), document))
    if not all("embed" in full for full in made(tiny(name), document).moved):
        line_with(advice.cannot, "zero-copy", "computes on the CPU what is not on the GPU")


def test_whole_layers_leave_the_kv_cache_where_it_is(tiny: MakeTiny) -> None:
    """By -ngl the cache would go with them; and that counts layers that predict further tokens, which no plan has."""
    advice = assert_exact(made(tiny("llama"), {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["layers.0-2"]}}))
    assert value_of(advice, "-ot") == r"^blk\.(0|1|2)\.=CPU"


def test_other_whole_layers_are_a_pattern(tiny: MakeTiny) -> None:
    advice = assert_exact(made(tiny("qwen3_moe"), {"prefetch": {"offload_group_size": 2}}))
    assert value_of(advice, "-ot") == r"^blk\.(1|3|5)\.=CPU"
    line_with(advice.cannot, "prefetch", "computes on the CPU")


def test_dense_ffn_of_some_layers(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 3, "offload_params": ["mlp"]}}
    advice = assert_exact(made(tiny("llama"), document))
    assert value_of(advice, "-ot") == r"^blk\.(2|5)\.(ffn_down\.weight|ffn_gate\.weight|ffn_up\.weight)$=CPU"


def test_mixtures(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 2}, **placing(n_cpu_moe=3)}
    advice = assert_exact(made(tiny("gpt_oss"), document))
    assert value_of(advice, "--n-cpu-moe") == "3"
    mixed = {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["lm_head", "k_proj"]}, **placing(cpu_moe=True)}
    assert_exact(made(tiny("deepseek_v2"), {**mixed, "uva": {**mixed["uva"], "cpu_offload_params": ["lm_head"]}}))
    assert_exact(made(tiny("qwen3_moe"), mixed))


def test_slots_have_their_experts_computed_on_the_cpu(tiny: MakeTiny) -> None:
    advice = assert_exact(made(tiny("qwen3_moe"), {"overspill": {"expert_stream": {"slots": 4}}}))
    assert "--cpu-moe" in advice.command
    line_with(advice.cannot, "slots", "computes on the CPU", "--moe-cache-mib")


def test_nemotrons_experts_are_known_by_their_gguf_names(tiny: MakeTiny) -> None:
    made_ = made(tiny("nemotron_h"), {"overspill": {"placement": {"n_cpu_moe": 2}}})
    advice = made_.told("llama.cpp")
    assert value_of(advice, "--n-cpu-moe") == "2"
    names = gguf_names(made_.plan.model)
    assert names["model.layers.1.mixer.experts.up_proj"] == ("blk.1.ffn_up_exps.weight",)
    assert names["model.layers.2.mixer.q_proj.weight"] == ("blk.2.attn_q.weight",)


def test_a_weight_without_a_known_name_stays_on_the_gpu_and_is_named(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_ = made(tiny("llama"), {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["k_proj", "q_proj"]}})
    model = made_.plan.model
    known = {full: names for full, names in gguf_names(model).items() if "k_proj" not in full}
    monkeypatch.setattr("overspill.advice.llama_cpp.gguf_names", lambda _: known)
    advice = made_.told("llama.cpp")
    assert "attn_k" not in advice.shell
    line_with(advice.cannot, "model.layers.0.self_attn.k_proj.weight", "3 more", "not known")
    assert advice.host_bytes == 6 * 5600 + 17920


def test_a_pattern_that_finds_more_is_a_defect(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model: ModelMap = model_of(tiny("llama"))
    moved = {"model.layers.1.self_attn.q_proj.weight"}
    assert cpu_flags(model, moved, gguf_names(model)).patterns == (r"^blk\.1\.attn_q\.weight$",)
    for wrong, why in (("attn_q", r"blk\.0\.attn_q"), ("nothing", "attn_q"), ("a,b", "comma"), ("a=b", "cuts")):
        monkeypatch.setattr(llama_rules, "_tensor_patterns", lambda _, wrong=wrong: [wrong])
        with pytest.raises(AssertionError, match=why):
            cpu_flags(model, moved, gguf_names(model))


# -- the rest of the command -------------------------------------------------------------------------------------------


def test_context_slots_fit_and_conversion(tiny: MakeTiny) -> None:
    advice = made(tiny("llama_bf16"), max_num_seqs=3).told("llama.cpp")
    assert advice.command[:3] == ("llama-server", "-m", "model.gguf")
    assert (value_of(advice, "-c"), value_of(advice, "-np"), value_of(advice, "-fit")) == ("96", "3", "off")
    line_with(advice.notes, "shared by 3 slots of 32 tokens")
    line_with(advice.notes, "convert_hf_to_gguf.py", "--outtype bf16")
    assert "--no-mmap" not in advice.command, "nothing is on the CPU"


def test_mapped_experts_stay_mapped_and_are_warned_of(tiny: MakeTiny, fused: Path) -> None:
    document = {"overspill": {"placement": {"cpu_moe": True}, "mmap": {"enabled": True}}}
    made_ = made(fused, document, dtype="bfloat16")
    assert made_.plan.mapped
    advice = made_.told("llama.cpp")
    assert "--no-mmap" not in advice.command
    line_with(advice.notes, "mapped", "slower")
    line_with(made(tiny("qwen3_moe"), placing(cpu_moe=True)).told("llama.cpp").notes, "--load-mode none")


def test_host_memory_is_what_lies_on_the_cpu_and_the_embedding(tiny: MakeTiny) -> None:
    advice = made(tiny("qwen3_moe"), placing(n_cpu_moe=2)).told("llama.cpp")
    assert advice.host_bytes == 2 * 27720 + 17920
    short = with_host(made(tiny("qwen3_moe"), placing(n_cpu_moe=2)), advice.host_bytes - 1).told("llama.cpp")
    line_with(short.cannot, "host memory", format_bytes(advice.host_bytes))
    assert format_bytes(17920) in line_with(advice.notes, "token_embd")
    tied = made(tiny("llama_tied"), {"uva": {"cpu_offload_gb": gib(1)}}).told("llama.cpp")
    line_with(tied.notes, "token_embd", "a second time as the head")


def test_the_table_of_embeddings_is_on_the_cpu_by_whatever_name(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_ = made(tiny("llama"), uva(1 << 30, ["model.embed_tokens", "o_proj"]))
    assert "model.embed_tokens.weight" in made_.moved
    whole = made_.told("llama.cpp").host_bytes
    assert whole == 6 * 5600 + 17920
    monkeypatch.setattr("overspill.advice.llama_cpp.gguf_names", lambda _: {})
    advice = made_.told("llama.cpp")
    assert "embed_tokens" not in line_with(advice.cannot, "not known")
    assert advice.host_bytes == 17920


@pytest.mark.parametrize(
    "model_type",
    ["cohere", "ministral3", "olmo3", "phi", "glm_moe_dsa", "hunyuan_v1_moe", "mimo_v2_flash", "granitemoehybrid",
     "gpt_bigcode", "falcon_mamba", "qwen3_5_moe_text", "deepseek_v3"],
)  # fmt: skip
def test_an_architecture_is_found_under_llama_cpps_name(model_type: str) -> None:
    names = name_map(model_type, 2)
    assert names is not None
    assert names.get_name("model.embed_tokens") == "token_embd"


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "phi3", "gpt2", "bloom", "qwen35"])
def test_every_byte_of_a_file_is_counted_once(name: str, tmp_path: Path) -> None:
    made_ = made(save_gguf(tmp_path / "m.gguf", name))
    checkpoint = made_.plan.model.checkpoint
    assert checkpoint is not None
    assert sum(map(stored_bytes, made_.plan.model)) == checkpoint.nbytes


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_file_is_fitted_as_it_lies(tied: bool, tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "m.gguf", "gemma3" if tied else "llama")
    whole = made(file).plan
    packed = sum(map(stored_bytes, whole.model))
    assert 3 * packed < whole.model.nbytes
    made_, device = fitted(file, 0.8)
    assert made_.plan.offloads
    advice = made_.told("llama.cpp", device=device)
    assert "-ot" not in advice.command
    line_with(advice.notes, "packed as it is stored", "fits without offload")
    line_with(advice.notes, format_bytes(packed), format_bytes(whole.model.nbytes), "float32")
    (table,) = [stored_bytes(w) for w in whole.model if "embed_tokens" in w.full]
    assert advice.host_bytes == table, "not as large as it is decoded"
    assert "-ot" in made_.told("llama.cpp").command, "without the device nothing is fitted again"


def test_files_are_named_so_that_a_shell_finds_them(
    tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's a; model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    made_ = made(tiny("llama"))
    advice = advise(made_.plan, made_.settings, "llama.cpp", model_name=".")
    assert value_of(advice, "-m") == "it's a; model.gguf"
    convert = line_with(advice.notes, "convert_hf_to_gguf").partition("needed: ")[2].partition(" (of")[0]
    assert shlex.split(convert)[-1] == "it's a; model.gguf"


def test_on_a_cpu_the_file_is_mapped_where_memory_does_not_hold_it(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "READER_BYTES", 0)
    model = model_of(tiny("llama"))
    everything = settings_for(device="cpu")
    whole = make_plan(model, everything, CpuDevice(), context_tokens=32)
    in_memory = advise(whole, everything, "llama.cpp", model_name="m")
    assert value_of(in_memory, "-ngl") == "0"
    assert "--no-mmap" in in_memory.command
    limit = int(whole.memory.device_bytes * 0.6)
    settings_ = settings_for(device="cpu", memory_limit_bytes=limit)
    plan = make_plan(model, settings_, CpuDevice(limit), context_tokens=32)
    advice = advise(plan, settings_, "llama.cpp", model_name="m")
    assert "--no-mmap" not in advice.command
    line_with(advice.cannot, "disk", "mapped file")


def test_a_gguf_file_is_served_as_it_is_and_its_own_names_are_matched(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "m.gguf", "qwen3moe")
    made_ = made(file, {"uva": {"cpu_offload_gb": gib(1), "cpu_offload_params": ["k_proj"]}, **placing(n_cpu_moe=1)})
    advice = made_.told("llama.cpp")
    assert value_of(advice, "-m") == str(file)
    assert value_of(advise(made_.plan, made_.settings, "llama.cpp", model_name="m.gguf"), "-m") == "m.gguf"
    assert not [note for note in advice.notes if "convert" in note]
    checkpoint = made_.plan.model.checkpoint
    assert checkpoint is not None
    found = {name for name in checkpoint.tensors if any(re.search(p, name) for p in cpu_rules(advice))}
    experts = {f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    assert found == {*experts, "blk.0.attn_k.weight"}
