"""`overspill compare`: both sides in fresh processes, judged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.options import MODEL, OUTPUT, Shared, shared_options
from overspill.cli.progress import err, out
from overspill.config import read_document, resolve
from overspill.errors import ConfigError, VerdictError

COMPARISON = "Comparison"
PROMPTS = ("What is the capital of France?", "Explain in one sentence why the sky is blue.")


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
    max_slowdown: Annotated[
        float | None,
        typer.Option(
            help="Fail where a decode step takes more than X times the baseline's. [default: not judged]",
            metavar="X",
            show_default=False,
            rich_help_panel=COMPARISON,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for report.html and report.json.", rich_help_panel=OUTPUT)
    ] = Path("report"),
    *,
    shared: Shared,
) -> None:
    """Run with and without the offload, in fresh processes, and judge: bytes moved, memory, answers, time."""
    document = shared.values["offload_config"]
    if candidate is not None and document is not None:
        raise ConfigError(
            "--candidate and --offload-config both say what the candidate offloads", hint="give one of the two"
        )
    document = candidate if candidate is not None else document
    resolve(document, shared.flags(), shared.engine())
    resolve(baseline, None, shared.engine())
    from overspill.compare import Event, Outcome, Planned, RunFinished, RunStarted
    from overspill.compare import compare as run_comparison
    from overspill.compare.terminal import render_terminal
    from overspill.plan.report import render_plan

    with err.status("planning both sides") as status:

        def show(event: Event) -> None:
            match event:
                case Planned():
                    (err if shared.json_output else out).print(render_plan(event.candidate))
                case RunStarted():
                    status.update(f"run {event.number} of {event.total}: {event.side}")
                case RunFinished():
                    err.print(f"run {event.number} of {event.total}: {event.side}, {event.seconds:.1f} s")

        report = run_comparison(
            model,
            _document(baseline),
            _document(document),
            prompts=prompt or list(PROMPTS),
            max_tokens=max_tokens,
            repeat=repeat,
            output_dir=output,
            progress=show,
            max_slowdown=max_slowdown,
            **shared.flags(),
            **shared.engine(),
        )
    if shared.json_output:
        print((output / "report.json").read_text())
    else:
        out.print(render_terminal(report))
        out.print(f"report: {output / 'report.html'} and {output / 'report.json'}")
    if report.failed:
        failed = ", ".join(verdict.name for verdict in report.verdicts if verdict.outcome is Outcome.FAIL)
        raise VerdictError(f"failed: {failed}", hint=f"{output / 'report.html'} shows the grounds")


def _document(text: str | None) -> str | None:
    return read_document(text) if text is not None else None
