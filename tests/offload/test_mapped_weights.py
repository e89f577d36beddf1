"""Weights used in place in mapped files: the same bits, where they really lie, and what happens when a file changes."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import overspill
from changed_files import restored
from emulated_runs import CONTEXT, PROMPT, emulated, mapped, passes, planned, settings_for
from overspill.engine import Engine, SamplingParams
from overspill.errors import CheckpointError, PlacementDefect, UnsupportedModelError
from overspill.machine.cpu import CpuDevice
from overspill.model.weights import Role
from overspill.offload.ledger import take_ledger
from overspill.offload.placed import place
from overspill.plan import Access, Plan, Tier, disk, make_plan
from overspill.plan.mapped import mapped_pieces
from tiny_models import TINY, MakeTiny

MMAP = {"overspill": {"mmap": {"enabled": True}}}
NAMES = ("llama", "llama_tied", "llama_sharded", "llama_bf16", "qwen3", "gpt_oss", "deepseek_v2", "nemotron_h")


@pytest.fixture(autouse=True)
def _no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "READER_BYTES", 0)


def on_cpu(folder: Path, document: Any = None, **options: Any) -> Engine:
    return overspill.load(folder, device="cpu", max_model_len=CONTEXT, offload_config=document, **options)


def logits(engine: Engine) -> torch.Tensor:
    completion = engine.generate(list(PROMPT), SamplingParams(max_tokens=4), logits=True, ignore_eos=True)
    assert completion.logits is not None
    return completion.logits


def moved_by(folder: Path, shift: int) -> None:
    """Have the checkpoint's tensors begin `shift` bytes later in their file than at a multiple of 64."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(json.loads(content[8 : 8 + length])).encode()
    header += b" " * ((shift - 8 - len(header)) % 64)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_and_weights_lie_in_the_file(name: str, tiny: MakeTiny) -> None:
    expected = logits(on_cpu(tiny(name)))
    engine = on_cpu(tiny(name), MMAP)
    assert torch.equal(logits(engine), expected)
    assert torch.equal(logits(engine), expected)
    plan, ledger = engine.plan, engine.ledger
    held = {entry.name: (entry.tier, entry.access) for entry in ledger.entries}
    assert plan.mapped
    assert {n for n, how in held.items() if how == (Tier.DISK, Access.IN_PLACE)} == {w.full for w in plan.mapped}
    files = regions(tiny(name))
    for name_, tensor in engine.placed.mapped.tensors.items():
        assert any(begin <= tensor.data_ptr() < end for begin, end in files), name_
    assert ledger.allocated_on(Tier.DEVICE) < sum(w.nbytes for w in plan.model)


def regions(folder: Path) -> list[tuple[int, int]]:
    """Address ranges at which this process maps the folder's files, and may only read them."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if str(folder.resolve()) in line:
            assert rights == "r--s", line
            begin, end = span.split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


@pytest.mark.parametrize("shift", [0, 2, 8, 16, 34])
@pytest.mark.parametrize("name", ["llama", "llama_bf16"])
def test_a_float32_weight_at_an_odd_address_is_copied(name: str, shift: int, tmp_path: Path) -> None:
    TINY[name].save(tmp_path)
    expected = logits(on_cpu(tmp_path))
    moved_by(tmp_path, shift)
    engine = on_cpu(tmp_path, MMAP)
    assert torch.equal(logits(engine), expected)
    every = 2 if name == "llama_bf16" else 16
    for weight in engine.plan.model:
        (piece,) = mapped_pieces(weight) or (None,)
        if piece is not None:
            assert (weight in engine.plan.mapped) is (piece.offset % every == 0)
    if shift in (2, 34) and name == "llama":
        assert not engine.plan.mapped
        assert any("in a file at no multiple of 16 bytes" in w for w in engine.plan.warnings)


def test_buffers_are_copied_since_a_model_may_write_them(tmp_path: Path) -> None:
    TINY["nemotron_h"].save(tmp_path)
    for shift in (0, 8):
        moved_by(tmp_path, shift)
        plan = on_cpu(tmp_path, MMAP).plan
        assert plan.mapped
        assert any(weight.role is Role.BUFFER for weight in plan.model)
        assert all(weight.role is not Role.BUFFER for weight in plan.mapped)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_in_tensors_of_their_own_are_used_where_each_of_them_lies(name: str, tmp_path: Path) -> None:
    replace(TINY[name], dtype=torch.bfloat16).save(tmp_path)
    expected = logits(on_cpu(tmp_path))
    engine = on_cpu(tmp_path, MMAP)
    assert torch.equal(logits(engine), expected)
    runs = engine.placed.mapped.experts
    assert len(runs) == 6, "one for each layer"
    files = regions(tmp_path)
    down = {f"{run.block.path}.down_proj" for run in runs}
    assert down <= {weight.full for weight in engine.plan.mapped}
    stored = load_file(tmp_path / "model.safetensors")
    for run in runs:
        for expert in range(run.block.experts):
            view = run._tables["down_proj"][expert]
            assert any(begin <= view.data_ptr() < end for begin, end in files)
            key = [k for k in stored if f"layers.{run.block.layer}." in k and f"experts.{expert}." in k]
            assert any(torch.equal(stored[k], view) for k in key)


def test_with_a_limit_what_does_not_fit_is_read_each_step_and_the_rest_is_mapped(tiny: MakeTiny) -> None:
    whole = on_cpu(tiny("llama_bf16"))
    expected = logits(whole)
    limit = int(whole.plan.memory.device_bytes * 0.8)
    engine = on_cpu(tiny("llama_bf16"), MMAP, memory_limit_bytes=limit)
    plan = engine.plan
    read = [p.weight for p in plan.placements if p.access is Access.PREFETCH]
    assert read
    assert plan.mapped
    assert not set(map(id, read)) & set(map(id, plan.mapped))
    assert plan.memory.device_bytes <= limit, "mapped weights count"
    (note,) = (note for note in plan.notes if note.startswith("mmap: "))
    assert "the others are" in note
    assert "(prefetch from disk)" in note
    assert torch.equal(logits(engine), expected)
    assert torch.equal(logits(engine), expected)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose experts of a layer are one tensor, in bfloat16."""
    folder = tmp_path_factory.mktemp("fused")
    replace(TINY["mixtral_fused"], dtype=torch.bfloat16).save(folder)
    return folder


def beside_a_device(folder: Path, document: Any, **engine: Any) -> Plan:
    source = mapped(folder, "bfloat16")
    return make_plan(source, settings_for(document, **engine), emulated(), context_tokens=CONTEXT)


def test_experts_computed_on_the_cpu_beside_a_device_are_used_in_the_mapping(fused: Path) -> None:
    document = {"overspill": {"placement": {"cpu_moe": True}}}
    held = place(beside_a_device(fused, document), emulated(), debug=True)
    expected, _ = passes(held)
    both = {"overspill": {**document["overspill"], "mmap": {"enabled": True}}}
    model = place(beside_a_device(fused, both), emulated(), debug=True)
    weights = {w.full for b in model.plan.placed for w in b.weights.values()}
    there = {w.full for w in model.plan.mapped}
    assert there
    assert there == weights
    assert all(torch.equal(one, other) for one, other in zip(passes(model)[0], expected, strict=True))
    assert model.plan.memory.host_bytes < held.plan.memory.host_bytes
    assert model.plan.memory.device_bytes == held.plan.memory.device_bytes
    assert all(e.access is Access.IN_PLACE and e.calls for e in model.ledger.experts)


def test_beside_a_device_nothing_else_is_mapped_and_that_is_said(tiny: MakeTiny) -> None:
    plan = planned(tiny("llama_bf16"), {**MMAP, "uva": {"cpu_offload_gb": 1e-5}})
    assert not plan.mapped
    (warning,) = (w for w in plan.warnings if w.startswith("mmap.enabled changes nothing"))
    assert "(zero_copy from host)" in warning
    assert "(on the device)" in warning
    assert "--cpu-moe" in warning


def test_what_is_converted_while_loading_is_not_mapped(tiny: MakeTiny) -> None:
    source = mapped(tiny("llama_bf16"), "float32")
    plan = make_plan(source, settings_for(MMAP), CpuDevice(), context_tokens=CONTEXT)
    assert not plan.mapped
    assert any("(cast from bfloat16)" in warning for warning in plan.warnings)


@pytest.mark.parametrize("harm", ["cut short", "rewritten", "taken away"])
def test_a_file_that_changes_fails_the_pass_by_name_and_works_again_when_it_is_back(harm: str, tmp_path: Path) -> None:
    TINY["llama_bf16"].save(tmp_path)
    engine = on_cpu(tmp_path, MMAP)
    expected = logits(engine)
    file = tmp_path / "model.safetensors"
    restore = restored(file)
    if harm == "cut short":
        os.truncate(file, 4096)
    elif harm == "rewritten":
        file.write_bytes(file.read_bytes())
    else:
        file.unlink()
    told = {"cut short": r"changed .*\(size", "rewritten": r"changed .*\(mtime_ns\)", "taken away": "cannot be read"}
    with pytest.raises(CheckpointError, match=rf"model\.safetensors {told[harm]}"):
        logits(engine)
    restore()
    assert torch.equal(logits(engine), expected)


def test_a_file_that_shrinks_while_a_pass_reads_it_fails_that_pass_with_the_weight(tmp_path: Path) -> None:
    TINY["llama_bf16"].save(tmp_path)
    engine = on_cpu(tmp_path, MMAP)
    expected = logits(engine)
    file = tmp_path / "model.safetensors"
    restore = restored(file)
    layer = engine.placed.model.get_submodule("model.layers.2")
    hook = layer.register_forward_pre_hook(lambda module, arguments: os.truncate(file, 0))
    with pytest.raises(CheckpointError) as failed:
        logits(engine)
    hook.remove()
    told = rf"{file}: what is mapped from byte \d+ on \([a-z0-9_.]+\.weight\) could not be read any more"
    assert re.match(told, failed.value.message)
    restore()
    assert torch.equal(logits(engine), expected)


HANDLED = """
import os, signal, sys
import overspill
from overspill.engine import SamplingParams
from overspill.errors import CheckpointError

engine = overspill.load(sys.argv[1], {"overspill": {"mmap": {"enabled": True}}}, device="cpu", max_model_len=32)
signal.signal(signal.SIGBUS, lambda *told: None)
layer = engine.placed.model.get_submodule("model.layers.2")
layer.register_forward_pre_hook(lambda *told: os.truncate(sys.argv[1] + "/model.safetensors", 0))
try:
    engine.generate([1, 2, 3], SamplingParams(max_tokens=2), ignore_eos=True)
except CheckpointError as error:
    print(error.message)
"""


def test_another_handler_that_was_set_after_loading_takes_nothing_away(tmp_path: Path) -> None:
    TINY["llama_bf16"].save(tmp_path)
    command = [sys.executable, "-c", HANDLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "could not be read any more" in done.stdout


def test_what_is_lost_in_a_part_of_the_model_that_is_called_alone_fails_as_well(tmp_path: Path) -> None:
    TINY["llama_bf16"].save(tmp_path)
    placed_ = on_cpu(tmp_path, MMAP).placed
    os.truncate(tmp_path / "model.safetensors", 4096)
    with pytest.raises(CheckpointError, match=r"what is mapped from byte \d+ on"), placed_.running():
        placed_.model.get_submodule("model")(torch.tensor([PROMPT]))


def test_what_a_pass_throws_over_lost_pages_is_told_as_the_loss(tmp_path: Path) -> None:
    TINY["llama_bf16"].save(tmp_path)
    engine = on_cpu(tmp_path, MMAP)

    def throw(module: Any, arguments: Any) -> None:
        os.truncate(tmp_path / "model.safetensors", 0)
        assert not engine.placed.mapped.tensors["lm_head.weight"].any()
        raise ValueError("computed on zeros")

    engine.placed.model.get_submodule("model.layers.3").register_forward_pre_hook(throw)
    with pytest.raises(CheckpointError, match="could not be read any more") as failed:
        logits(engine)
    assert isinstance(failed.value.__context__, ValueError)


def test_a_weight_that_is_not_where_its_file_is_mapped_stops_the_start(tiny: MakeTiny) -> None:
    folder = tiny("llama_bf16")
    model = on_cpu(folder, MMAP).placed
    name = model.plan.mapped[0].full
    owner, _, attribute = name.rpartition(".")
    copy = torch.nn.Parameter(model.mapped.tensors[name].clone(), requires_grad=False)
    model.model.get_submodule(owner)._parameters[attribute] = copy
    with pytest.raises(PlacementDefect, match=rf"{name}: not where it lies in the mapped file"):
        take_ledger(
            model.model,
            model.plan,
            model.blocks,
            model.hosts,
            model.mapped.tensors,
            model.device,
            read_bytes=0,
            load_seconds=0,
        )


@pytest.mark.parametrize("prefault", [True, False, None])
def test_prefault_reads_what_is_mapped_while_loading(prefault: bool | None, tmp_path: Path) -> None:
    TINY["llama_bf16"].save(tmp_path)
    file = tmp_path / "model.safetensors"
    heard: list[int] = []
    mmap = {"enabled": True} if prefault is None else {"enabled": True, "prefault": prefault}
    engine = on_cpu(tmp_path, {"overspill": {"mmap": mmap}}, progress=heard.append)
    assert engine.plan.prefault is (prefault is not False)
    nbytes = sum(w.nbytes for w in engine.plan.mapped)
    assert (sum(heard) >= nbytes) is (prefault is not False)
    assert file.stat().st_size > nbytes


def test_mapped_experts_beyond_host_memory_are_warned_of_and_not_prefaulted(fused: Path) -> None:
    both = {"overspill": {"placement": {"cpu_moe": True}, "mmap": {"enabled": True}}}
    whole = beside_a_device(fused, both)
    nbytes = sum(w.nbytes for w in whole.mapped)
    limit = whole.memory.host_bytes + whole.memory.staging_bytes + nbytes // 2
    plan = beside_a_device(fused, both, memory_limit_bytes=limit)
    assert whole.prefault
    assert not plan.prefault
    assert any("left for the page cache" in warning for warning in plan.warnings)


def test_a_tied_weight_with_two_values_is_refused_mapped_or_not(tmp_path: Path) -> None:
    TINY["llama_tied"].save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="different values"):
        on_cpu(tmp_path, MMAP)
