"""Packed ggml blocks as floats. The block layouts are ggml's (ggml-common.h, ggml-quants.c)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as decode_blocks

from overspill.checkpoint.records import TensorRecord
from overspill.errors import UnsupportedModelError

SLICE_ELEMENTS = 1 << 18  # 1 MiB of float32; a decoder's temporaries are up to eight times that
THREADS = min(4, os.cpu_count() or 1)
_SERIAL_ELEMENTS = 1 << 14  # below this torch copies without waking its own threads


def dequantize(
    raw: np.ndarray | torch.Tensor, record: TensorRecord, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tensor of `record.shape` that `raw` (uint8 [record.nbytes], contiguous) encodes.

    Values are decoded in float32, so float32 is exact and another `dtype` is that rounded. A dense record is a
    view of `raw`, unless it has to be cast or lies unaligned. Packed blocks are decoded into new memory, slices
    of them in up to four threads, with at most 32 MiB besides. Raises UnsupportedModelError for a type that the
    gguf package cannot decode.
    """
    flat = torch.from_numpy(raw) if isinstance(raw, np.ndarray) else raw
    assert flat.dtype == torch.uint8, flat.dtype
    assert flat.numel() == record.nbytes, f"{record.name}: {flat.numel()} bytes of {record.nbytes}"
    if record.encoding.packed:
        return _packed(flat.reshape(-1).numpy(), record, dtype).reshape(record.shape)
    return _dense(flat.reshape(-1), record).to(dtype).reshape(record.shape)


def _dense(flat: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    dtype = getattr(torch, record.encoding.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModelError(f"tensor {record.name!r} is stored as {record.encoding.name}")
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def _packed(flat: np.ndarray, record: TensorRecord, dtype: torch.dtype) -> torch.Tensor:
    """numpy in threads: it decodes without torch's own threads, which stall each other on a busy machine."""
    ggml_type = GGMLQuantizationType.__members__.get(record.encoding.name)
    if ggml_type is None:
        raise _unknown(record)
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    values = torch.empty(record.elements, dtype=dtype)
    step = max(1, SLICE_ELEMENTS // block_elements)

    def decode(block: int) -> None:
        blocks = flat[block * block_bytes : (block + step) * block_bytes]
        decoded = torch.from_numpy(decode_blocks(blocks, ggml_type))
        target = values[block * block_elements :][: decoded.numel()]
        for part, into in zip(decoded.split(_SERIAL_ELEMENTS), target.split(_SERIAL_ELEMENTS), strict=True):
            into.copy_(part)

    starts = range(0, flat.size // block_bytes, step)
    try:
        if len(starts) == 1:
            decode(0)
        else:
            list(_decoders().map(decode, starts))
    except NotImplementedError as error:
        raise _unknown(record) from error
    return values


@cache
def _decoders() -> ThreadPoolExecutor:
    """Kept between tensors: starting threads for each took as long as decoding it."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="overspill-decode")


def _unknown(record: TensorRecord) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tensor {record.name!r} is in {record.encoding.name} blocks, which the gguf package cannot decode",
        hint="quantize the model to another type, or update the gguf package",
    )
