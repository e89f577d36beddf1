"""`overspill run`: load as planned, prove it, and answer a prompt."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from overspill.cli.options import MODEL, OUTPUT, Shared, shared_options
from overspill.cli.progress import err, loading
from overspill.config import format_bytes
from overspill.engine.sampling import SamplingParams
from overspill.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from overspill.api import Prepared
    from overspill.engine import Completion, Engine
    from overspill.offload.expert_runs import ExpertRuns

GENERATION = "Generation"
MAX_TOKENS = 128


@shared_options
def command(
    model: MODEL,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="What to answer; - or nothing reads standard input.", metavar="TEXT", rich_help_panel=GENERATION
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens to generate at the most. [default: {MAX_TOKENS}, or what --max-model-len leaves]",
            metavar="N",
            show_default=False,
            rich_help_panel=GENERATION,
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", metavar="X", rich_help_panel=GENERATION)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the likeliest tokens of this mass.", metavar="X", rich_help_panel=GENERATION),
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(help="Sample from so many likeliest tokens; 0 is all.", metavar="N", rich_help_panel=GENERATION),
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
    params = SamplingParams(MAX_TOKENS if max_tokens is None else max_tokens, temperature, top_p, top_k, shared.seed)
    text = _text(prompt)
    from overspill.api import prepare, start, with_files
    from overspill.engine.tokens import encode, refuse_length, refuse_no_text
    from overspill.plan.report import render_plan

    prepared = prepare(model, settings)
    refuse_no_text(prepared.plan.model)
    prompt_ids = encode(prepared.tokenizer, text, chat=not raw)
    room = prepared.plan.context_tokens - len(prompt_ids)
    if max_tokens is None:
        params = replace(params, max_tokens=max(1, min(MAX_TOKENS, room)))
    refuse_length(len(prompt_ids), params.max_tokens, prepared.plan.context_tokens)
    if verbose:
        err.print(render_plan(prepared.plan))
    else:
        for line in (
            *(f"note: {note}" for note in prepared.plan.notes),
            *(f"warning: {warning}" for warning in prepared.plan.warnings),
        ):
            err.print(line, style="dim", highlight=False, markup=False)
    prepared = with_files(prepared)
    with loading(prepared.checkpoint.nbytes) as progress:
        engine = start(prepared, progress)
    try:
        completion = engine.generate(prompt_ids, params, on_text=None if shared.json_output else _write)
        told = _against_forecast(prepared, completion)
        if shared.json_output:
            print(json.dumps(_as_json(engine, completion)))
        else:
            print(flush=True)
            for line in (_summary(engine, completion), *told, *_experts_summary(engine.placed.experts)):
                err.print(line, style="dim", highlight=False)
    finally:
        if (counted := _stream_line(engine.placed.experts)) is not None:
            print(counted, file=sys.stderr, flush=True)


def _text(prompt: str | None) -> str:
    """The prompt that was given, or standard input without its last line end. ConfigError where there is none."""
    piped = prompt in (None, "-")
    if piped and (sys.stdin is None or (prompt is None and sys.stdin.isatty())):
        raise ConfigError("run has no prompt", hint='--prompt "…", or the text on standard input')
    try:
        text = sys.stdin.read().removesuffix("\n") if piped else str(prompt)
        text.encode()
    except UnicodeError as error:
        raise ConfigError(f"the prompt is not text: {error}", hint="give it in UTF-8") from error
    if not text:
        raise ConfigError("the prompt is empty", hint='--prompt "…", or the text on standard input')
    return text


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _against_forecast(prepared: Prepared, completion: Completion) -> list[str]:
    """What a step took beside what the plan had forecast, kept for `overspill plan --calibrate`."""
    plan, steps = prepared.plan, [step.seconds for step in completion.steps[2:]]
    if plan.rates is None or not steps:
        return []
    from overspill.machine.observed import remember
    from overspill.plan.forecast import pass_forecast

    kept_tokens = len(completion.prompt_ids) + len(completion.token_ids) // 2
    forecast_s, measured_s = (
        pass_forecast(plan, plan.rates, 1, kept_tokens=kept_tokens).seconds,
        statistics.median(steps),
    )
    way = ", ".join(plan.ways)
    told = [
        f"a decode step was forecast at {forecast_s * 1e3:.1f} ms and took {measured_s * 1e3:.1f} ms, "
        f"{measured_s / forecast_s:.2f} times that"
    ]
    try:
        remember(prepared.device, plan.model.architecture, way, forecast_s=forecast_s, measured_s=measured_s)
    except CheckpointError as error:  # the answer is there all the same
        told.append(f"warning: {error.message}")
    return told


def _summary(engine: Engine, completion: Completion) -> str:
    """What was measured, in one line."""
    first, *rest = completion.steps
    generated = len(completion.token_ids)
    answer = f"answer: {generated} token{'s' * (generated != 1)}"
    if rest:
        answer += f", {1 / statistics.median(step.seconds for step in rest):.1f} tokens/s"
    if completion.finish_reason == "length":
        answer += ", cut there (--max-tokens)"
    parts = [f"prompt: {first.tokens} tokens in {first.seconds:.2f} s", answer]
    if moved := statistics.median(step.traffic.bytes for step in rest or [first]):
        parts.append(f"{format_bytes(int(moved))} over the link per {'token' if rest else 'prompt pass'}")
    if engine.plan.device_kind == "emulated":
        parts.append("emulated: no GPU time")
    return "; ".join(parts)


def _experts_summary(experts: ExpertRuns) -> Iterator[str]:
    """What became of routed experts that the CPU computes or that stream, a line each."""
    if experts.in_place:
        calls, layers = sum(run.use.calls for run in experts.in_place), len(experts.in_place)
        read = format_bytes(sum(run.use.bytes for run in experts.in_place))
        yield f"experts on the CPU: {layers} layer{'s' * (layers != 1)}, {calls} calls, {read} of weights read there"
    if experts.stream is not None:
        counts = experts.stream.counts
        hits = f"{counts.hits / counts.lookups:.0%} of {counts.lookups}" if counts.lookups else "none looked up"
        yield (
            f"expert slots: hits {hits}; misses {counts.fetched} fetched, {counts.streamed} streamed, "
            f"{counts.computed} on the CPU; prefetched {counts.prefetched} ({counts.prefetch_used} used, "
            f"{counts.prefetch_wasted} wasted); {counts.evictions} evicted; {format_bytes(counts.bytes)} brought; "
            f"waited {counts.stall_s:.2f} s"
        )


def _stream_line(experts: ExpertRuns) -> str | None:
    """vllm.cpp's line at exit, which scripts look for; a slot that must be had is had, so none is ever exhausted."""
    if experts.stream is None:
        return None
    counts, steps = experts.stream.counts, experts.streamed[0].use.calls
    return (
        f"[expert-stream] steps={steps} hits={counts.hits} misses={counts.misses} evictions={counts.evictions} "
        f"fills={counts.fills} bytes={counts.bytes} exhausted=0"
    )


def _experts_as_json(experts: ExpertRuns) -> dict[str, object] | None:
    if not experts.by_module():
        return None
    slots = None
    if experts.stream is not None:
        counts, cache = experts.stream.counts, experts.stream.cache
        derived = {name: getattr(counts, name) for name in ("lookups", "misses", "fills")}
        slots = {"count": cache.count, "held": cache.count - cache.free, **asdict(counts), **derived}
    layers = [
        {"path": path, "layer": run.block.layer, "access": run.access.value, **asdict(run.use)}
        for path, run in experts.by_module()
    ]
    return {"slots": slots, "layers": layers}


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
        "experts": _experts_as_json(engine.placed.experts),
    }
