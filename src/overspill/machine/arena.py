"""Blocks of memory, and tensors cut from them.

Every tensor starts at a 64-byte boundary: on a CPU the bits of a float32 product depend on its weight's address
modulo 16, so the same weight must be aligned alike in every tier (docs/architecture.md, "Same bits in every tier").
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import torch

ALIGNMENT = 64
FLOAT32_ALIGNMENT = 16
HUGE_PAGE_BYTES = 2 << 20


def bits_alignment(dtype: torch.dtype) -> int:
    """What a weight's address must be a multiple of for the bits of its products to be those of an arena's tensor.

    Those of float32 depend on the address modulo 16, those of narrower dtypes on nothing.
    """
    return FLOAT32_ALIGNMENT if dtype.itemsize >= 4 else dtype.itemsize


def aligned_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to the next 64-byte boundary."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packed_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a block that holds tensors of `sizes` bytes one after the other, each aligned."""
    return sum(map(aligned_bytes, sizes))


def tensor_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


@dataclass
class Block:
    """One allocation. `data` is uint8 [requested_bytes] and owns the memory; `allocated_bytes` is what it took."""

    data: torch.Tensor
    allocated_bytes: int
    pinned: bool = False

    @property
    def requested_bytes(self) -> int:
        return self.data.numel()


class Arena:
    """Cuts tensors from a block in order. The tensors share the block's storage and keep it alive."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.used_bytes = 0

    def take(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        shape = tuple(shape)
        nbytes = tensor_bytes(shape, dtype)
        assert self.used_bytes + nbytes <= self.block.requested_bytes, "the plan sized this block too small"
        tensor = cut(self.block.data, self.used_bytes, shape, dtype)
        self.used_bytes += aligned_bytes(nbytes)
        return tensor


def cut(block: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of `shape` and `dtype` that starts `offset` bytes into uint8 `block`; a view, no copy."""
    nbytes = tensor_bytes(shape, dtype)
    return block[offset : offset + nbytes].view(dtype).view(shape)


def map_memory(nbytes: int) -> torch.Tensor:
    """Anonymous private memory, uint8 [nbytes]: page-aligned, zero, exact to the page, huge pages where it is large.

    Pages are taken when first written. The tensor owns the mapping.
    """
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages; ordinary ones do as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]


def page_bytes(nbytes: int) -> int:
    """Bytes that a mapping of `nbytes` takes: whole pages."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
