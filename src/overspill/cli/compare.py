"""`overspill compare`: both sides in fresh processes, judged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.options import MODEL, OUTPUT, Shared, shared_options
from overspill.cli.progress import err, out
from overspill.errors import VerdictError

COMPARISON = "Comparison"


@shared_options
def command(
    model: MODEL,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Offload document of the side to compare with. [default: nothing offloaded]",
            rich_help_panel=COMPARISON,
            show_default=False,
        ),
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(
            help="Offload document of the side to judge. [default: the offload options]",
            rich_help_panel=COMPARISON,
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What to complete; may be given more than once.", rich_help_panel=COMPARISON),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate for each prompt.", rich_help_panel=COMPARISON)
    ] = 32,
    repeat: Annotated[int, typer.Option(help="Runs of each side, interleaved.", rich_help_panel=COMPARISON)] = 3,
    output: Annotated[
        Path, typer.Option(help="Folder for report.html and report.json.", rich_help_panel=OUTPUT)
    ] = Path("report"),
    *,
    shared: Shared,
) -> None:
    """Run with and without the offload, in fresh processes, and judge: bytes moved, memory, answers, time."""
    raise VerdictError("not wired yet")
