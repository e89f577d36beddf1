"""Experts from their files: which runs of bytes, and what arrives."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import overspill
from emulated_runs import emulated, mapped
from overspill.checkpoint import Extent
from overspill.engine import SamplingParams
from overspill.errors import CheckpointError
from overspill.machine.emulated import _EmulatedTransfer
from overspill.model.experts import expert_blocks
from overspill.model.sources import Extents, runs_of
from overspill.offload.expert_sources import DiskSource
from overspill.offload.fetches import DiskReads
from overspill.offload.loader import fill
from overspill.plan.slots import Slots
from overspill.plan.staging import READ_BUFFERS
from overspill.plan.tiers import Tier
from tiny_models import TINY, MakeTiny


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9), st.integers(0, 3)), min_size=1), st.integers(1, 6))
def test_an_experts_runs_are_its_bytes_in_order(pieces: list[tuple[int, int, int]], experts: int) -> None:
    """A parameter of any extents, gaps between them or none: the runs of each expert are a part of it, merged."""
    extents, at, offsets = [], 0, [0, 0]
    for file, length, gap in pieces:
        offsets[file] += gap
        extents.append(Extent(Path(str(file)), offsets[file], length * experts, at))
        offsets[file] += length * experts
        at += length * experts
    byte_of = [(e.file, e.offset + i) for e in extents for i in range(e.length)]
    nbytes = at // experts
    for expert in range(experts):
        runs = runs_of(Extents(tuple(extents), torch.uint8), expert * nbytes, (expert + 1) * nbytes)
        read = {run.at + i: (run.file, run.offset + i) for run in runs for i in range(run.length)}
        assert [read[i] for i in range(nbytes)] == byte_of[expert * nbytes : (expert + 1) * nbytes]
        assert sum(run.length for run in runs) == nbytes
        for first, second in pairwise(runs):
            assert (first.file, first.offset + first.length) != (second.file, second.offset), "one read per run"


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral_fused"])
def test_many_experts_at_once_arrive_as_they_lie_in_the_files(
    name: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are buffers to read into, so that these are used again; transfers are in no hurry."""
    run = _EmulatedTransfer.run

    def late(self: _EmulatedTransfer, timeline: Any) -> None:
        time.sleep(0.003)
        run(self, timeline)

    monkeypatch.setattr(_EmulatedTransfer, "run", late)
    device = emulated()
    model = mapped(tiny(name))
    block = expert_blocks(model)[2]
    whole = {weight.full: torch.empty(weight.shape, dtype=weight.dtype) for weight in block.weights.values()}
    fill(whole, model, device)
    slots = Slots((block,), block.experts, "fetch", Tier.DISK)
    staging = device.allocate_host(READ_BUFFERS * slots.slot_bytes, pinned=False).data
    source = DiskSource(slots, DiskReads(device, staging.split(slots.slot_bytes), {}), {})
    rounds = [expert for _ in range(3) for expert in range(block.experts)]
    rooms = []
    for expert in rounds:
        room = device.allocate(slots.slot_bytes, "expert_slots").data
        rooms.append((expert, room, source.start(block, expert, room)))
    for expert, room, fetch in rooms:
        fetch.wait()
        assert fetch.settle()
        for weight in block.weights.values():
            part = room[slots.span(weight, expert)].view(weight.dtype).view(weight.shape[1:])
            assert torch.equal(part, whole[weight.full][expert])
    assert source.reads.bytes_read >= len(rounds) * block.expert_bytes


def test_a_read_that_fails_is_told_to_the_one_who_waits(tmp_path: Path) -> None:
    TINY["qwen3_moe"].save(tmp_path)
    block = expert_blocks(mapped(tmp_path))[-1]
    slots = Slots((block,), block.experts, "fetch", Tier.DISK)
    device = emulated()
    staging = device.allocate_host(READ_BUFFERS * slots.slot_bytes, pinned=False).data
    source = DiskSource(slots, DiskReads(device, staging.split(slots.slot_bytes), {}), {})
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    room = device.allocate(slots.slot_bytes, "expert_slots").data
    fetches = [source.start(block, 1, room) for _ in range(2 * READ_BUFFERS)]
    for fetch in fetches:
        with pytest.raises(CheckpointError, match=r"model\.safetensors ends at byte 2000"):
            fetch.wait()
        assert not fetch.settle()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_experts_are_read_where_they_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    """Experts of a tensor each, of a size that a disk is asked for: only edges are copied after they were read."""
    sizes = {**TINY["qwen3_moe"].options, "hidden_size": 256, "moe_intermediate_size": 520, "num_hidden_layers": 2}
    replace(TINY["qwen3_moe"], options=sizes, dtype=dtype).save(tmp_path)
    whole = overspill.load(tmp_path, device="cpu", max_model_len=64)
    stream = {"overspill": {"expert_stream": {"slots": 3, "tier": "disk"}}}
    engine = overspill.load(tmp_path, stream, device="cpu", max_model_len=64)
    asked = SamplingParams(max_tokens=4)
    ids = [
        list(e.generate([5, 17, 99, 3], asked, ignore_eos=True, logits=True).logits.flatten()) for e in (whole, engine)
    ]
    assert ids[0] == ids[1]
    assert engine.placed.experts.stream is not None
    source = engine.placed.experts.stream.source
    assert isinstance(source, DiskSource)
    assert source.reads.bytes_read > 10 * engine.plan.slots.slot_bytes
    places = {w.source.extents[0].offset % 16 for b in engine.plan.slots.blocks for w in b.weights.values()}
    if dtype == torch.bfloat16 or places == {0}:
        assert source.reads.staged_bytes < source.reads.bytes_read // 10
