"""The plan for people (rich renderables) and for machines (JSON)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overspill.config import format_bytes
from overspill.plan.disk import process_binds
from overspill.plan.forecast import Forecast, PassForecast, forecast
from overspill.plan.placement import Placement, Plan
from overspill.plan.tiers import Access, Tier

SCHEMA = 1
_BAR = 24


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything the plan says; bytes and seconds, no rounding. `schema` is raised when a key changes its meaning."""
    memory, step, model = plan.memory, plan.step, plan.model
    return {
        "schema": SCHEMA,
        "model": {
            "architecture": model.architecture,
            "bytes": model.nbytes,
            "parameters": sum(_elements(p) for p in plan.placements),
            "layers": {stack.path: stack.layers for stack in model.stacks},
            "files": [str(path.name) for path in model.checkpoint.files] if model.checkpoint is not None else [],
        },
        "device": {
            "kind": plan.device_kind,
            "name": plan.device_name,
            "emulated": plan.device_kind == "emulated",
            "link": None
            if step.link is None
            else {
                "bytes_per_s": step.link.bandwidth,
                "latency_s": step.link.latency_s,
                "measured": step.link.measured,
            },
        },
        "backend": plan.backend,
        "order": plan.order,
        "context_tokens": plan.context_tokens,
        "sequences": plan.sequences,
        "offloaded_bytes": plan.offloaded_bytes,
        "saved_bytes": plan.saved_bytes,
        "memory": {
            "device": {
                "weights_bytes": memory.weights_bytes,
                "mapped_bytes": memory.mapped_bytes,
                "buffer_pool_bytes": memory.buffer_pool_bytes,
                "expert_slots_bytes": memory.expert_slots_bytes,
                "kv_cache_bytes": memory.kv_cache_bytes,
                "working_bytes": memory.working_bytes,
                "total_bytes": memory.device_bytes,
                "available_bytes": memory.available_device_bytes,
                "loading_bytes": memory.loading_bytes if memory.unified else None,
                "available_process_bytes": memory.available_process_bytes if memory.unified else None,
            },
            "host": {
                "weights_bytes": memory.host_bytes,
                "staging_bytes": memory.staging_bytes,
                "available_bytes": memory.available_host_bytes if memory.available_host_bytes < sys.maxsize else None,
                "pinned": plan.pinned,
            },
        },
        "step": {
            "tokens": step.tokens,
            "link_bytes": step.link_bytes,
            "zero_copy_bytes": step.zero_copy_bytes,
            "prefetch_bytes": step.prefetch_bytes,
            "in_place_bytes": step.in_place_bytes,
            "stream_bytes": step.stream_bytes,
            "disk_bytes": step.disk_bytes,
            "transfers": step.transfers,
            "link_floor_s": step.link_floor_s,
        },
        "fit": None
        if not plan.fitted
        else {"chosen": plan.fitted[0][0], "ways": [{"settings": w, "decode_s": s} for w, s in plan.fitted]},
        "forecast": None if plan.rates is None else forecast_as_json(forecast(plan, plan.rates)),
        "ring": None
        if plan.ring is None
        else {
            "step": plan.ring.step,
            "look_ahead": plan.ring.look_ahead,
            "buffer_bytes": plan.ring.buffer_bytes,
            "layers": [layer.path for layer in plan.ring.layers],
            "on_disk": [layer.path for layer in plan.ring.on(Tier.DISK)],
        },
        "placed": [block.path for block in plan.placed],
        "slots": None
        if plan.slots is None
        else {
            "count": plan.slots.count,
            "slot_bytes": plan.slots.slot_bytes,
            "experts": plan.slots.experts,
            "policy": plan.slots.policy,
            "tier": plan.slots.tier.value,
            "blocks": [block.path for block in plan.slots.blocks],
        },
        "weights": [
            {
                "name": p.weight.full,
                "tied": list(p.weight.aliases),
                "role": p.weight.role.value,
                "stack": p.weight.name.stack,
                "layer": p.weight.name.layer,
                "shape": list(p.weight.shape),
                "dtype": str(p.weight.dtype).removeprefix("torch."),
                "bytes": p.weight.nbytes,
                "tier": p.tier.value,
                "access": p.access.value,
                "reason": p.reason,
            }
            for p in plan.placements
        ],
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def render_plan(plan: Plan) -> RenderableType:
    """The plan as tables for a terminal."""
    parts: list[RenderableType] = [_headline(plan), _placement_table(plan), _memory_table(plan)]
    if plan.offloads:
        parts.append(_step_line(plan))
    if plan.rates is not None:
        parts += [forecast_table(forecast(plan, plan.rates), plan)]
    else:
        parts.append(Text("time is not forecast: `overspill bench` measures this machine", style="dim"))
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in plan.warnings]
    return Group(*parts)


def _headline(plan: Plan) -> Text:
    model = plan.model
    stacks = ", ".join(f"{stack.layers} layers in {stack.path}" for stack in model.stacks)
    count = sum(_elements(p) for p in plan.placements)
    return Text.assemble(
        (model.architecture, "bold"),
        f", {count / 1e9:.3f} B parameters, {format_bytes(model.nbytes)} in {_dtypes(plan)}, {stacks}\n",
        f"on {plan.device_name}, {plan.kv_cache_for}, ",
        "nothing offloaded" if not plan.ways else "backend " * (plan.backend is not None) + ", ".join(plan.ways),
        f" in {plan.order} order" if plan.backend == "uva" else "",
    )


def _dtypes(plan: Plan) -> str:
    return " and ".join(sorted({str(p.weight.dtype).removeprefix("torch.") for p in plan.placements}))


def _placement_table(plan: Plan) -> Table:
    table = Table(title="Where the weights go", title_justify="left")
    for column in ("tier", "access", "role"):
        table.add_column(column)
    for column in ("weights", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("layers", overflow="fold")
    table.add_column("why", overflow="fold")
    for (tier, access, role, reason), group in _grouped(plan.placements):
        table.add_row(
            tier,
            access,
            role,
            str(len(group)),
            format_bytes(sum(p.weight.nbytes for p in group)),
            _ranges(p.weight.name.layer for p in group),
            reason,
        )
    return table


def _grouped(placements: Iterable[Placement]) -> Iterator[tuple[tuple[str, str, str, str], list[Placement]]]:
    groups: dict[tuple[str, str, str, str], list[Placement]] = {}
    for p in placements:
        groups.setdefault((p.tier.value, p.access.value, p.weight.role.value, p.reason), []).append(p)
    yield from sorted(groups.items(), key=lambda item: (item[0][0], -sum(p.weight.nbytes for p in item[1])))


def _ranges(layers: Iterable[int | None]) -> str:
    """Layer numbers as ranges: "0-3, 7", "1-29 by 2"; weights outside any layer add nothing."""
    numbers = sorted({n for n in layers if n is not None})
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    table = Table(title="Memory forecast", title_justify="left")
    table.add_column("where")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    rows = [
        ("weights", memory.weights_bytes),
        *([("mapped files, in the page cache", memory.mapped_bytes)] if memory.mapped_bytes else []),
        ("buffer pool", memory.buffer_pool_bytes),
        *([(f"expert slots, {plan.slots.count} and 2", memory.expert_slots_bytes)] if plan.slots is not None else []),
        (f"KV cache, {plan.kv_cache_for}", memory.kv_cache_bytes),
        ("working memory of a prompt pass", memory.working_bytes),
        ("together", memory.device_bytes),
        ("available", memory.available_device_bytes),
    ]
    if memory.loading_bytes:
        rows.append(("loading, at its most", memory.loading_bytes))
    if process_binds(memory):
        rows.append(("available for that and the reader", memory.available_process_bytes))
    for what, nbytes in rows:
        table.add_row("device", what, "not known" if nbytes is None else format_bytes(nbytes))
    if plan.offloads:
        table.add_section()
        table.add_row("host", "weights" + (", pinned" if plan.pinned else ""), format_bytes(memory.host_bytes))
        if memory.staging_bytes:
            table.add_row("host", "staging", format_bytes(memory.staging_bytes))
        known = memory.available_host_bytes < sys.maxsize
        table.add_row("host", "available", format_bytes(memory.available_host_bytes) if known else "not stated")
        table.add_section()
        if on_disk := plan.on(Tier.DISK):
            table.add_row("disk", "weights", format_bytes(sum(p.weight.nbytes for p in on_disk)))
            table.add_section()
        taken = "buffer pool and expert slots" if plan.slots is not None else "buffer pool"
        if memory.mapped_bytes:
            taken += ", mapped files included: the page cache can let go of them"
        table.add_row("saved", f"offloaded less {taken}", format_bytes(plan.saved_bytes))
    return table


def _step_line(plan: Plan) -> Text:
    step = plan.step
    text = Text(
        f"a step over {step.tokens} token{'s' * (step.tokens != 1)} moves {format_bytes(round(step.link_bytes))}"
    )
    if step.link is not None and step.link_floor_s is not None:
        kind = "measured" if step.link.measured else "stated"
        text.append(
            f" across the link: at least {step.link_floor_s * 1e3:.2f} ms at {step.link.bandwidth / 1e9:.1f} GB/s "
            f"({kind}{', emulated: no GPU time' if plan.device_kind == 'emulated' else ''})"
        )
    if step.disk_bytes:
        text.append(f"; it reads {format_bytes(step.disk_bytes)} from disk")
    if plan.slots is not None:
        text.append(
            f"; streamed experts bring {format_bytes(round(step.stream_bytes))} more if all were alike, less as far as "
            f"{plan.slots.count} of {plan.slots.experts} in slots are the ones in demand"
        )
    if any(p.access is Access.ZERO_COPY and p.weight.routing is not None for p in plan.placements):
        text.append("; routed experts as expected over many tokens")
    return text


def forecast_as_json(found: Forecast) -> dict[str, Any]:
    def one(step: PassForecast) -> dict[str, Any]:
        return {"tokens": step.tokens, "seconds": step.seconds, "limit": step.limit, "parts": dict(step.parts)}

    return {"rates": found.origin, "decode": [one(step) for step in found.decode], "prompt": one(found.prompt)}


def forecast_table(found: Forecast, plan: Plan) -> Table:
    """Decoding by batch with a curve, and a prompt pass."""
    emulated = ", emulated: no GPU time" if plan.device_kind == "emulated" else ""
    table = Table(title=f"Time forecast: {found.origin}{emulated}", title_justify="left")
    for column in ("pass", "ms", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("limited by")
    most = max(step.tokens_per_s for step in found.decode)
    for step in found.decode:
        bar = "█" * max(1, round(_BAR * step.tokens_per_s / most))
        what = f"decode, {step.tokens} sequence{'s' * (step.tokens != 1)}"
        table.add_row(what, f"{step.seconds * 1e3:.1f}", f"{step.tokens_per_s:.1f}", bar, step.limit)
    table.add_section()
    prompt = found.prompt
    what = f"prompt of {prompt.tokens} tokens"
    table.add_row(what, f"{prompt.seconds * 1e3:.1f}", f"{prompt.tokens_per_s:.1f}", "", prompt.limit)
    return table


def _elements(placement: Placement) -> int:
    return placement.weight.nbytes // placement.weight.dtype.itemsize
