"""Long work shows how far it is, on stderr, where someone is looking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_PIPED_WIDTH = 110  # of tables, where no terminal says how wide it is


class _Console(Console):
    """Breaks the lines of tables, and leaves those of sentences to who reads them."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=True)
        if not self.is_terminal:
            self.width = _PIPED_WIDTH

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # told in app.py, and not by rich's exit code 1, which is a failed verdict's


err = _Console(stderr=True)
out = _Console()


@contextmanager
def loading(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar that is fed with the bytes read as they arrive."""
    columns = (
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("loading", total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)
