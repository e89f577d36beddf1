"""What the page draws: where the weights are, layer by layer, how long steps took, and what batches were forecast."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from overspill.compare.report import Report
from overspill.compare.results import PlacedWeight, RunResult
from overspill.config import format_bytes

ACCESS_ORDER = ("resident", "prefetch", "zero_copy", "stream", "in_place")


@dataclass(frozen=True)
class Segment:
    """A part of a bar; `percent` is of the width that there is."""

    access: str
    percent: float
    title: str


@dataclass(frozen=True)
class LayerRow:
    """A bar. `cut`: it is longer than drawn, being no layer and larger than any."""

    label: str
    bytes: int
    segments: tuple[Segment, ...]
    cut: bool


def layer_rows(weights: Sequence[PlacedWeight]) -> list[LayerRow]:
    """A bar for every layer, and for every module outside the layers, in declaration order.

    The largest layer is the scale: an embedding that is larger than any would leave the layers too short to read.
    """
    groups: dict[tuple[str, int], list[PlacedWeight]] = {}
    for weight in weights:
        if weight.stack is not None and weight.layer is not None:
            key = (weight.stack, weight.layer)
        else:
            key = (weight.name.rpartition(".")[0] or weight.name, -1)
        groups.setdefault(key, []).append(weight)
    stacks = dict.fromkeys(owner for owner, layer in groups if layer >= 0)
    sizes = {key: sum(weight.bytes for weight in group) for key, group in groups.items()}
    longest = max((size for (_, layer), size in sizes.items() if layer >= 0), default=0) or max(sizes.values())
    rows = []
    for (owner, layer), group in groups.items():
        size = sizes[owner, layer]
        label = _short(owner) if layer < 0 else f"layer {layer}" if len(stacks) == 1 else f"{owner}.{layer}"
        segments = tuple(
            _segment(access, held, max(longest, size))
            for access in ACCESS_ORDER
            if (held := [weight for weight in group if weight.access == access])
        )
        rows.append(LayerRow(label, size, segments, cut=size > longest))
    return rows


def _short(owner: str) -> str:
    return owner.removeprefix("model.")


def _segment(access: str, held: Sequence[PlacedWeight], longest: int) -> Segment:
    roles = Counter[str]()
    for weight in held:
        roles[weight.role] += weight.bytes
    told = ", ".join(f"{role.replace('_', ' ')} {format_bytes(nbytes)}" for role, nbytes in roles.most_common())
    total = sum(roles.values())
    reasons = "; ".join(dict.fromkeys(weight.reason for weight in held))
    where = ", on disk" if any(weight.tier == "disk" for weight in held) else ""
    return Segment(
        access,
        round(100 * total / longest, 3),
        f"{access.replace('_', '-')}{where}, {format_bytes(total)}: {told} ({reasons})",
    )


# -- step times --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 960, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 12, 34


@dataclass(frozen=True)
class Line:
    """One side's decode steps: the median over its runs as SVG points, and the band from the least to the most."""

    side: str
    points: str
    band: str
    steps: int


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Geometry in a view box of WIDTH x HEIGHT. `floor` is the height of the link floor, None where there is none."""

    lines: tuple[Line, ...]
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    prompts: tuple[Tick, ...]
    floor: float | None
    floor_label: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def step_chart(report: Report) -> Chart | None:
    """Decode steps of all prompts one after the other; None where nothing was decoded."""
    series = {side.name: _steps(side.runs) for side in report.sides}
    count = max((len(steps) for steps in series.values()), default=0)
    if count == 0:
        return None
    floor_s = report.candidate.runs[0].plan.link_floor_s
    highest = max([1.2 * median(steps) for side in series.values() for steps in side] + [1.2 * (floor_s or 0)])
    ticks = _ticks(highest * 1e3)
    top_s = max(ticks[-1] / 1e3, highest)

    def x(index: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / count, 1)

    def y(seconds: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(seconds / top_s, 1.0), 1)

    lines = []
    for side, steps in series.items():
        upper = [f"{x(i)},{y(max(values))}" for i, values in enumerate(steps)]
        lower = [f"{x(i)},{y(min(values))}" for i, values in enumerate(steps)]
        middle = " ".join(f"{x(i)},{y(median(values))}" for i, values in enumerate(steps))
        lines.append(Line(side, middle, " ".join([*upper, *reversed(lower)]), len(steps)))
    every = max(1, math.ceil(count / 12))
    starts, at = [], 0
    for number, generation in enumerate(report.candidate.runs[0].generations, 1):
        starts.append(Tick(x(at - 0.5), f"prompt {number}"))
        at += len(generation.decode)
    return Chart(
        lines=tuple(lines),
        y_ticks=tuple(Tick(y(ms / 1e3), f"{ms:g}") for ms in ticks),
        x_ticks=tuple(Tick(x(i), str(i + 1)) for i in range(0, count, every)),
        prompts=tuple(starts) if len(starts) <= 12 else (),
        floor=y(floor_s) if floor_s else None,
        floor_label=f"link floor {(floor_s or 0) * 1e3:.1f} ms",
    )


def _steps(runs: Sequence[RunResult]) -> list[tuple[float, ...]]:
    """The seconds of each decode step in every run."""
    return list(zip(*(run.decode_seconds for run in runs), strict=False))


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`, about five of them."""
    raw = max(highest, 1e-6) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [step * i for i in range(math.ceil(highest / step) + 1)]


# -- the forecast by batch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Curve:
    """One side's forecast: tokens per second by the number of sequences, `points` for SVG, a mark on each."""

    side: str
    points: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class ForecastChart:
    """Geometry as Chart's; both axes grow by factors."""

    origin: str
    curves: tuple[Curve, ...]
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def forecast_chart(report: Report) -> ForecastChart | None:
    """None where nothing was forecast."""
    times = {side.name: side.runs[0].plan.times for side in report.sides}
    known = {side: found for side, found in times.items() if found is not None}
    if not known:
        return None
    rates = [batch.tokens / batch.seconds for found in known.values() for batch in found.batches]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    high = max(high, low + 1)
    most = math.log2(max(batch.tokens for found in known.values() for batch in found.batches)) or 1.0

    def x(tokens: int) -> float:
        return round(LEFT + 12 + (WIDTH - LEFT - RIGHT - 24) * math.log2(tokens) / most, 1)

    def y(rate: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(rate) - low) / (high - low), 1)

    curves = []
    for side, found in known.items():
        marks = tuple(
            Mark(
                x(batch.tokens),
                y(batch.tokens / batch.seconds),
                f"{batch.tokens} sequences: {batch.seconds * 1e3:.1f} ms a step, "
                f"{batch.tokens / batch.seconds:.1f} tokens/s, limited by {batch.limit}",
            )
            for batch in found.batches
        )
        curves.append(Curve(side, " ".join(f"{mark.x},{mark.y}" for mark in marks), marks))
    first = next(iter(known.values()))
    return ForecastChart(
        first.origin,
        tuple(curves),
        tuple(Tick(y(10.0**power), f"{10.0**power:g}") for power in range(low, high + 1)),
        tuple(Tick(x(batch.tokens), str(batch.tokens)) for batch in first.batches),
    )
