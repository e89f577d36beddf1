from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from overspill.checkpoint import file_stamp, open_checkpoint, stamps, verify_unchanged
from overspill.errors import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(100_000, dtype=np.uint8)}, path)
    return path


def test_an_untouched_file_keeps_its_stamp(path: Path) -> None:
    taken = stamps(open_checkpoint(path))
    assert taken == {path: file_stamp(path)}
    assert taken[path].size == path.stat().st_size
    verify_unchanged(taken)


def test_every_kind_of_change_is_noticed(path: Path) -> None:
    taken = stamps(open_checkpoint(path))
    before = path.stat()
    content = bytearray(path.read_bytes())

    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match=rf"{path} changed since its header was read \(mtime_ns\)"):
        verify_unchanged(taken)

    content[20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"\(header_hash\)"):
        verify_unchanged(taken)

    content[20] ^= 1
    path.write_bytes(content + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"\(size\)"):
        verify_unchanged(taken)

    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        verify_unchanged(taken)
