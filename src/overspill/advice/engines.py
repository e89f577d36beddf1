"""The engines that a plan can be told to."""

from __future__ import annotations

from overspill.advice.llama_cpp import advise_llama_cpp
from overspill.advice.own import advise_overspill
from overspill.advice.record import Advice
from overspill.advice.vllm import advise_vllm
from overspill.config import Settings
from overspill.config.refusals import did_you_mean
from overspill.errors import ConfigError
from overspill.plan import Plan

ENGINES = ("vllm", "llama.cpp", "overspill")


def advise(
    plan: Plan,
    settings: Settings,
    engine: str,
    *,
    model_name: str,
    ranks: int = 1,
    device_total_bytes: int | None = None,
) -> Advice:
    """The command line of `engine` that does what `plan`, made of `settings`, does, or the nearest that it has.

    `model_name` is how the user names the model. `ranks` are vLLM's tensor-parallel ranks, each of which holds its
    share. `device_total_bytes` is the whole memory of the GPU, where it is known: what vLLM takes a share of. Raises
    ConfigError for an engine that is not in ENGINES, and for ranks that it cannot have.
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
    if engine == "vllm":
        return advise_vllm(plan, settings, model_name, ranks=ranks, device_total_bytes=device_total_bytes)
    if engine == "llama.cpp":
        return advise_llama_cpp(plan, settings, model_name)
    return advise_overspill(plan, settings, model_name)
