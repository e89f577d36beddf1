"""Packed ggml blocks as floats. The block layouts are ggml's (ggml-common.h, ggml-quants.c)."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from overspill.checkpoint.records import TensorRecord
from overspill.errors import UnsupportedModelError
from overspill.model import hf_gguf

SLICE_ELEMENTS = 1 << 20  # 4 MiB of float32; a decoder's temporaries are up to six times that


def dequantize(
    raw: np.ndarray | torch.Tensor, record: TensorRecord, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tensor of `record.shape` that `raw` (uint8 [record.nbytes], contiguous) encodes.

    Values are decoded in float32, so float32 is exact and another `dtype` is that rounded. A dense record
    is a view of `raw`, unless it has to be cast or lies unaligned; packed blocks are decoded into new
    memory, a slice at a time, with at most 32 MiB besides. Raises UnsupportedModelError for a type that the
    gguf package cannot decode.
    """
    flat = torch.from_numpy(raw) if isinstance(raw, np.ndarray) else raw
    assert flat.dtype == torch.uint8, flat.dtype
    assert flat.numel() == record.nbytes, f"{record.name}: {flat.numel()} bytes of {record.nbytes}"
    if not record.encoding.packed:
        return _dense(flat.reshape(-1), record).to(dtype).reshape(record.shape)
    ggml_type = _ggml_type(record)
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    blocks = flat.reshape(-1, block_bytes)
    values = torch.empty((blocks.shape[0], block_elements), dtype=dtype)
    step = max(1, SLICE_ELEMENTS // block_elements)
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step].reshape(-1)
        values[start : start + step] = _decode(part, ggml_type, record).reshape(-1, block_elements)
    return values.reshape(record.shape)


def _dense(flat: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    dtype = getattr(torch, record.encoding.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModelError(f"tensor {record.name!r} is stored as {record.encoding.name}")
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def _ggml_type(record: TensorRecord) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType[record.encoding.name]
    except KeyError as error:
        raise _unknown(record) from error


def _decode(flat: torch.Tensor, ggml_type: GGMLQuantizationType, record: TensorRecord) -> torch.Tensor:
    """Bytes of whole blocks as float32, flat. transformers' torch code is the faster, to the same bits."""
    if (values := hf_gguf.dequantize_blocks(flat, int(ggml_type))) is not None:
        return values
    try:
        return torch.from_numpy(gguf_dequantize(flat.numpy(), ggml_type))
    except NotImplementedError as error:
        raise _unknown(record) from error


def _unknown(record: TensorRecord) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tensor {record.name!r} is in {record.encoding.name} blocks, which the gguf package cannot decode",
        hint="quantize the model to another type, or update the gguf package",
    )
