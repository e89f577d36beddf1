from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from overspill.checkpoint import Extent
from overspill.config import WeightName
from overspill.machine.arena import ALIGNMENT, bits_alignment
from overspill.model.sources import Extents
from overspill.model.weights import Role, Weight
from overspill.plan.ring import DISK_ALIGNMENT, LARGE_BYTES, Ring, RingLayer, buffer_of, next_index

PASSES = 3


@pytest.mark.parametrize(
    ("count", "step", "targets"),
    [
        (3, 1, [1, 2, 0]),
        (3, 2, [2, 1, 0]),
        (4, 2, [2, 3, 0, 1]),
        (5, 2, [2, 3, 4, 1, 0]),
        (3, 3, [0, 1, 2]),
        (3, 4, [1, 2, 0]),
        (8, 3, [3, 4, 5, 6, 7, 2, 0, 1]),
    ],
)
def test_targets_are_vllms(count: int, step: int, targets: list[int]) -> None:
    assert [next_index(index, step, count) for index in range(count)] == targets


@pytest.mark.parametrize("step", range(1, 65))
def test_no_buffer_is_overwritten_before_its_reader_is_done(step: int) -> None:
    """Every number of layers from 1 to 64: each layer finds its own bytes, and each is copied once a pass."""
    for count in range(1, 65):
        holds: list[int | None] = [None] * step
        unread = [False] * step
        for index in range(min(step, count)):
            holds[buffer_of(index, step)] = index
            unread[buffer_of(index, step)] = True
        for _ in range(PASSES):
            copied = [0] * count
            for index in range(count):
                own = buffer_of(index, step)
                assert holds[own] == index
                unread[own] = False
                following = next_index(index, step, count)
                target = buffer_of(following, step)
                copied[following] += 1
                if holds[target] != following:
                    assert not unread[target], f"{count} layers, step {step}: {following} overwrites {holds[target]}"
                    assert step < count, "with a buffer for each layer nothing is ever replaced"
                    holds[target] = following
                unread[target] = True
            assert copied == [1] * count


# -- layers read from disk ---------------------------------------------------------------------------------------------


def _stored(name: str, nbytes: int, offset: int, dtype: torch.dtype) -> Weight:
    source = Extents((Extent(Path("model.safetensors"), offset, nbytes),), dtype)
    return Weight(WeightName(name, name, "layers", 0), Role.DENSE_MLP, (nbytes // dtype.itemsize,), dtype, source)


@given(
    sizes=st.lists(st.integers(1, 3 * LARGE_BYTES // 8).map(lambda n: 8 * n), min_size=1, max_size=6),
    start=st.integers(0, 1 << 40),
    gaps=st.lists(st.sampled_from([0, 0, 2, 8, 64, 5000]), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_layer_on_disk_lies_as_its_files_do_where_bits_allow_it(
    sizes: list[int], start: int, gaps: list[int], dtype: torch.dtype
) -> None:
    weights = []
    for number, (nbytes, gap) in enumerate(zip(sizes, gaps, strict=False)):
        start += gap
        weights.append(_stored(f"w{number}", nbytes, start, dtype))
        start += nbytes
    layer = RingLayer("layers", 0, tuple(reversed(weights))).from_disk()
    assert layer.weights == tuple(weights), "in the order of the file"
    end = 0
    for weight, offset in zip(layer.weights, layer.offsets, strict=True):
        assert isinstance(weight.source, Extents)
        place = weight.source.extents[0].offset
        assert offset >= end, "apart"
        if weight.nbytes >= LARGE_BYTES and place % bits_alignment(dtype) == 0:
            assert (offset - place) % DISK_ALIGNMENT == 0
            assert offset - end < DISK_ALIGNMENT
        else:
            assert offset % ALIGNMENT == 0
            assert offset - end < ALIGNMENT
        end = offset + weight.nbytes
    assert 0 <= layer.nbytes - end < ALIGNMENT
    useful = sum(weight.nbytes for weight in weights)
    assert layer.nbytes <= useful * (1 + 1 / 64) + ALIGNMENT * (len(weights) + 1)
    assert Ring((layer,), 1).buffer_bytes % DISK_ALIGNMENT == 0 or layer.nbytes < LARGE_BYTES
