"""What a plan says of a run, and its ledger, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from overspill.compare.kernels import other_kernels
from overspill.compare.results import Forecast, Generation, Pass, PassTime, PlacedWeight, TimeForecast
from overspill.engine import Step
from overspill.machine.device import Device
from overspill.machine.read_requests import most_bytes
from overspill.model.experts import ExpertBlock
from overspill.model.weights import Role, Weight
from overspill.offload.expert_runs import ExpertRuns
from overspill.offload.expert_sources import DiskSource
from overspill.offload.ledger import Ledger
from overspill.offload.placed import PlacedModel
from overspill.offload.prefetch import layer_runs
from overspill.plan import Access, Plan, Tier
from overspill.plan.forecast import forecast, pass_forecast


def pass_of(step: Step, plan: Plan, device: Device, *, computed: bool) -> Pass:
    """`computed`: experts that were in no slot were computed on the CPU in this answer."""
    low = high = float(plan.step.prefetch_bytes + step.tokens * _result_bytes(plan.placed))
    if device.sees_the_link:
        for weight in _zero_copy_weights(plan):
            least, most = _reads(weight, step.tokens)
            low, high = low + least, high + most
    if computed and plan.slots is not None:
        high += step.tokens * _result_bytes(plan.slots.blocks)
    return Pass(step.tokens, step.seconds, step.traffic.bytes, step.traffic.stall_s, low, high)


def _result_bytes(blocks: Sequence[ExpertBlock]) -> int:
    """Bytes that the CPU sends for a token: its hidden state after each of `blocks`."""
    return sum(block.hidden_size * next(iter(block.weights.values())).dtype.itemsize for block in blocks)


def _reads(weight: Weight, tokens: int) -> tuple[float, float]:
    """The least and the most bytes that a pass over `tokens` tokens reads of a weight."""
    if weight.routing is None:  # experts that the architecture computes by itself may be chosen, or all of them read
        least = weight.step_bytes(tokens) if weight.role is not Role.ROUTED_EXPERT else 0
        return least, weight.step_bytes(tokens)
    share = weight.routing.top_k / weight.routing.experts
    return weight.nbytes * share, weight.nbytes * min(1.0, share * tokens)


def _zero_copy_weights(plan: Plan) -> list[Weight]:
    return [p.weight for p in plan.placements if p.access is Access.ZERO_COPY]


def times_of(plan: Plan, generations: Sequence[Generation]) -> TimeForecast | None:
    """What a decode step of `generations`, halfway through each, and steps of many sequences were forecast to take."""
    if plan.rates is None:
        return None
    kept_tokens = round(mean(len(g.prompt_ids) + len(g.token_ids) / 2 for g in generations))
    step_s = pass_forecast(plan, plan.rates, 1, kept_tokens=kept_tokens).seconds
    found = forecast(plan, plan.rates)
    return TimeForecast(found.origin, step_s, tuple(PassTime(b.tokens, b.seconds, b.limit) for b in found.decode))


def forecast_of(placed: PlacedModel, generations: Sequence[Generation]) -> Forecast:
    plan = placed.plan
    link, memory, ring = plan.step.link, plan.memory, plan.ring
    zero_copy = _zero_copy_weights(plan)
    zero_copy_bytes = sum(weight.step_bytes(1) for weight in zero_copy)
    transfers = ring.transfers if ring is not None else 0
    in_place_bytes = _result_bytes(plan.placed)
    slots = plan.slots
    return Forecast(
        backend=plan.backend,
        ways=plan.ways if plan.offloads else (),
        offloaded_bytes=plan.offloaded_bytes,
        saved_bytes=plan.saved_bytes,
        weights_bytes=memory.weights_bytes,
        mapped_bytes=sum(weight.nbytes for weight in plan.mapped),
        buffer_pool_bytes=memory.buffer_pool_bytes,
        expert_slots_bytes=memory.expert_slots_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        working_bytes=memory.working_bytes,
        host_bytes=memory.host_bytes,
        staging_bytes=memory.staging_bytes,
        context_tokens=plan.context_tokens,
        sequences=plan.sequences,
        zero_copy_bytes=zero_copy_bytes,
        prefetch_bytes=plan.step.prefetch_bytes,
        in_place_bytes=in_place_bytes,
        stream_bytes=slots.expected_bytes(1) if slots is not None else 0.0,
        disk_bytes=plan.step.disk_bytes,
        disk_most_bytes=_most_of_layers(placed),
        expert_edges_bytes=_expert_edges(placed.experts),
        zero_copy_floor_s=link.seconds(int(zero_copy_bytes), len(zero_copy)) if link else None,
        prefetch_floor_s=link.seconds(plan.step.prefetch_bytes, transfers) if link else None,
        in_place_floor_s=link.seconds(in_place_bytes, len(plan.placed)) if link else None,
        placed=tuple(block.path for block in plan.placed),
        streamed=tuple(block.path for block in slots.blocks) if slots is not None else (),
        slots=slots.count if slots is not None else 0,
        policy=slots.policy if slots is not None else None,
        other_kernels=other_kernels(plan),
        times=times_of(plan, generations),
    )


def _most_of_layers(placed: PlacedModel) -> int:
    """The most bytes that a pass reads of layers on disk, each in a read of its own."""
    ring = placed.plan.ring
    layers = [layer for layer in ring.copied if layer.tier is Tier.DISK] if ring is not None else []
    rounds = ring.rounds if ring is not None else 1
    return rounds * sum(most_bytes(layer_runs(layer, placed.converted.sources)) for layer in layers)


def _expert_edges(experts: ExpertRuns) -> int:
    """The most bytes that reading one streamed expert brings beyond its own."""
    stream = experts.stream
    if stream is None or not isinstance(stream.source, DiskSource):
        return 0
    edges = 0
    for block in stream.slots.blocks:
        for expert in range(block.experts):
            runs = [run for found in stream.source.runs(block, expert).values() for run in found]
            edges = max(edges, most_bytes(runs) - block.expert_bytes)
    return edges


def weights_of(plan: Plan, ledger: Ledger) -> tuple[PlacedWeight, ...]:
    """Plan and ledger joined by name; tier and address are the ledger's."""
    entries = {entry.name: entry for entry in ledger.entries}
    rows = []
    for placement in plan.placements:
        weight, entry = placement.weight, entries[placement.weight.full]
        rows.append(
            PlacedWeight(
                name=weight.full,
                aliases=weight.aliases,
                stack=weight.name.stack,
                layer=weight.name.layer,
                role=weight.role,
                dtype=str(weight.dtype).removeprefix("torch."),
                bytes=entry.bytes,
                tier=entry.tier,
                access=entry.access,
                reason=placement.reason,
                address=entry.address,
                host_address=entry.host_address,
            )
        )
    return tuple(rows)
