"""The folder of converted weights: an entry for what was converted together, found by the keys of its weights.

lock                        held for moments: while room is made, an entry is put in its place, or removed
hashes/                     what is known of checkpoint files (contents.py)
KEY/weights.safetensors     the weights; the header's metadata says of each its key, its bytes' SHA-256, and its origin
KEY/used                    its time of change is the last use; locked, shared, while the entry is in use
KEY.lock                    held by the one process that makes KEY
KEY.part/                   the entry in the making; its `used` is locked by who writes it

Nothing here is reached through a symbolic link: one in an entry's place is removed itself. What else bears a key for a
name, and never was an entry, is listed, and left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from overspill.checkpoint.contents import ContentIndex
from overspill.checkpoint.file_locks import FileLock, lock_file
from overspill.checkpoint.own_files import bytes_in, kind_of, take_away
from overspill.checkpoint.records import TensorRecord
from overspill.checkpoint.safetensors import read_shard
from overspill.config.sizes import GIB, parse_bytes
from overspill.errors import CheckpointError, ConfigError

DIR_VARIABLE, LIMIT_VARIABLE = "OVERSPILL_CACHE_DIR", "OVERSPILL_CACHE_LIMIT"
LIMIT_BYTES = 50 * GIB
FILE_NAME = "weights.safetensors"
USED_NAME = "used"
NO_DIGEST = "0" * 64
_METADATA = "overspill"
_HEX = frozenset("0123456789abcdef")

logger = logging.getLogger("overspill")


def entry_key(weight_keys: Iterable[str]) -> str:
    """The key of an entry with these weights."""
    return hashlib.sha256("\n".join(sorted(weight_keys)).encode()).hexdigest()


def is_key(name: str) -> bool:
    return len(name) == 64 and _HEX.issuperset(name)


def entry_metadata(keys: Mapping[str, str], sha256: Mapping[str, str], made_from: Iterable[Path]) -> dict[str, str]:
    """An entry's header metadata; `keys` of the weights, and `sha256` of their bytes, by tensor name.

    As long with NO_DIGEST in the place of hashes as with them.
    """
    made_at = datetime.now(UTC).isoformat(timespec="microseconds")
    said = {"keys": dict(keys), "sha256": dict(sha256), "made_from": list(map(str, made_from)), "made_at": made_at}
    return {_METADATA: json.dumps(said)}


@dataclass(frozen=True)
class Entry:
    """An entry as it is listed. `made_from` are files; nothing is known of a `damaged` one's making.

    `foreign` is a damaged one that never was an entry: it does not count, and only `remove` removes it.
    """

    key: str
    nbytes: int
    weights: int
    made_from: tuple[str, ...]
    made_at: datetime | None
    used_at: datetime
    in_use: bool
    damaged: bool
    foreign: bool


@dataclass(frozen=True)
class Contents:
    """What an entry's header says: its weights, and the SHA-256 of their bytes, by their keys."""

    records: Mapping[str, TensorRecord]
    sha256: Mapping[str, str]
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
        return [name for name in names if is_key(name)]

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
        """Entries with any of `weight_keys`, held and marked as used. Damaged ones go, foreign ones are left alone."""
        missing, found = set(weight_keys), []
        for key in self.entry_keys():
            lock = self._use(key)
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

    @contextmanager
    def reading(self, key: str) -> Iterator[Contents]:
        """What is in entry `key`, which stays meanwhile, and is not marked. CheckpointError for a damaged one."""
        lock = self._use(key)
        try:
            yield self._contents(key)
        finally:
            if lock is not None:
                lock.release()

    def _use(self, key: str) -> FileLock | None:
        """None where there is no such entry."""
        used = self.path / key / USED_NAME
        with self.writing():
            if not self._has_form(key):
                return None
            lock = lock_file(used, shared=True, create=False)
            if lock is None:  # the entry went, or has lost that file; while `locked` none goes
                with self.locked():
                    lock = lock_file(used, shared=True) if self._has_form(key) else None
        return lock

    def _has_form(self, key: str) -> bool:
        folder = self.path / key
        form = kind_of(folder), kind_of(self._file(key))
        return form == ("folder", "file") and kind_of(folder / USED_NAME) in ("file", None)

    def _file(self, key: str) -> Path:
        return self.path / key / FILE_NAME

    def _contents(self, key: str) -> Contents:
        """CheckpointError where the entry is not what was once written there."""
        file = self._file(key)
        for path, wanted in ((self.path / key, "folder"), (file, "file"), (self.path / key / USED_NAME, "file")):
            if (kind := kind_of(path)) not in (wanted, None):
                raise CheckpointError(f"{path} is no {wanted} but a {kind}")
        shard = read_shard(file)
        try:
            said = json.loads(shard.metadata[_METADATA])
            made_at = datetime.fromisoformat(said["made_at"])
            records = {weight_key: shard.tensors[name] for name, weight_key in said["keys"].items()}
            sha256 = {weight_key: str(said["sha256"][name]) for name, weight_key in said["keys"].items()}
            made_from = tuple(map(str, said["made_from"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file} is no file of converted weights") from error
        if entry_key(records) != key:
            raise CheckpointError(f"{file} holds other weights than its folder's name says")
        return Contents(records, sha256, made_from, made_at)

    def _entry(self, key: str) -> Entry | None:
        folder = self.path / key
        used = folder / USED_NAME
        lockable = kind_of(folder) == "folder" and kind_of(used) == "file"
        try:
            nbytes = bytes_in(folder)
            used_at = datetime.fromtimestamp((used if lockable else folder).lstat().st_mtime, UTC)
            lock = lock_file(used, create=False, wait=False) if lockable else None
            in_use = lockable and lock is None and used.exists()
            if lock is not None:
                lock.release()
            contents = self._contents(key)
        except FileNotFoundError:
            return None
        except CheckpointError:
            return Entry(key, nbytes, 0, (), None, used_at, in_use, damaged=True, foreign=self._is_foreign(key))
        made_from, made_at, weights = contents.made_from, contents.made_at, len(contents.records)
        return Entry(key, nbytes, weights, made_from, made_at, used_at, in_use, damaged=False, foreign=False)

    def _is_foreign(self, key: str) -> bool:
        """Of a damaged one: whether it is neither a link nor a folder with nothing but an entry's files."""
        folder = self.path / key
        if kind_of(folder) != "folder":
            return kind_of(folder) in ("file", "special file")
        return any(path.name not in (FILE_NAME, USED_NAME) for path in folder.iterdir())

    # -- removing ------------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these entries. ConfigError, and none is removed, where one is in use."""
        if not keys:
            return
        with self.writing(), self.locked(), ExitStack() as claims:
            used = []
            for key in keys:
                if (claim := self.claim(key)) is not None:
                    claims.enter_context(claim)
                else:
                    used.append(key)
            if used:
                raise ConfigError(
                    f"in use, so nothing is removed: {', '.join(key[:12] for key in used)}",
                    hint="end the processes that run from it, or name other entries",
                )
            for key in keys:
                take_away(self.path / key)

    def claim(self, key: str) -> AbstractContextManager[object] | None:
        """While `locked`: what keeps others from using entry `key` before it is removed; None where it is in use."""
        used = self.path / key / USED_NAME
        if kind_of(self.path / key) != "folder" or kind_of(used) not in ("file", None):
            return nullcontext()
        return lock_file(used, wait=False)

    def _remove_damaged(self, key: str, error: CheckpointError) -> None:
        """Whoever uses it: it serves nobody."""
        with self.writing(), self.locked():
            try:
                self._contents(key)
            except CheckpointError:
                if kind_of(self.path / key) is None:
                    return
                if self._is_foreign(key):
                    logger.warning("conversion cache: %s is no entry, and is left alone: %s", key[:12], error.message)
                    return
                logger.warning("conversion cache: %s is removed: %s", key[:12], error.message)
                take_away(self.path / key)

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
                f"the conversion cache {self.path} cannot be written: {error.strerror or error}",
                hint=f"name a folder that can be, with {DIR_VARIABLE}",
            ) from error
