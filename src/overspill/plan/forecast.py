"""What a pass takes, from what it reads and moves and how fast the machine does that; and what limits it.

A pass over `tokens` tokens reads every dense weight once, of `experts` the share that so many tokens are expected to
choose, E·(1−(1−k/E)^b), and what is kept of earlier tokens. Products are bound by reading weights or by arithmetic,
whichever takes longer. What crosses the link in place adds to that; what is copied ahead runs beside it as far as the
ring's buffers allow (pipeline.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from overspill.machine.device import Link
from overspill.machine.rates import Rates
from overspill.model.weights import Role, Weight
from overspill.plan.pipeline import Copy, Turn, pass_seconds
from overspill.plan.placement import Placement, Plan
from overspill.plan.ring import RingLayer
from overspill.plan.tiers import Access, Tier

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 512

_CACHE_CROSSINGS = 3
"""Keys and values are read, laid beside the new ones in other memory, and read there by attention."""

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
    times, runs = rates.correction(", ".join(plan.ways))
    return Forecast(
        f"{rates.origin}, corrected by {times:.2f} ({runs})" if runs else rates.origin,
        tuple(decode_forecast(plan, rates, sequences) for sequences in BATCHES),
        prompt_forecast(plan, rates),
    )


def decode_forecast(plan: Plan, rates: Rates, sequences: int | None = None) -> PassForecast:
    """A token of each of so many sequences, by default as many as the plan is for, each halfway through its context.

    Where a server's cache does not hold so much, each has its share of what it holds.
    """
    sequences = plan.sequences if sequences is None else sequences
    kept_tokens = plan.context_tokens // 2
    if plan.kv_cache_tokens is not None:
        kept_tokens = min(kept_tokens, plan.kv_cache_tokens // sequences)
    return pass_forecast(plan, rates, sequences, kept_tokens=kept_tokens)


def prompt_forecast(plan: Plan, rates: Rates) -> PassForecast:
    """A prompt of 512 tokens, or of as many as the context has; logits of the last token alone are computed."""
    tokens = min(PROMPT_TOKENS, plan.context_tokens)
    return pass_forecast(plan, rates, tokens, kept_tokens=0, logits=1)


def pass_forecast(
    plan: Plan, rates: Rates, tokens: int, *, kept_tokens: int, logits: int | None = None
) -> PassForecast:
    """One pass over `tokens` tokens, each after `kept_tokens` of its own sequence in the cache.

    `logits`: of how many tokens they are computed, by default of all.
    """
    logits = tokens if logits is None else logits
    link, ring = _link(plan, rates), plan.ring
    work = [*_layers(plan, rates, link, tokens, kept_tokens), _rest(plan, rates, link, tokens, logits)]
    in_ring = {(layer.stack, layer.number): index for index, layer in enumerate(ring.layers if ring else ())}
    turns = [Turn(turn.seconds(asynchronous=rates.asynchronous), in_ring.get(turn.layer)) for turn in work]
    copies = [_copy(layer, rates, link) for layer in (ring.layers if ring else ())]
    copied_s = dict.fromkeys((LINK, DISK), 0.0)
    for layer, copy in zip(ring.layers if ring else (), copies, strict=True):
        if ring is not None and layer in ring.copied:
            copied_s[copy.channel] += ring.rounds * copy.seconds
    reading_s, computing_s = (sum(getattr(turn, name) for turn in work) for name in ("reading_s", "computing_s"))
    parts = {
        DEVICE_MEMORY: reading_s if reading_s >= computing_s else 0.0,
        DEVICE_COMPUTE: computing_s if computing_s > reading_s else 0.0,
        LAUNCHES: sum(turn.launches_s for turn in work),
        LINK: sum(turn.link_s for turn in work) + copied_s[LINK],
        CPU: sum(turn.cpu_s for turn in work),
        DISK: sum(turn.disk_s for turn in work) + copied_s[DISK],
    }
    times, _ = rates.correction(", ".join(plan.ways))
    parts = {name: times * seconds for name, seconds in parts.items()}
    seconds = times * pass_seconds(turns, ring, copies)
    return PassForecast(tokens, seconds, parts, max(parts, key=lambda name: parts[name]))


_NO_LAYER = ("", -1)


@dataclass
class _Work:
    """What one run of a layer takes of each resource, in seconds; `layer` is _NO_LAYER for what is in none."""

    layer: tuple[str, int]
    launches_s: float
    reading_s: float = 0.0
    computing_s: float = 0.0
    link_s: float = 0.0
    cpu_s: float = 0.0
    disk_s: float = 0.0

    def seconds(self, *, asynchronous: bool) -> float:
        """Products are bound by reading or by arithmetic; what is in line with them adds."""
        products_s = max(self.reading_s, self.computing_s)
        busy_s = max(products_s, self.launches_s) if asynchronous else products_s + self.launches_s
        return busy_s + self.link_s + self.cpu_s + self.disk_s


def _layers(plan: Plan, rates: Rates, link: Link | None, tokens: int, kept_tokens: int) -> list[_Work]:
    """The layers of a pass in the order in which they run, each as often as it does."""
    order = layers_run(plan)
    times = Counter(order)
    work = {layer: _Work(layer, rates.layer_s) for layer in times}
    cached_s = _CACHE_CROSSINGS * plan.model.trace.kept_bytes(kept_tokens) * tokens / max(rates.read_bytes_s.values())
    for layer, turn in work.items():
        turn.reading_s += cached_s * times[layer] / len(order)
    for placement in plan.placements:
        if (layer := _layer_of(placement.weight)) in work:
            _add(work[layer], placement, plan, rates, link, tokens)
    for block in plan.placed:
        turn = work[plan.model.decoder.path, block.layer]
        results = tokens * block.hidden_size * next(iter(block.weights.values())).dtype.itemsize
        turn.link_s += _over(link, 4 * results, 2)
        for weight in block.weights.values():
            reading_s = weight.step_bytes(tokens) / rates.expert_bytes_s
            turn.cpu_s += max(reading_s, _operations(weight, tokens) / rates.expert_flops)
    if (slots := plan.slots) is not None:
        missed = slots.expected_bytes(tokens) / len(slots.blocks)
        disk_s = missed / _disk_bytes_s(rates) if slots.tier is Tier.DISK else 0.0
        fetched_s, computed_s = _over(link, missed, missed / max(1, slots.slot_bytes)), missed / rates.expert_bytes_s
        on_cpu = slots.policy == "cpu" or (slots.policy == "auto" and computed_s < fetched_s + disk_s)
        for block in slots.blocks:
            turn = work[plan.model.decoder.path, block.layer]
            turn.disk_s += disk_s
            turn.link_s += 0.0 if on_cpu else fetched_s
            turn.cpu_s += computed_s if on_cpu else 0.0
    for layer, seconds in _expert_layers(plan, rates).items():
        work[layer].launches_s = seconds
    return [_per_run(work[layer], times[layer]) for layer in order]


def _rest(plan: Plan, rates: Rates, link: Link | None, tokens: int, logits: int) -> _Work:
    """What a pass does outside of the layers that it runs."""
    work = _Work(_NO_LAYER, rates.step_s)
    layers = set(layers_run(plan))
    for placement in plan.placements:
        if _layer_of(placement.weight) not in layers:
            head = placement.weight.role in (Role.HEAD, Role.EMBEDDING)  # an embedding's products are a tied head's
            _add(work, placement, plan, rates, link, tokens, products=logits if head else tokens)
    return work


def _add(
    work: _Work,
    placement: Placement,
    plan: Plan,
    rates: Rates,
    link: Link | None,
    tokens: int,
    products: int | None = None,
) -> None:
    """What is read of a weight, multiplied by it, and brought for it when it is its turn."""
    weight = placement.weight
    away = placement.access is Access.IN_PLACE and placement.tier is not Tier.DEVICE
    if not away or plan.memory.unified:  # mapped weights are computed where everything is
        if placement.access is not Access.ZERO_COPY or not rates.asynchronous:  # a GPU reads it over the link alone
            work.reading_s += weight.step_bytes(tokens) / rates.reading(_dtype(weight))
        work.computing_s += _operations(weight, products or tokens) / rates.computing(_dtype(weight))
    if placement.access is Access.ZERO_COPY:
        work.link_s += _over(link, weight.step_bytes(tokens), weight.reads.times)


def _expert_layers(plan: Plan, rates: Rates) -> dict[tuple[str, int], float]:
    """The overhead of layers with routed experts, by where these are computed."""
    decoder = plan.model.decoder.path
    slots = () if plan.slots is None else plan.slots.blocks
    where = {_layer_of(weight): "device" for weight in plan.model if weight.role is Role.ROUTED_EXPERT}
    where |= {(decoder, block.layer): "cpu" for block in plan.placed}
    where |= {(decoder, block.layer): "slots" for block in slots}
    run = set(layers_run(plan))
    return {layer: rates.expert_layer_s.get(what, rates.layer_s) for layer, what in where.items() if layer in run}


def _layer_of(weight: Weight) -> tuple[str, int]:
    name = weight.name
    return _NO_LAYER if name.stack is None or name.layer is None else (name.stack, name.layer)


def _per_run(work: _Work, times: int) -> _Work:
    """A weight's bytes are those of all runs of its layer in a pass."""
    return replace(
        work,
        reading_s=work.reading_s / times,
        computing_s=work.computing_s / times,
        link_s=work.link_s / times,
        cpu_s=work.cpu_s / times,
        disk_s=work.disk_s / times,
    )


def _copy(layer: RingLayer, rates: Rates, link: Link | None) -> Copy:
    """How a layer comes. From disk to a device it crosses the link on the way, which is seldom the slower."""
    if layer.tier is Tier.DISK:
        seconds = sum(weight.nbytes for weight in layer.weights) / _disk_bytes_s(rates)
        if link is not None and (crossing_s := _over(link, layer.nbytes, 1)) > seconds:
            return Copy(LINK, crossing_s, crossing_s, rates.beside_copies)
        return Copy(DISK, seconds, seconds, rates.beside_reads)
    seconds = _over(link, layer.nbytes, 1)
    if rates.copy_bytes_s is None:
        return Copy(LINK, seconds, seconds, rates.beside_copies)
    copying_s = rates.copies_beside * layer.nbytes / rates.copy_bytes_s
    return Copy(LINK, max(seconds, copying_s), copying_s, rates.beside_copies)


def _link(plan: Plan, rates: Rates) -> Link | None:
    """The device's link, as fast as it was found to be."""
    link = plan.step.link
    if link is None:
        return None
    return replace(link, bandwidth=min(link.bandwidth, rates.copy_bytes_s or link.bandwidth))


def _disk_bytes_s(rates: Rates) -> float:
    return rates.disk_bytes_s or float("inf")


def layers_run(plan: Plan) -> list[tuple[str, int]]:
    """The layers of a pass as they run, (stack, number), each as often as it does; towers left out."""
    model = plan.model
    towers = {stack.path for stack in model.stacks if stack.tower}
    order = [layer for layer in model.trace.layer_order if layer[0] not in towers]
    return order or [(model.decoder.path, number) for number in range(model.decoder.layers)]


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
