"""The live page, and what it reads: the model as a map, and what the engine does now."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from typing import Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

from overspill.engine.engine import Engine
from overspill.engine.service import EngineService, ExpertStats
from overspill.machine.device import Device
from overspill.model.weights import Role
from overspill.offload.ledger import Ledger
from overspill.plan import Placement, Plan, Tier

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
}


class AccessBytes(BaseModel):
    """The weights of one tier and access, as the ledger holds them."""

    tier: str
    access: str
    weights: int
    bytes: int


class Block(BaseModel):
    """A weight; or `count` of a layer's experts' weights that are alike but for their numbers, which `*` stands for."""

    name: str
    tied: list[str]
    role: str
    shape: list[int] = Field(description="of each, where count is above 1")
    dtype: str
    bytes: int
    count: int
    experts: int | None = Field(description="how many experts' weights these are; null for other weights")
    tier: str
    access: str
    reason: str


class Row(BaseModel):
    """A layer, or a module outside the layers (`layer` is null), with its weights in declaration order."""

    label: str
    layer: int | None
    bytes: int
    blocks: list[Block]


class ModelMap(BaseModel):
    """Every weight of the model: what it is from the plan, where it is and its bytes from the ledger."""

    started_at: float = Field(description="when this server started, in seconds since 1970; tells servers apart")
    architecture: str
    bytes: int
    context_tokens: int
    max_request_tokens: int = Field(description="the most tokens, prompt and answer together, of one request")
    chat: Literal["template", "text", "none"] = Field(
        description="what can be asked: messages, plain text to continue (no chat template), or token ids only"
    )
    accesses: list[AccessBytes]
    rows: list[Row]


class LiveDevice(BaseModel):
    name: str
    emulated: bool


class LiveLink(BaseModel):
    """What crossed the link since the start, and what it can carry."""

    bytes_per_s: float = Field(description="its bandwidth")
    measured: bool = Field(description="whether the bandwidth was measured; it was stated otherwise")
    bytes: int
    transfers: int
    stall_s: float | None = Field(description="seconds that computing waited for the link; null where not known")
    zero_copy_counted: bool = Field(description="whether bytes include what is read across the link in place")


class PurposeBytes(BaseModel):
    purpose: str
    held_bytes: int
    planned_bytes: int | None = Field(description="null where the plan does not know")


class TierMemory(BaseModel):
    tier: str
    limit_bytes: int | None = Field(
        description="what was available when the plan was made; null for what stays in the checkpoint on disk"
    )
    peak_bytes: int | None = Field(description="the most held at once; null where it is not kept")
    purposes: list[PurposeBytes]


class LiveExpertStream(BaseModel):
    """Experts that come through slots.

    `lookups` are `hits` and the three kinds of misses. `fetched`, `prefetched`, `promoted` and `loaded` less
    `evictions` are what the slots hold. Of `prefetched`, those neither used nor wasted are in their slots and not asked
    for yet.
    """

    policy: str = Field(description="what is done with an expert that is in no slot: fetch, cpu, or auto")
    tier: str = Field(description="where they live: host or disk")
    slots: int = Field(description="for one expert each")
    slots_held: int
    slots_free: int
    slot_bytes: int
    lookups: int = Field(description="experts that passes chose, each once for a pass and layer")
    hits: int = Field(description="found in a slot, or on their way to one")
    fetched: int = Field(description="missed, and brought into a slot")
    streamed: int = Field(description="missed, and passed through without staying")
    computed: int = Field(description="missed, and computed on the CPU")
    prefetched: int = Field(description="brought into a slot before they were asked for")
    prefetch_used: int = Field(description="prefetched, and then chosen")
    prefetch_wasted: int = Field(description="prefetched, and evicted before they were chosen")
    promoted: int = Field(description="brought into a slot after the CPU had computed them")
    loaded: int = Field(description="brought into a slot before the first pass")
    evictions: int
    bytes: int = Field(description="of experts brought to the device")
    stall_s: float = Field(description="seconds that the host waited for them; what a GPU waits alone is not known")


class ExpertUse(BaseModel):
    calls: int = Field(description="passes")
    tokens: int
    bytes: int = Field(description="of weights that were read")


class LayerExpertUse(ExpertUse):
    layer: int


class LivePlacedExperts(ExpertUse):
    """Experts that the CPU computes where they lie: all layers together, and each."""

    layers: list[LayerExpertUse]


class LiveExperts(BaseModel):
    """Routed experts that are streamed or placed on the CPU, as they were after the latest step."""

    stream: LiveExpertStream | None
    placed: LivePlacedExperts | None


class LiveStats(BaseModel):
    """A snapshot. Counts are since the start, so that two snapshots give a rate over the seconds between them."""

    started_at: float
    clock_s: float = Field(description="when this snapshot was taken, on a clock that never goes back")
    failure: str | None = Field(description="why the engine cannot go on")
    batching: str = Field(description="how this architecture's requests are batched")
    device: LiveDevice
    running: int
    waiting: int
    finished: dict[str, int] = Field(description="requests by finish reason")
    kv_usage: float = Field(description="share of the KV cache that is in use")
    prompt_tokens: int
    generation_tokens: int
    steps: int
    step_s: float = Field(description="seconds of the latest step")
    step_tokens: int = Field(description="tokens of the latest step")
    step_link_floor_s: float | None = Field(description="the least that the plan says the link needs for a step")
    link: LiveLink | None
    memory: list[TierMemory]
    experts: LiveExperts | None = Field(description="null where no expert is streamed or placed")


def mount(app: FastAPI, service: EngineService, engine: Engine) -> None:
    """Add the page at `/`, its files below `/page`, and its two sources `/live/map` and `/live/stats` to `app`."""
    started_at = time.time()
    plan, ledger, device = engine.plan, engine.ledger, engine.placed.device
    model_map = ModelMap(
        started_at=started_at,
        architecture=plan.model.architecture,
        bytes=sum(entry.bytes for entry in ledger.entries),
        context_tokens=plan.context_tokens,
        max_request_tokens=service.max_request_tokens,
        chat="none"
        if engine.tokenizer is None
        else "template"
        if getattr(engine.tokenizer, "chat_template", None)
        else "text",
        accesses=access_bytes(ledger),
        rows=map_rows(plan, ledger),
    ).model_dump_json()

    @app.get("/live/map", tags=["live"], summary="The model as a map", response_model=ModelMap)
    def live_map() -> Response:
        return Response(model_map, media_type="application/json")

    @app.get("/live/stats", tags=["live"], summary="What the engine does now")
    def live_stats() -> LiveStats:
        return _stats(service, plan, ledger, device, started_at)

    page = files(__package__).joinpath("page")
    for path, (name, media_type) in _FILES.items():
        app.get(path, include_in_schema=False)(_file(page.joinpath(name).read_text(encoding="utf-8"), media_type))


def _file(content: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file


def access_bytes(ledger: Ledger) -> list[AccessBytes]:
    """The ledger's weights and bytes by tier and access, the device first."""
    weights: Counter[tuple[Tier, str]] = Counter()
    nbytes: Counter[tuple[Tier, str]] = Counter()
    for entry in ledger.entries:
        weights[entry.tier, entry.access] += 1
        nbytes[entry.tier, entry.access] += entry.bytes
    order = list(Tier)
    return [
        AccessBytes(tier=tier, access=access, weights=weights[tier, access], bytes=nbytes[tier, access])
        for tier, access in sorted(weights, key=lambda key: (order.index(key[0]), key[1]))
    ]


def map_rows(plan: Plan, ledger: Ledger) -> list[Row]:
    """A row for every layer, and for every module outside the layers, in declaration order."""
    groups: dict[tuple[str, int | None], list[Placement]] = {}
    for placement in plan.placements:
        name = placement.weight.name
        owner = name.stack if name.stack is not None else name.full.rpartition(".")[0] or name.full
        groups.setdefault((owner, name.layer), []).append(placement)
    one_stack = len({owner for owner, layer in groups if layer is not None}) == 1
    held = {entry.name: entry.bytes for entry in ledger.entries}
    rows = []
    for (owner, layer), placements in groups.items():
        short = owner.removeprefix("model.")
        label = short if layer is None else f"layer {layer}" if one_stack else f"{short}.{layer}"
        blocks = [_block(alike, held) for alike in _alike(placements)]
        rows.append(Row(label=label, layer=layer, bytes=sum(block.bytes for block in blocks), blocks=blocks))
    return rows


def _alike(placements: Iterable[Placement]) -> Iterable[list[Placement]]:
    """One by one, but for experts that are weights of their own: those that differ only in their numbers together."""
    groups: dict[tuple[object, ...], list[Placement]] = {}
    for p in placements:
        weight = p.weight
        key = (_pattern(p), weight.shape, weight.dtype, p.tier, p.access, p.reason)
        groups.setdefault(key if weight.role is Role.ROUTED_EXPERT else (weight.full,), []).append(p)
    return groups.values()


def _pattern(placement: Placement) -> str:
    """The weight's name with `*` for every number below its layer."""
    full, relative = placement.weight.full, placement.weight.name.relative or placement.weight.full
    return full.removesuffix(relative) + re.sub(r"(?<=\.)\d+(?=\.)", "*", relative)


def _block(alike: list[Placement], held: dict[str, int]) -> Block:
    first, weight = alike[0], alike[0].weight
    experts = weight.routing.experts if weight.routing is not None else len(alike)
    return Block(
        name=weight.full if len(alike) == 1 else _pattern(first),
        tied=list(weight.aliases),
        role=weight.role,
        shape=list(weight.shape),
        dtype=str(weight.dtype).removeprefix("torch."),
        bytes=sum(held[p.weight.full] for p in alike),
        count=len(alike),
        experts=experts if weight.role is Role.ROUTED_EXPERT else None,
        tier=first.tier,
        access=first.access,
        reason=first.reason,
    )


def _stats(service: EngineService, plan: Plan, ledger: Ledger, device: Device, started_at: float) -> LiveStats:
    clock_s, stats, traffic = time.monotonic(), service.stats(), device.traffic.copy()
    return LiveStats(
        started_at=started_at,
        clock_s=clock_s,
        failure=service.failure,
        batching=service.batching,
        device=LiveDevice(name=device.name, emulated=device.kind == "emulated"),
        running=stats.running,
        waiting=stats.waiting,
        finished=dict(stats.finished),
        kv_usage=stats.kv_usage,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        steps=stats.steps,
        step_s=stats.step_seconds,
        step_tokens=stats.step_tokens,
        step_link_floor_s=stats.step_link_floor_s,
        link=None
        if plan.step.link is None
        else LiveLink(
            bytes_per_s=plan.step.link.bandwidth,
            measured=plan.step.link.measured,
            bytes=traffic.bytes,
            transfers=traffic.transfers,
            stall_s=traffic.stall_s if device.sees_the_link else None,
            zero_copy_counted=device.sees_the_link,
        ),
        memory=_memory(plan, ledger, device),
        experts=None if stats.experts is None else _experts(stats.experts, plan),
    )


def _experts(experts: ExpertStats, plan: Plan) -> LiveExperts:
    stream = placed = None
    if (counts := experts.counts) is not None:
        assert plan.slots is not None
        stream = LiveExpertStream(
            policy=plan.slots.policy,
            tier=plan.slots.tier,
            slots=experts.slots,
            slots_held=experts.slots - experts.slots_free,
            slots_free=experts.slots_free,
            slot_bytes=plan.slots.slot_bytes,
            lookups=counts.lookups,
            **vars(counts),
        )
    if experts.placed:
        uses = experts.placed.values()
        placed = LivePlacedExperts(
            calls=sum(use.calls for use in uses),
            tokens=sum(use.tokens for use in uses),
            bytes=sum(use.bytes for use in uses),
            layers=[LayerExpertUse(layer=layer, **vars(use)) for layer, use in experts.placed.items()],
        )
    return LiveExperts(stream=stream, placed=placed)


def _memory(plan: Plan, ledger: Ledger, device: Device) -> list[TierMemory]:
    memory = plan.memory
    planned = {
        "weights": memory.weights_bytes,
        "buffer_pool": memory.buffer_pool_bytes,
        **({"expert_slots": memory.expert_slots_bytes} if plan.slots is not None else {}),
        "kv_cache": memory.kv_cache_bytes,
        "working": memory.working_bytes,
    }
    tiers = [
        TierMemory(
            tier=Tier.DEVICE,
            limit_bytes=memory.available_device_bytes,
            peak_bytes=device.peak_bytes(),
            purposes=[
                PurposeBytes(purpose=purpose, held_bytes=device.held_bytes(purpose), planned_bytes=nbytes)
                for purpose, nbytes in planned.items()
            ],
        )
    ]
    hosted = {block.purpose: block.allocated_bytes for block in ledger.blocks if block.tier is Tier.HOST}
    if hosted:
        purposes = [
            PurposeBytes(purpose=purpose, held_bytes=hosted[block], planned_bytes=nbytes)
            for purpose, block, nbytes in (
                ("weights", "host", memory.host_bytes),
                ("staging", "staging", memory.staging_bytes),
            )
            if block in hosted
        ]
        peak_bytes = sum(hosted.values())
        limit_bytes = memory.available_host_bytes
        tiers.append(TierMemory(tier=Tier.HOST, limit_bytes=limit_bytes, peak_bytes=peak_bytes, purposes=purposes))
    if on_disk := plan.on(Tier.DISK):
        kept = PurposeBytes(
            purpose="weights",
            held_bytes=ledger.bytes_on(Tier.DISK),
            planned_bytes=sum(placement.weight.nbytes for placement in on_disk),
        )
        tiers.append(TierMemory(tier=Tier.DISK, limit_bytes=None, peak_bytes=None, purposes=[kept]))
    return tiers
