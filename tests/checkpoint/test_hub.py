"""A hub over HTTP, and processes of their own, since where the hub is is read when its library is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hub_server import COMMIT, MODEL, Hub, hub_of
from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.hub import FIRST_BYTES

OPEN = """
import json, sys
from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.hub import download
from overspill.errors import OverspillError
try:
    own_code, then = json.loads(sys.argv[2])
    found = open_checkpoint(sys.argv[1], own_code=own_code)
    told = {"absent": found.absent is not None, "folder": str(found.folder)}
    told["tensors"] = {n: [str(r.extent.file), r.extent.offset, r.nbytes, *r.shape] for n, r in found.tensors.items()}
    if then == "download":
        download(found)
        again = open_checkpoint(sys.argv[1])
        told["same"] = (again.absent, again.tensors) == (None, found.tensors)
except OverspillError as error:
    told = {"error": error.message, "hint": error.hint}
print(json.dumps(told))
"""


def opened(hub: Hub, home: Path, *, own_code: bool = False, then: str = "", offline: bool = False) -> dict[str, Any]:
    """What a process finds that opens MODEL."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        **hub.environment,
        "HF_HOME": str(home),
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
    }
    command = [sys.executable, "-c", OPEN, MODEL, json.dumps([own_code, then])]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(process.stdout))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards, the second with a header that is longer than what is asked for at first; and files besides."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "modeling_own.py").write_text("")
    (folder / "consolidated.safetensors").write_bytes(b"another copy")
    shards = {
        "model-00001-of-00002.safetensors": {"large": np.ones((1000, 1000), np.float32)},
        "model-00002-of-00002.safetensors": {f"a name of some length {i}": np.ones(1, np.int8) for i in range(2000)},
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_of_weights_on_the_hub_the_headers_alone_come(model: Path, tmp_path: Path) -> None:
    with hub_of(model) as hub:
        found = opened(hub, tmp_path / "home")
        given = dict(hub.given)
    local = open_checkpoint(model)
    assert found["absent"]
    assert found["tensors"] == {
        name: [str(Path(found["folder"]) / r.extent.file.name), r.extent.offset, r.nbytes, *r.shape]
        for name, r in local.tensors.items()
    }
    large, long = (given[f"model-0000{number}-of-00002.safetensors"] for number in (1, 2))
    assert large == FIRST_BYTES
    header = int.from_bytes((model / "model-00002-of-00002.safetensors").read_bytes()[:8], "little")
    assert header > FIRST_BYTES
    assert long == 8 + header
    assert sorted(file.name for file in Path(found["folder"]).iterdir()) == [
        "config.json",
        "model.safetensors.index.json",
    ]
    assert Path(found["folder"]).name == COMMIT


def test_what_is_downloaded_later_is_what_was_planned(model: Path, tmp_path: Path) -> None:
    with hub_of(model) as hub:
        found = opened(hub, tmp_path / "home", then="download")
        assert found["same"]
        before = hub.given["model-00001-of-00002.safetensors"]
        assert not opened(hub, tmp_path / "home")["absent"]
        assert hub.given["model-00001-of-00002.safetensors"] == before, "a file that is here was asked for"
        offline = opened(hub, tmp_path / "home", offline=True)
    assert (offline["absent"], offline["tensors"]) == (False, found["tensors"])
    assert opened(hub, tmp_path / "home")["tensors"] == found["tensors"], "the hub has gone, and the cache has not"


def test_python_files_come_where_the_models_own_code_may_run(model: Path, tmp_path: Path) -> None:
    with hub_of(model) as hub:
        assert not (Path(opened(hub, tmp_path / "home")["folder"]) / "modeling_own.py").exists()
        assert (Path(opened(hub, tmp_path / "home", own_code=True)["folder"]) / "modeling_own.py").exists()


def test_a_server_that_gives_whole_files_is_left_at_once(model: Path, tmp_path: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    save_file({"large": np.zeros((64, 1 << 20), np.int8)}, model / name)
    with hub_of(model, ranges=False) as hub:
        found = opened(hub, tmp_path / "home")
        assert hub.given.get(name, 0) == 0
    assert "the server does not answer with a part of a file" in found["error"]
    assert f"`hf download {MODEL}`" in found["hint"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["pytorch_model.bin"], "Python pickles"),
        (["model-Q4_0.gguf", "model-Q8_0.gguf"], "has its weights as GGUF"),
        (["README.md"], "holds no weights"),
    ],
)
def test_what_has_no_safetensors_is_refused(names: list[str], said: str, tmp_path: Path) -> None:
    for name in ("config.json", *names):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text("{}")
    with hub_of(tmp_path / "model") as hub:
        assert said in opened(hub, tmp_path / "home")["error"]
        assert not hub.given.keys() & set(names)


def test_a_missing_and_a_damaged_shard_are_named(model: Path, tmp_path: Path) -> None:
    first, second = (model / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    content = first.read_bytes()
    first.write_bytes(content[:-8])
    with hub_of(model) as hub:
        assert f"{first.name}, tensor 'large': its data ends at byte" in opened(hub, tmp_path / "home")["error"]
        first.write_bytes(content)
        second.unlink()
        assert f"{second.name} is missing" in opened(hub, tmp_path / "home")["error"]


def test_more_than_the_disk_holds_is_not_downloaded(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    nbytes = 8 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + nbytes)
        except OSError:
            pytest.skip("no file of 8 TiB can be made here")
    with hub_of(tmp_path / "model") as hub:
        found = opened(hub, tmp_path / "home", then="download")
    assert "8192.00 GiB are to be downloaded" in found["error"]
    assert "HF_HOME" in found["hint"]


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with hub_of(tmp_path / "model") as hub:
        pass
    found = opened(hub, tmp_path / "home")
    assert f"{MODEL} is neither here nor to be had" in found["error"]
