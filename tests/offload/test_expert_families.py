"""Every family of routed experts in transformers: what the CPU makes of it, and what comes through slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulated_runs import emulated
from expert_modules import EXPERTS, block_of, experts_classes, make_experts, routed, stacked
from overspill.machine.arena import Arena, packed_bytes
from overspill.model.hf_experts import original_forward
from overspill.offload.expert_sources import HostSource
from overspill.offload.in_place import CpuSide, InPlaceExperts, cpu_kernel
from overspill.offload.stream import ExpertStream
from overspill.plan import Tier
from overspill.plan.slots import Slots
from overspill.plan.staging import staging_for

NMSE_BOUND = 5e-4  # design.md, promise 4
TOKENS = 9


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (result.double() - expected.double()).square().sum()
    return float(difference / expected.double().square().sum())


def on_host(experts: Any, device: Any) -> dict[str, torch.Tensor]:
    """The experts' stacks copied into host memory as a plan lays it out, by attribute."""
    parameters = dict(stacked(experts))
    nbytes = packed_bytes(p.numel() * p.element_size() for p in parameters.values())
    arena = Arena(device.allocate_host(nbytes, pinned=False))
    hosts = {}
    for attribute, parameter in parameters.items():
        hosts[attribute] = arena.take(parameter.shape, parameter.dtype)
        hosts[attribute].copy_(parameter)
    return hosts


def resident(experts: Any, device: Any) -> None:
    """Move the experts' parameters into device memory, aligned as a plan lays them out."""
    parameters = dict(experts.named_parameters())
    arena = Arena(device.allocate(packed_bytes(p.numel() * p.element_size() for p in parameters.values()), "weights"))
    for parameter in parameters.values():
        parameter.data = arena.take(parameter.shape, parameter.dtype).copy_(parameter.data)


def test_most_families_are_here() -> None:
    families = {name.partition(".")[0] for name in experts_classes()}
    named = {
        "qwen3_moe", "qwen3_5_moe", "qwen3_next", "nemotron_h", "deepseek_v2", "deepseek_v3", "deepseek_v4",
        "kimi_linear", "laguna", "gpt_oss", "mixtral", "glm4_moe",
    }  # fmt: skip
    assert named <= families
    assert len(families) >= 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", experts_classes())
def test_the_cpu_computes_what_the_architecture_computes(name: str, dtype: torch.dtype) -> None:
    experts = make_experts(name, dtype)
    if experts.has_post_expert_norm:
        pytest.skip("a norm follows each expert; the planner refuses to place it")
    device = emulated()
    block = block_of(experts)
    staging = staging_for((block,), None, None, TOKENS, unified=False)
    memory = device.allocate_host(staging.nbytes, pinned=False).data
    run = InPlaceExperts(
        block, CpuSide(device, memory, (block,), staging.rows), cpu_kernel(experts, on_host(experts, device)), None
    )
    resident(experts, device)
    for tokens in (TOKENS, 1):
        given = [device.to_device(t.to(dtype) if t.is_floating_point() else t) for t in routed(tokens, seed=tokens)]
        with torch.no_grad(), device.execution():
            expected = original_forward(experts)(*given)
            result = run(*given)
        assert result.dtype == expected.dtype
        assert expected.std() > 0
        # Rounding to bfloat16 alone makes the two differ by some 1e-5.
        assert nmse(result, expected) < (1e-10 if dtype is torch.float32 else NMSE_BOUND)
    assert (run.use.calls, run.use.tokens) == (2, TOKENS + 1)
    assert run.use.bytes == (len(set(routed(TOKENS, seed=TOKENS)[1].flatten().tolist())) + 2) * block.expert_bytes


@pytest.mark.parametrize("count", [2 * EXPERTS, 4])
@pytest.mark.parametrize("name", experts_classes())
def test_experts_through_slots_are_the_same_bits(name: str, count: int) -> None:
    """Two layers of them, prompts and single tokens in turn, with slots for all and for some."""
    device = emulated()
    layers = [make_experts(name), make_experts(name)]
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.mul_(-1)
    blocks = tuple(block_of(experts, number) for number, experts in enumerate(layers))
    slots = Slots(blocks, count, "fetch", Tier.HOST)
    hosts = {
        f"{block.path}.{attribute}": tensor
        for block, experts in zip(blocks, layers, strict=True)
        for attribute, tensor in on_host(experts, device).items()
    }
    pool = device.allocate(slots.pool_bytes, "expert_slots").data
    stream = ExpertStream(slots, pool, HostSource(slots, device, hosts), device, None)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"experts": experts}) for experts in layers])
    runs = stream.install(model, ())
    expected = []
    given = [[device.to_device(t) for t in routed(tokens, seed=turn)] for turn, tokens in enumerate((9, 1, 1, 9, 1))]
    for experts in layers:
        resident(experts, device)
    with torch.no_grad(), device.execution():
        expected = [original_forward(experts)(*inputs) for inputs in given for experts in layers]
        results = [run(*inputs) for inputs in given for run in runs]
    device.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    stream.cache.check()
    counts = stream.counts
    assert counts.lookups == sum(len(set(inputs[1].flatten().tolist())) for inputs in given) * 2
    brought = counts.fills + counts.streamed
    assert counts.bytes == device.traffic.bytes == brought * blocks[0].expert_bytes
    if count == 2 * EXPERTS:
        assert counts.fetched <= 2 * EXPERTS, "what is in a slot is not brought again"
        assert counts.evictions == 0
