"""The options that every command shares, grouped in `--help` as vLLM groups them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

from overspill.config import Settings, parse_bytes, resolve
from overspill.config.settings import FLAGS

OFFLOAD, ENGINE, OUTPUT = "OffloadConfig", "Engine", "Output"


def _offload(text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=OFFLOAD, show_default=False, **extra)


def _engine(text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=ENGINE, **extra)


MODEL = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, or .gguf file.")]

SHARED: dict[str, tuple[Any, Any]] = {
    "offload_config": (
        Annotated[
            str | None,
            _offload(
                "vLLM's OffloadConfig, with the extension 'overspill' (or 'vllm_cpp'); @FILE reads a file.",
                metavar="JSON",
            ),
        ],
        None,
    ),
    "offload_backend": (
        Annotated[
            str | None,
            _offload(
                "What the other options ask for: prefetch with a group size, else uva with a budget. [default: auto]",
                metavar="auto|uva|prefetch",
            ),
        ],
        None,
    ),
    "cpu_offload_gb": (
        Annotated[str | None, _offload("Weights to move off the device: GiB, or a size as 512MiB.", metavar="GIB")],
        None,
    ),
    "cpu_offload_params": (
        Annotated[
            list[str] | None,
            _offload("Only weights that these name segments, full names or layer ranges select.", metavar="NAME..."),
        ],
        None,
    ),
    "offload_group_size": (
        Annotated[int | None, _offload("Take layers in groups of N, and offload the last of each.", metavar="N")],
        None,
    ),
    "offload_num_in_group": (
        Annotated[int | None, _offload("Offload the last N layers of each group. [default: 1]", metavar="N")],
        None,
    ),
    "offload_prefetch_step": (
        Annotated[int | None, _offload("Copy N layers ahead: the ring has N buffers. [default: 1]", metavar="N")],
        None,
    ),
    "offload_params": (
        Annotated[
            list[str] | None,
            _offload("Only weights of the offloaded layers that these select.", metavar="NAME..."),
        ],
        None,
    ),
    "cpu_moe": (Annotated[bool | None, _offload("Compute all routed experts on the CPU.", "--cpu-moe")], None),
    "n_cpu_moe": (
        Annotated[int | None, _offload("Compute routed experts of the first N layers on the CPU.", metavar="N")],
        None,
    ),
    "override_tensor": (
        Annotated[
            list[str] | None,
            _offload(
                "Weights whose name a regular expression finds go to DEVICE, cpu. May be said again; the first wins.",
                "--override-tensor",
                "-ot",
                metavar="PATTERN=DEVICE",
            ),
        ],
        None,
    ),
    "fit": (
        Annotated[
            bool | None,
            _offload(
                "Make a model that does not fit the device fit, where nothing else is said. [default: fit]",
                "--fit/--no-fit",
            ),
        ],
        None,
    ),
    "expert_cache": (
        Annotated[
            str | None,
            _offload("Stream routed experts through a cache on the device: GiB, or a size as 512MiB.", metavar="SIZE"),
        ],
        None,
    ),
    "expert_policy": (
        Annotated[
            str | None,
            _offload(
                "Experts not in the cache: fetch them, compute them on the CPU, or what costs less. [default: fetch]",
                metavar="fetch|cpu|auto",
            ),
        ],
        None,
    ),
    "device": (
        Annotated[str, _engine("What computes; auto is a GPU where there is one.", metavar="auto|cuda|cpu|emulated")],
        "auto",
    ),
    "device_memory": (
        Annotated[str | None, _engine("Device memory that may be used: a size as 512MiB, or GiB.", metavar="SIZE")],
        None,
    ),
    "memory_limit": (
        Annotated[
            str | None,
            _engine("Host memory for weights, buffers and KV cache: a size as 8GiB, or GiB.", metavar="SIZE"),
        ],
        None,
    ),
    "link_bandwidth": (
        Annotated[str | None, _engine("The emulated link's bandwidth, as 16GB/s.", metavar="SIZE/s")],
        None,
    ),
    "link_latency": (
        Annotated[str | None, _engine("The emulated link's latency per transfer, as 10us.", metavar="TIME")],
        None,
    ),
    "dtype": (
        Annotated[
            str,
            _engine("What is computed in; auto is the checkpoint's own.", metavar="auto|float32|bfloat16|float16"),
        ],
        "auto",
    ),
    "max_model_len": (
        Annotated[
            int | None,
            _engine("Tokens of prompt and answer that memory is planned for. [default: the model's own]", metavar="N"),
        ],
        None,
    ),
    "max_num_seqs": (Annotated[int, _engine("Sequences that memory is planned for.", metavar="N")], 1),
    "revision": (Annotated[str | None, _engine("Branch, tag or commit of a Hugging Face id.", metavar="NAME")], None),
    "seed": (Annotated[int, _engine("Seed for sampling.", metavar="N")], 0),
    "trust_remote_code": (
        Annotated[bool, _engine("Run code that the model brings along.", "--trust-remote-code")],
        False,
    ),
    "json_output": (
        Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.", rich_help_panel=OUTPUT)],
        False,
    ),
    "debug": (
        Annotated[
            bool,
            typer.Option(
                "--debug",
                help="Tracebacks; check every device read by address, poison freed buffers.",
                rich_help_panel=OUTPUT,
            ),
        ],
        False,
    ),
}


@dataclass(frozen=True)
class Shared:
    """The shared options as given. `settings` judges them; nothing heavy is imported and no file opened before."""

    values: dict[str, Any]

    @property
    def json_output(self) -> bool:
        return bool(self.values["json_output"])

    @property
    def debug(self) -> bool:
        return bool(self.values["debug"])

    @property
    def seed(self) -> int:
        return int(self.values["seed"])

    def flags(self) -> dict[str, Any]:
        """The flat offload flags that were given, vLLM's and the extension's."""
        return {name: self.values[name] for name in FLAGS if self.values[name] is not None}

    def engine(self) -> dict[str, Any]:
        """EngineSettings' fields that were given."""
        values = self.values
        memory = values["device_memory"]
        fields = {
            "device": values["device"],
            "device_memory_bytes": memory and parse_bytes(memory, bare="GiB", field="device_memory"),
            "memory_limit_bytes": values["memory_limit"]
            and parse_bytes(values["memory_limit"], bare="GiB", field="memory_limit"),
            "link_bandwidth": values["link_bandwidth"],
            "link_latency_s": values["link_latency"],
            **{name: values[name] for name in ("dtype", "max_model_len", "max_num_seqs", "revision", "seed", "debug")},
            "trust_remote_code": values["trust_remote_code"],
        }
        return {name: value for name, value in fields.items() if value is not None}

    def settings(self, **engine: Any) -> Settings:
        return resolve(self.values["offload_config"], self.flags(), {**self.engine(), **engine})


def shared_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Give `command` every shared option, handed over together as its argument `shared`; `defaults` of its own win."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "shared"]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=defaults.get(name, default)
        )
        for name, (annotation, default) in SHARED.items()
    ]

    @wraps(command)
    def with_shared(**given: Any) -> None:
        shared = Shared({name: given.pop(name) for name in SHARED})
        command(**given, shared=shared)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    with_shared.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_shared.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_shared
