from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


CMAKE = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(CMAKE is None, reason="no cmake here")
@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_without_a_compiler_the_build_says_in_a_sentence_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "make").symlink_to(str(shutil.which("make")))
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    done = subprocess.run(
        [str(CMAKE), "-G", "Unix Makefiles", "-S", str(ROOT), "-B", str(tmp_path / "build")],
        env={**environment, "PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "need a C++17 compiler and none was found: install one (Debian, Ubuntu: apt install g++" in said
    assert said.count("CMake Error") == 1
