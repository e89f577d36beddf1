"""A model placed as its plan says: memory laid out, filled, handed to the modules, and proved."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock

import torch
from torch import nn

from overspill.machine.arena import Arena, Block, packed_bytes
from overspill.machine.device import Device
from overspill.model.hf import rebuild_buffers
from overspill.model.hf_experts import IMPLEMENTATION, install, set_experts_implementation
from overspill.offload.conversion_cache import Converted, convert
from overspill.offload.expert_runs import ExpertRuns, run_experts
from overspill.offload.fetches import DiskReads
from overspill.offload.ledger import Ledger, take_ledger
from overspill.offload.loader import Progress, assign, fill
from overspill.offload.mapped import MappedWeights
from overspill.offload.prefetch import LayerSource, Prefetcher
from overspill.plan import Access, Plan, Tier

logger = logging.getLogger("overspill")


@dataclass
class PlacedModel:
    """A transformers model that runs, its plan, and the proof. It owns all blocks; dropping it frees them.

    `loaded` is the ledger as it was taken after loading, `ledger` has what happened since as well.
    `blocks` are the allocations by purpose, `hosts` the host copies by weight name, `mapped` the files that weights are
    used in, `converted` the files of the cache that are read, which stay as long as this does.
    """

    model: nn.Module
    plan: Plan
    loaded: Ledger
    device: Device
    prefetcher: Prefetcher | None
    experts: ExpertRuns
    blocks: dict[str, Block] = field(repr=False)
    hosts: dict[str, torch.Tensor] = field(repr=False)
    mapped: MappedWeights = field(repr=False)
    converted: Converted = field(repr=False)
    turn: RLock = field(default_factory=RLock, repr=False)

    @property
    def ledger(self) -> Ledger:
        """What lies where since loading, and what became of routed experts until now."""
        stream = self.experts.stream
        counts = stream.counts.copy() if stream is not None else None
        return replace(self.loaded, experts=self.experts.entries(), slots=counts)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run forward passes inside this, one thread at a time: layers share buffers, so others wait their `turn`.

        The weights are read-only here. Under prefetch a parameter is a view of a buffer that several layers share:
        what is written into it is lost, and `state_dict()` does not hold the weights.
        """
        with self.turn, torch.no_grad(), self.device.execution():
            try:
                yield
            finally:
                self.mapped.verify()


def place(plan: Plan, device: Device, *, progress: Progress | None = None, debug: bool = False) -> PlacedModel:
    """Load `plan.model` as planned and prove it.

    Raises CheckpointError, CapacityError (of the conversion cache), DeviceOutOfMemoryError, or PlacementDefect (ours).
    `debug` poisons released ring buffers.
    """
    started = time.perf_counter()
    model = plan.model.skeleton
    if plan.model.checkpoint is not None:
        rebuild_buffers(model)
    converted = convert(plan.converted, plan.model, progress=progress)  # while memory is free
    blocks, targets, prefetcher = _lay_out(plan, device, model, converted, debug=debug)
    device.reserve("kv_cache", plan.memory.kv_cache_bytes or 0)
    read_bytes = fill(targets, plan.model, device, progress=progress)
    mapped = MappedWeights(plan, model)
    if plan.prefault:
        mapped.populate(progress)
    for placement in plan.placements:
        if placement.mapped and placement.weight.full in mapped.tensors:
            assign(model, placement.weight, mapped.tensors[placement.weight.full])
        if placement.tier is Tier.DISK:
            continue
        weight, tensor = placement.weight, targets[placement.weight.full]
        if placement.access is Access.ZERO_COPY:
            tensor = device.zero_copy(tensor)
        elif placement.access is Access.PREFETCH:
            assert prefetcher is not None
            continue
        assign(model, weight, tensor)
    if prefetcher is not None:
        for index, layer in enumerate(prefetcher.ring.layers):
            for weight, offset in zip(layer.weights, layer.offsets, strict=True):
                assign(model, weight, prefetcher.view(index, offset, weight.shape, weight.dtype))
        prefetcher.install(model)
    hosts = {p.weight.full: targets[p.weight.full] for p in plan.on(Tier.HOST)}
    experts = run_experts(plan, model, device, blocks, hosts | mapped.tensors, converted)
    if experts.stream is not None and experts.stream.slots.tier is Tier.DISK:
        read_bytes += experts.stream.fill(progress)
    mapped.install(model)
    for path, runner in experts.by_module():
        install(model.get_submodule(path), runner)
    if experts.by_module() or mapped.experts:
        set_experts_implementation(model, IMPLEMENTATION)
    elif device.kind != "cuda":  # the loop over chosen experts reads only those; torch's grouped product reads all
        set_experts_implementation(model, "eager")
    device.synchronize()
    ledger = take_ledger(
        model,
        plan,
        blocks,
        hosts,
        mapped.tensors,
        device,
        read_bytes=read_bytes,
        load_seconds=time.perf_counter() - started,
    )
    _say(plan, ledger)
    return PlacedModel(model, plan, ledger, device, prefetcher, experts, blocks, hosts, mapped, converted)


def _lay_out(
    plan: Plan, device: Device, model: nn.Module, converted: Converted, *, debug: bool
) -> tuple[dict[str, Block], dict[str, torch.Tensor], Prefetcher | None]:
    """Allocate what the plan says, cut every weight's place, and move the rebuilt buffers in."""
    resident = [p.weight for p in plan.on(Tier.DEVICE)]
    blocks = {"weights": device.allocate(plan.memory.weights_bytes, "weights")}
    device_arena = Arena(blocks["weights"])
    targets = {weight.full: device_arena.take(weight.shape, weight.dtype) for weight in resident}
    planned = {name for p in plan.placements for name in (p.weight.full, *p.weight.aliases)}
    moved: dict[int, torch.Tensor] = {}  # two modules may hold one buffer
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if name not in planned:
            if id(buffer) not in moved:
                moved[id(buffer)] = device_arena.take(buffer.shape, buffer.dtype)
                device.upload(moved[id(buffer)], buffer.contiguous())
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._buffers[attribute] = moved[id(buffer)]
    if plan.slots is not None:
        blocks["expert_slots"] = device.allocate(plan.slots.pool_bytes, "expert_slots")
    if plan.memory.staging_bytes:
        blocks["staging"] = device.allocate_host(plan.memory.staging_bytes, pinned=plan.pinned)
    ring = plan.ring
    layers = ring.layers if ring is not None else ()
    in_ring = {weight.full for layer in layers for weight in layer.weights}
    host_layers = {index: layer for index, layer in enumerate(layers) if layer.tier is Tier.HOST}
    outside = [p.weight for p in plan.on(Tier.HOST) if p.weight.full not in in_ring]
    layer_host: dict[int, torch.Tensor] = {}
    if on_host := [*(weight for layer in host_layers.values() for weight in layer.weights), *outside]:
        nbytes = packed_bytes(weight.nbytes for weight in on_host)
        blocks["host"] = device.allocate_host(nbytes, pinned=plan.pinned)
        host_arena = Arena(blocks["host"])
        for index, layer in host_layers.items():
            start = host_arena.used_bytes
            for weight in layer.weights:
                targets[weight.full] = host_arena.take(weight.shape, weight.dtype)
            layer_host[index] = blocks["host"].data[start : start + layer.nbytes]
        for weight in outside:
            targets[weight.full] = host_arena.take(weight.shape, weight.dtype)
    if ring is None:
        return blocks, targets, None
    blocks["buffer_pool"] = device.allocate(ring.pool_bytes, "buffer_pool")
    reads = None
    if ring.on(Tier.DISK):
        nbytes = plan.staging.layer_bytes
        buffers = blocks["staging"].data[-nbytes:].split(ring.buffer_bytes) if nbytes else ()
        reads = DiskReads(device, buffers, {**plan.model.stamps, **converted.stamps})
    source = LayerSource(device, ring.layers, layer_host, reads, converted.sources)
    return blocks, targets, Prefetcher(ring, blocks["buffer_pool"].data, source, device, poison=debug)


def _say(plan: Plan, ledger: Ledger) -> None:
    """The lines that operators of vLLM already look for, in vLLM's words."""
    if plan.backend == "uva":
        logger.info("Offloader set to UVAOffloader")
        logger.info("Total CPU offloaded parameters: %.2f GiB", ledger.bytes_on(Tier.HOST) / (1 << 30))
    elif plan.backend == "prefetch":
        assert plan.ring is not None
        logger.info("Offloader set to PrefetchOffloader")
        logger.info(
            "[PrefetchOffloader] Initialized %d modules. Total GPU memory saved: %.4f GB, "
            "Static buffer pool: %.4f GB (prefetch_step=%d)",
            len(plan.ring.layers),
            plan.saved_bytes / 1e9,
            plan.ring.pool_bytes / 1e9,
            plan.ring.step,
        )
    for note in plan.notes:
        if note.startswith("device placement:"):
            logger.info(note)
    if (slots := plan.slots) is not None:
        logger.info(
            "[expert-stream] ON slots=%d slot_bytes=%d experts=%d policy=%s tier=%s",
            slots.count,
            slots.slot_bytes,
            slots.experts,
            slots.policy,
            slots.tier.value,
        )
    logger.info(
        "Model loading took %.2f GiB memory and %.6f seconds",
        ledger.allocated_on(Tier.DEVICE) / (1 << 30),
        ledger.load_seconds,
    )
