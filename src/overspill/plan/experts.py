"""Which routed experts the CPU computes, and which stream through slots: what was asked, held against the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from overspill.config import ExpertStreamConfig, ExtensionConfig, PlacementConfig, PlacementRule, format_bytes
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.model.experts import ExpertBlock, expert_blocks, other_experts
from overspill.model.weights import ModelMap
from overspill.plan.slots import SWEEP_SLOTS, Slots
from overspill.plan.tiers import Access, Tier

ROOM_SHARE = 0.9
"""Of what the device has left, the share that slots take where nobody said how many."""


@dataclass(frozen=True)
class ExpertChoice:
    """Blocks that leave the device. `slots.count` is 0 where it is to be what the device has left."""

    placed: tuple[ExpertBlock, ...] = ()
    slots: Slots | None = None
    reasons: tuple[tuple[ExpertBlock, str], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def moved(self) -> dict[str, tuple[Tier, Access, str]]:
        """Tier, access and why, by weight."""
        found = {}
        for block, reason in self.reasons:
            for weight in block.weights.values():
                found[weight.full] = (Tier.HOST, Access.IN_PLACE, reason)
        if self.slots is not None:
            for block in self.slots.blocks:
                for weight in block.weights.values():
                    why = f"expert slots: a token reads {block.top_k} of {block.experts} experts"
                    found[weight.full] = (self.slots.tier, Access.STREAM, why)
        return found


def choose_experts(model: ModelMap, extension: ExtensionConfig, *, unified: bool) -> ExpertChoice:
    """What `placement` and `expert_stream` ask of this model. `unified`: the device is the CPU itself.

    Raises ConfigError where they name nothing or cannot be carried out, UnsupportedModelError where the architecture
    computes its experts in a way that nothing can be put in the place of.
    """
    placement, stream = extension.placement, extension.expert_stream
    if not placement.on and not stream.on:
        return ExpertChoice()
    blocks = _blocks(model, "placement" if placement.on else "expert_stream")
    reasons, warnings = _placed(model, blocks, placement)
    if reasons and unified:
        count = len(placement.rules)
        notes = [
            f"device placement: {count} override{'s resolve' if count > 1 else ' resolves'} to the engine's own device "
            "(cpu), so nothing is placed"
        ]
        reasons = []
    else:
        notes = _placement_notes(model, reasons)
    placed = tuple(block for block, _ in reasons)
    rest = tuple(block for block in blocks if block not in placed)
    slots = _slots(rest, stream) if stream.on else None
    if slots is not None:
        notes += _stream_notes(slots, stream)
    return ExpertChoice(placed, slots, tuple(reasons), tuple(notes), tuple(warnings))


def _blocks(model: ModelMap, asked: str) -> tuple[ExpertBlock, ...]:
    if model.trace.failure is not None:
        raise UnsupportedModelError(
            f"{asked}: {model.architecture} could not be traced, so its routed experts are not known "
            f"({model.trace.failure})",
            hint='move its weights whole: uva with "cpu_offload_gb", or prefetch',
        )
    blocks = expert_blocks(model)
    others = other_experts(model, blocks)
    if not blocks and others:
        raise UnsupportedModelError(
            f"{asked}: {model.architecture} computes its routed experts ({others[0].full}) by itself and not through "
            "transformers' experts interface, so nothing can be put in their place",
            hint='move them whole: uva or prefetch, with "experts" selected',
        )
    if not blocks:
        raise ConfigError(
            f"{asked}: {model.architecture} is a dense model: none of its weights are routed experts that "
            "transformers knows as such",
            hint="take it away; uva or prefetch move any weights",
        )
    return blocks


# -- placement ---------------------------------------------------------------------------------------------------------


def _placed(
    model: ModelMap, blocks: Sequence[ExpertBlock], placement: PlacementConfig
) -> tuple[list[tuple[ExpertBlock, str]], list[str]]:
    """The blocks that rules put on the CPU, each with why; and what the rules also name that stays."""
    rules = placement.rules
    layers = model.decoder.layers
    if placement.n_cpu_moe is not None and placement.n_cpu_moe > layers:
        raise ConfigError(
            f"n_cpu_moe is {placement.n_cpu_moe}, above the {layers} layers of {model.architecture}",
            hint=f"at most {layers}, or cpu_moe for the experts of all layers",
        )
    placed = []
    compiled = [(rule, re.compile(rule.pattern)) for rule in rules]
    used: set[PlacementRule] = set()
    for block in blocks:
        winners = {part: _first(compiled, names) for part, names in block.parts().items()}
        used.update(rule for rule in winners.values() if rule is not None)
        if all(rule is None for rule in winners.values()):
            continue
        if any(rule is None for rule in winners.values()):
            _refuse_parted(block, winners)
        _refuse_norm(model, block)
        rule = next(rule for rule in winners.values() if rule is not None)
        placed.append((block, _why(rule)))
    warnings = _refuse_unused(model, blocks, rules, used)
    return placed, warnings


def _first(rules: Iterable[tuple[PlacementRule, re.Pattern[str]]], names: Sequence[str]) -> PlacementRule | None:
    """The first rule that finds any of the weight's names."""
    return next((rule for rule, pattern in rules if any(map(pattern.search, names))), None)


def _why(rule: PlacementRule) -> str:
    return f"override {rule.pattern}" if rule.origin.startswith("overrides") else rule.origin


def _refuse_parted(block: ExpertBlock, winners: dict[str, PlacementRule | None]) -> None:
    parts = block.parts()
    told = ", ".join(f'"{parts[part][0]}" -> {"cpu" if rule else "the device"}' for part, rule in winners.items())
    raise ConfigError(
        f"device placement: layer {block.layer} splits its routed experts across devices ({told}); gate, up and down "
        "of a layer are computed together, so they must share a device",
        hint="widen the pattern to cover all of them",
    )


def _refuse_norm(model: ModelMap, block: ExpertBlock) -> None:
    if getattr(model.skeleton.get_submodule(block.path), "has_post_expert_norm", False):
        raise UnsupportedModelError(
            f"device placement: the experts of {model.architecture} end in a norm of their own, which the CPU kernels "
            "do not compute",
            hint='stream them ("expert_stream"), or move them whole with uva or prefetch',
        )


def _refuse_unused(
    model: ModelMap, blocks: Sequence[ExpertBlock], rules: Sequence[PlacementRule], used: set[PlacementRule]
) -> list[str]:
    """ConfigError where a rule finds nothing that can be placed; warnings where it also finds what cannot."""
    of_blocks = {weight.full for block in blocks for weight in block.weights.values()}
    others = [name for weight in model if weight.full not in of_blocks for name in (weight.full, *weight.aliases)]
    if model.checkpoint is not None and model.checkpoint.format == "gguf":
        others += [name for name in model.checkpoint.tensors if re.search(r"_exps\.", name) is None]
    parts = list(dict.fromkeys(name for block in blocks for names in block.parts().values() for name in names))
    biases = [name for block in blocks for name in block.bias_names()]
    warnings = []
    for rule in rules:
        if rule.origin == "n_cpu_moe":
            continue
        also = [name for name in others if re.search(rule.pattern, name)]
        finds = any(re.search(rule.pattern, name) for name in parts)
        if not finds and any(re.search(rule.pattern, name) for name in biases):
            raise ConfigError(
                f'device placement: the pattern "{rule.pattern}" matches only biases of routed experts, which go where '
                "their block goes",
                hint="a pattern for the experts' weights, as ffn_(gate|up|down)_exps",
            )
        if not finds and also:
            raise ConfigError(
                f'device placement: the pattern "{rule.pattern}" matches {_few(also)}, and no routed expert: only '
                "routed experts are computed on the CPU",
                hint="a pattern for routed experts, as ffn_(gate|up|down)_exps; uva or prefetch move other weights",
            )
        if not finds:
            near = get_close_matches(rule.pattern, parts, n=3, cutoff=0.3) or parts[:3]
            raise ConfigError(
                f'device placement: the pattern "{rule.pattern}" matches no weight of {model.architecture}',
                hint=f"a regular expression that finds, for example, {', '.join(near)}",
            )
        if rule not in used:
            warnings.append(
                f'device placement: the pattern "{rule.pattern}" changes nothing: earlier ones take all that it matches'
            )
        if also and rule in used:
            warnings.append(
                f'device placement: the pattern "{rule.pattern}" also matches {_few(also)}, which stay on the device: '
                "only routed experts are computed on the CPU"
            )
    if any(rule.origin == "n_cpu_moe" for rule in rules) and not any(rule.origin == "n_cpu_moe" for rule in used):
        first = blocks[0].layer
        earlier = "an earlier rule places them all" if used else f"the first layer with routed experts is {first}"
        count = sum(rule.origin == "n_cpu_moe" for rule in rules)
        if not used:
            held = f"the first {count} layers hold" if count > 1 else "the first layer holds"
            raise ConfigError(
                f"n_cpu_moe is {count}, and {held} no routed experts: {earlier}",
                hint=f"an n_cpu_moe of at least {first + 1}",
            )
        warnings.append(f"n_cpu_moe changes nothing: {earlier}")
    return warnings


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _placement_notes(model: ModelMap, reasons: Sequence[tuple[ExpertBlock, str]]) -> list[str]:
    if not reasons:
        return []
    count, layers = len(reasons), model.decoder.layers
    run = "run their" if count > 1 else "runs its"
    nbytes = format_bytes(sum(block.nbytes for block, _ in reasons))
    return [f"device placement: {count} of {layers} layers {run} routed experts on the CPU, {nbytes} of weights"]


# -- streaming ---------------------------------------------------------------------------------------------------------


def _slots(blocks: tuple[ExpertBlock, ...], stream: ExpertStreamConfig) -> Slots:
    if not blocks:
        raise ConfigError(
            "expert_stream: the placement takes the experts of every layer, so none is left to stream",
            hint="place fewer layers (n_cpu_moe), or take expert_stream away",
        )
    tier = Tier.DISK if stream.tier == "disk" else Tier.HOST
    policy = stream.policy or "fetch"
    if tier is Tier.DISK and policy != "fetch":
        raise ConfigError(
            f'expert_stream: "policy" is "{policy}" and "tier" is "disk": what is on disk must be read before anything '
            "can compute it",
            hint='"policy": "fetch", or "tier": "host"',
        )
    slots = Slots(blocks, 0, policy, tier)
    if stream.slots is not None and stream.slot_bytes is not None:
        nbytes = stream.slots * stream.slot_bytes
        count = nbytes // slots.slot_bytes
        if count < 1:
            raise ConfigError(
                f"expert_stream: {stream.slots} slots of {stream.slot_bytes} bytes hold no expert, which takes "
                f"{slots.slot_bytes} bytes",
                hint=f'"slots" x "slot_bytes" of at least {slots.slot_bytes}',
            )
        return slots.of(count)
    if stream.cache_bytes is not None:
        count = stream.cache_bytes // slots.slot_bytes
        if count < 1:
            raise ConfigError(
                f"expert_stream: a cache of {format_bytes(stream.cache_bytes)} holds no expert, which takes "
                f"{format_bytes(slots.slot_bytes)}",
                hint=f"a cache of at least {slots.slot_bytes} bytes",
            )
        return slots.of(count)
    if stream.slot_bytes is not None:
        raise ConfigError(
            f'expert_stream: "slot_bytes" is {stream.slot_bytes} without "slots"',
            hint='give both, or "cache_bytes"',
        )
    return slots.of(stream.slots or 0)


def _stream_notes(slots: Slots, stream: ExpertStreamConfig) -> list[str]:
    if stream.slots is not None and stream.slot_bytes is not None and stream.slot_bytes < slots.slot_bytes:
        stated = f"{stream.slots} slots of {stream.slot_bytes} bytes"
        return [f"expert_stream: {stated} are a cache of {slots.count} experts"]
    if stream.slots is not None:
        held = f"{slots.count} slot{'s' * (slots.count > 1)}"
        return [f"expert_stream: {held} of a whole expert each, {format_bytes(slots.slot_bytes)}"]
    return []


def nothing_saved(slots: Slots) -> str | None:
    """A line where the slots take as much of the device as the experts would."""
    total = sum(block.nbytes for block in slots.blocks)
    if slots.pool_bytes < total:
        return None
    return (
        f"expert_stream: {slots.count} slots take {format_bytes(slots.pool_bytes)}, all {slots.experts} experts "
        f"{format_bytes(total)}: nothing is saved; fewer slots would save, or leave it away"
    )


def sized(slots: Slots, room_bytes: int) -> tuple[Slots, str]:
    """`slots` with as many as `room_bytes` of the device hold, at least one; and a line that says so."""
    count = int(room_bytes * ROOM_SHARE) // slots.slot_bytes - SWEEP_SLOTS
    fitting = slots.of(max(1, count))
    return fitting, (
        f"expert_stream: {fitting.count} slot{'s' * (fitting.count > 1)}, for want of a stated number: "
        f"{ROOM_SHARE:.0%} of the {format_bytes(max(0, room_bytes))} that the device has left"
    )
