"""From what a person calls a model (a file, a folder, a Hugging Face id) to its checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from overspill.checkpoint.files import opened
from overspill.checkpoint.gguf import PART_NAME, open_gguf
from overspill.checkpoint.records import Checkpoint
from overspill.checkpoint.sharded import INDEX_NAME, open_safetensors
from overspill.checkpoint.sniff import (
    CONVERT_PICKLE,
    GGUF,
    HEAD_BYTES,
    PICKLE_SUFFIXES,
    SAFETENSORS,
    recognise,
    wrong_kind,
)
from overspill.errors import CheckpointError, ConfigError

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
# Subfolders hold other formats of the same weights (original/, onnx/), consolidated* a second copy of them.
HUB_IGNORED = ["*/*", "consolidated*", "adapter_*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LISTED_NAMES = 8


def open_checkpoint(model: str | Path, *, revision: str | None = None) -> Checkpoint:
    """The headers of `model`: a .gguf or .safetensors file, a folder, or a Hugging Face id `org/name`.

    What exists on disk wins over an id; only an id is downloaded (weights, configuration and tokenizer), at
    `revision` if given. No tensor data is read. Raises CheckpointError for what is missing, damaged,
    ambiguous or a pickle, and ConfigError for an empty name or a revision of local files.
    """
    if not str(model).strip():
        raise ConfigError("the model is empty", hint="give a .gguf file, a folder or a Hugging Face id")
    path = Path(model).expanduser()
    if not path.exists():
        return _open_folder(_download(str(model), revision))
    if revision is not None:
        raise ConfigError(f"revision {revision!r} is given for local files: {path}", hint="leave the revision out")
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLE_SUFFIXES:
        raise _pickle_refused(path.name, path.parent)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return open_safetensors(path)
    with opened(path) as file:
        head = file.read(0, HEAD_BYTES)
    kind = recognise(head)
    if kind is GGUF:
        return open_gguf(path)
    if kind is SAFETENSORS:
        return open_safetensors(path)
    raise wrong_kind(path, "a safetensors or GGUF file", head)


def _open_folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}") from error
    if any(name == INDEX_NAME or name.endswith(".safetensors") for name in names):
        return open_safetensors(folder)
    models = {_model_name(name): name for name in reversed(names) if name.endswith(".gguf")}
    if len(models) == 1:
        return open_gguf(folder / next(iter(models.values())))
    if models:
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models: {_listing(sorted(models.values()))}",
            hint="give the path of the one that is meant",
        )
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        raise _pickle_refused(_listing(pickles), folder)
    raise CheckpointError(
        f"{folder} holds no weights (*.safetensors, *.gguf) but {_listing(names) or 'nothing'}",
        hint="give the folder that holds the weights, or the path of a .gguf file",
    )


def _model_name(file_name: str) -> str:
    """What the parts of one split GGUF model have in common."""
    match = PART_NAME.fullmatch(file_name)
    return f"{match['stem']}-of-{match['count']}" if match else file_name


def _download(model: str, revision: str | None) -> Path:
    """The local folder of the Hugging Face model `model`, downloaded if it is not in the hub's cache."""
    if not _HUB_ID.fullmatch(model) or Path(model).suffix in {".gguf", ".safetensors", *PICKLE_SUFFIXES}:
        raise CheckpointError(
            f"{model} does not exist", hint="give a .gguf file, a folder or a Hugging Face id (org/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2

    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED)
    except (OSError, ValueError, HTTPError) as error:
        where = model if revision is None else f"{model} at revision {revision}"
        raise CheckpointError(
            f"{where} is neither here nor to be had from the Hugging Face hub: {_first_line(error)}",
            hint="check the name and the connection; for a gated model log in with `hf auth login`; "
            "a folder or file on this machine needs no connection",
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _pickle_refused(what: str, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} has its weights as Python pickles ({what}), which run code of their author when opened",
        hint=CONVERT_PICKLE,
    )


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED_NAMES
    return ", ".join(names[:_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")
