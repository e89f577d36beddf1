"""The command line for vLLM: the nearest to the plan, and the truth about what it then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from advised import NAME, Made, line_with, made, model_of, uva, value_of, values_of

from emulated_runs import settings_for
from gguf_files import save_gguf
from overspill.advice import Advice
from overspill.advice.vllm_tensors import VllmTensor, taken_by_uva, vllm_tensors
from overspill.config import WeightName, format_bytes
from overspill.errors import ConfigError
from overspill.machine.cpu import CpuDevice
from overspill.machine.named import CONTEXT_BYTES, NamedDevice
from overspill.machine.specs import gpu_named, link_named
from overspill.model.stacks import Stack
from overspill.plan import disk, make_plan
from tiny_models import MakeTiny

PIN = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"


def moved_there(made_: Made) -> tuple[VllmTensor, ...]:
    """What vLLM moves by the budget and the selectors of the command."""
    advice = made_.told("vllm")
    budget = int(float(value_of(advice, "--cpu-offload-gb")) * 1024**3)
    return taken_by_uva(vllm_tensors(made_.plan.model), budget, values_of(advice, "--cpu-offload-params"))


def test_context_sequences_and_dtype_are_carried_over(tiny: MakeTiny) -> None:
    advice = made(tiny("llama"), uva(9000), max_num_seqs=3, seed=7, revision="v2", trust_remote_code=True).told("vllm")
    assert advice.command[:3] == ("vllm", "serve", NAME)
    assert value_of(advice, "--max-model-len") == "32"
    assert value_of(advice, "--max-num-seqs") == "3"
    assert value_of(advice, "--dtype") == "float32"
    assert (value_of(advice, "--seed"), value_of(advice, "--revision")) == ("7", "v2")
    assert "--trust-remote-code" in advice.command
    assert value_of(made(tiny("llama_bf16")).told("vllm"), "--dtype") == "bfloat16"


def gpu(name: str) -> NamedDevice:
    return NamedDevice(gpu_named(name), link_named("pcie4x16"), 64 << 30)


def test_the_share_of_the_gpu_is_what_the_plan_has_of_it(tiny: MakeTiny) -> None:
    """vLLM takes 0.92 unasked, and refuses to start where the share is more than is free."""
    device, settings = gpu("L40S"), settings_for(device="cuda")
    made_ = Made(make_plan(model_of(tiny("llama")), settings, device, context_tokens=32), settings)
    share = float(value_of(made_.told("vllm", device=device), "--gpu-memory-utilization"))
    total = device.memory_bytes + CONTEXT_BYTES
    assert share * total <= device.memory_bytes < (share + 1e-4) * total
    unknown = made_.told("vllm")
    assert "--gpu-memory-utilization" not in unknown.command
    line_with(unknown.notes, "--gpu-memory-utilization", str(device.memory_bytes))
    assert "--gpu-memory-utilization" not in made_.told("vllm", device=gpu("T4")).command, "more than all it has"


def test_where_vllm_leaves_no_room_for_a_kv_cache_it_does_not_start(tiny: MakeTiny) -> None:
    made_ = made(tiny("llama"), uva(1 << 30))
    kept = 2 * 17920 + 140  # embeddings, head and last norm, which this plan moves as well
    memory = made_.plan.memory
    enough = kept + made_.plan.buffers_bytes + (memory.working_bytes or 0) + (memory.kv_cache_bytes or 0)

    def cannot(available: int) -> list[str]:
        plan = replace(made_.plan, memory=replace(memory, available_device_bytes=available))
        return [line for line in replace(made_, plan=plan).told("vllm").cannot if "KV cache" in line]

    assert not cannot(enough)
    (told,) = cannot(enough - 1)
    assert "have a KV cache of 32 tokens" in told
    assert f"weights take {format_bytes(kept)} there" in told


def test_a_plan_without_offload_has_no_offload_flags(tiny: MakeTiny) -> None:
    advice = made(tiny("llama")).told("vllm")
    assert advice.command == ("vllm", "serve", NAME, *advice.command[3:])
    assert not [word for word in advice.command if "offload" in word]
    assert (advice.host_bytes, advice.cannot) == (0, ())
    assert "nothing is offloaded" in advice.notes


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2", "nemotron_h", "gemma3"])
@pytest.mark.parametrize("budget", [1, 20_000, 110_000])
def test_a_budget_in_declaration_order_stays_what_it_is(name: str, budget: int, tiny: MakeTiny) -> None:
    made_ = made(tiny(name), uva(budget, order="declaration"))
    taken = moved_there(made_)
    held = {weight.full for tensor in taken for weight in tensor.weights}
    tensors = vllm_tensors(made_.plan.model)
    touched = {(t.layer, t.name) for t in tensors if any(w.full in made_.moved for w in t.weights)}
    assert sum(t.nbytes for t in taken) >= made_.plan.offloaded_bytes, "the device would not hold the rest"
    if {(t.layer, t.name) for t in taken} == touched and held == made_.moved:
        assert not made_.told("vllm").cannot
    else:
        assert any("alone" in line or "fused" in line for line in made_.told("vllm").cannot)


def test_experts_alone_become_the_selector_experts_and_the_cost_of_going_without_it_is_told(tiny: MakeTiny) -> None:
    made_ = made(tiny("qwen3_moe"), uva(60_000, ["experts"]))
    advice = made_.told("vllm")
    assert values_of(advice, "--cpu-offload-params") == ["experts"]
    taken = moved_there(made_)
    assert {t.name.rpartition(".")[2] for t in taken} == {"w13_weight", "w2_weight"}
    there = sum(t.nbytes for t in taken) * 2 / 6  # a token reads 2 of 6 experts
    without = taken_by_uva(vllm_tensors(made_.plan.model), made_.plan.offloaded_bytes)
    cost = sum(t.nbytes * (2 / 6 if t.routed else 1) for t in without)
    told = line_with(advice.notes, "without the selector")
    assert format_bytes(round(cost)) in told
    assert f"{cost / there:.1f} x" in told
    assert f"brings {format_bytes(round(there))} across the link there" in line_with(advice.notes, "a step over")


def test_a_sparse_model_in_declaration_order_is_told_what_experts_alone_would_cost(tiny: MakeTiny) -> None:
    made_ = made(tiny("qwen3_moe"), uva(100_000, order="declaration"))
    advice = made_.told("vllm")
    assert not values_of(advice, "--cpu-offload-params")
    taken = moved_there(made_)
    size = sum(t.nbytes for t in taken)
    alone = taken_by_uva(vllm_tensors(made_.plan.model), size, ("experts",))
    told = line_with(advice.notes, "declaration order", "--cpu-offload-params experts")
    assert format_bytes(round(sum(t.nbytes for t in alone) * 2 / 6)) in told
    assert format_bytes(round(sum(t.nbytes * (2 / 6 if t.routed else 1) for t in taken))) in told
    assert not any("declaration order moves" in n for n in made(tiny("llama"), uva(60_000)).told("vllm").notes)
    more = made(tiny("qwen3_moe"), uva(200_000, order="declaration"))
    assert sum(t.nbytes for t in moved_there(more)) > 6 * 27720
    assert not any("declaration order moves" in n for n in more.told("vllm").notes), "experts alone are too few bytes"


def test_a_step_of_several_tokens_counts_experts_as_expected(tiny: MakeTiny) -> None:
    made_ = made(tiny("qwen3_moe"), uva(60_000, ["experts"]), max_num_seqs=4)
    there = sum(t.nbytes for t in moved_there(made_)) * (1 - (1 - 2 / 6) ** 4)
    here = made_.plan.step.link_bytes
    told = line_with(made_.told("vllm").notes, "a step over 4 tokens")
    assert f"{format_bytes(round(there))} across the link there, {format_bytes(round(here))} in this plan" in told
    assert told.endswith("the same")


def test_what_the_device_reads_instead_of_the_cpu_is_the_difference(tiny: MakeTiny) -> None:
    made_ = made(tiny("qwen3_moe"), {"overspill": {"placement": {"cpu_moe": True}}})
    more = 6 * 27720 * 2 / 6 - 6 * 35 * 4  # chosen experts, less the results that the CPU sends
    assert line_with(made_.told("vllm").notes, "a step over 1 token").endswith(f"{format_bytes(round(more))} more")


def test_our_selectors_become_vllms_names(tiny: MakeTiny) -> None:
    """`q_proj` is part of `qkv_proj` there, and goes with k and v."""
    advice = made(tiny("llama"), uva(1 << 20, ["q_proj", "mlp.up_proj"])).told("vllm")
    assert values_of(advice, "--cpu-offload-params") == ["gate_up_proj", "qkv_proj"]
    more = 4 * (2 * 1120 + 6300)  # four layers of what is fused are as many bytes as six of what is not
    told = line_with(advice.cannot, "fused", "self_attn.qkv_proj.weight")
    assert f"{format_bytes(more)} more than in this plan" in told


def test_what_no_budget_reaches_is_named(tiny: MakeTiny) -> None:
    advice = made(tiny("llama"), uva(1 << 30)).told("vllm")
    told = line_with(advice.cannot, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    assert format_bytes(2 * 17920 + 140) in told
    assert "run out of memory" in line_with(advice.notes, "all that the selectors reach")
    assert "model.embed_tokens.weight" in line_with(made(tiny("llama_tied"), uva(1 << 30)).told("vllm").cannot, "move ")


def test_towers_are_not_counted_on(tiny: MakeTiny) -> None:
    made_ = made(tiny("llama"), uva(60_000, ["lm_head", "mlp"]))
    plan = made_.plan
    tower = WeightName("model.visual.blocks.0.proj.weight", "proj.weight", "model.visual.blocks", 0, tower=True)
    placements = tuple(
        replace(p, weight=replace(p.weight, name=tower)) if p.weight.full == "lm_head.weight" else p
        for p in plan.placements
    )
    stacks = (*plan.model.stacks, Stack("model.visual.blocks", 1, tower=True))
    seen = replace(plan, placements=placements, model=replace(plan.model, stacks=stacks))
    advice = replace(made_, plan=seen).told("vllm")
    line_with(advice.cannot, "model.visual.blocks.0.proj.weight", "a tower is reached only where")
    line_with(advice.notes, "more stacks of layers (model.visual.blocks)", "prefetch refuses it")
    assert not [note for note in made_.told("vllm").notes if "more stacks" in note]


def test_a_packed_checkpoint_is_no_measure_of_what_vllm_holds(tmp_path: Path, tiny: MakeTiny) -> None:
    file = save_gguf(tmp_path / "m.gguf", "llama")
    advice = made(file, uva(1000)).told("vllm")
    line_with(advice.notes, "packed", "float32")
    line_with(advice.cannot, "GGUF", "vllm-gguf-plugin", "--tokenizer")
    tight = made(file, uva(1 << 30)).plan
    tight = replace(tight, memory=replace(tight.memory, available_device_bytes=1))
    told = Made(tight, settings_for()).told("vllm").cannot
    assert not [line for line in told if "KV cache" in line], "how much is left is not known"
    assert advice.command[2] == str(file)
    assert not [note for note in made(tiny("llama"), uva(1000)).told("vllm").notes if "packed" in note]


def test_layers_cannot_be_chosen(tiny: MakeTiny) -> None:
    made_ = made(tiny("llama"), uva(1 << 30, ["layers.4-5"]))
    advice = made_.told("vllm")
    assert not values_of(advice, "--cpu-offload-params"), "every name of a layer is wanted"
    assert {t.layer for t in moved_there(made_)} == {0, 1}
    assert "12 of the 12 tensors" in line_with(advice.cannot, "layer 0 first")


# -- other ways --------------------------------------------------------------------------------------------------------


def test_prefetch_is_carried_over_exactly(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2}}
    made_ = made(tiny("gemma3"), document)
    advice = made_.told("vllm")
    flags = "--offload-group-size 3 --offload-num-in-group 2 --offload-prefetch-step 2"
    assert flags in advice.shell
    assert "--offload-params" not in advice.command
    assert not advice.cannot
    taken = [t for t in vllm_tensors(made_.plan.model) if t.layer in (1, 2, 4, 5)]
    held, pool = sum(t.nbytes for t in taken), 2 * sum(t.nbytes for t in taken if t.layer == 1)
    assert f"frees {format_bytes(held - pool)} of" in line_with(advice.notes, "vLLM moves")
    assert format_bytes(pool) in line_with(advice.notes, "static buffers")
    assert f"brings {format_bytes(held)} across" in line_with(advice.notes, "a step over")
    assert advice.host_bytes == sum(1 << (t.nbytes - 1).bit_length() for t in taken)


def test_prefetch_of_experts_brings_all_of_them_each_step(tiny: MakeTiny) -> None:
    document = {"prefetch": {"offload_group_size": 2, "offload_params": ["mlp.experts"]}}
    made_ = made(tiny("qwen3_moe"), document)
    advice = made_.told("vllm")
    assert values_of(advice, "--offload-params") == ["experts"]
    assert f"brings {format_bytes(3 * 27720)} across" in line_with(advice.notes, "a step over")
    whole = {"prefetch": {"offload_group_size": 2, "offload_params": ["self_attn", "mlp", "weight"]}}
    assert not values_of(made(tiny("llama"), whole).told("vllm"), "--offload-params")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"overspill": {"placement": {"cpu_moe": True}}}, ("compute experts on the CPU", "6 layers")),
        ({"overspill": {"expert_stream": {"slots": 4}}}, ("4 of 36 experts in slots",)),
        (
            {"prefetch": {"offload_group_size": 2}, "overspill": {"placement": {"n_cpu_moe": 6}}},
            ("combine its backends", "prefetch"),
        ),
        ({"overspill": {"expert_stream": {"slots": 4, "tier": "disk"}}}, ("leave weights on disk", "a disk tier")),
    ],
)
def test_what_vllm_has_no_way_for_is_said_and_experts_by_uva_stand_for_it(
    document: dict[str, Any], words: tuple[str, ...], tiny: MakeTiny
) -> None:
    made_ = made(tiny("qwen3_moe"), document)
    advice = made_.told("vllm")
    line_with(advice.cannot, *words)
    selectors = values_of(advice, "--cpu-offload-params")
    assert selectors == (["experts"] if "prefetch" not in document else ["experts", "qkv_proj"])
    assert sum(t.nbytes for t in moved_there(made_)) >= made_.plan.saved_bytes > 0
    assert not [word for word in advice.command if "group" in word]


def test_mapped_experts_lie_in_memory_there(fused: Path) -> None:
    document = {"overspill": {"placement": {"cpu_moe": True}, "mmap": {"enabled": True}}}
    made_ = made(fused, document, dtype="bfloat16")
    assert made_.plan.mapped
    line_with(made_.told("vllm").cannot, "leave weights on disk", "mapped files")


def test_slots_that_save_nothing_need_no_budget(tiny: MakeTiny) -> None:
    made_ = made(tiny("nemotron_h"), {"overspill": {"expert_stream": {"slots": 12}}})
    assert made_.plan.saved_bytes <= 0
    advice = made_.told("vllm")
    assert "--cpu-offload-gb" not in advice.command
    line_with(advice.notes, "frees no device memory")


def test_without_uva_the_copies_need_eager_mode(tiny: MakeTiny) -> None:
    environ = {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}
    made_ = made(tiny("qwen3_moe"), uva(60_000, order="declaration"), environ)
    advice = made_.told("vllm")
    assert dict(advice.environment) == environ
    assert advice.command[-1] == "--enforce-eager"
    held = sum(t.nbytes for t in moved_there(made_))
    assert f"brings {format_bytes(held)} across" in line_with(advice.notes, "a step over")


@pytest.mark.parametrize(
    "environ", [{"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}, {PIN: "1"}], ids=["copied", "pageable"]
)
def test_prefetch_needs_eager_mode_where_its_copies_are_pageable(environ: dict[str, str], tiny: MakeTiny) -> None:
    advice = made(tiny("gemma3"), {"prefetch": {"offload_group_size": 2}}, environ).told("vllm")
    assert ("--enforce-eager" in advice.command) == (PIN in environ)
    assert "--enforce-eager" not in made(tiny("llama"), uva(60_000), {PIN: "1"}).told("vllm").command, "a view is made"
    assert "--enforce-eager" not in made(tiny("llama"), None, {PIN: "1"}).told("vllm").command, "nothing is copied"


# -- read back ---------------------------------------------------------------------------------------------------------


def read_back(advice: Advice) -> dict[str, Any]:
    """The document of what vLLM's flags say."""
    document: dict[str, Any] = {}
    if "--cpu-offload-gb" in advice.command:
        document["uva"] = {
            "cpu_offload_gb": float(value_of(advice, "--cpu-offload-gb")),
            "cpu_offload_params": values_of(advice, "--cpu-offload-params"),
        }
    if "--offload-group-size" in advice.command:
        numbers = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
        fields: dict[str, Any] = {name: int(value_of(advice, f"--{name.replace('_', '-')}")) for name in numbers}
        document["prefetch"] = {**fields, "offload_params": values_of(advice, "--offload-params")}
    return document


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2", "nemotron_h", "gemma3"])
@pytest.mark.parametrize("params", [None, ["experts"], ["mlp"], ["q_proj", "k_proj", "v_proj"]])
@pytest.mark.parametrize("order", ["declaration", "traffic"])
def test_flags_that_do_the_same_there_are_the_same_plan_here(
    name: str, params: list[str] | None, order: str, tiny: MakeTiny
) -> None:
    documents = [uva(nbytes, params, order=order) for nbytes in (5000, 30_000, 110_000, 1 << 20)]
    documents += [
        {"prefetch": {"offload_group_size": size, "offload_prefetch_step": step, "offload_params": params or []}}
        for size, step in ((2, 1), (2, 2))
    ]
    for document in documents:
        try:
            made_ = made(tiny(name), document)
        except ConfigError:  # a selector of nothing, or a step that saves nothing
            continue
        advice = made_.told("vllm")
        if not advice.cannot:
            again = made(tiny(name), {**read_back(advice), "overspill": {"order": made_.plan.order}})
            assert again.plan.placements == made_.plan.placements, advice.shell


@pytest.fixture
def _no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "READER_BYTES", 0)


@pytest.mark.usefixtures("_no_reader")
def test_on_a_cpu_nothing_is_offloaded_and_all_of_it_is_in_memory(tiny: MakeTiny) -> None:
    model = model_of(tiny("llama"))
    whole = make_plan(model, settings_for(device="cpu"), CpuDevice(), context_tokens=32)
    limit = int(whole.memory.device_bytes * 0.6)
    settings = settings_for(device="cpu", memory_limit_bytes=limit)
    plan = make_plan(model, settings, CpuDevice(limit), context_tokens=32)
    advice = Made(plan, settings).told("vllm")
    assert advice.host_bytes == model.nbytes
    assert not [word for word in advice.command if "offload" in word]
    line_with(advice.cannot, "on disk", "layers from disk")
    line_with(advice.cannot, "hold the model")
