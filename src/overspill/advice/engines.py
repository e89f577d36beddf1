"""The engines that a plan can be told to."""

from __future__ import annotations

from dataclasses import replace

import torch

from overspill.advice.facts import is_gguf, is_packed, stored_bytes
from overspill.advice.llama_cpp import advise_llama_cpp, lies_on_cpu
from overspill.advice.own import advise_overspill
from overspill.advice.record import Advice
from overspill.advice.refit import Held, fitted_again
from overspill.advice.vllm import advise_vllm
from overspill.advice.vllm_ranks import cache_bytes, rank_bytes, refuse_ranks
from overspill.config import Settings
from overspill.config.refusals import did_you_mean
from overspill.errors import ConfigError
from overspill.machine.device import Device
from overspill.machine.named import CONTEXT_BYTES, NamedDevice
from overspill.model.weights import Weight
from overspill.plan import Plan

ENGINES = ("vllm", "llama.cpp", "overspill")


def advise(
    plan: Plan,
    settings: Settings,
    engine: str,
    *,
    model_name: str,
    ranks: int = 1,
    device: Device | None = None,
) -> Advice:
    """The command line of `engine` that does what `plan`, made of `settings`, does, or the nearest that it has.

    `model_name` is how the user names the model. `ranks` are vLLM's tensor-parallel ranks, each of which holds its
    share. `device` is what was planned for: with it a plan that fit chose is fitted again to what the engine holds, and
    vLLM is told its share of the memory. Raises ConfigError for an engine that is not in ENGINES, and for ranks that it
    cannot have.
    """
    if engine not in ENGINES:
        raise ConfigError(
            f'"emit" is "{engine}", which is no engine that a plan can be told to (expected one of: '
            f"{' '.join(ENGINES)})",
            hint=did_you_mean(engine, ENGINES) or "for example vllm",
        )
    if ranks < 1 or (ranks > 1 and engine != "vllm"):
        raise ConfigError(
            f'"ranks" is {ranks}' + (f", but {engine} is advised for one device only" if ranks > 1 else ""),
            hint='1, or more with "vllm"',
        )
    if ranks > 1:
        refuse_ranks(plan.model.config, ranks)
    held = _held(plan, engine, ranks)
    if device is not None and held is not None:
        plan = fitted_again(plan, settings, device, held)
    if engine == "vllm":
        total = total_bytes_of(device) if device is not None else None
        told = advise_vllm(plan, settings, model_name, ranks=ranks, device_total_bytes=total)
    elif engine == "llama.cpp":
        told = advise_llama_cpp(plan, settings, model_name)
    else:
        told = advise_overspill(plan, settings, model_name)
    return replace(told, notes=(*told.notes, *(f"of this plan: {line}" for line in (*plan.notes, *plan.warnings))))


def _held(plan: Plan, engine: str, ranks: int) -> Held | None:
    """Where the engine holds other bytes than the plan, which: shares, or tensors as packed as they are stored."""
    packed = is_gguf(plan) if engine == "llama.cpp" else engine == "vllm" and is_packed(plan)
    why = [f"over {ranks} ranks"] * (ranks > 1) + ["packed as it is stored"] * packed

    def held(weight: Weight) -> int:
        if engine == "llama.cpp" and lies_on_cpu(weight):
            return 0
        share = rank_bytes(weight, ranks)
        return share * stored_bytes(weight) // weight.nbytes if packed and share else share

    cache = cache_bytes(plan, ranks) if engine == "vllm" else plan.memory.kv_cache_bytes or 0
    return Held(", ".join(why), held, cache) if why else None


def total_bytes_of(device: Device) -> int | None:
    """All the memory of a GPU, what its context takes included; None of what is no GPU."""
    if isinstance(device, NamedDevice):
        return device.memory_bytes + CONTEXT_BYTES
    return torch.cuda.mem_get_info(device.torch_device)[1] if device.kind == "cuda" else None
