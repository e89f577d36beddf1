"""Ways that are sensible for a model on a device, side by side: what each takes of memory and time, and the pick."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from overspill.config import GIB, OffloadConfig, Settings, format_bytes, parse_offload_config
from overspill.config.experts import PlacementConfig
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.machine.device import Device
from overspill.model.experts import expert_blocks
from overspill.plan.fit import AS_GOOD, ASSUMED, excess_bytes, fit, fits
from overspill.plan.forecast import PassForecast, decode_forecast, prompt_forecast
from overspill.plan.placement import Plan
from overspill.plan.planner import planner_of
from overspill.plan.tiers import Tier

_DOCUMENT = "--offload-config"
_OF_FIT = 4
"""So many of the ways that fit finds are shown."""


@dataclass(frozen=True)
class Alternative:
    """One way: what it is, its settings, and what it comes to; `refused` says why it cannot be."""

    what: str
    settings: str
    plan: Plan | None
    fits: bool
    decode: PassForecast | None
    prompt: PassForecast | None
    refused: str | None = None


@dataclass(frozen=True)
class Alternatives:
    """All of them, the first that takes as little per token as any that fits (None: none does), the rates' origin."""

    rows: tuple[Alternative, ...]
    pick: Alternative | None
    origin: str
    emulated: bool


def alternatives(plan: Plan, settings: Settings, device: Device) -> Alternatives:
    """What was planned, and the usual ways beside it, on the same device, for the same context and weight budget."""
    rates = plan.rates or ASSUMED
    planner = planner_of(plan, settings, device)
    device_fit = plan.offload.extension.device_fit
    nothing = _beside(OffloadConfig(), device_fit=device_fit, placement=PlacementConfig(fit=False))
    whole = planner.plan(nothing)
    chosen = plan.fitted[0][0] if plan.fitted else ""
    rows = [_row("as planned", chosen, plan, rates), _row("nothing offloaded", "--no-fit", whole, rates)]
    known = [_comes_to(plan), _comes_to(whole)]

    def add(what: str, written: str, other: Plan) -> None:
        if (key := _comes_to(other)) not in known:
            known.append(key)
            rows.append(_row(what, written, other, rates))

    if excess_bytes(whole) > 0 and not device.unified:
        ways = fit(plan.model, _beside(OffloadConfig(), device_fit=device_fit), planner.plan, rates)
        for way in ways[:_OF_FIT]:
            add("as fit would", way.settings, way.plan)
    for what, written, document in _ways(plan, whole, device):
        try:
            add(
                what,
                written or _config(document),
                planner.plan(_beside(parse_offload_config(document), device_fit=device_fit)),
            )
        except (ConfigError, UnsupportedModelError) as refused:
            rows.append(Alternative(what, written, None, False, None, None, refused.message.splitlines()[0]))
    able = [(row.decode.seconds, row) for row in rows if row.fits and row.decode is not None]
    least = min((seconds for seconds, _ in able), default=0.0)
    pick = next((row for seconds, row in able if seconds <= AS_GOOD * least), None)
    return Alternatives(tuple(rows), pick, rates.origin, plan.device_kind == "emulated")


def _comes_to(plan: Plan) -> object:
    """What is equal for plans that differ in their settings alone."""
    slots = None if plan.slots is None else (plan.slots.count, plan.slots.policy, plan.slots.tier)
    return [(p.tier, p.access) for p in plan.placements], None if plan.ring is None else plan.ring.step, slots


def _row(what: str, written: str, plan: Plan, rates: Any) -> Alternative:
    return Alternative(what, written, plan, fits(plan), decode_forecast(plan, rates), prompt_forecast(plan, rates))


def _ways(plan: Plan, whole: Plan, device: Device) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What each is, how the command line writes it where a document is not needed, and the document."""
    blocks = expert_blocks(plan.model)
    from_disk = _extension(expert_stream={"enabled": True, "tier": "disk"})
    if device.unified:
        if blocks:
            yield "experts from disk", "", from_disk
        yield "mapped files", "", _extension(mmap={"enabled": True})
        return
    missing = excess_bytes(whole)
    budget = -(-(missing if missing > 0 else max(1, plan.offloaded_bytes)) * 100 // GIB) / 100
    in_place: dict[str, Any] = {"uva": {"cpu_offload_gb": budget}}
    yield "least traffic first", f"--cpu-offload-gb {budget:.2f}", in_place
    yield "declaration order, as vLLM", "", in_place | _extension(order="declaration")
    layers = plan.model.decoder.layers
    for share, size in (("a quarter", 4), ("half", 2), ("all", 1)):
        if layers >= 2 * size:
            step = 2 if layers // size > 2 else 1
            yield (
                f"{share} of the layers copied ahead",
                f"--offload-group-size {size} --offload-prefetch-step {step}",
                {"prefetch": {"offload_group_size": size, "offload_prefetch_step": step}},
            )
    if not blocks:
        return
    experts = -(-sum(block.nbytes for block in blocks) * 100 // GIB) / 100
    yield (
        "experts only, in place across the link",
        f"--cpu-offload-gb {experts:.2f} --cpu-offload-params experts",
        {"uva": {"cpu_offload_gb": experts, "cpu_offload_params": ["experts"]}},
    )
    for count in sorted({max(1, len(blocks) // 2), len(blocks)}):
        last = blocks[count - 1].layer + 1
        written = "--cpu-moe" if count == len(blocks) else f"--n-cpu-moe {last}"
        fields: dict[str, object] = {"cpu_moe": True} if count == len(blocks) else {"n_cpu_moe": last}
        yield f"experts of {count} layers on the CPU", written, _extension(placement=fields)
    for share, part in (("a quarter", 4), ("half", 2)):
        slots = sum(block.experts for block in blocks) // part
        yield f"{share} of the experts in slots", "", _extension(expert_stream={"slots": slots})
    yield "experts from disk", "", from_disk


def _extension(**fields: object) -> dict[str, Any]:
    return {"overspill": fields}


def _config(document: dict[str, Any]) -> str:
    return f"{_DOCUMENT} '{json.dumps(document)}'"


def _beside(offload: OffloadConfig, **fields: object) -> OffloadConfig:
    """`offload` with fields of the extension that hold for every way."""
    return offload.model_copy(update={"overspill": offload.extension.model_copy(update=fields)})


def alternatives_as_json(found: Alternatives) -> dict[str, Any]:
    return {
        "rates": found.origin,
        "pick": None if found.pick is None else found.rows.index(found.pick),
        "alternatives": [
            {
                "what": row.what,
                "settings": row.settings,
                "fits": row.fits,
                "refused": row.refused,
                "device_bytes": row.plan and row.plan.memory.device_bytes,
                "host_bytes": row.plan and row.plan.memory.host_bytes + row.plan.memory.staging_bytes,
                "disk_bytes": row.plan and sum(p.weight.nbytes for p in row.plan.on(Tier.DISK)),
                "decode_s": row.decode and row.decode.seconds,
                "decode_limit": row.decode and row.decode.limit,
                "prompt_tokens_per_s": row.prompt and row.prompt.tokens_per_s,
            }
            for row in found.rows
        ],
    }


def render_alternatives(found: Alternatives) -> Table:
    """A row each; the pick is marked."""
    emulated = ", emulated: no GPU time" if found.emulated else ""
    table = Table(title=f"Ways, by {found.origin}{emulated}", title_justify="left")
    table.add_column("")
    table.add_column("way", overflow="fold")
    table.add_column("settings", overflow="fold")
    for column in ("device", "host", "disk", "ms/step", "prompt tok/s"):
        table.add_column(column, justify="right")
    table.add_column("limited by", overflow="fold")
    for row in found.rows:
        if row.plan is None or row.decode is None or row.prompt is None:
            table.add_row("", row.what, row.settings, "", "", "", "", "", f"refused: {row.refused}")
            continue
        memory = row.plan.memory
        on_disk = sum(p.weight.nbytes for p in row.plan.on(Tier.DISK))
        table.add_row(
            "→" if row is found.pick else "",
            row.what,
            "(a document, see --json)" if _DOCUMENT in row.settings else row.settings,
            format_bytes(memory.device_bytes),
            format_bytes(memory.host_bytes + memory.staging_bytes) if memory.host_bytes else "",
            format_bytes(on_disk) if on_disk else "",
            f"{row.decode.seconds * 1e3:.1f}",
            f"{row.prompt.tokens_per_s:.0f}",
            row.decode.limit if row.fits else "does not fit",
        )
    return table
