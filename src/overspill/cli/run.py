"""`overspill run`: load as planned, prove it, and answer a prompt."""

from __future__ import annotations

import json
import statistics
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from overspill.cli.options import MODEL, OUTPUT, Shared, shared_options
from overspill.cli.progress import err, loading
from overspill.errors import ConfigError

if TYPE_CHECKING:
    from overspill.engine import Completion, Engine

GENERATION = "Generation"


@shared_options
def command(
    model: MODEL,
    prompt: Annotated[
        str | None,
        typer.Option(help="What to complete; - or nothing reads standard input.", rich_help_panel=GENERATION),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at the most.", rich_help_panel=GENERATION)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=GENERATION)] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of this mass.", rich_help_panel=GENERATION)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Sample from so many likeliest tokens; 0 is all.", rich_help_panel=GENERATION)
    ] = 0,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="The prompt as it is, without the chat template.", rich_help_panel=GENERATION),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the whole plan first.", rich_help_panel=OUTPUT)
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Generate an answer with the weights placed as the plan says."""
    settings = shared.settings()
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("run has no prompt", hint='--prompt "…", or the text on standard input')
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    assert text is not None
    from overspill.api import prepare, start
    from overspill.engine import SamplingParams
    from overspill.plan.report import render_plan

    params = SamplingParams(max_tokens, temperature, top_p, top_k, shared.seed)
    prepared = prepare(model, settings)
    if verbose:
        err.print(render_plan(prepared.plan))
    else:
        for line in (*prepared.plan.notes, *(f"warning: {w}" for w in prepared.plan.warnings)):
            err.print(line, style="dim", highlight=False)
    with loading(prepared.checkpoint.nbytes) as progress:
        engine = start(prepared, progress)
    show = None if shared.json_output else _write
    completion = engine.generate(text, params, chat=not raw, on_text=show)
    if shared.json_output:
        print(json.dumps(_as_json(engine, completion), ensure_ascii=False, indent=2))
    else:
        print(flush=True)
        err.print(_summary(engine, completion), style="dim", highlight=False)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _summary(engine: Engine, completion: Completion) -> str:
    from overspill.config import format_bytes

    first, *rest = completion.steps
    parts = [f"{len(completion.prompt_ids)} prompt tokens in {first.seconds:.2f} s"]
    if rest:
        median = statistics.median(step.seconds for step in rest)
        moved = statistics.median(step.traffic.bytes for step in rest)
        parts.append(f"{len(rest) + 1} tokens, {1 / median:.1f} tokens/s")
        if moved:
            parts.append(f"{format_bytes(int(moved))} across the link a step")
    if engine.plan.device_kind == "emulated":
        parts.append("emulated: no GPU time")
    return "; ".join(parts)


def _as_json(engine: Engine, completion: Completion) -> dict[str, object]:
    from overspill.plan.report import plan_as_json

    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "steps": [
            {
                "tokens": s.tokens,
                "seconds": s.seconds,
                "link_bytes": s.traffic.bytes,
                "stall_s": s.traffic.stall_s,
            }
            for s in completion.steps
        ],
        "plan": plan_as_json(engine.plan),
        "ledger": engine.ledger.as_json(),
    }
