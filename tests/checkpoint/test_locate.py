from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.hub import IGNORED, SMALL_FILES, WEIGHTS
from overspill.errors import CheckpointError, ConfigError


def safetensors(path: Path, name: str = "a") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ones(4, dtype=np.float32)}, path)
    return path


def gguf(path: Path, **options: int) -> Path:
    writer = GGUFWriter(path, "llama", **options)
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_opened_as_what_it_is(tmp_path: Path) -> None:
    assert open_checkpoint(str(gguf(tmp_path / "m.gguf"))).format == "gguf"
    assert open_checkpoint(gguf(tmp_path / "sha256-without-suffix")).format == "gguf"
    assert open_checkpoint(safetensors(tmp_path / "m.safetensors")).format == "safetensors"
    assert open_checkpoint(safetensors(tmp_path / "without-suffix")).format == "safetensors"


def test_a_folder_is_opened_for_the_one_model_in_it(tmp_path: Path) -> None:
    gguf(tmp_path / "m.gguf", split_max_tensors=1)
    (tmp_path / "config.json").write_text("{}")
    assert len(open_checkpoint(tmp_path).files) == 2
    safetensors(tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).format == "safetensors"


def test_two_gguf_models_in_a_folder_are_not_guessed_between(tmp_path: Path) -> None:
    gguf(tmp_path / "m.Q4_0.gguf")
    gguf(tmp_path / "m.Q8_0.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: m\.Q4_0\.gguf, m\.Q8_0\.gguf") as caught:
        open_checkpoint(tmp_path)
    assert "path of the one" in str(caught.value.hint)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    safetensors(tmp_path / "m.safetensors")
    assert open_checkpoint("~/m.safetensors").folder == tmp_path


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickle_is_refused_with_the_reason_and_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    for model in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=rf"pickles \({name}\), which run code") as caught:
            open_checkpoint(model)
        assert "safetensors" in str(caught.value.hint)


def test_a_file_of_another_kind_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    kinds = {
        path.read_bytes(): "zip archive as torch.save writes it",
        b"\x80\x04\x95\x00": "Python pickle",
        b"version https://git-lfs.github.com/spec/v1\n": "git-lfs pointer",
        b"\n<html>": "web page",
        b"\x1f\x8b\x08": "gzip",
        b"": "empty file",
        b"unheard of": "starts with b'unheard '",
    }
    for content, name in kinds.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            open_checkpoint(path)
    weights = path.rename(tmp_path / "model.safetensors")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "fetch the weights: git lfs pull"


def test_a_folder_without_weights_is_told_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no weights .* but nothing"):
        open_checkpoint(tmp_path)
    for number in range(10):
        (tmp_path / f"{number}.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"but 0\.json, .*7\.json and 2 more"):
        open_checkpoint(tmp_path)


def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "m.gguf")


def test_an_empty_name_and_a_revision_of_local_files_are_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model is empty"):
        open_checkpoint(" ")
    with pytest.raises(ConfigError, match="revision 'main' is given for local files"):
        open_checkpoint(safetensors(tmp_path / "m.safetensors"), revision="main")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "gpt2", "some/model.gguf", "-x/y"])
def test_what_is_neither_a_path_nor_an_id_does_not_exist(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        open_checkpoint(name)


def test_an_id_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="org/model at revision v1 is neither here nor to be had") as caught:
        open_checkpoint("org/model", revision="v1")
    assert "needs no connection" in str(caught.value.hint)


def test_an_id_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    for revision, commit in (("main", "1" * 40), ("v1", "2" * 40)):
        blob = safetensors(repository / "blobs" / commit, name=f"of {revision}")
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(blob)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    assert list(open_checkpoint("org/model").tensors) == ["of main"]
    assert list(open_checkpoint("org/model", revision="v1").tensors) == ["of v1"]


def test_of_a_hub_repository_only_what_a_model_needs_is_downloaded() -> None:
    needed = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    others = {
        "pytorch_model.bin",
        "modeling_custom.py",
        "model.gguf",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
        "README.md",
    }
    found = filter_repo_objects(needed | others, allow_patterns=[*SMALL_FILES, *WEIGHTS], ignore_patterns=IGNORED)
    assert set(found) == needed
