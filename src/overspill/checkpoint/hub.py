"""Models on the Hugging Face hub: small files are downloaded, of weights the headers alone, until they are needed."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_url, snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, and loaded when they are asked for
    build_hf_headers,
    filter_repo_objects,
    hf_raise_for_status,
    http_stream_backoff,
)

from overspill.checkpoint.records import Checkpoint, HubRevision
from overspill.checkpoint.safetensors import Shard, read_shard, shard_of
from overspill.config.sizes import format_bytes
from overspill.errors import CheckpointError

logger = logging.getLogger("overspill")

WEIGHTS = ["*.safetensors"]
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
OWN_CODE = ["*.py"]
# Subfolders hold other formats of the same weights (original/, onnx/), consolidated* a second copy of them.
IGNORED = ["*/*", "consolidated*", "adapter_*"]
FIRST_BYTES = 128 << 10
"""Of a file asked for at first: most headers are shorter."""
_AT_ONCE = 8
_UNREACHED = (OSError, ValueError, HTTPError)
_TOTAL = re.compile(r"bytes \d+-\d+/(\d+)")


def small_files(model: str, revision: str | None, *, own_code: bool) -> tuple[Path, list[str] | None]:
    """The folder in the hub's cache with all of the model but its weights, and the names of all files on the hub.

    No names: the hub is not to be reached, and the folder is what its cache has. Raises CheckpointError where that has
    nothing either.
    """
    patterns = [*SMALL_FILES, *(OWN_CODE if own_code else [])]
    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED))
    except _UNREACHED as error:
        raise _not_to_be_had(model, revision, error) from error
    try:
        info = HfApi().model_info(model, revision=folder.name)
    except _UNREACHED as error:
        logger.debug("%s: %s; its files are those of the cache", model, _first_line(error))
        return folder, None
    return folder, [file.rfilename for file in info.siblings or []]


def download(checkpoint: Checkpoint) -> None:
    """Bring the files of `checkpoint` that are not here. Raises CheckpointError where they cannot be had or kept."""
    at = checkpoint.absent
    assert at is not None, f"{checkpoint.folder} is here"
    missing = {file for file in checkpoint.files if not file.exists()}
    nbytes = sum(record.nbytes for record in checkpoint.tensors.values() if record.extent.file in missing)
    free_bytes = shutil.disk_usage(checkpoint.folder).free
    if nbytes > free_bytes:
        raise CheckpointError(
            f"{at.model}: {format_bytes(nbytes)} are to be downloaded, {format_bytes(free_bytes)} are free "
            f"under {checkpoint.folder.parent}",
            hint="HF_HOME in the environment names another place for the hub's cache",
        )
    try:
        folder = snapshot_download(at.model, revision=at.commit, allow_patterns=WEIGHTS, ignore_patterns=IGNORED)
    except _UNREACHED as error:
        raise _not_to_be_had(at.model, at.commit, error) from error
    assert Path(folder) == checkpoint.folder, f"{folder} is not {checkpoint.folder}"


class HubFiles:
    """The safetensors files of one commit on the hub; those that lie in `folder` already are read there."""

    def __init__(self, model: str, folder: Path, names: Iterable[str]) -> None:
        self._revision = HubRevision(model, folder.name)
        weights = filter_repo_objects(names, allow_patterns=WEIGHTS, ignore_patterns=IGNORED)
        self._files = {folder / name for name in weights}

    def has(self, file: Path) -> bool:
        return file in self._files

    def listed(self, folder: Path) -> list[Path]:
        return sorted(file for file in self._files if file.parent == folder)

    def read(self, files: Sequence[Path]) -> Iterable[Shard]:
        absent = sum(not file.exists() for file in files)
        if absent:
            logger.info("%s: reading the headers of %d files on the hub", self._revision.model, absent)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from pool.map(self._read, files)

    def marked(self, checkpoint: Checkpoint) -> Checkpoint:
        """`checkpoint`, knowing where what is not here is."""
        here = all(file.exists() for file in checkpoint.files)
        return checkpoint if here else replace(checkpoint, absent=self._revision)

    def _read(self, file: Path) -> Shard:
        return read_shard(file) if file.exists() else shard_of(RemoteFile(self._revision, file))


class RemoteFile:
    """A file of which runs of bytes are asked for (RFC 9110, 14.2). `path` is where it will lie."""

    def __init__(self, revision: HubRevision, path: Path) -> None:
        self.path = path
        self._where = f"{path.name} of {revision.model}"
        self._url = hf_hub_url(revision.model, path.name, revision=revision.commit)
        self._head, self.size = self._range(0, FIRST_BYTES)

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        if end <= len(self._head):
            return self._head[offset:end]
        return self._head[offset:] + self._range(max(offset, len(self._head)), end)[0]

    def _range(self, begin: int, end: int) -> tuple[bytes, int]:
        """(bytes from `begin` to `end`, or to the file's end; the file's size)."""
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            with http_stream_backoff("GET", self._url, headers=headers) as response:
                hf_raise_for_status(response)
                total = _TOTAL.fullmatch(response.headers.get("Content-Range", ""))
                if total is None:  # before 5 GB come that nobody asked for
                    raise CheckpointError(
                        f"{self._where}: the server does not answer with a part of a file",
                        hint=f"`hf download {self._where.rpartition(' ')[2]}` fetches the whole model first",
                    )
                return response.read(), int(total[1])
        except _UNREACHED as error:
            raise CheckpointError(
                f"{self._where} cannot be read: {_first_line(error)}", hint="check the connection, and try again"
            ) from error


def _not_to_be_had(model: str, revision: str | None, error: Exception) -> CheckpointError:
    where = model if revision is None else f"{model} at revision {revision}"
    return CheckpointError(
        f"{where} is neither here nor to be had from the Hugging Face hub: {_first_line(error)}",
        hint="check the name and the connection; for a gated model log in with `hf auth login`; "
        "a folder or file on this machine needs no connection",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
