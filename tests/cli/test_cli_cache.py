from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import Cli

from overspill.checkpoint.converted import USED_NAME, ConvertedFolder, entry_key, entry_metadata
from overspill.checkpoint.converted_making import making, new_entry
from overspill.checkpoint.safetensors_layout import lay_out
from overspill.config import format_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConvertedFolder:
    monkeypatch.setenv("OVERSPILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", "1MiB")
    return ConvertedFolder.of_environment(os.environ)


def add(folder: ConvertedFolder, name: str, used_at: int) -> str:
    """An entry of one weight, and its key."""
    key = entry_key([name])
    sha256 = hashlib.sha256(bytes(1024)).hexdigest()
    metadata = entry_metadata({"w": name}, {"w": sha256}, [Path("/models") / f"{name}.gguf"])
    layout = lay_out([("w", "float32", (256,))], metadata)
    with making(folder, key), new_entry(folder, key, layout.nbytes) as path, path.open("r+b") as file:
        file.write(layout.head)
    os.utime(folder.path / key / USED_NAME, (used_at, used_at))
    return key


def test_an_empty_cache_says_so(cli: Cli, folder: ConvertedFolder) -> None:
    listed = cli("cache", "ls")
    assert (listed.code, listed.out) == (0, "")
    assert listed.err == f"the conversion cache is empty: {folder.path}\n"
    assert cli("cache", "ls", "--json").out == "[]\n"
    removed = cli("cache", "rm", "--all")
    assert (removed.code, removed.err) == (0, listed.err)
    assert not folder.path.exists()


def test_entries_are_listed_the_last_used_first(cli: Cli, folder: ConvertedFolder) -> None:
    older, newer = add(folder, "first", 1_000_000), add(folder, "second", 2_000_000)
    (held,) = folder.find(["first"])
    os.utime(folder.path / older / USED_NAME, (1_000_000, 1_000_000))
    found = json.loads(cli("cache", "ls", "--json").out)
    assert [entry["key"] for entry in found] == [newer, older]
    assert found[1]["made_from"] == ["/models/first.gguf"]
    assert found[1]["bytes"] == (folder.path / older / "weights.safetensors").stat().st_size
    assert (found[0]["weights"], found[0]["in_use"], found[1]["in_use"]) == (1, False, True)
    assert datetime.fromisoformat(found[0]["used_at"]) == datetime.fromtimestamp(2_000_000, UTC)
    assert datetime.fromisoformat(found[0]["made_at"]).date() <= datetime.now(UTC).date()
    shown = cli("cache", "ls")
    size = format_bytes(found[0]["bytes"])
    for text in (older[:12], newer[:12], "first.gguf", "second.gguf", size, "in use"):
        assert text in shown.out
    total = format_bytes(sum(entry["bytes"] for entry in found))
    assert shown.err == f"{total} of at most 1.00 MiB, in {folder.path}\n"
    held.lock.release()
    (folder.path / newer / "weights.safetensors").write_bytes(b"x")
    assert "damaged" in cli("cache", "ls").out
    assert "in use" not in cli("cache", "ls").out


def test_entries_are_removed_by_key_or_all(cli: Cli, folder: ConvertedFolder) -> None:
    keys = [add(folder, name, 1_000_000) for name in ("first", "second", "third")]
    size = format_bytes(folder.entries()[0].nbytes)
    removed = cli("cache", "rm", keys[0][:8], keys[0])
    assert (removed.code, removed.out) == (0, "")
    assert removed.err == f"removed {keys[0][:12]} ({size})\n"
    assert sorted(folder.entry_keys()) == sorted(keys[1:])
    assert cli("cache", "rm", "--all").code == 0
    assert folder.entries() == []


@pytest.mark.parametrize("everything", [False, True])
def test_what_a_process_uses_is_refused_by_name_and_nothing_is_removed(
    everything: bool, cli: Cli, folder: ConvertedFolder
) -> None:
    keys = [add(folder, name, 1_000_000) for name in ("first", "second")]
    script = (
        "import os, sys; from overspill.checkpoint.converted import ConvertedFolder\n"
        "held = ConvertedFolder.of_environment(os.environ).find(['first']); print('held', flush=True)\n"
        "sys.stdin.readline()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    user = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    with user:
        assert user.stdout is not None
        assert user.stdout.readline() == "held\n"
        refused = cli("cache", "rm", *(["--all"] if everything else keys))
        assert refused.code == 2
        assert f"in use, so nothing is removed: {keys[0][:12]}\nhint: " in refused.error
        assert len(folder.entries()) == 2
        user.communicate("\n")
    assert cli("cache", "rm", *keys).code == 0
    assert folder.entries() == []


def test_what_is_no_entry_is_listed_and_removed_by_name(cli: Cli, folder: ConvertedFolder, tmp_path: Path) -> None:
    kept = add(folder, "first", 1_000_000)
    nbytes = folder.entries()[0].nbytes
    blob, link, other = (folder.path / (digit * 64) for digit in "abc")
    blob.write_bytes(bytes(5000))
    link.symlink_to(tmp_path)
    other.mkdir()
    (other / "notes").touch()
    listed = cli("cache", "ls")
    assert (listed.code, listed.out.count("foreign"), listed.out.count("damaged")) == (0, 2, 1)
    total = format_bytes(nbytes + link.lstat().st_size)
    assert f"{total} of at most" in listed.err, "what is foreign does not count"
    found = {entry["key"]: entry for entry in json.loads(cli("cache", "ls", "--json").out)}
    assert [found[path.name]["foreign"] for path in (blob, link, other)] == [True, False, True]
    removed = cli("cache", "rm", blob.name, link.name, other.name)
    assert (removed.code, folder.entry_keys()) == (0, [kept])
    assert f"removed {'a' * 12} (4.88 KiB)" in removed.err
    assert folder.path.exists(), "what the link names stays"


def test_verify_reads_every_byte(cli: Cli, folder: ConvertedFolder) -> None:
    assert cli("cache", "verify").err == f"the conversion cache is empty: {folder.path}\n"
    keys = [add(folder, name, 1_000_000) for name in ("first", "second", "third")]
    checked = cli("cache", "verify")
    assert (checked.code, sorted(checked.out.splitlines())) == (0, sorted(f"{key[:12]} whole" for key in keys))
    file = folder.path / keys[1] / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (folder.path / keys[2] / "weights.safetensors").write_bytes(b"x")
    assert cli("cache", "verify", keys[0]).code == 0
    checked = cli("cache", "verify")
    assert checked.code == 1
    assert f"{keys[1][:12]} damaged: other bytes than were written in w\n" in checked.out
    assert f"{keys[2][:12]} damaged: {folder.path}" in checked.out
    assert f"{keys[0][:12]} whole\n" in checked.out
    assert "2 of 3 entries of the conversion cache are damaged\nhint: `overspill cache rm " in checked.error
    assert cli("cache", "verify", "zz").code == 2
    assert all((folder.path / key / USED_NAME).stat().st_mtime == 1_000_000 for key in keys), "no use"


def test_what_names_no_entry_is_refused(cli: Cli, folder: ConvertedFolder) -> None:
    keys = [add(folder, f"n{number}", 1_000_000) for number in range(17)]  # two of them begin alike
    begin = next(first for first in "0123456789abcdef" if sum(key.startswith(first) for key in keys) > 1)
    for arguments, told in (
        (["zz"], '"zz" is no entry of the conversion cache\nhint: it holds '),
        ([keys[0], begin], f'"{begin}" begins '),
        ([], "cache rm was given nothing to remove"),
        ([keys[0], "--all"], "cache rm was given keys, and --all"),
    ):
        refused = cli("cache", "rm", *arguments)
        assert refused.code == 2
        assert told in refused.error
    assert len(folder.entry_keys()) == 17
    assert cli("cache").code == 2
