"""Which weights leave the device: budget and order for `uva`, the group rule for `prefetch`, selectors for both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from overspill.config import OffloadConfig, closest, format_bytes, matches
from overspill.errors import ConfigError
from overspill.model.weights import ModelMap, Role, Weight
from overspill.plan.experts import ExpertChoice, choose_experts
from overspill.plan.ring import Ring, RingLayer
from overspill.plan.tiers import Access


@dataclass(frozen=True)
class Choice:
    """Weights that leave the device for host memory, each with its access and why; the ring, where there is one.

    `experts` are the routed experts that leave it in ways of their own.
    """

    moved: dict[str, tuple[Access, str]]
    ring: Ring | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    experts: ExpertChoice = field(default_factory=ExpertChoice)


def choose(model: ModelMap, offload: OffloadConfig, *, zero_copy: bool, unified: bool = False) -> Choice:
    """What `offload` asks of this model. `zero_copy` False: the device cannot read host memory, or must not.

    Routed experts are placed first; a backend takes of what is left.
    """
    experts = choose_experts(model, offload.extension, unified=unified)
    taken = experts.moved().keys()
    free = [weight for weight in model if weight.full not in taken and weight.role is not Role.BUFFER and weight.nbytes]
    backend = offload.resolved_backend
    selectors = offload.prefetch.offload_params if backend == "prefetch" else offload.uva.cpu_offload_params
    if backend is not None and taken:
        _refuse_taken(model, free, selectors)
    if backend == "prefetch":
        return replace(_prefetch(model, free, offload), experts=experts)
    if backend == "uva":
        return replace(_budget(model, free, offload, offload.extension.order, zero_copy=zero_copy), experts=experts)
    return Choice({}, experts=experts)


# -- uva: a budget -------------------------------------------------------------------------------------------------


def _budget(model: ModelMap, free: Sequence[Weight], offload: OffloadConfig, order: str, *, zero_copy: bool) -> Choice:
    budget = offload.uva.budget_bytes
    eligible = list(free)
    if order == "declaration" or not zero_copy:  # vLLM reaches the layers only; a staged copy is made layer by layer
        eligible = [w for w in eligible if w.name.stack is not None]
    if not zero_copy:
        eligible = [w for w in eligible if model.comes_in_turn(w)]
    eligible = _selected(eligible, offload.uva.cpu_offload_params, "cpu_offload_params")
    if order == "traffic":
        eligible = sorted(eligible, key=lambda w: (w.step_bytes(1) / w.nbytes, -w.nbytes))
    moved: dict[str, tuple[Access, str]] = {}
    total = 0
    for weight in eligible:
        if total >= budget:  # tested before each weight: the last one may overshoot by its whole size, as in vLLM
            break
        access = Access.ZERO_COPY if zero_copy else Access.PREFETCH
        moved[weight.full] = (access, _why_budget(weight, order))
        total += weight.nbytes
    if not moved:
        raise ConfigError(
            "cpu_offload_gb: no weight of this model can leave the device under these settings",
            hint="take away cpu_offload_params, or the budget",
        )
    warnings = []
    if total < budget:
        warnings.append(
            f"cpu_offload_gb asks for {format_bytes(budget)} but only {format_bytes(total)} of eligible weights exist; "
            "all of them are offloaded"
        )
    notes = [f"{len(moved)} weights, {format_bytes(total)}, fill the budget of {format_bytes(budget)}"]
    if total > budget:
        notes[0] += f" (the last one overshoots it by {format_bytes(total - budget)})"
    if zero_copy:
        return Choice(moved, None, tuple(notes), tuple(warnings))
    layers = ring_layers(model, [w for w in eligible if w.full in moved])
    ring = Ring(layers, step=1, look_ahead=False, rounds=model.rounds or 1)
    _refuse_no_saving(ring, "cpu_offload_gb without zero-copy", "a larger budget: weights of more than one layer")
    notes.append(
        "without zero-copy each layer's weights are copied when the layer runs, into one buffer, with no overlap"
    )
    return Choice(moved, ring, (*notes, *_guessed(model)), (*warnings, *_untraced(model)))


def _why_budget(weight: Weight, order: str) -> str:
    if order == "declaration":
        return "budget, in declaration order"
    if not weight.step_bytes(1):
        return "budget: decoding text does not read it"
    if not weight.reads.whole_bytes and weight.routing is None:
        return "budget: a step reads only the rows it looks up"
    if weight.routing is not None:
        return f"budget: a token reads {weight.routing.top_k} of {weight.routing.experts} experts"
    return "budget: read whole each step, largest first"


# -- prefetch: groups of layers --------------------------------------------------------------------------------------


def _prefetch(model: ModelMap, free: Sequence[Weight], offload: OffloadConfig) -> Choice:
    settings = offload.prefetch
    size, num, step = (
        settings.offload_group_size,
        settings.offload_num_in_group,
        settings.offload_prefetch_step,
    )
    decoder = model.decoder
    chosen = [n for n in range(decoder.layers) if n % size >= size - num]
    if not chosen:
        raise ConfigError(
            f"offload_group_size {size} with offload_num_in_group {num} selects none of the {decoder.layers} layers "
            f"of {decoder.path}",
            hint=f"an offload_group_size of at most {decoder.layers}",
        )
    inside = [w for w in free if w.name.stack == decoder.path]
    inside = _selected(inside, settings.offload_params, "offload_params")
    notes: list[str] = []
    warnings: list[str] = []
    if skipped := sorted(model.out_of_order & set(chosen)):
        notes.append(f"layers {skipped} of {decoder.path} stay resident: a pass does not run each of them exactly once")
    if outside := [w.full for w in inside if w.read_outside and w.name.layer in chosen]:
        notes.append(f"read outside their layer, so resident: {', '.join(outside)}")
    if written := [w.full for w in inside if w.written and w.name.layer in chosen]:
        notes.append(f"changed by the architecture while it runs, so resident: {', '.join(written)}")
    kept = [w for w in inside if w.name.layer in chosen and model.comes_in_turn(w)]
    layers = ring_layers(model, kept)
    if model.rounds > 1:
        notes.append(f"a pass runs the layers of {decoder.path} {model.rounds} times, and brings them as often")
    if not layers:
        raise ConfigError(
            f"prefetch can take no weight of the layers that the group rule names ({decoder.path} {chosen})"
            + "".join(f"; {note}" for note in notes),
            hint="another offload_group_size, other offload_params, or uva",
        )
    ring = Ring(layers, step, rounds=model.rounds or 1)
    if step >= len(layers):
        raise ConfigError(
            f"offload_prefetch_step ({step}) is not smaller than the {len(layers)} offloaded layers: every layer would "
            "own a device buffer and nothing would be saved",
            hint=f"an offload_prefetch_step of at most {len(layers) - 1}"
            if len(layers) > 1
            else "a smaller offload_group_size, so that more layers share the buffers",
        )
    _refuse_no_saving(ring, "prefetch", "a smaller offload_prefetch_step, or more layers")
    if step < num:
        warnings.append(
            f"offload_prefetch_step ({step}) is smaller than offload_num_in_group ({num}): offloaded layers follow "
            f"each other, and the copy of one can start only when the one {step} before it has run; "
            f"a step of {num} overlaps them"
        )
    if alone := [layer.number for layer in layers if layer not in ring.copied]:
        notes.append(
            f"layers {alone} of {decoder.path} have a buffer to themselves and are copied once: "
            f"{step} buffers for {len(layers)} layers"
        )
    reason = f"group rule: layer mod {size} >= {size - num}"
    moved = {w.full: (Access.PREFETCH, reason) for layer in layers for w in layer.weights}
    return Choice(moved, ring, (*notes, *_guessed(model)), (*warnings, *_untraced(model)))


def _guessed(model: ModelMap) -> list[str]:
    if not model.trace.guesses:
        return []
    return [
        f"the architecture asks for {model.trace.guesses} values while it runs, which the trace had to guess: a weight "
        "that is read outside its layer only where they are others would not be noticed"
    ]


def _untraced(model: ModelMap) -> list[str]:
    if model.trace.failure is None:
        return []
    return [
        "the architecture could not be traced, so a weight that is read while its layer does not run would not be "
        f"noticed, and a buffer shared by layers does not hold it then ({model.trace.failure}); uva with zero-copy "
        "reads every weight where it is"
    ]


def _refuse_no_saving(ring: Ring, what: str, hint: str) -> None:
    if ring.nbytes <= ring.pool_bytes:
        raise ConfigError(
            f"{what} would offload {format_bytes(ring.nbytes)} and take "
            f"{format_bytes(ring.pool_bytes)} of buffers: nothing is saved",
            hint=hint,
        )


def ring_layers(model: ModelMap, weights: Sequence[Weight]) -> tuple[RingLayer, ...]:
    """The weights by layer, in the order in which the layers run."""
    by_layer: dict[tuple[str, int], list[Weight]] = {}
    for weight in sorted(weights, key=lambda w: model.position(w)):
        assert weight.name.stack is not None
        assert weight.name.layer is not None
        by_layer.setdefault((weight.name.stack, weight.name.layer), []).append(weight)
    order = {layer: i for i, layer in enumerate(model.trace.layer_order)}
    keys = sorted(by_layer, key=lambda key: (order.get(key, len(order)), key[0], key[1]))
    return tuple(RingLayer(stack, number, tuple(by_layer[stack, number])) for stack, number in keys)


# -- selectors -------------------------------------------------------------------------------------------------------


def _refuse_taken(model: ModelMap, free: Sequence[Weight], selectors: Iterable[str]) -> None:
    """ConfigError for a selector of nothing but weights that a placement or expert_stream has taken."""
    for selector in sorted(selectors):
        if any(matches(selector, name) for weight in free for name in weight.names):
            continue
        if any(matches(selector, name) for weight in model for name in weight.names):
            raise ConfigError(
                f"{selector!r} selects only routed experts that the placement, or expert_stream, has taken already",
                hint="take the selector away, or the placement",
            )


def _selected(weights: Sequence[Weight], selectors: Iterable[str], field: str) -> list[Weight]:
    """The weights that any selector matches (all, without selectors); ConfigError where one matches none."""
    selectors = sorted(selectors)
    if not selectors:
        return list(weights)
    kept: set[str] = set()
    for selector in selectors:
        hits = {w.full for w in weights if any(matches(selector, name) for name in w.names)}
        if not hits:
            near = closest(selector, [w.name for w in weights])
            raise ConfigError(
                f"{field}: {selector!r} matches no weight of this model",
                hint=f"the closest names are {', '.join(near)}"
                if near
                else "see `overspill plan --json` for the names",
            )
        kept |= hits
    return [w for w in weights if w.full in kept]
