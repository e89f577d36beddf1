"""Everything that computes routed experts in a way of ours, made as the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from overspill.errors import PlacementDefect
from overspill.machine.arena import Block
from overspill.machine.device import Device
from overspill.offload.conversion_cache import Converted
from overspill.offload.expert_costs import measure_costs
from overspill.offload.expert_sources import DiskSource, ExpertSource, HostSource
from overspill.offload.fetches import DiskReads
from overspill.offload.in_place import CpuSide, InPlaceExperts, SharedAhead, cpu_kernel
from overspill.offload.ledger import ExpertEntry
from overspill.offload.stream import CpuHelp, ExpertStream, StreamedExperts
from overspill.plan import Access, Plan, Slots, Tier
from overspill.plan.staging import READ_BUFFERS, computes_on_cpu


@dataclass
class ExpertRuns:
    """The blocks computed on the CPU, those that stream, and the slots of the latter. Empty where there are none."""

    in_place: tuple[InPlaceExperts, ...] = ()
    streamed: tuple[StreamedExperts, ...] = ()
    stream: ExpertStream | None = None

    def by_module(self) -> list[tuple[str, InPlaceExperts | StreamedExperts]]:
        runs: list[InPlaceExperts | StreamedExperts] = [*self.in_place, *self.streamed]
        return [(run.block.path, run) for run in runs]

    def entries(self) -> tuple[ExpertEntry, ...]:
        """What each block did so far."""
        return tuple(
            ExpertEntry(path, run.access, run.use.calls, run.use.tokens, run.use.bytes)
            for path, run in self.by_module()
        )

    def prove_used(self) -> None:
        """After a pass over the model: PlacementDefect where one of these blocks was never called."""
        idle = [path for path, run in self.by_module() if run.use.calls == 0]
        if idle:
            few = ", ".join(idle[:5])
            raise PlacementDefect(
                f"experts of {len(idle)} layers are planned to run in a way of their own, and no pass ran them: {few}",
                hint="this is a defect of overspill; please report it with the output of `overspill plan --json`",
            )


def run_experts(
    plan: Plan,
    model: nn.Module,
    device: Device,
    blocks: Mapping[str, Block],
    hosts: Mapping[str, torch.Tensor],
    converted: Converted,
) -> ExpertRuns:
    """What `plan` says of routed experts. `blocks` are the allocations by purpose, `hosts` the filled host weights."""

    def tensors(weights: Mapping[str, object], owner: str) -> dict[str, torch.Tensor]:
        return {attribute: hosts[f"{owner}.{attribute}"] for attribute in weights}

    slots = plan.slots
    side = None
    if on_cpu := computes_on_cpu(plan.placed, slots):
        side = CpuSide(device, blocks["staging"].data, on_cpu, plan.staging.rows)
    in_place = []
    for block in plan.placed:
        assert side is not None
        kernel = cpu_kernel(model.get_submodule(block.path), tensors(block.weights, block.path))
        shared = None
        if block.shared is not None:
            shared = SharedAhead(model.get_submodule(block.parent), model.get_submodule(block.shared))
        in_place.append(InPlaceExperts(block, side, kernel, shared))
    if slots is None:
        return ExpertRuns(tuple(in_place))
    source: ExpertSource
    if slots.tier is Tier.DISK:
        staging = plan.staging
        buffers: Sequence[torch.Tensor] = ()
        if staging.expert_bytes:
            memory = blocks["staging"].data[staging.cpu_bytes :]
            buffers = memory[: READ_BUFFERS * slots.slot_bytes].split(slots.slot_bytes)
        source = DiskSource(
            slots, DiskReads(device, buffers, {**plan.model.stamps, **converted.stamps}), converted.sources
        )
    else:
        source = HostSource(slots, device, hosts)
    help_ = None
    if slots.policy != "fetch":
        assert side is not None
        assert device.link is not None
        kernels = [cpu_kernel(model.get_submodule(b.path), tensors(b.weights, b.path)) for b in slots.blocks]
        first = next(iter(slots.blocks[0].weights.values()))
        costs = measure_costs(slots.blocks[0], kernels[0], first.dtype, device.link) if slots.policy == "auto" else None
        help_ = CpuHelp(side, kernels, costs)
    stream = ExpertStream(slots, blocks["expert_slots"].data, source, device, help_)
    return ExpertRuns(tuple(in_place), tuple(stream.install(model, _routers(plan, slots))), stream)


def _routers(plan: Plan, slots: Slots) -> set[str]:
    """Routers that may be asked out of turn: their matrix is on the device for good, and takes what experts take."""
    found = set()
    for block in slots.blocks:
        if block.router is not None:
            router = plan.of(f"{block.router}.weight")
            if router.access is Access.RESIDENT and router.weight.shape[1] == block.hidden_size:
                found.add(block.router)
    return found
