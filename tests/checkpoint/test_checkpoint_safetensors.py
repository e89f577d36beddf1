from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from overspill.checkpoint.safetensors import ENCODINGS, read_shard
from overspill.errors import CheckpointError


def write(path: Path, header: Any, data_bytes: int) -> Path:
    """A file with any header (an object to be dumped, or the text itself) and `data_bytes` zeros."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def entry(begin: int, end: int, *, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_dtype_of_torch_is_found_where_it_lies(tmp_path: Path) -> None:
    names = [encoding.name for encoding in ENCODINGS.values()]
    tensors = {
        name: torch.arange(24, dtype=torch.uint8).view(getattr(torch, name)).clone() for name in names if name != "bool"
    }
    tensors |= {
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 7, dtype=torch.bfloat16),
        "matrix": torch.randn(3, 5, 2),
    }
    path = tmp_path / "all.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    shard = read_shard(path)
    content = path.read_bytes()
    assert shard.metadata == {"format": "pt"}
    assert shard.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        record = shard.tensors[name]
        assert record.shape == tuple(tensor.shape)
        assert getattr(torch, record.encoding.name) == tensor.dtype
        assert record.nbytes == record.encoding.nbytes(record.elements)
        assert record.extent.file == path
        raw = content[record.extent.offset : record.extent.offset + record.nbytes]
        assert raw == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


HOLE = {"a": entry(0, 4), "b": entry(6, 8)}
OVERLAP = {"a": entry(0, 6), "b": entry(4, 8)}
REFUSED = {
    "no JSON": (b"{nonsense}", 0, "not valid JSON"),
    "not UTF-8": (b'{"a\xff": 1}', 0, "not valid JSON"),
    "nested without end": (b'{"a":' * 50_000, 0, "not valid JSON"),
    "a list": (b"[]", 0, "not a safetensors file"),
    "the same name twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
        "'a' stands 2 times",
    ),
    "the same key twice": (
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        1,
        "'dtype' stands 2",
    ),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    "no object": ({"a": [1, 2]}, 0, "tensor 'a': its entry is not an object"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, 1, "tensor 'a': dtype None is unknown"),
    "unknown dtype": ({"a": entry(0, 1, dtype="F4")}, 1, "tensor 'a': dtype 'F4' is unknown"),
    "a list as dtype": ({"a": {**entry(0, 1), "dtype": []}}, 1, "dtype"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, 1, "shape None is not a list"),
    "too many dimensions": ({"a": entry(0, 1, shape=[1] * 65)}, 1, "is not a list of at most 64"),
    "negative size": ({"a": entry(0, 1, shape=[-1, -1])}, 1, "tensor 'a': shape"),
    "fraction as size": ({"a": entry(0, 1, shape=[1.0])}, 1, "tensor 'a': shape"),
    "truth as size": ({"a": entry(0, 1, shape=[True])}, 1, "tensor 'a': shape"),
    "one offset": ({"a": {**entry(0, 1), "data_offsets": [0]}}, 1, "not two integers"),
    "offsets of text": ({"a": {**entry(0, 1), "data_offsets": ["0", "1"]}}, 1, "not two integers"),
    "negative offset": ({"a": entry(-1, 0)}, 1, "reversed or negative"),
    "reversed offsets": ({"a": entry(4, 2, shape=[2])}, 4, "reversed or negative"),
    "shape beside offsets": ({"a": entry(0, 8, dtype="F32", shape=[3])}, 8, "takes 12 bytes, its data_offsets span 8"),
    "a size beyond all": ({"a": entry(0, 8, shape=[2**62, 2**62])}, 8, "tensor 'a'"),
    "data cut short": ({"a": entry(0, 100)}, 99, "tensor 'a': its data ends at byte"),
    "overlap": (OVERLAP, 8, "tensor 'b': its data starts at byte \\d+, inside that of 'a'"),
    "hole": (HOLE, 8, "tensor 'b': bytes \\d+ to \\d+ before its data belong to no tensor"),
    "hole at the start": ({"a": entry(1, 2)}, 2, "tensor 'a': bytes"),
    "bytes after the last": ({"a": entry(0, 2)}, 5, "3 bytes at the end belong to no tensor"),
}


@pytest.mark.parametrize(("header", "data_bytes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_header_that_departs_from_the_format_is_refused(
    tmp_path: Path, header: Any, data_bytes: int, reason: str
) -> None:
    path = write(tmp_path / "bad.safetensors", header, data_bytes)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_shard(path)
    assert str(path) in caught.value.message


def test_a_header_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="claims a header of 100000001 bytes; the format allows 100000000"):
        read_shard(path)


def sample() -> bytes:
    return save(
        {"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.int8), "c": torch.ones(2, dtype=torch.bfloat16)},
        metadata={"format": "pt"},
    )


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = sample()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(content)
    assert len(read_shard(path).tensors) == 3
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            read_shard(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_or_another_valid_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(sample())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_end - 1))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b'"', b"{", b"]", b"9", b"-"])))
        content[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    message = path.name
    tracemalloc.start()
    try:
        for record in read_shard(path).tensors.values():
            assert record.extent.offset + record.nbytes <= len(content)
    except CheckpointError as error:
        message = str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert path.name.encode() in message.encode()
