"""The command line for overspill itself: parsed by our own command line, it gives the same plan, weight by weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from advised import NAME, Made, line_with, made, model_of

from emulated_runs import CONTEXT, emulated, gib, prefetch, settings_for
from overspill.advice import Advice, advise
from overspill.advice.own import document_of
from overspill.cli.app import app
from overspill.cli.arguments import normalise
from overspill.cli.options import SHARED, Shared
from overspill.config import Settings, parse_bytes
from overspill.machine.cpu import CpuDevice
from overspill.plan import Plan, disk, make_plan
from tiny_models import MakeTiny

EXTRA = ("max_num_batched_tokens", "kv_cache_memory_bytes")


def settings_from(advice: Advice, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of `overspill serve …`, as its own command line reads it."""
    for variable, value in advice.environment.items():
        monkeypatch.setenv(variable, value)
    program, name, *arguments = normalise(advice.command)
    assert (program, name) == ("overspill", "serve")
    root: Any = typer.main.get_command(app)
    parameters = root.commands["serve"].make_context("serve", arguments).params
    assert parameters["model"] == NAME
    extra = {name: parameters[name] for name in EXTRA if parameters[name] is not None}
    if "kv_cache_memory_bytes" in extra:
        extra["kv_cache_memory_bytes"] = parse_bytes(extra["kv_cache_memory_bytes"])
    given = {name: None if parameters[name] == () else parameters[name] for name in SHARED}  # as typer hands it over
    return Shared(given).settings(**extra)


def placed(plan: Plan) -> list[tuple[str, str, str]]:
    return [(p.weight.full, p.tier.value, p.access.value) for p in plan.placements]


def assert_again(made_: Made, monkeypatch: pytest.MonkeyPatch) -> Advice:
    """The command gives this very plan."""
    advice = made_.told("overspill")
    settings = settings_from(advice, monkeypatch)
    again = make_plan(made_.plan.model, settings, emulated(), context_tokens=CONTEXT)
    assert placed(again) == placed(made_.plan)
    assert again.slots == made_.plan.slots
    assert again.ring == made_.plan.ring
    assert again.memory.device_bytes == made_.plan.memory.device_bytes
    assert (settings.engine.max_model_len, settings.engine.max_num_seqs) == (CONTEXT, made_.plan.sequences)
    return advice


def uva(nbytes: int, params: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {"uva": {"cpu_offload_gb": gib(nbytes), "cpu_offload_params": params or []}, **more}


def extension(**fields: Any) -> dict[str, Any]:
    return {"overspill": fields}


RULES = [
    {"pattern": r"blk\.(1|3)\..*exps", "device": "CPU"},
    {"pattern": r"-?blk\.4\.ffn_.{1,9}_exps", "device": "cpu"},
]

FLAGS_ONLY = [
    ("llama", None),
    ("llama", uva(60_000)),
    ("llama", uva(60_000, ["mlp.down_proj", "layers.1-3", "lm_head"])),
    ("gemma3", prefetch(3, 2, 2)),
    ("llama", prefetch(2, params=["mlp", "o_proj"])),
    ("qwen3_moe", extension(placement={"cpu_moe": True})),
    ("gpt_oss", extension(placement={"n_cpu_moe": 2})),
    ("qwen3_moe", extension(placement={"overrides": RULES})),
    ("qwen3_moe", extension(placement={"overrides": RULES, "n_cpu_moe": 1})),
    ("qwen3_moe", extension(expert_stream={"cache_bytes": 60_000, "policy": "auto"})),
    ("deepseek_v2", {**prefetch(2), **extension(placement={"n_cpu_moe": 3})}),
    ("nemotron_h", {**uva(30_000), **extension(placement={"cpu_moe": True})}),
    ("qwen3_moe", extension(placement={"cpu_moe": False, "n_cpu_moe": 0, "fit": True})),
    ("qwen3_moe", extension(placement={"fit": False})),
]

DOCUMENTS = [
    ("llama", {**uva(60_000), **extension(order="declaration")}),
    ("qwen3_moe", {**uva(60_000, ["experts"]), **extension(order="declaration")}),
    ("qwen3_moe", extension(expert_stream={"slots": 5})),
    ("qwen3_moe", extension(expert_stream={"slots": 5, "tier": "disk"})),
    ("gpt_oss", extension(expert_stream={"enabled": True})),
    ("nemotron_h", extension(expert_stream={"slots": 3, "policy": "cpu"}, placement={"n_cpu_moe": 2})),
    ("qwen3_moe", {**uva(20_000), **extension(expert_stream={"slots": 4})}),
    ("llama", extension(device_fit={"weight_budget_bytes": 1 << 30})),
    ("qwen3_moe", extension(placement={"overrides": [{"pattern": "exps|=cpu,", "device": "cpu"}]})),
]


@pytest.mark.parametrize(("name", "document"), FLAGS_ONLY)
def test_flags_where_flags_do(
    name: str, document: dict[str, Any] | None, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = assert_again(made(tiny(name), document), monkeypatch)
    assert "--offload-config" not in advice.command


@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
def test_a_document_where_they_do_not(
    name: str, document: dict[str, Any], tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = assert_again(made(tiny(name), document), monkeypatch)
    assert "--offload-config" in advice.command
    assert not [word for word in advice.command if word.startswith(("--cpu-", "--n-cpu", "--expert", "--override"))]


def test_mapped_experts(fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = extension(placement={"cpu_moe": True}, mmap={"enabled": True, "prefault": False})
    made_ = made(fused, document, dtype="bfloat16")
    assert made_.plan.mapped
    assert_again(made_, monkeypatch)


def test_slots_that_the_room_decided_are_stated(tiny: MakeTiny) -> None:
    made_ = made(tiny("gpt_oss"), extension(expert_stream={"enabled": True}))
    assert made_.plan.slots is not None
    assert document_of(made_.plan) == extension(expert_stream={"slots": made_.plan.slots.count})


def test_what_fit_chose_is_stated(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tiny("qwen3_moe"))
    whole = make_plan(model, settings_for(None), emulated(), context_tokens=CONTEXT)
    device = emulated(int(whole.memory.device_bytes * 0.8))
    plan = make_plan(model, settings_for(None), device, context_tokens=CONTEXT)
    assert plan.offloads
    settings = settings_from(Made(plan, settings_for(None)).told("overspill"), monkeypatch)
    assert settings.offload.offloads
    roomy = make_plan(model, settings, emulated(), context_tokens=CONTEXT)
    assert placed(roomy) == placed(plan), "whatever the room"


@pytest.mark.parametrize(
    "environ",
    [{"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}, {"VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"}],
    ids=["no UVA", "not pinned"],
)
def test_vllms_switches_stand_before_the_command(
    environ: dict[str, str], tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_ = made(tiny("llama"), uva(60_000), environ)
    assert made_.plan.ring is not None
    advice = assert_again(made_, monkeypatch)
    assert dict(advice.environment) == environ


def test_the_engines_settings_are_carried_over(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: dict[str, Any] = {
        "device_memory_bytes": (64 << 20) + 1,
        "memory_limit_bytes": (1 << 30) + 3,
        "link_bandwidth": 1.25e10,
        "link_latency_s": 1e-5,
        "dtype": "bfloat16",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 48,
        "kv_cache_memory_bytes": 1 << 20,
        "revision": "main",
        "seed": 11,
        "trust_remote_code": True,
    }
    made_ = made(tiny("llama"), uva(60_000), **engine)
    advice = made_.told("overspill")
    settings = settings_from(advice, monkeypatch)
    stated = settings.engine.model_dump()
    assert {name: stated[name] for name in engine} == engine
    assert stated["device"] == "emulated"
    assert not [note for note in advice.notes if "of this plan" not in note]


def test_host_memory_is_the_plans(tiny: MakeTiny) -> None:
    made_ = made(tiny("qwen3_moe"), extension(placement={"cpu_moe": True}))
    assert made_.told("overspill").host_bytes == made_.plan.memory.host_bytes + made_.plan.memory.staging_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_memory_limit_leaves_the_same_on_disk(
    name: str, mapped: bool, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "READER_BYTES", 0)
    model = model_of(tiny(name))
    whole = make_plan(model, settings_for(device="cpu"), CpuDevice(), context_tokens=CONTEXT)
    limit = int(whole.memory.device_bytes * 0.75)
    document = extension(mmap={"enabled": True}) if mapped else None
    settings = settings_for(document, device="cpu", memory_limit_bytes=limit)
    plan = make_plan(model, settings, CpuDevice(limit), context_tokens=CONTEXT)
    assert plan.offloads
    advice = advise(plan, settings, "overspill", model_name=NAME)
    again = settings_from(advice, monkeypatch)
    assert again.engine.memory_limit_bytes == limit
    found = make_plan(model, again, CpuDevice(limit), context_tokens=CONTEXT)
    assert placed(found) == placed(plan)
    assert found.slots == plan.slots
    line_with(advice.notes, "leaves on disk")


def test_the_document_is_one_word_of_json(tiny: MakeTiny) -> None:
    advice = made(tiny("llama"), {**uva(60_000), **extension(order="declaration")}).told("overspill")
    text = advice.command[advice.command.index("--offload-config") + 1]
    assert json.loads(text) == {"uva": {"cpu_offload_gb": gib(60_000)}, **extension(order="declaration")}


def test_the_model_is_named_as_the_user_does(tiny: MakeTiny) -> None:
    assert made(tiny("llama")).told("overspill").command[:3] == ("overspill", "serve", NAME)
