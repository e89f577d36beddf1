"""`overspill serve`: load as planned, prove it, and answer over HTTP until told to stop."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.help import GroupedCommand
from overspill.cli.options import ENGINE, Shared, shared_options
from overspill.cli.progress import err, loading
from overspill.config import Settings, parse_bytes
from overspill.errors import ConfigError
from overspill.serve.address import address_of, bound, is_loopback
from overspill.serve.limits import MIB, Limits
from overspill.serve.vllm_flags import without_vllm_flags

if TYPE_CHECKING:
    from overspill.plan import Plan

SERVER = "Server"
MAX_NUM_SEQS = 32
BATCHED_TOKENS, BATCHED_TOKENS_ON_GPU = 512, 2048  # a pass should not hold up those who decode for seconds
KEY_VARIABLES = ("OVERSPILL_API_KEY", "VLLM_API_KEY")
_LIMITS = Limits()
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")

logger = logging.getLogger(__name__)


def _server(text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SERVER, **extra)


def _engine(text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=ENGINE, show_default=False, **extra)


class ServeCommand(GroupedCommand):
    """Knows vLLM's flags, and so can refuse them by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept, notes = without_vllm_flags(args)
        for note in notes:
            logger.info("note: %s", note)
        return list(super().parse_args(ctx, kept))


@partial(shared_options, max_num_seqs=MAX_NUM_SEQS)
def command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, or .gguf file.", show_default=False)
    ] = None,
    model_option: Annotated[str | None, _engine("The same as MODEL.", "--model", metavar="MODEL")] = None,
    host: Annotated[str, _server("The address to listen at; others than loopback want --api-key.")] = "127.0.0.1",
    port: Annotated[int, _server("The port to listen at; 0 takes a free one.", min=0, max=65535, metavar="N")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _server("What the model is called; may be said again. [default: MODEL]", metavar="NAME", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None,
        _server(f"What clients must show. [default: {' or '.join(KEY_VARIABLES)} in the environment]", metavar="KEY"),
    ] = None,
    allow_unauthenticated: Annotated[
        bool, _server("Serve whoever can reach --host, without a key.", "--allow-unauthenticated")
    ] = False,
    allowed_origins: Annotated[
        list[str] | None,
        _server("Web pages of this origin may use the server; may be said again, or a JSON list.", metavar="ORIGIN"),
    ] = None,
    max_waiting: Annotated[
        int, _server("Requests that may wait; more are told to come back.", min=1, metavar="N")
    ] = _LIMITS.max_waiting,
    max_body_bytes: Annotated[
        str, _server("The largest body of a request: a size as 16MiB.", metavar="SIZE")
    ] = f"{_LIMITS.max_body_bytes // MIB}MiB",
    grace: Annotated[float, _server("Seconds that running requests may take after SIGTERM.", metavar="SECONDS")] = 30.0,
    max_num_batched_tokens: Annotated[
        int | None,
        _engine(
            "Tokens of one pass, prompts and answers together. "
            f"[default: {BATCHED_TOKENS_ON_GPU} on a GPU, else {BATCHED_TOKENS}]",
            metavar="N",
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, _engine("Device memory for the KV cache: a size as 512MiB, or bytes.", metavar="SIZE")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, _engine("Share of the device's memory that may be used, in place of a size.", metavar="X")
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Answer OpenAI's API over HTTP, with the weights placed as the plan says."""
    name = _one_model(model, model_option)
    sequences = int(shared.values["max_num_seqs"])
    options: dict[str, Any] = {"max_num_batched_tokens": _batch_tokens(max_num_batched_tokens, sequences)}
    if kv_cache_memory_bytes is not None:
        options["kv_cache_memory_bytes"] = parse_bytes(kv_cache_memory_bytes, field="kv_cache_memory_bytes")
    settings = shared.settings(**options)
    _refuse_share(gpu_memory_utilization, settings)
    if not grace >= 0.0:
        raise ConfigError(f"--grace is {grace}", hint="seconds, as 30")
    limits = Limits(max_waiting=max_waiting, max_body_bytes=_body_bytes(max_body_bytes))
    origins = _origins(allowed_origins or [])
    key = _key(api_key)
    names = _names(served_model_name, name)
    listener = bound(host, port, anyone=key is not None or allow_unauthenticated)
    with listener:
        if gpu_memory_utilization is not None:
            options["device_memory_bytes"] = int(gpu_memory_utilization * _device_bytes(settings))
        if max_num_batched_tokens is None and _on_gpu(settings):
            options["max_num_batched_tokens"] = max(BATCHED_TOKENS_ON_GPU, sequences)
        settings = shared.settings(**options)
        from overspill.api import prepare, start, with_files
        from overspill.engine.service import EngineService
        from overspill.engine.tokens import refuse_no_text
        from overspill.serve.app import create_app
        from overspill.serve.listen import run

        prepared = prepare(name, settings)
        refuse_no_text(prepared.plan.model, by_steps="serve")
        _tell(prepared.plan)
        prepared = with_files(prepared)
        with loading(prepared.checkpoint.nbytes) as progress:
            engine = start(prepared, progress)
        service = EngineService(
            engine,
            max_num_seqs=settings.engine.max_num_seqs,
            max_waiting=limits.max_waiting,
            max_batch_tokens=options["max_num_batched_tokens"],
        )
        app = create_app(
            service,
            engine,
            model_names=names,
            api_key=key,
            cors_origins=origins,
            loopback_only=is_loopback(str(listener.getsockname()[0])),
            limits=limits,
            seed=settings.engine.seed,
        )
        service.start()

        def ready() -> None:
            address = address_of(listener)
            print(f"serving {' '.join(names)} at {address}", file=sys.stderr, flush=True)
            if shared.json_output:
                print(json.dumps({"address": address, "models": names}), flush=True)

        run(app, service, listener, limits=limits, grace_s=grace, on_ready=ready)


def _one_model(positional: str | None, option: str | None) -> str:
    if positional is None and option is None:
        raise ConfigError("serve has no model", hint="overspill serve MODEL")
    if positional is not None and option is not None and positional != option:
        raise ConfigError(f"the model is {positional!r}, but --model says {option!r}", hint="give it once")
    return str(positional if positional is not None else option)


def _names(given: list[str] | None, model: str) -> list[str]:
    """Where no name is given: the hub's, or the last part of a path, since where files lie is nobody's business."""
    names = given or [Path(model).resolve().name if Path(model).exists() else model]
    if not all(names):
        raise ConfigError('--served-model-name is ""', hint="a name, or leave it out")
    return list(dict.fromkeys(names))


def _key(given: str | None) -> str | None:
    source, key = "--api-key", given
    if key is None:
        source = next((name for name in KEY_VARIABLES if os.environ.get(name)), "")
        if not source:
            return None
        key = os.environ[source]
        logger.info("note: the API key is that of %s", source)
    if not key or key != key.strip():
        raise ConfigError(f"{source} is empty or has spaces around it", hint="a key that is hard to guess, or none")
    return key


def _origins(given: list[str]) -> list[str]:
    origins: list[str] = []
    for text in given:
        try:
            listed = json.loads(text) if text.lstrip().startswith("[") else [text]
        except ValueError:
            listed = [None]
        if not all(isinstance(origin, str) and _ORIGIN.fullmatch(origin) for origin in listed):
            raise ConfigError(
                f"--allowed-origins is {text!r}", hint="an origin as https://example.org, *, or a JSON list of such"
            )
        origins += listed
    return origins


def _batch_tokens(given: int | None, sequences: int) -> int:
    if given is not None and given < sequences:
        raise ConfigError(
            f"--max-num-batched-tokens is {given}, less than --max-num-seqs {sequences}: each has a token in a pass",
            hint=f"at least {sequences}, or fewer sequences",
        )
    return max(BATCHED_TOKENS, sequences) if given is None else given


def _on_gpu(settings: Settings) -> bool:
    if settings.engine.device not in ("auto", "cuda"):
        return False
    import torch

    return torch.cuda.is_available()


def _body_bytes(text: str) -> int:
    nbytes = parse_bytes(text, field="max_body_bytes")
    if not nbytes:
        raise ConfigError(f"--max-body-bytes is {text}: no request would pass", hint="a size as 16MiB")
    return nbytes


def _refuse_share(share: float | None, settings: Settings) -> None:
    """ConfigError for a share of the device's memory that says nothing, or says it a second time."""
    if share is None:
        return
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"--gpu-memory-utilization is {share}", hint="a share above 0 and at most 1, as 0.9")
    if settings.engine.device == "cpu":
        raise ConfigError(
            f"--gpu-memory-utilization is {share}, but the cpu has no memory of its own: it computes in host memory",
            hint="leave it out, or --device emulated",
        )
    if settings.engine.device != "emulated" and settings.engine.device_memory_bytes is not None:
        raise ConfigError(
            "--gpu-memory-utilization and --device-memory both say how much of the device may be used",
            hint="give one of them",
        )


def _device_bytes(settings: Settings) -> int:
    """What the share is of: the GPU's memory, or what the emulated device is given."""
    if settings.engine.device == "emulated":
        from overspill.machine.emulated import DEFAULT_MEMORY_BYTES

        return settings.engine.device_memory_bytes or DEFAULT_MEMORY_BYTES
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "--gpu-memory-utilization is given, but there is no GPU", hint="leave it out, or --device emulated"
        )
    return torch.cuda.mem_get_info()[1]


def _tell(plan: Plan) -> None:
    for line in (*(f"note: {note}" for note in plan.notes), *(f"warning: {warning}" for warning in plan.warnings)):
        err.print(line, style="dim", highlight=False, markup=False)
