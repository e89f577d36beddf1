"""What is where and what it took: every parameter's storage is walked after load and held against the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from overspill.errors import PlacementDefect
from overspill.machine.arena import Block
from overspill.machine.device import Device
from overspill.model.hf_experts import installed
from overspill.offload.expert_slots import SlotCounts
from overspill.plan import Access, Placement, Plan, Ring, Tier
from overspill.plan.ring import buffer_of


@dataclass(frozen=True)
class Entry:
    """One weight as it lies in memory. `address` is where the model reads it, `host_address` its host copy."""

    name: str
    tier: Tier
    access: Access
    bytes: int
    address: int
    host_address: int | None = None


@dataclass(frozen=True)
class BlockEntry:
    """One allocation: what was asked for and what the allocator took."""

    purpose: str
    tier: Tier
    requested_bytes: int
    allocated_bytes: int
    pinned: bool


@dataclass(frozen=True)
class ExpertEntry:
    """The routed experts of one layer that run in a way of their own, since loading.

    `calls` passes over `tokens` tokens read `bytes` of their weights, on the CPU (`in_place`) or in slots (`stream`).
    """

    path: str
    access: Access
    calls: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Ledger:
    """The proof that the plan happened; made by `take_ledger`, which raises PlacementDefect where it did not.

    `experts` and `slots` are what happened by the time the ledger was asked for; `slots` is None where there are none.
    """

    entries: tuple[Entry, ...]
    blocks: tuple[BlockEntry, ...]
    read_bytes: int
    load_seconds: float
    experts: tuple[ExpertEntry, ...] = ()
    slots: SlotCounts | None = None

    def bytes_on(self, tier: Tier) -> int:
        return sum(entry.bytes for entry in self.entries if entry.tier is tier)

    def allocated_on(self, tier: Tier) -> int:
        return sum(block.allocated_bytes for block in self.blocks if block.tier is tier)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def take_ledger(
    model: nn.Module,
    plan: Plan,
    blocks: Mapping[str, Block],
    hosts: Mapping[str, torch.Tensor],
    mapped: Mapping[str, torch.Tensor],
    device: Device,
    *,
    read_bytes: int,
    load_seconds: float,
) -> Ledger:
    """Walk `model` and hold every weight against `plan`.

    `blocks` are the allocations by purpose ("weights", "buffer_pool", "expert_slots", "host", "staging"), `hosts` the
    host copies by weight name, `mapped` the weights that lie in mapped files in one piece.
    Raises PlacementDefect, naming the weights, where tier, bytes or address differ from the plan, where a weight is
    missing from the walk, or where the plan offloads and nothing was consulted.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    slots = _ring_slots(plan.ring, blocks["buffer_pool"]) if plan.ring is not None else {}
    wrong = [
        f"{name}: {fault}"
        for placement in plan.placements
        for name in (placement.weight.full, *placement.weight.aliases)
        if (
            fault := _mapped_fault(tensors.get(name), _runs(model, name), placement, mapped)
            if placement.mapped
            else _fault(tensors.get(name), _runs(model, name), placement, blocks, hosts, slots, device)
        )
        is not None
    ]
    walked = [p for p in plan.placements if p.weight.full in tensors]
    entries = [
        _entry(
            p,
            tensors[p.weight.full],
            _runs(model, p.weight.full),
            blocks,
            hosts.get(p.weight.full),
            mapped.get(p.weight.full),
        )
        for p in walked
    ]
    wrong += _overlaps({e.name: (e.address, e.bytes) for e in entries if e.access is Access.RESIDENT})
    wrong += _overlaps({e.name: (e.host_address, e.bytes) for e in entries if e.host_address is not None})
    planned = {name for p in plan.placements for name in (p.weight.full, *p.weight.aliases)}
    for name, tensor in tensors.items():
        if name not in planned and not (_is_rebuilt_buffer(model, name) and _inside(tensor, blocks["weights"])):
            wrong.append(f"{name}: in the model but not in the plan")
    if plan.ways and not any(entry.tier is not Tier.DEVICE for entry in entries):
        wrong.append(f"the plan offloads with {', '.join(plan.ways)}, and no weight was consulted")
    if wrong:
        raise PlacementDefect(
            "memory is not what the plan says:\n  " + "\n  ".join(wrong[:20]),
            hint="this is a defect of overspill; please report it with the output of `overspill plan --json`",
        )
    return Ledger(
        tuple(entries),
        tuple(
            BlockEntry(
                purpose,
                Tier.HOST if purpose in ("host", "staging") else Tier.DEVICE,
                b.requested_bytes,
                b.allocated_bytes,
                b.pinned,
            )
            for purpose, b in blocks.items()
        ),
        read_bytes,
        load_seconds,
    )


def _runs(model: nn.Module, name: str) -> Access | None:
    """How experts are run in the module that holds this weight, as it was installed there; None for other modules."""
    access: Access | None = getattr(installed(model.get_submodule(name.rpartition(".")[0])), "access", None)
    return access


def _entry(
    placement: Placement,
    tensor: torch.Tensor,
    runs: Access | None,
    blocks: Mapping[str, Block],
    host: torch.Tensor | None,
    mapped: torch.Tensor | None,
) -> Entry:
    """A weight as the walk found it; nothing here is taken from the plan but its name."""
    name, nbytes = placement.weight.full, tensor.numel() * tensor.element_size()
    if tensor.device.type == "meta":
        return Entry(name, Tier.DISK, runs or Access.RESIDENT, nbytes, 0)
    if mapped is not None and tensor.data_ptr() == mapped.data_ptr():
        return Entry(name, Tier.DISK, Access.IN_PLACE, nbytes, tensor.data_ptr())
    in_ring = "buffer_pool" in blocks and _inside(tensor, blocks["buffer_pool"])
    if host is None or not _inside(host, blocks["host"]):
        if in_ring:
            return Entry(name, Tier.DISK, Access.PREFETCH, nbytes, tensor.data_ptr())
        return Entry(name, Tier.DEVICE, Access.RESIDENT, nbytes, tensor.data_ptr())
    access = runs or (Access.PREFETCH if in_ring else Access.ZERO_COPY)
    return Entry(name, Tier.HOST, access, nbytes, tensor.data_ptr(), host.data_ptr())


def _fault(
    tensor: torch.Tensor | None,
    runs: Access | None,
    placement: Placement,
    blocks: Mapping[str, Block],
    hosts: Mapping[str, torch.Tensor],
    slots: Mapping[str, int],
    device: Device,
) -> str | None:
    weight, access = placement.weight, placement.access
    if tensor is None:
        return "missing from the model"
    nbytes = tensor.numel() * tensor.element_size()
    if (nbytes, tensor.dtype) != (weight.nbytes, weight.dtype):
        return f"{nbytes} bytes of {tensor.dtype}, planned {weight.nbytes} of {weight.dtype}"
    if access in (Access.IN_PLACE, Access.STREAM) and runs is not access:
        return f"nothing computes its experts as planned ({access})"
    on_disk = placement.tier is Tier.DISK
    if (tensor.device.type == "meta") is not (on_disk and access is Access.STREAM):
        return "in memory, and planned to stay on disk" if on_disk else "still on the meta device, without a value"
    if weight.nbytes == 0 or tensor.device.type == "meta":
        return None
    if access is Access.RESIDENT:
        return None if _inside(tensor, blocks["weights"]) else "not in the device's weight block"
    host = hosts.get(weight.full)
    if on_disk:
        in_place = host is None and tensor.data_ptr() == slots[weight.full]
        return None if in_place else "not at its place in its ring buffer, or with a host copy"
    if host is None or not _inside(host, blocks["host"]):
        return "its host copy is not in the host block"
    if access is Access.ZERO_COPY:
        return None if device.host_address(tensor) == host.data_ptr() else "the device's view is not over its host copy"
    if access is Access.PREFETCH:
        return None if tensor.data_ptr() == slots[weight.full] else "not at its place in its ring buffer"
    return None if tensor.data_ptr() == host.data_ptr() else "another tensor than its host copy"


def _mapped_fault(
    tensor: torch.Tensor | None, runs: Access | None, placement: Placement, mapped: Mapping[str, torch.Tensor]
) -> str | None:
    """As `_fault`, of a weight that is used in a mapped file: in one piece, or by what computes its experts."""
    weight = placement.weight
    if tensor is None:
        return "missing from the model"
    if (tensor.numel() * tensor.element_size(), tensor.dtype) != (weight.nbytes, weight.dtype):
        return f"{tuple(tensor.shape)} of {tensor.dtype}, planned {weight.nbytes} bytes of {weight.dtype}"
    if tensor.device.type == "meta":
        return None if runs is Access.IN_PLACE else "nothing computes its experts in the mapped files"
    there = weight.full in mapped and tensor.data_ptr() == mapped[weight.full].data_ptr()
    return None if there else "not where it lies in the mapped file"


def _ring_slots(ring: Ring, pool: Block) -> dict[str, int]:
    """Where in the buffer pool each ring weight is read, by name."""
    return {
        weight.full: pool.data.data_ptr() + buffer_of(index, ring.step) * ring.buffer_bytes + offset
        for index, layer in enumerate(ring.layers)
        for weight, offset in zip(layer.weights, layer.offsets, strict=True)
    }


def _overlaps(spans: Mapping[str, tuple[int, int]]) -> list[str]:
    """Weights that lie in each other's memory, of (address, bytes) by name."""
    placed = sorted((address, nbytes, name) for name, (address, nbytes) in spans.items() if address and nbytes)
    return [
        f"{second}: shares memory with {first}"
        for (start, nbytes, first), (next_start, _, second) in pairwise(placed)
        if next_start < start + nbytes
    ]


def _inside(tensor: torch.Tensor, block: Block) -> bool:
    start, nbytes = block.data.data_ptr(), block.data.numel()
    return (
        tensor.numel() == 0
        or start <= tensor.data_ptr() <= tensor.data_ptr() + tensor.numel() * tensor.element_size() <= start + nbytes
    )


def _is_rebuilt_buffer(model: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    return attribute in model.get_submodule(owner)._non_persistent_buffers_set
