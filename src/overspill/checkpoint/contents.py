"""What is known of the bytes of checkpoint files: their SHA-256 by range, as long as a file's stamp stays the same."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from overspill.checkpoint.records import Extent
from overspill.checkpoint.stamp import FileStamp


class ContentIndex:
    """A small JSON file in `folder` for each checkpoint file, under its real path. What cannot be read knows nothing.

    It saves reading the bytes again. A file whose size, time of change or header differs is not the one it knew.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def known(self, file: Path, stamp: FileStamp) -> dict[str, str]:
        """Hashes by `span_of`; empty where `file` was never seen with `stamp`."""
        try:
            found = json.loads(self._path(file).read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict) or found.get("stamp") != asdict(stamp):
            return {}
        spans = found.get("spans")
        return {str(span): str(digest) for span, digest in spans.items()} if isinstance(spans, dict) else {}

    def learn(self, file: Path, stamp: FileStamp, spans: Mapping[str, str]) -> None:
        """Add hashes of `file`. Of two who do this at once one is forgotten, and will hash again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = {"file": os.path.realpath(file), "stamp": asdict(stamp), "spans": {**self.known(file, stamp), **spans}}
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix="new-", delete=False) as written:
            try:
                json.dump(known, written)
                written.flush()
                Path(written.name).replace(self._path(file))
            except BaseException:
                Path(written.name).unlink()
                raise

    def _path(self, file: Path) -> Path:
        return self._folder / f"{hashlib.sha256(os.path.realpath(file).encode()).hexdigest()[:32]}.json"


def span_of(extent: Extent) -> str:
    """An extent's place in its file."""
    return f"{extent.offset}+{extent.length}"
