from __future__ import annotations

import struct
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.checkpoint.gguf import open_gguf
from overspill.errors import CheckpointError

TEXT, ARRAY, F32, I32, Q8_0 = 8, 9, 0, 26, 8
METADATA: dict[str, Any] = {
    "x.uint8": 200,
    "x.int8": -5,
    "x.uint16": 40_000,
    "x.int16": -4000,
    "x.uint32": 4_000_000_000,
    "x.int32": -4,
    "x.uint64": 2**63,
    "x.int64": -(2**62),
    "x.float32": 0.5,
    "x.float64": 1e-300,
    "x.bool": True,
    "x.string": "größer",
}
ARRAYS: dict[str, Any] = {
    "x.tokens": ["a", "ĠÜ", "", "日本"],
    "x.scores": [0.5, -2.0],
    "x.types": [3, 1, -1],
    "x.flags": [True, False],
    "x.nested": [[1, 2], [3]],
}


def write(path: Path, *, alignment: int | None = None, **options: Any) -> Path:
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama", **options)
    for key, value in METADATA.items():
        getattr(writer, f"add_{key.removeprefix('x.')}")(key, value)
    for key, value in ARRAYS.items():
        writer.add_array(key, value)
    if alignment:
        writer.add_custom_alignment(alignment)
    dense = random.standard_normal((3, 4, 64)).astype(np.float32)
    writer.add_tensor("float", dense)
    writer.add_tensor("half", dense[0].astype(np.float16))
    for kind in (GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        writer.add_tensor(kind.name.lower(), quants.quantize(dense, kind), raw_dtype=kind)
    writer.add_tensor("vector", np.arange(5, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
@pytest.mark.parametrize("version", [2, 3])
def test_what_the_gguf_package_wrote_is_read_back(tmp_path: Path, version: int, alignment: int | None) -> None:
    path = write(tmp_path / "model.gguf", alignment=alignment)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(version.to_bytes(4, "little"))
    checkpoint = open_gguf(path)
    assert (checkpoint.format, checkpoint.folder, checkpoint.files) == ("gguf", tmp_path, (path,))
    assert checkpoint.metadata["general.architecture"] == "llama"
    for key, value in (METADATA | ARRAYS).items():
        assert checkpoint.metadata[key] == value
        assert type(checkpoint.metadata[key]) is type(value)
    content = path.read_bytes()
    theirs = GGUFReader(path).tensors
    assert list(checkpoint.tensors) == [str(tensor.name) for tensor in theirs]
    for tensor in theirs:
        record = checkpoint.tensors[tensor.name]
        assert record.shape == tuple(reversed(tensor.shape.tolist()))
        assert record.extent.offset == tensor.data_offset
        assert record.nbytes == record.encoding.nbytes(record.elements) == tensor.n_bytes
        assert content[tensor.data_offset :][: record.nbytes] == tensor.data.tobytes()
    encodings = {name: record.encoding for name, record in checkpoint.tensors.items()}
    assert {name: encoding.name for name, encoding in encodings.items()} == {
        "float": "float32",
        "half": "float16",
        "bf16": "bfloat16",
        "q4_1": "Q4_1",
        "q8_0": "Q8_0",
        "vector": "int32",
    }
    assert encodings["q4_1"].packed
    assert (encodings["q4_1"].block_elements, encodings["q4_1"].block_bytes) == (32, 20)


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    tokens = [f"token {index}" for index in range(60_000)]
    writer = GGUFWriter(tmp_path / "long.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", [float(index) for index in range(60_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    metadata = open_gguf(tmp_path / "long.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"] == tokens
    assert metadata["tokenizer.ggml.scores"][-1] == 59_999.0


def test_any_part_of_a_split_model_opens_all(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split_max_tensors=2)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for part in parts:
        checkpoint = open_gguf(part)
        assert checkpoint.files == tuple(parts)
        assert list(checkpoint.tensors) == ["float", "half", "bf16", "q4_1", "q8_0", "vector"]
        assert checkpoint.metadata["general.architecture"] == "llama"
        assert checkpoint.tensors["vector"].extent.file == parts[2]


def test_a_missing_a_renamed_and_a_foreign_part_are_named(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split_max_tensors=2)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is missing"):
        open_gguf(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf says that it is part 2 \(from 0\) of 3"):
        open_gguf(first)
    second.write_bytes(content.replace(b"bf16", b"half"))
    with pytest.raises(CheckpointError, match="tensor 'half' stands in"):
        open_gguf(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 parts, which its name does not tell"):
        open_gguf(renamed)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def model(
    pairs: list[bytes], tensors: list[bytes] | None = None, *, data_bytes: int = 0, head: bytes = b"GGUF" + u32(3)
) -> bytes:
    tensors = tensors or []
    header = head + u64(len(tensors)) + u64(len(pairs)) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % 32 + data_bytes)


FLOATS = tensor(b"a", [8], F32, 0)
REFUSED = {
    "big endian": (model([], head=b"GGUF" + struct.pack(">I", 3)), "big-endian"),
    "version 1": (model([], head=b"GGUF" + u32(1)), "GGUF version 1; 2 and 3 are read"),
    "version 4": (model([], head=b"GGUF" + u32(4)), "GGUF version 4"),
    "version 0": (model([], head=b"GGUF" + u32(0)), "GGUF version 0"),
    "a web page": (b"<!DOCTYPE html><html>", "but a web page"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
    "a zip": (b"PK\x03\x04 and more", "zip archive as torch.save writes it"),
    "a pickle": (b"\x80\x02}q\x00.", "Python pickle"),
    "safetensors": (u64(2) + b"{}", "but a safetensors file"),
    "nothing known": (b"abcdefghij", "it starts with b'abcdefgh'"),
    "absurd number of tensors": (b"GGUF" + u32(3) + u64(2**40) + u64(0), "number of tensors is 1099511627776, more"),
    "absurd number of keys": (b"GGUF" + u32(3) + u64(0) + u64(2**63), "number of keys is 9223372036854775808, more"),
    "absurd string": (model([text(b"k") + u32(TEXT) + u64(2**60)]), "value of 'k'\\[0\\] ends at byte"),
    "absurd array": (model([pair(b"k", ARRAY, u32(0) + u64(2**50))]), "length of the value of 'k' is"),
    "unknown type": (model([pair(b"k", 13, b"1234")]), "value of 'k' has the unknown type 13"),
    "unknown element type": (model([pair(b"k", ARRAY, u32(99) + u64(1) + b"1234")]), "unknown type 99"),
    "nested too deep": (
        model([pair(b"k", ARRAY, (u32(ARRAY) + u64(1)) * 5 + u32(0) + u64(0))]),
        "nests arrays deeper than 4",
    ),
    "neither true nor false": (model([pair(b"k", 7, b"\x02")]), "neither 0 nor 1"),
    "no UTF-8": (model([pair(b"k", TEXT, text(b"\xff"))]), "value of 'k'\\[0\\] is not UTF-8"),
    "empty key": (model([pair(b"", 0, b"1")]), "key '' is empty"),
    "the same key twice": (model([pair(b"k", 0, b"1")] * 2), "key 'k' stands twice"),
    "the same tensor twice": (model([], [FLOATS] * 2, data_bytes=64), "tensor 'a' stands twice"),
    "too many dimensions": (model([], [tensor(b"a", [1] * 5, F32, 0)]), "tensor 'a' has 5 dimensions"),
    "unknown ggml type": (model([], [tensor(b"a", [8], 4, 0)]), "tensor 'a': ggml type 4 is unknown or was removed"),
    "no whole blocks": (model([], [tensor(b"a", [33, 32], Q8_0, 0)]), "rows of 33 elements are not whole blocks"),
    "unaligned": (model([], [tensor(b"a", [8], F32, 8)], data_bytes=64), "offset 8 is not a multiple"),
    "out of range": (model([], [FLOATS], data_bytes=31), "tensor 'a': its data ends at byte"),
    "a size beyond all": (model([], [tensor(b"a", [2**62] * 4, F32, 0)]), "tensor 'a': its data ends at byte"),
    "overlap": (
        model([], [tensor(b"a", [16], F32, 0), tensor(b"b", [8], I32, 32)], data_bytes=64),
        "tensor 'b': its data starts at byte \\d+, inside that of 'a'",
    ),
    "alignment of no power": (model([pair(b"general.alignment", 4, u32(24))], [FLOATS]), "24 is not a power of two"),
    "alignment of text": (model([pair(b"general.alignment", TEXT, text(b"32"))], [FLOATS]), "'32' is not a power"),
}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_header_that_departs_from_the_format_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_gguf(path)
    assert str(path) in caught.value.message


def test_a_big_endian_file_of_the_gguf_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="big-endian"):
        open_gguf(write(tmp_path / "big.gguf", endianess=GGUFEndian.BIG))


@cache
def sample() -> tuple[bytes, int]:
    """A valid file, and the byte where its tensor data ends."""
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "sample.gguf")
        end = max(r.extent.offset + r.nbytes for r in open_gguf(path).tensors.values())
        return path.read_bytes(), end


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content, end = sample()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:end])
    assert len(open_gguf(path).tensors) == 6
    header_bytes = content.index(b"vector") + 64
    for length in [*range(header_bytes), *range(header_bytes, end, 97), end - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_gguf(path)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_or_another_valid_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(sample()[0])
    header_bytes = content.index(b"vector") + 64
    numbers = st.sampled_from([u64(n) for n in (0, 1, 13, 2**31, 2**32, 2**62, 2**64 - 1, len(content))])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes - 1))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=8), numbers))
        content[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    message = path.name
    tracemalloc.start()
    try:
        for record in open_gguf(path).tensors.values():
            assert record.extent.offset + record.nbytes <= len(content)
    except CheckpointError as error:
        message = str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert path.name.encode() in message.encode()
