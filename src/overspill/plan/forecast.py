"""What a pass takes, from what it reads and moves and how fast the machine does that; and what limits it.

A pass over `tokens` tokens reads every dense weight once, of `experts` the share that so many tokens are expected to
choose, E·(1−(1−k/E)^b), and the cache of what came before. Products are bound by reading weights or by arithmetic,
whichever takes longer. What crosses the link in place adds to that, what is copied ahead runs beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from overspill.machine.device import Link
from overspill.machine.rates import Rates
from overspill.model.weights import Weight
from overspill.plan.placement import Plan
from overspill.plan.tiers import Access, Tier

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 512

DEVICE_MEMORY, DEVICE_COMPUTE, LAUNCHES = "device memory", "device compute", "layers' overhead"
LINK, CPU, DISK = "link", "CPU", "disk"


@dataclass(frozen=True)
class PassForecast:
    """Seconds of one pass over `tokens` tokens. `parts` are seconds by resource, as if each were alone.

    `limit` is the resource that the pass waits for most.
    """

    tokens: int
    seconds: float
    parts: Mapping[str, float]
    limit: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Forecast:
    """Decoding with so many sequences at once, each a token a pass, and one prompt pass; `origin` is the rates'."""

    origin: str
    decode: tuple[PassForecast, ...]
    prompt: PassForecast


def forecast(plan: Plan, rates: Rates) -> Forecast:
    """What `plan` takes on a machine of these rates: batches of 1 to 256, and a prompt of up to 512 tokens."""
    prompt = min(PROMPT_TOKENS, plan.context_tokens)
    return Forecast(
        rates.origin,
        tuple(pass_forecast(plan, rates, tokens, kept_tokens=plan.context_tokens // 2) for tokens in BATCHES),
        pass_forecast(plan, rates, prompt, kept_tokens=0),
    )


def pass_forecast(plan: Plan, rates: Rates, tokens: int, *, kept_tokens: int) -> PassForecast:
    """One pass over `tokens` tokens, each after `kept_tokens` of its own sequence in the cache."""
    elsewhere = {p.weight.full for p in plan.placements if p.access is Access.IN_PLACE and p.tier is not Tier.DEVICE}
    if plan.memory.unified:  # mapped weights are computed where everything is
        elsewhere = set()
    on_device = [p.weight for p in plan.placements if p.weight.full not in elsewhere]
    reading_s = sum(w.step_bytes(tokens) / rates.reading(_dtype(w)) for w in on_device)
    cached = plan.model.trace.kv_token_bytes * kept_tokens * tokens
    reading_s += cached / max(rates.read_bytes_s.values())
    computing_s = sum(_operations(w, tokens) / rates.computing(_dtype(w)) for w in on_device)
    launches_s = rates.layer_s * sum(weight_runs(plan))
    products_s = max(reading_s, computing_s)
    busy_s = max(products_s, launches_s) if rates.asynchronous else products_s + launches_s

    link = (
        None
        if plan.step.link is None
        else replace(
            plan.step.link,
            bandwidth=plan.step.link.bandwidth / rates.link_times,
            latency_s=plan.step.link.latency_s * rates.link_times,
        )
    )
    zero_copy = [p.weight for p in plan.placements if p.access is Access.ZERO_COPY]
    in_line_s = _over(link, sum(w.step_bytes(tokens) for w in zero_copy), sum(w.reads.times for w in zero_copy))
    blocks = plan.placed
    results = tokens * sum(b.hidden_size * next(iter(b.weights.values())).dtype.itemsize for b in blocks)
    in_line_s += _over(link, 4 * results, 2 * len(blocks))
    cpu_s = sum(
        max(w.step_bytes(tokens) / rates.expert_bytes_s, _operations(w, tokens) / rates.expert_flops)
        for block in blocks
        for w in block.weights.values()
    )
    disk_in_line_s = 0.0
    disk_bytes_s = rates.disk_bytes_s or float("inf")
    if plan.slots is not None:
        missed = plan.slots.expected_bytes(tokens)
        experts = missed / max(1, plan.slots.slot_bytes)
        if plan.slots.tier is Tier.DISK:
            disk_in_line_s = missed / disk_bytes_s
        in_line_s += _over(link, missed, experts)

    ring_link_s = ring_disk_s = 0.0
    if (ring := plan.ring) is not None:
        ring_link_s = _over(link, ring.pass_bytes, ring.transfers)
        ring_disk_s = ring.disk_pass_bytes / disk_bytes_s
    if ring is not None and not ring.look_ahead:
        in_line_s, ring_link_s = in_line_s + ring_link_s, 0.0

    working_s = busy_s + in_line_s + cpu_s + disk_in_line_s
    parts = {
        DEVICE_MEMORY: reading_s if reading_s >= computing_s else 0.0,
        DEVICE_COMPUTE: computing_s if computing_s > reading_s else 0.0,
        LAUNCHES: launches_s,
        LINK: in_line_s + ring_link_s,
        CPU: cpu_s,
        DISK: disk_in_line_s + ring_disk_s,
    }
    seconds = max(working_s, ring_link_s, ring_disk_s)
    return PassForecast(tokens, seconds, parts, max(parts, key=lambda name: parts[name]))


def weight_runs(plan: Plan) -> list[int]:
    """How often a pass runs each layer that it runs, towers left out."""
    towers = {stack.path for stack in plan.model.stacks if stack.tower}
    order = [layer for layer in plan.model.trace.layer_order if layer[0] not in towers]
    if not order:
        return [1] * plan.model.decoder.layers
    return [order.count(layer) for layer in dict.fromkeys(order)]


def _over(link: Link | None, nbytes: float, transfers: float) -> float:
    if link is None or not nbytes:
        return 0.0
    return nbytes / link.bandwidth + transfers * link.latency_s


def _operations(weight: Weight, tokens: int) -> float:
    """Of products with the weight: two for each element and token; rows that are looked up are no product."""
    elements = weight.nbytes / weight.dtype.itemsize
    if weight.routing is not None:
        return 2 * tokens * elements * weight.routing.top_k / weight.routing.experts * weight.runs
    if len(weight.shape) < 2:
        return 0.0
    return 2 * tokens * weight.reads.whole_bytes / weight.dtype.itemsize


def _dtype(weight: Weight) -> str:
    return str(weight.dtype).removeprefix("torch.")
