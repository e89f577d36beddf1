"""What each side runs: settings judged, prompts as token ids, memory planned, before any process is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overspill.api import OffloadDocument, prepare, settings_of
from overspill.checkpoint import open_checkpoint
from overspill.compare.kernels import first_with_other_kernels
from overspill.compare.limited import refuse_idle_limit
from overspill.compare.results import Job
from overspill.config import FLAGS, Settings, format_bytes
from overspill.engine.tokens import encode, refuse_no_text, tokenizer_of
from overspill.errors import CapacityError, ConfigError
from overspill.machine.device import Device
from overspill.machine.memory import host_available_bytes
from overspill.machine.select import select_device
from overspill.plan import Plan, refuse_device

Prompt = str | Sequence[int]

_CANDIDATES = {*FLAGS, "memory_limit_bytes"}
_ROOMY_BYTES = 1 << 60
_SLACK_BYTES = 16 << 20
_MIB = 1 << 20


@dataclass(frozen=True)
class Side:
    """One side's job and plan. `job.folder` is filled in for each run."""

    name: str
    job: Job
    plan: Plan


@dataclass(frozen=True)
class Contest:
    """Both sides. `baseline` is None where `baseline_missing` says why; `notes` are lines for the report.

    `prompts` are as they were given, for people to read.
    """

    baseline: Side | None
    candidate: Side
    baseline_missing: str | None
    prompts: tuple[str, ...]
    notes: tuple[str, ...]


def make_contest(
    model: str | Path,
    baseline: OffloadDocument,
    candidate: OffloadDocument,
    *,
    prompts: Sequence[Prompt],
    max_tokens: int,
    options: Mapping[str, Any],
) -> Contest:
    """Plan both sides. `options` are engine settings for both; the memory limit and offload flags are the candidate's.

    Raises ConfigError before any file is opened; then what `overspill.plan` raises, and ConfigError where what was
    asked turns out to move nothing on this device.
    """
    wanted = settings_of(candidate, options)
    resident = settings_of(baseline, {name: value for name, value in options.items() if name not in _CANDIDATES})
    resident = _as_stated(resident)
    limited = wanted.engine.memory_limit_bytes is not None
    if not wanted.offload.offloads and not limited:
        raise ConfigError(
            "the candidate offloads nothing, so there is nothing to compare",
            hint="say what to offload, for example --cpu-offload-gb 4, --offload-group-size 4 or --cpu-moe; or on the "
            "CPU --memory-limit, less than the model takes",
        )
    alike = _as_stated(wanted).offload == resident.offload
    only_limited = limited and alike
    if alike and not limited:
        raise ConfigError(
            "baseline and candidate are the same document, so there is nothing to compare",
            hint="another --baseline, or none: then nothing is offloaded on that side",
        )
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}", hint="max_tokens must be at least 1")
    if not prompts:
        raise ConfigError("there is no prompt", hint="give at least one")
    device = select_device(wanted.engine)
    refuse_device(wanted, device)
    trust = wanted.engine.trust_remote_code
    checkpoint = open_checkpoint(model, revision=wanted.engine.revision, own_code=trust)
    texts = any(isinstance(prompt, str) for prompt in prompts)
    tokenizer = tokenizer_of(checkpoint, trust_remote_code=trust) if texts else None
    ids = tuple(tuple(encode(tokenizer, prompt)) for prompt in prompts)  # once, so both sides are asked the same
    tokens = _context(wanted, max(map(len, ids)) + max_tokens)
    wanted = _with_engine(wanted, device=device.kind, max_model_len=tokens)
    resident = _with_engine(resident, device=device.kind, max_model_len=tokens)

    def side(name: str, settings: Settings, plan: Plan, observe: str | None) -> Side:
        job = Job(
            model=str(model),
            document=settings.offload.model_dump(mode="json", exclude_defaults=True),
            engine=settings.engine.model_dump(mode="json", exclude_defaults=True),
            prompts=ids,
            max_tokens=max_tokens,
            folder="",
            observe=observe,
        )
        return Side(name, job, plan)

    shown = tuple(p if isinstance(p, str) else f"token ids {' '.join(map(str, p))}" for p in prompts)
    moving = prepare(model, wanted, device).plan
    refuse_no_text(moving.model, by_steps="compare")
    if not only_limited:
        _refuse_moving_nothing(moving)
    try:
        # The CPU as a device knows the limit, which is not the baseline's.
        fitted, plan, note = _fitted(model, resident, select_device(resident.engine) if device.unified else device)
    except CapacityError as error:
        if resident.offload.offloads:
            raise
        alone = side("candidate", wanted, moving, None)
        return Contest(None, alone, f"the baseline does not fit: {error.message}", shown, wanted.notes)
    if only_limited:
        refuse_idle_limit(model, wanted, moving, plan)
    notes = (*dict.fromkeys((*wanted.notes, *resident.notes)), *((note,) if note else ()))
    observe = first_with_other_kernels(plan, moving)
    sides = side("baseline", fitted, plan, observe), side("candidate", wanted, moving, observe)
    return Contest(*sides, None, shown, notes)


def _refuse_moving_nothing(plan: Plan) -> None:
    """ConfigError where what was asked of the candidate has nothing to do on this device."""
    if plan.offloads:
        return
    why = next((note for note in plan.notes if note.startswith("device placement:")), "no weight leaves the device")
    raise ConfigError(
        f"the candidate moves nothing, so there is nothing to compare: {why}",
        hint="an accelerator, as --device emulated, beside which the CPU has memory and work of its own",
    )


def _context(settings: Settings, needed: int) -> int:
    """Tokens that memory is planned for: what was asked, or else exactly what this comparison needs."""
    asked = settings.engine.max_model_len
    if asked is not None and asked < needed:
        raise ConfigError(
            f"max_model_len is {asked}, but the longest prompt and its answer take {needed} tokens",
            hint=f"a max_model_len of at least {needed}, or none: the default is exactly that",
        )
    return asked or needed


def _with_engine(settings: Settings, **changes: Any) -> Settings:
    return replace(settings, engine=settings.engine.model_copy(update=changes))


def _as_stated(settings: Settings) -> Settings:
    """Without what fit would choose: the side that everything is held against is what was said, or nothing."""
    extension = settings.offload.extension
    if extension.placement.fit is not None:
        return settings
    placement = extension.placement.model_copy(update={"fit": False})
    stated = settings.offload.model_copy(update={"overspill": extension.model_copy(update={"placement": placement})})
    return replace(settings, offload=stated)


def _fitted(model: str | Path, settings: Settings, device: Device) -> tuple[Settings, Plan, str | None]:
    """The baseline's settings and plan, on an emulated device with as much memory as it needs, and a line about it.

    Raises CapacityError where a real device, or the memory that the emulated one is made of, does not hold it.
    """
    if device.kind != "emulated":
        return settings, prepare(model, settings, device).plan, None
    roomy = _with_engine(settings, device_memory_bytes=_ROOMY_BYTES)
    needed = _needed_bytes(prepare(model, roomy).plan)
    if needed <= device.memory_bytes:
        return settings, prepare(model, settings, device).plan, None
    if needed > host_available_bytes():
        raise CapacityError(
            f"it needs {format_bytes(needed)} of emulated device memory, {format_bytes(host_available_bytes())} of "
            "real memory are free"
        )
    note = (
        f"the baseline does not fit into the {format_bytes(device.memory_bytes)} of device memory that were asked for: "
        f"on the emulated device it runs with {format_bytes(needed)}, so that there is something to compare with"
    )
    enlarged = _with_engine(settings, device_memory_bytes=needed)
    return enlarged, prepare(model, enlarged).plan, note


def _needed_bytes(plan: Plan) -> int:
    """Device bytes that `plan` takes while running, in whole MiB; generous where working memory is only guessed."""
    memory = plan.memory
    working = memory.working_bytes
    spare = working + _SLACK_BYTES if working is not None else memory.weights_bytes + _SLACK_BYTES
    return -(-(memory.device_bytes + spare) // _MIB) * _MIB
