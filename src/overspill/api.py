"""The main job from Python: plan, load, offload. The command line is a view of this."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig

from overspill.checkpoint import Checkpoint, open_checkpoint
from overspill.checkpoint.hub import download
from overspill.config import OffloadConfig, Settings, resolve
from overspill.config.settings import FLAGS
from overspill.engine import Engine
from overspill.engine.tokens import tokenizer_of
from overspill.errors import CheckpointError, ConfigError, OverspillWarning
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes
from overspill.machine.named import NamedDevice
from overspill.machine.observed import corrections, observations
from overspill.machine.rates import Rates, load_report
from overspill.machine.select import select_device
from overspill.machine.specs import gpu_of_device, named_rates
from overspill.model.gguf import generation_config_from_gguf
from overspill.model.hf import load_generation_config
from overspill.model.map import context_tokens, map_live, map_model, read_config, resolve_dtype
from overspill.model.weights import ModelMap
from overspill.offload.placed import PlacedModel, place
from overspill.plan import Plan, make_plan, refuse_device

_OF_A_CHECKPOINT = frozenset({"dtype", "max_model_len", "revision", "seed", "trust_remote_code"})
_PLACED = "_overspill_placed"

_DECODED = 8  # times as large as packed at the most
_ROOMY_BYTES = 4 << 30
"""Where less than this is left beside the checkpoint, a tokenizer is made first, so that what it takes is counted."""

OffloadDocument = str | Mapping[str, object] | OffloadConfig | None


@dataclass(frozen=True)
class Prepared:
    """A plan with what it takes to carry it out."""

    plan: Plan
    device: Device
    checkpoint: Checkpoint
    settings: Settings

    @cached_property
    def tokenizer(self) -> Any:
        """What came with the weights, or None."""
        return tokenizer_of(self.checkpoint, trust_remote_code=self.settings.engine.trust_remote_code)

    @property
    def generation_config(self) -> GenerationConfig:
        if self.checkpoint.format == "gguf":
            return generation_config_from_gguf(self.checkpoint)
        return load_generation_config(self.checkpoint.folder, self.plan.model.config)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Garbage collection would walk the records of large checkpoints again and again: a quarter of planning's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def prepare(
    model: str | Path,
    settings: Settings,
    device: Device | None = None,
    *,
    judged: bool = True,
    calibrated: bool = False,
) -> Prepared:
    """Plan `model` from its headers: settings are judged first, then the device, then the files.

    Without `judged` the plan may be one that memory does not hold. `calibrated`: times are corrected by what earlier
    runs here took; ConfigError where there are none.
    """
    device = device or select_device(settings.engine)
    refuse_device(settings, device)
    engine = settings.engine
    checkpoint = open_checkpoint(model, revision=engine.revision, own_code=engine.trust_remote_code)
    config = read_config(checkpoint, trust_remote_code=engine.trust_remote_code)
    tokens = context_tokens(config, engine.max_model_len)
    tight = device.unified and _DECODED * checkpoint.nbytes + _ROOMY_BYTES > host_available_bytes()
    tokenizer = tokenizer_of(checkpoint, trust_remote_code=engine.trust_remote_code) if tight else None
    mapped = map_model(
        checkpoint,
        config,
        resolve_dtype(engine.dtype, checkpoint, config, device.kind),
        tokens=tokens,
        sequences=1 if engine.max_num_batched_tokens is not None else engine.max_num_seqs,
        trust_remote_code=engine.trust_remote_code,
    )
    made = _planned(mapped, settings, device, tokens, judged=judged, calibrated=calibrated)
    prepared = Prepared(made, device, checkpoint, settings)
    if tight:
        vars(prepared)["tokenizer"] = tokenizer
    return prepared


def _planned(
    mapped: ModelMap,
    settings: Settings,
    device: Device,
    tokens: int,
    *,
    judged: bool = True,
    calibrated: bool = False,
) -> Plan:
    """The plan; a damaged measurement of this machine costs it the forecast of time, and it says so."""
    told: tuple[str, ...] = ()
    try:
        rates = rates_of(device)
    except CheckpointError as error:
        rates, told = None, (f"time is not forecast: {error.message}; {error.hint}",)
    if calibrated:
        rates = _corrected(rates, device, mapped.architecture)
    made = make_plan(mapped, settings, device, context_tokens=tokens, rates=rates, judged=judged)
    return replace(made, warnings=(*made.warnings, *told)) if told else made


def rates_of(device: Device) -> Rates | None:
    """How fast `device` is: as measured on this machine, else by the data sheet of a GPU that has one here, or None.

    Raises CheckpointError where what was measured cannot be read.
    """
    if isinstance(device, NamedDevice):
        return named_rates(device.gpu)
    if (report := load_report(device)) is not None:
        return report.rates
    gpu = gpu_of_device(device.name) if device.kind == "cuda" else None
    return named_rates(gpu) if gpu is not None else None


def with_files(prepared: Prepared) -> Prepared:
    """`prepared` with all files here: what is on the hub alone is downloaded, and planned again as it then lies."""
    if prepared.checkpoint.absent is None:
        return prepared
    download(prepared.checkpoint)
    engine = prepared.settings.engine.model_copy(update={"revision": None})  # the folder is of one commit
    return prepare(prepared.checkpoint.folder, replace(prepared.settings, engine=engine), prepared.device)


def _corrected(rates: Rates | None, device: Device, architecture: str) -> Rates:
    if rates is None:
        raise ConfigError(
            "--calibrate has no forecast to correct", hint="`overspill bench` measures this machine first"
        )
    found = corrections(observations(device), architecture)
    if not found:
        raise ConfigError(
            "--calibrate has no run to correct by", hint="`overspill run` keeps what its steps took beside the forecast"
        )
    return replace(rates, corrections=found)


def start(prepared: Prepared, progress: Callable[[int], None] | None = None) -> Engine:
    """Carry a plan out: load, prove, and give the engine. `progress` hears the bytes read as they arrive."""
    prepared = with_files(prepared)
    debug = prepared.settings.engine.debug
    placed = place(prepared.plan, prepared.device, progress=progress, debug=debug)
    return Engine(placed, prepared.tokenizer, prepared.generation_config)


def settings_of(offload_config: OffloadDocument, options: Mapping[str, Any]) -> Settings:
    """One judged value of a document and keyword options: vLLM's flat fields and the engine's own."""
    flags = {name: value for name, value in options.items() if name in FLAGS}
    engine = {name: value for name, value in options.items() if name not in FLAGS and value is not None}
    return resolve(offload_config, flags, engine)


def plan(model: str | Path, offload_config: OffloadDocument = None, **options: Any) -> Plan:
    """Say what would be where, from the checkpoint's headers alone.

    `model`: a Hugging Face id, a folder, or a .gguf file. `offload_config`: vLLM's OffloadConfig as JSON text or a
    mapping, with the extension `overspill` (or `vllm_cpp`); None and "" mean no offload. `options`: vLLM's flat fields
    (`cpu_offload_gb`, `offload_group_size`, …), those of routed experts (`cpu_moe=True`, `n_cpu_moe=8`,
    `override_tensor=["exps=cpu"]`, `expert_cache="4GiB"`, `expert_policy="auto"`) and the engine's (`device`,
    `device_memory_bytes`, `dtype`, `max_model_len`, `max_num_seqs`, …; docs/configuration.md). Raises ConfigError
    before any file is opened, CheckpointError, UnsupportedModelError and CapacityError before any weight is read.
    """
    return prepare(model, settings_of(offload_config, options)).plan


def load(
    model: str | Path,
    offload_config: OffloadDocument = None,
    *,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Engine:
    """Plan `model` and carry the plan out; the arguments are `plan`'s. The engine owns all memory."""
    prepared = prepare(model, settings_of(offload_config, options))
    _warn(prepared.plan)
    return start(prepared, progress)


def _warn(made: Plan) -> None:
    for warning in made.warnings:
        warnings.warn(warning, OverspillWarning, stacklevel=3)


def offload(model: nn.Module, offload_config: OffloadDocument, *, tokens: int = 512, **options: Any) -> PlacedModel:
    """Move the weights of a transformers model that the caller built as `offload_config` and `options` (`plan`'s) say.

    `model` is changed in place and stays usable: run it inside `placed.running()`. Its tensors are handed over one by
    one, so peak memory is the model plus its largest weight. `tokens` is the context that memory is planned for. The
    model is put into inference mode (`eval`, no gradients), and its weights are read-only from then on. Its routed
    experts can be computed on the CPU and stream from host memory; patterns know weights by the model's own names and
    by GGUF's. From disk they do not stream, since a model in memory has no file. Raises ConfigError,
    UnsupportedModelError and CapacityError before the model is touched.
    """
    settings = settings_of(offload_config, options)
    if not settings.offload.offloads:
        raise ConfigError("overspill.offload() was given no offload", hint='for example {"uva": {"cpu_offload_gb": 4}}')
    if idle := sorted(_OF_A_CHECKPOINT & options.keys()):
        raise ConfigError(
            f"overspill.offload() was given {', '.join(idle)}, which a model that is in memory already has no use for",
            hint="leave them out; `tokens` is the context to plan for, overspill.load() takes the others",
        )
    stream = settings.offload.extension.expert_stream
    if stream.on and stream.tier == "disk":
        raise ConfigError(
            'expert_stream: "tier" is "disk", but a model that is in memory already has no file to stream from',
            hint='"tier": "host", or overspill.load() of its checkpoint',
        )
    if tokens < 1:
        raise ConfigError(f"tokens is {tokens}", hint="tokens must be at least 1")
    if getattr(model, _PLACED, False):
        raise ConfigError(
            "the weights of this model have been offloaded already, and what it holds now are views of them",
            hint="build the model again, and say everything in one overspill.offload()",
        )
    device = select_device(settings.engine)
    refuse_device(settings, device)
    mapped = map_live(model, tokens=tokens, sequences=settings.engine.max_num_seqs)
    made = _planned(mapped, settings, device, tokens)
    _warn(made)
    model.eval().requires_grad_(False)  # from here on the model is changed
    setattr(model, _PLACED, True)
    return place(made, device, debug=settings.engine.debug)
