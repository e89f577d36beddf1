"""Weights read from the checkpoint each step: the same bits, on the CPU and through an emulated link."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from changed_files import restored
from emulated_runs import CONTEXT, PROMPT, emulated, forward, mapped, passes, placed, planned, settings_for
from overspill.engine import Engine, SamplingParams
from overspill.errors import CheckpointError
from overspill.machine.reads import FileReader
from overspill.offload.placed import PlacedModel, place
from overspill.plan import Access, Tier, disk, make_plan
from sized_models import llama_config, save_random
from tiny_models import TINY, MakeTiny

NAMES = (
    "llama",
    "llama_tied",
    "llama_sharded",
    "llama_bf16",
    "qwen3",
    "gemma3",
    "gpt_oss",
    "deepseek_v2",
    "nemotron_h",
)
PREFETCH = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}


@pytest.fixture(autouse=True)
def _no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "READER_BYTES", 0)


def on_cpu(folder: Path, limit: int | None = None) -> Engine:
    return overspill.load(folder, device="cpu", max_model_len=CONTEXT, memory_limit_bytes=limit, debug=True)


def logits(engine: Engine) -> torch.Tensor:
    completion = engine.generate(list(PROMPT), SamplingParams(max_tokens=4), logits=True, ignore_eos=True)
    assert completion.logits is not None
    return completion.logits


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_reads_each_step_what_memory_does_not_hold(name: str, share: float, tiny: MakeTiny) -> None:
    whole = on_cpu(tiny(name))
    expected = logits(whole)
    engine = on_cpu(tiny(name), int(whole.plan.memory.device_bytes * share))
    plan, ledger = engine.plan, engine.ledger
    assert plan.on(Tier.DISK)
    assert ledger.bytes_on(Tier.DISK) == plan.offloaded_bytes
    held = {entry.name: (entry.tier, entry.access) for entry in ledger.entries}
    assert all(held[p.weight.full] == (p.tier, p.access) for p in plan.placements)
    assert ledger.allocated_on(Tier.DEVICE) <= plan.memory.available_device_bytes
    assert torch.equal(logits(engine), expected)
    assert torch.equal(logits(engine), expected), "buffers by then hold other layers"
    prefetcher = engine.placed.prefetcher
    if prefetcher is not None:
        assert prefetcher.out_of_turn == 0
        reads = prefetcher.source.reads
        assert reads is not None
        passes_done = 2 * 4
        assert reads.bytes_read >= passes_done * plan.step.disk_bytes - plan.memory.buffer_pool_bytes


@pytest.mark.parametrize("shift", [8, 34])
def test_large_weights_are_read_where_they_stay(shift: int, tmp_path: Path) -> None:
    """bfloat16 in a file where nothing lies at a multiple of 64: no byte but the edges is copied after it was read."""
    nbytes = save_random(tmp_path / "llama", llama_config(4, hidden=512, intermediate=1024), shift=shift)
    whole = on_cpu(tmp_path / "llama")
    expected = logits(whole)
    engine = on_cpu(tmp_path / "llama", whole.plan.memory.device_bytes - nbytes // 3)
    assert engine.plan.step.disk_bytes > nbytes // 4
    assert torch.equal(logits(engine), expected)
    assert engine.placed.prefetcher is not None
    reads = engine.placed.prefetcher.source.reads
    assert reads is not None
    assert reads.bytes_read > 4 * engine.plan.step.disk_bytes
    assert reads.staged_bytes < reads.bytes_read // 20
    assert any(weight.data_ptr() % 64 for weight in engine.placed.model.parameters())


def host_limited(folder: Path) -> PlacedModel:
    """Prefetch with host memory for half of what it copies."""
    whole = planned(folder, PREFETCH)
    assert whole.ring is not None
    limit = whole.memory.host_bytes // 2 + whole.ring.buffer_bytes
    device = emulated()
    settings = settings_for(PREFETCH, memory_limit_bytes=limit)
    return place(make_plan(mapped(folder), settings, device, context_tokens=CONTEXT), device, debug=True)


@pytest.mark.parametrize("name", ["llama", "llama_sharded", "qwen3", "gpt_oss"])
def test_layers_come_from_host_memory_and_from_disk_through_one_ring(name: str, tiny: MakeTiny) -> None:
    resident, _ = passes(placed(tiny(name)))
    model = host_limited(tiny(name))
    tiers = {p.tier for p in model.plan.placements if p.access is Access.PREFETCH}
    assert tiers == {Tier.HOST, Tier.DISK}
    ring, prefetcher = model.plan.ring, model.prefetcher
    assert ring is not None
    assert prefetcher is not None
    prefetcher.settle()  # what comes from disk crosses the link when it was read, whatever pass that is in
    before = model.device.traffic.copy()
    found, _ = passes(model)
    prefetcher.settle()
    assert all(torch.equal(one, other) for one, other in zip(found, resident, strict=True))
    assert (model.device.traffic - before).bytes == len(found) * ring.pass_bytes
    assert model.ledger.bytes_on(Tier.DISK) == sum(p.weight.nbytes for p in model.plan.on(Tier.DISK)) > 0


@pytest.mark.parametrize("harm", ["cut short", "rewritten", "taken away"])
def test_a_file_that_changes_fails_the_pass_by_name_and_is_read_again_when_it_is_back(
    harm: str, tmp_path: Path
) -> None:
    TINY["llama"].save(tmp_path)
    whole = on_cpu(tmp_path)
    expected = logits(whole)
    engine = on_cpu(tmp_path, int(whole.plan.memory.device_bytes * 0.7))
    file = tmp_path / "model.safetensors"
    restore = restored(file)
    if harm == "cut short":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "rewritten":
        file.write_bytes(file.read_bytes())
    else:
        file.unlink()
    told = {"cut short": r"changed .*\(size", "rewritten": r"changed .*\(mtime_ns\)", "taken away": "cannot be read"}
    with pytest.raises(CheckpointError, match=rf"model\.safetensors {told[harm]}") as failed:
        logits(engine)
    assert "start again" in (failed.value.hint or "")
    assert re.search(r"; it was read for model\.layers\.\d\.\S+weight", failed.value.message)
    restore()
    assert torch.equal(logits(engine), expected)


def test_a_disk_that_fails_fails_the_pass_and_nothing_hangs(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = on_cpu(tiny("llama"))
    expected = logits(whole)
    engine = on_cpu(tiny("llama"), int(whole.plan.memory.device_bytes * 0.7))
    read = FileReader.read
    broken = [True]

    def failing(self: FileReader, pieces: Any, progress: Any = None) -> None:
        if broken[0]:
            raise CheckpointError("model.safetensors: reading 4096 bytes at 0 failed: Input/output error")
        read(self, pieces, progress)

    monkeypatch.setattr(FileReader, "read", failing)
    for _ in range(3):
        with pytest.raises(CheckpointError, match="Input/output error"):
            logits(engine)
    broken[0] = False
    assert torch.equal(logits(engine), expected)


def test_a_prompt_pass_out_of_turn_costs_a_read_and_no_answer(tiny: MakeTiny) -> None:
    model = host_limited(tiny("llama"))
    expected, _, _ = forward(placed(tiny("llama")), PROMPT)
    with model.running(), pytest.raises(AttributeError):
        model.model.model.layers[3](None)  # breaks off in the middle of the ring
    found, _, _ = forward(model, PROMPT)
    assert torch.equal(found, expected)
