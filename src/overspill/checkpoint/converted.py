"""The folder of converted weights: an entry for what was converted together, found by the keys of its weights.

lock                        held for moments: while room is made, an entry is put in its place, or removed
hashes/                     what is known of checkpoint files (contents.py)
KEY/weights.safetensors     the weights; the header's metadata says of each its key, and what it was made from
KEY/used                    its time of change is the last use; locked, shared, while the entry is in use
KEY.lock, KEY.part/         an entry that is being made, by who holds the lock
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from overspill.checkpoint.contents import ContentIndex
from overspill.checkpoint.file_locks import FileLock, lock_file
from overspill.checkpoint.records import TensorRecord
from overspill.checkpoint.safetensors import read_shard
from overspill.config.sizes import GIB, parse_bytes
from overspill.errors import CheckpointError, ConfigError

DIR_VARIABLE, LIMIT_VARIABLE = "OVERSPILL_CACHE_DIR", "OVERSPILL_CACHE_LIMIT"
LIMIT_BYTES = 50 * GIB
FILE_NAME = "weights.safetensors"
USED_NAME = "used"
_METADATA = "overspill"

logger = logging.getLogger("overspill")


def entry_key(weight_keys: Iterable[str]) -> str:
    """The key of an entry with these weights."""
    return hashlib.sha256("\n".join(sorted(weight_keys)).encode()).hexdigest()


def entry_metadata(keys: Mapping[str, str], made_from: Iterable[Path]) -> dict[str, str]:
    """An entry's header metadata; `keys` by tensor name."""
    made_at = datetime.now(UTC).isoformat()
    return {_METADATA: json.dumps({"keys": dict(keys), "made_from": list(map(str, made_from)), "made_at": made_at})}


@dataclass(frozen=True)
class Entry:
    """An entry as it is listed. `made_from` are files; nothing is known of a `damaged` one's making."""

    key: str
    nbytes: int
    weights: int
    made_from: tuple[str, ...]
    made_at: datetime | None
    used_at: datetime
    in_use: bool
    damaged: bool


@dataclass(frozen=True)
class Contents:
    """What an entry's header says: its weights by their keys."""

    records: Mapping[str, TensorRecord]
    made_from: tuple[str, ...]
    made_at: datetime


@dataclass(frozen=True)
class Held:
    """Weights of one entry, by key. The entry stays as long as the lock is held."""

    file: Path
    records: Mapping[str, TensorRecord]
    lock: FileLock


class ConvertedFolder:
    """Entries at `path`, of at most `limit_bytes` together: the one that was not used for longest goes first.

    The methods that write raise ConfigError where the folder cannot be written.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.index = ContentIndex(path / "hashes")

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> ConvertedFolder:
        """As OVERSPILL_CACHE_DIR, else XDG_CACHE_HOME, and OVERSPILL_CACHE_LIMIT say. ConfigError for no size."""
        home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(environ.get(DIR_VARIABLE) or Path(home) / "overspill" / "converted").expanduser().absolute()
        limit = environ.get(LIMIT_VARIABLE)
        return cls(path, parse_bytes(limit, field=LIMIT_VARIABLE) if limit else LIMIT_BYTES)

    # -- what is there -------------------------------------------------------------------------------------------------

    def entry_keys(self) -> list[str]:
        """Of all entries, damaged ones included."""
        try:
            names = sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return []
        return [name for name in names if len(name) == 64 and set(name) <= set("0123456789abcdef")]

    def entries(self) -> list[Entry]:
        """The last used first."""
        found = [entry for key in self.entry_keys() if (entry := self._entry(key)) is not None]
        return sorted(found, key=lambda entry: entry.used_at, reverse=True)

    def has(self, weight_keys: Iterable[str]) -> set[str]:
        """Those of `weight_keys` that an entry holds; none is held or counts as used."""
        wanted, there = set(weight_keys), set[str]()
        for key in self.entry_keys() if wanted else ():
            try:
                there |= self._contents(key).records.keys()
            except CheckpointError:
                continue
        return wanted & there

    def find(self, weight_keys: Iterable[str]) -> list[Held]:
        """Entries with any of `weight_keys`, held and marked as used. An entry that is damaged is removed."""
        missing, found = set(weight_keys), []
        for key in self.entry_keys():
            with self.writing():
                lock = lock_file(self.path / key / USED_NAME, shared=True, create=False)
            try:
                contents = self._contents(key)
            except CheckpointError as error:
                if lock is not None:
                    lock.release()
                self._remove_damaged(key, error)
                continue
            given = missing & contents.records.keys()
            if lock is None or not given:
                continue
            lock.touch()
            missing -= given
            found.append(Held(self._file(key), {k: contents.records[k] for k in given}, lock))
        return found

    def _file(self, key: str) -> Path:
        return self.path / key / FILE_NAME

    def _contents(self, key: str) -> Contents:
        """CheckpointError where the entry is not what was once written there."""
        file = self._file(key)
        shard = read_shard(file)
        try:
            said = json.loads(shard.metadata[_METADATA])
            made_at = datetime.fromisoformat(said["made_at"])
            records = {weight_key: shard.tensors[name] for name, weight_key in said["keys"].items()}
            made_from = tuple(map(str, said["made_from"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file} is no file of converted weights") from error
        if entry_key(records) != key:
            raise CheckpointError(f"{file} holds other weights than its folder's name says")
        return Contents(records, made_from, made_at)

    def _entry(self, key: str) -> Entry | None:
        folder = self.path / key
        try:
            nbytes = bytes_in(folder)
            used = (folder / USED_NAME).stat().st_mtime if (folder / USED_NAME).exists() else folder.stat().st_mtime
        except FileNotFoundError:
            return None
        lock = lock_file(folder / USED_NAME, create=False, wait=False)
        in_use = lock is None and (folder / USED_NAME).exists()
        if lock is not None:
            lock.release()
        used_at = datetime.fromtimestamp(used, UTC)
        try:
            contents = self._contents(key)
        except CheckpointError:
            return Entry(key, nbytes, 0, (), None, used_at, in_use, damaged=True)
        count = len(contents.records)
        return Entry(key, nbytes, count, contents.made_from, contents.made_at, used_at, in_use, damaged=False)

    # -- removing ------------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these entries. ConfigError, and none is removed, where one is in use."""
        if not keys:
            return
        with self.writing(), self.locked(), ExitStack() as locks:
            used = []
            for key in keys:
                lock = lock_file(self.path / key / USED_NAME, create=False, wait=False)
                if lock is not None:
                    locks.enter_context(lock)
                elif (self.path / key / USED_NAME).exists():
                    used.append(key)
            if used:
                raise ConfigError(
                    f"in use, so nothing is removed: {', '.join(key[:12] for key in used)}",
                    hint="end the processes that run from it, or name other entries",
                )
            for key in keys:
                shutil.rmtree(self.path / key)

    def _remove_damaged(self, key: str, error: CheckpointError) -> None:
        """Whoever uses it: it serves nobody."""
        with self.writing(), self.locked():
            try:
                self._contents(key)
            except CheckpointError:
                if (self.path / key).exists():
                    logger.warning("conversion cache: %s is removed: %s", key[:12], error.message)
                    shutil.rmtree(self.path / key)

    def locked(self) -> FileLock:
        """Held by whoever adds or removes entries. The folder must be there."""
        lock = lock_file(self.path / "lock")
        assert lock is not None
        return lock

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What the file system refuses in here is a ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the conversion cache {self.path} cannot be written: {error.strerror}",
                hint=f"name a folder that can be, with {DIR_VARIABLE}",
            ) from error


def bytes_in(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except FileNotFoundError:
        return 0
