"""Ways that are sensible for a model on a device, side by side: what each takes of memory and time, and the pick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from overspill.config import GIB, OffloadConfig, Settings, format_bytes, parse_offload_config
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.machine.device import Device
from overspill.model.experts import expert_blocks
from overspill.plan.fit import ASSUMED, excess_bytes, fits
from overspill.plan.forecast import PROMPT_TOKENS, PassForecast, pass_forecast
from overspill.plan.placement import Plan
from overspill.plan.planner import planner_of
from overspill.plan.tiers import Tier


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
    """All of them, the one that takes least per token of those that fit (None: none does), and the rates' origin."""

    rows: tuple[Alternative, ...]
    pick: Alternative | None
    origin: str


def alternatives(plan: Plan, settings: Settings, device: Device) -> Alternatives:
    """What was planned, and the usual ways beside it, on the same device and for the same context."""
    rates = plan.rates or ASSUMED
    planner = planner_of(plan, settings, device)
    rows = [_row("as planned", "", plan, rates)]
    for what, written, offload in _ways(plan, device):
        try:
            rows.append(_row(what, written, planner.plan(offload), rates))
        except (ConfigError, UnsupportedModelError) as refused:
            rows.append(Alternative(what, written, None, False, None, None, refused.message.splitlines()[0]))
    able = [row for row in rows if row.fits and row.decode is not None]
    pick = min(able, key=lambda row: row.decode.seconds if row.decode is not None else 0.0, default=None)
    return Alternatives(tuple(rows), pick, rates.origin)


def _row(what: str, written: str, plan: Plan, rates: Any) -> Alternative:
    kept = plan.context_tokens // 2
    decode = pass_forecast(plan, rates, plan.sequences, kept_tokens=kept)
    prompt = pass_forecast(plan, rates, min(PROMPT_TOKENS, plan.context_tokens), kept_tokens=0)
    return Alternative(what, written, plan, fits(plan), decode, prompt)


def _ways(plan: Plan, device: Device) -> Iterator[tuple[str, str, OffloadConfig]]:
    nothing = parse_offload_config({"overspill": {"placement": {"fit": False}}})
    yield "nothing offloaded", "--no-fit", nothing
    if device.unified:
        if expert_blocks(plan.model):
            yield "experts from disk", "", _extension(expert_stream={"enabled": True, "tier": "disk"})
        yield "mapped files", "", _extension(mmap={"enabled": True})
        return
    missing = max(excess_bytes(plan), plan.offloaded_bytes, 1)
    budget = -(-missing * 100 // GIB) / 100
    yield (
        "least traffic first",
        f"--cpu-offload-gb {budget:.2f}",
        parse_offload_config({"uva": {"cpu_offload_gb": budget}}),
    )
    yield (
        "declaration order, as vLLM",
        f"--cpu-offload-gb {budget:.2f}, order declaration",
        parse_offload_config({"uva": {"cpu_offload_gb": budget}, "overspill": {"order": "declaration"}}),
    )
    layers = plan.model.decoder.layers
    for share, size in (("a quarter", 4), ("half", 2), ("all", 1)):
        if layers >= 2 * size:
            step = 2 if layers // size > 2 else 1
            yield (
                f"{share} of the layers copied ahead",
                f"--offload-group-size {size} --offload-prefetch-step {step}",
                parse_offload_config({"prefetch": {"offload_group_size": size, "offload_prefetch_step": step}}),
            )
    blocks = expert_blocks(plan.model)
    if not blocks:
        return
    experts = sum(block.nbytes for block in blocks) / GIB
    yield (
        "experts only, in place across the link",
        f"--cpu-offload-gb {experts:.2f} --cpu-offload-params experts",
        parse_offload_config({"uva": {"cpu_offload_gb": experts, "cpu_offload_params": ["experts"]}}),
    )
    for count in sorted({max(1, len(blocks) // 2), len(blocks)}):
        last = blocks[count - 1].layer + 1
        written = "--cpu-moe" if count == len(blocks) else f"--n-cpu-moe {last}"
        fields: dict[str, object] = {"cpu_moe": True} if count == len(blocks) else {"n_cpu_moe": last}
        yield f"experts of {count} layers on the CPU", written, _extension(placement=fields)
    for share, part in (("a quarter", 4), ("half", 2)):
        slots = sum(block.experts for block in blocks) // part
        yield (
            f"{share} of the experts in slots",
            f"expert_stream slots {slots}",
            _extension(expert_stream={"slots": slots}),
        )
    yield "experts from disk", "expert_stream tier disk", _extension(expert_stream={"enabled": True, "tier": "disk"})


def _extension(**fields: object) -> OffloadConfig:
    return parse_offload_config({"overspill": fields})


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
    table = Table(title=f"Ways, by {found.origin}", title_justify="left")
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
            row.settings,
            format_bytes(memory.device_bytes),
            format_bytes(memory.host_bytes + memory.staging_bytes) if memory.host_bytes else "",
            format_bytes(on_disk) if on_disk else "",
            f"{row.decode.seconds * 1e3:.1f}",
            f"{row.prompt.tokens_per_s:.0f}",
            row.decode.limit if row.fits else "does not fit",
        )
    return table
