"""What a file is by its first bytes, for the errors about files that are not what they should be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overspill.errors import CheckpointError

HEAD_BYTES = 64
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
CONVERT_PICKLE = (
    "convert it to safetensors once, on a machine where running the file's code is acceptable: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
)
# safetensors' own limit (MAX_HEADER_SIZE in its reference implementation).
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Kind:
    """A recognised kind of file, and the way out for who expected weights."""

    name: str
    hint: str | None = None


SAFETENSORS = Kind("a safetensors file", "give the file its own suffix, .safetensors")
GGUF = Kind("a GGUF file", "give the file its own suffix, .gguf")
LFS_POINTER = Kind("a git-lfs pointer, not the weights", "fetch the weights: git lfs pull")
PICKLE = Kind("a Python pickle, which runs code of its author when it is opened", CONVERT_PICKLE)
TORCH_ZIP = Kind(
    "a zip archive as torch.save writes it; the pickle inside runs code of its author when it is opened",
    CONVERT_PICKLE,
)
HTML = Kind("a web page", "the download saved an error or login page: download the file itself")
GZIP = Kind("a gzip archive", "unpack it first")
EMPTY = Kind("an empty file", "download it again")


def recognise(head: bytes) -> Kind | None:
    """The kind of file that starts with `head` (the first HEAD_BYTES bytes, or all there are)."""
    text = head.lstrip().lower()
    length = int.from_bytes(head[:8], "little")
    if not head:
        return EMPTY
    if head.startswith(b"GGUF"):
        return GGUF
    # Before pickle: a header of 640 bytes starts with the same two bytes as pickle's protocol 2.
    if head[8:9] == b"{" and length <= MAX_SAFETENSORS_HEADER_BYTES:
        return SAFETENSORS
    if head.startswith(b"version https://git-lfs"):
        return LFS_POINTER
    if head.startswith(b"PK\x03\x04"):
        return TORCH_ZIP
    if len(head) > 1 and head[0] == 0x80 and head[1] in range(2, 6):
        return PICKLE
    if text.startswith((b"<!doctype", b"<html")):
        return HTML
    if head.startswith(b"\x1f\x8b"):
        return GZIP
    return None


def wrong_kind(path: Path, expected: str, head: bytes) -> CheckpointError:
    """The error for a file that is not `expected` ("a GGUF file"), saying what it is instead."""
    kind = recognise(head)
    if kind is None:
        return CheckpointError(f"{path} is not {expected}: it starts with {head[:8]!r}")
    return CheckpointError(f"{path} is not {expected} but {kind.name}", hint=kind.hint)
