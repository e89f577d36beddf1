"""From what a person calls a model (a file, a folder, a Hugging Face id) to its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection
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

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LISTED_NAMES = 8


def open_checkpoint(model: str | Path, *, revision: str | None = None, own_code: bool = False) -> Checkpoint:
    """The headers of `model`: a .gguf or .safetensors file, a folder, or a Hugging Face id `org/name`.

    What exists on disk wins over an id. Of an id's model, at `revision` if given, configuration and tokenizer are
    downloaded (with `own_code` its Python files too), and the headers alone of weights that are not here already
    (hub.py). No tensor data is read. Raises CheckpointError for what is missing, damaged,
    ambiguous or a pickle, and ConfigError for an empty name or a revision of local files.
    """
    if not str(model).strip():
        raise ConfigError("the model is empty", hint="give a .gguf file, a folder or a Hugging Face id")
    path = Path(model).expanduser()
    if not path.exists():
        return _open_id(str(model), revision, own_code)
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


def _open_id(model: str, revision: str | None, own_code: bool) -> Checkpoint:
    if not _HUB_ID.fullmatch(model) or Path(model).suffix in {".gguf", ".safetensors", *PICKLE_SUFFIXES}:
        raise CheckpointError(
            f"{model} does not exist", hint="give a .gguf file, a folder or a Hugging Face id (org/name)"
        )
    from overspill.checkpoint.hub import HubFiles, small_files

    folder, names = small_files(model, revision, own_code=own_code)
    if names is None:
        return _open_folder(folder)
    files = HubFiles(model, folder, names)
    if not files.listed(folder):
        raise _other_weights(model, names)
    return files.marked(open_safetensors(folder, files))


def _other_weights(model: str, names: Collection[str]) -> CheckpointError:
    """For a model on the hub that has no safetensors."""
    if pickles := sorted(name for name in names if Path(name).suffix in PICKLE_SUFFIXES):
        return _pickle_refused(_listing(pickles), model)
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        return CheckpointError(
            f"{model} has its weights as GGUF: {_listing(ggufs)}",
            hint=f"`hf download {model} {ggufs[0]}` fetches one, and prints the path to give",
        )
    return CheckpointError(f"{model} holds no weights (*.safetensors) but {_listing(sorted(names)) or 'nothing'}")


def _pickle_refused(what: str, folder: Path | str) -> CheckpointError:
    return CheckpointError(
        f"{folder} has its weights as Python pickles ({what}), which run code of their author when opened",
        hint=CONVERT_PICKLE,
    )


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED_NAMES
    return ", ".join(names[:_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")
