"""`overspill plan`: what would be where and what it takes, from headers alone."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from overspill.cli.options import ENGINE, MODEL, OUTPUT, Shared, shared_options
from overspill.cli.progress import out
from overspill.config import parse_bytes
from overspill.errors import ConfigError

ENGINES = ("vllm", "llama.cpp", "overspill")


@shared_options
def command(
    model: MODEL,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="Plan for this GPU, as L40S, by its data sheet.", rich_help_panel=ENGINE
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="NAME", help="The link of --gpu, as pcie4x16.", rich_help_panel=ENGINE),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", metavar="SIZE", help="Of the host beside --gpu.", rich_help_panel=ENGINE),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Ways that are sensible here, side by side.", rich_help_panel=OUTPUT),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Correct the forecast by what earlier runs here took.", rich_help_panel=OUTPUT
        ),
    ] = False,
    emit: Annotated[
        str | None,
        typer.Option(
            "--emit",
            metavar="vllm|llama.cpp|overspill",
            help="The command line that does the same there.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", metavar="N", min=1, help="Tensor-parallel ranks of --emit vllm.", rich_help_panel=OUTPUT
        ),
    ] = 1,
    *,
    shared: Shared,
) -> None:
    """Say what would go where and what it takes; no weight is read."""
    settings = shared.settings()
    if gpu is None and (link is not None or host_memory is not None):
        raise ConfigError(
            f"--{'link' if link is not None else 'host-memory'} without --gpu: this machine has its own",
            hint="--gpu names the one that is planned for",
        )
    if gpu is not None and (settings.engine.device not in ("auto", "cuda") or settings.engine.device_memory_bytes):
        raise ConfigError("--gpu stands for the device and its memory", hint="leave out --device and --device-memory")
    if emit is not None and emit not in ENGINES:
        raise ConfigError(f'--emit is "{emit}"', hint=f"one of {', '.join(ENGINES)}")
    if ranks != 1 and emit != "vllm":
        raise ConfigError("--ranks without --emit vllm: everything else is of one rank", hint="--emit vllm")
    if compare and emit is not None:
        raise ConfigError("--compare and --emit are two answers", hint="one of them")
    host_bytes = parse_bytes(host_memory, bare="GiB", field="host_memory") if host_memory is not None else None
    from overspill.api import prepare

    device = _named(gpu, link, host_bytes) if gpu is not None else None
    prepared = prepare(model, settings, device, judged=not compare, calibrated=calibrate)
    if compare:
        _compare(prepared, settings, shared)
    elif emit is not None:
        _emit(prepared, emit, ranks, model, shared)
    else:
        _show(prepared.plan, shared)


def _named(gpu: str, link: str | None, host_bytes: int | None) -> Any:
    from overspill.machine.named import NamedDevice
    from overspill.machine.specs import gpu_named, link_named

    found = gpu_named(gpu)
    return NamedDevice(found, link_named(found.link if link is None else link), host_bytes)


def _show(plan: Any, shared: Shared) -> None:
    from overspill.plan.report import plan_as_json, render_plan

    if shared.json_output:
        print(json.dumps(plan_as_json(plan)))
    else:
        out.print(render_plan(plan))


def _compare(prepared: Any, settings: Any, shared: Shared) -> None:
    from overspill.plan.alternatives import alternatives, alternatives_as_json, render_alternatives

    found = alternatives(prepared.plan, settings, prepared.device)
    if shared.json_output:
        print(json.dumps(alternatives_as_json(found)))
    else:
        out.print(render_alternatives(found))


def _emit(prepared: Any, engine: str, ranks: int, model: str, shared: Shared) -> None:
    from overspill.advice import advise, as_json, render

    advice = advise(prepared.plan, prepared.settings, engine, model_name=model, ranks=ranks, device=prepared.device)
    if shared.json_output:
        print(json.dumps(as_json(advice)))
    else:
        print(render(advice))
