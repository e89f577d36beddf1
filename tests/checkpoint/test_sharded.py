from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from overspill.checkpoint.sharded import INDEX_NAME, open_safetensors
from overspill.errors import CheckpointError

ONE = np.ones(4, dtype=np.float32)


def shards(folder: Path, **names: list[str]) -> dict[str, str]:
    """Writes `<shard>.safetensors` with the tensors named; returns the weight_map that tells so."""
    for shard, tensors in names.items():
        save_file(dict.fromkeys(tensors, ONE), folder / f"{shard}.safetensors", metadata={"by": shard})
    return {tensor: f"{shard}.safetensors" for shard, tensors in names.items() for tensor in tensors}


def index(folder: Path, weight_map: Any) -> Path:
    path = folder / INDEX_NAME
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def test_shards_of_an_index_become_one_checkpoint(tmp_path: Path) -> None:
    path = index(tmp_path, shards(tmp_path, x=["a", "b"], y=["c"]))
    shards(tmp_path, consolidated=["z"])
    for model in (tmp_path, path):
        checkpoint = open_safetensors(model)
        assert checkpoint.format == "safetensors"
        assert checkpoint.folder == tmp_path
        assert checkpoint.files == (tmp_path / "x.safetensors", tmp_path / "y.safetensors")
        assert {name: record.extent.file.name for name, record in checkpoint.tensors.items()} == {
            "a": "x.safetensors",
            "b": "x.safetensors",
            "c": "y.safetensors",
        }
        assert checkpoint.nbytes == 48
    assert gc.isenabled()


def test_files_without_an_index(tmp_path: Path) -> None:
    shards(tmp_path, x=["a"], y=["b"])
    assert sorted(open_safetensors(tmp_path).tensors) == ["a", "b"]
    assert sorted(open_safetensors(tmp_path / "y.safetensors").tensors) == ["b"]
    shards(tmp_path, model=["whole"])
    assert sorted(open_safetensors(tmp_path).tensors) == ["whole"]


def test_a_gap_in_the_numbers_of_shards_is_a_missing_shard(tmp_path: Path) -> None:
    shards(tmp_path, **{"m-00001-of-00003": ["a"], "m-00003-of-00003": ["c"]})
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.safetensors is missing"):
        open_safetensors(tmp_path)


def test_two_models_in_one_folder_are_not_guessed_between(tmp_path: Path) -> None:
    index(tmp_path, shards(tmp_path, x=["a"]))
    shards(tmp_path, model=["b"])
    with pytest.raises(CheckpointError, match="holds two models"):
        open_safetensors(tmp_path)


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, x=["a"], y=["a"])
    with pytest.raises(CheckpointError, match=r"tensor 'a' stands in .*x\.safetensors and in .*y\.safetensors"):
        open_safetensors(tmp_path)


def test_a_missing_shard_is_named_with_a_tensor_it_should_hold(tmp_path: Path) -> None:
    index(tmp_path, shards(tmp_path, x=["a"]) | {"b": "gone.safetensors"})
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing; .* says it holds 'b'"):
        open_safetensors(tmp_path)


def test_a_promise_of_the_index_is_kept_or_refused(tmp_path: Path) -> None:
    truth = shards(tmp_path, x=["a"], y=["b"])
    index(tmp_path, truth | {"c": "x.safetensors"})
    with pytest.raises(CheckpointError, match=r"x\.safetensors lacks the tensor 'c'"):
        open_safetensors(tmp_path)
    index(tmp_path, truth | {"a": "y.safetensors", "b": "x.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor 'a': promised in y\.safetensors, it lies in x\.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "", ".", "x\0y"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shards(tmp_path, x=["a"])
    index(folder, {"a": shard})
    with pytest.raises(CheckpointError, match="outside its own folder"):
        open_safetensors(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a safetensors index but an empty file"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        ("{", "not valid JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' stands 2 times"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        open_safetensors(tmp_path)
