"""`overspill cache`: the converted weights that are kept on disk; listing, checking and removing them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from overspill.checkpoint.converted import ConvertedFolder, Entry
from overspill.cli.progress import err, out
from overspill.config import format_bytes
from overspill.errors import CheckpointError, ConfigError, VerdictError

SHOWN_DIGITS = 12

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEBUG = Annotated[bool, typer.Option("--debug", help="Tracebacks.")]


@app.callback()
def _group() -> None:
    """List, check or remove converted weights that are kept on disk."""


@app.command("ls")
def list_entries(
    json_output: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
    debug: DEBUG = False,
) -> None:
    """List what the conversion cache holds, the last used first."""
    folder = ConvertedFolder.of_environment(os.environ)
    with folder.writing():
        entries = folder.entries()
    if json_output:
        print(json.dumps([_as_json(entry) for entry in entries]))
        return
    if not entries:
        err.print(f"the conversion cache is empty: {folder.path}", highlight=False, markup=False)
        return
    out.print(_table(entries))
    total = format_bytes(sum(entry.nbytes for entry in entries if not entry.foreign))
    err.print(f"{total} of at most {format_bytes(folder.limit_bytes)}, in {folder.path}", highlight=False, markup=False)


@app.command("rm")
def remove_entries(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys, or how they begin.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every entry.")] = False,
    debug: DEBUG = False,
) -> None:
    """Remove entries of the conversion cache; what is in use is refused."""
    if bool(keys) is everything:
        raise ConfigError(
            "cache rm was given " + ("keys, and --all" if keys else "nothing to remove"),
            hint="either keys as `overspill cache ls` shows them, or --all",
        )
    folder = ConvertedFolder.of_environment(os.environ)
    there = folder.entry_keys()
    chosen = there if keys is None or everything else list(dict.fromkeys(_named(keys, there)))
    with folder.writing():
        sizes = {entry.key: entry.nbytes for entry in folder.entries()} if chosen else {}
    folder.remove(chosen)
    for key in chosen:
        err.print(f"removed {key[:SHOWN_DIGITS]} ({format_bytes(sizes.get(key, 0))})", highlight=False, markup=False)
    if not chosen:
        err.print(f"the conversion cache is empty: {folder.path}", highlight=False, markup=False)


@app.command("verify")
def verify_entries(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys, or how they begin. [default: every entry]")
    ] = None,
    debug: DEBUG = False,
) -> None:
    """Read entries of the conversion cache whole, and compare their bytes with what was written."""
    from overspill.offload.conversion_cache import verify  # torch is slow to import, and the others do without

    folder = ConvertedFolder.of_environment(os.environ)
    there = folder.entry_keys()
    chosen = list(dict.fromkeys(_named(keys, there))) if keys else there
    damaged = []
    for key in chosen:
        try:
            names = verify(folder, key)
        except CheckpointError as error:
            found = error.message
        else:
            found = f"other bytes than were written in {', '.join(names)}" if names else ""
        if found:
            damaged.append(key[:SHOWN_DIGITS])
        print(f"{key[:SHOWN_DIGITS]} {'damaged: ' + found if found else 'whole'}", flush=True)
    if damaged:
        raise VerdictError(
            f"{len(damaged)} of {len(chosen)} entries of the conversion cache are damaged",
            hint=f"`overspill cache rm {' '.join(damaged)}` removes them, and they are made again when they are needed",
        )
    if not chosen:
        err.print(f"the conversion cache is empty: {folder.path}", highlight=False, markup=False)


def _named(keys: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    for given in keys:
        found = [key for key in there if given and key.startswith(given)]
        if not found:
            known = ", ".join(key[:SHOWN_DIGITS] for key in there) or "nothing"
            raise ConfigError(f'"{given}" is no entry of the conversion cache', hint=f"it holds {known}")
        if len(found) > 1:
            raise ConfigError(
                f'"{given}" begins {len(found)} keys: {", ".join(key[:SHOWN_DIGITS] for key in found)}',
                hint="give more of the key",
            )
        yield found[0]


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "key": entry.key,
        "bytes": entry.nbytes,
        "weights": entry.weights,
        "made_from": list(entry.made_from),
        "made_at": entry.made_at.isoformat() if entry.made_at is not None else None,
        "used_at": entry.used_at.isoformat(),
        "in_use": entry.in_use,
        "damaged": entry.damaged,
        "foreign": entry.foreign,
    }


def _table(entries: Sequence[Entry]) -> Table:
    table = Table()
    for column in ("key", "bytes", "weights"):
        table.add_column(column, justify="left" if column == "key" else "right", no_wrap=True)
    for column in ("made from", "made", "last used", ""):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(
            entry.key[:SHOWN_DIGITS],
            format_bytes(entry.nbytes),
            str(entry.weights),
            _files(entry.made_from),
            _moment(entry.made_at) if entry.made_at is not None else "not known",
            _moment(entry.used_at),
            _state(entry),
        )
    return table


def _state(entry: Entry) -> str:
    if entry.damaged:
        return "foreign" if entry.foreign else "damaged"
    return "in use" if entry.in_use else ""


def _files(paths: Sequence[str]) -> str:
    """A .gguf file's own name; for others the folder's says more."""
    if not paths:
        return "not known"
    first = Path(paths[0])
    named = first.name if first.suffix == ".gguf" else f"{first.parent.name}/{first.name}"
    return named + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _moment(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")
