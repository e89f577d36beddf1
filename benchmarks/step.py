"""Step time on the emulated link against its floor, for uva and prefetch, all rows by turns.

A step decodes one token of each of `sequences` sequences on one thread; the other core is the copy thread's. Links
are chosen so that what a row moves takes 0.5, 1 and 2 times the computing. The floor of uva is computing + bytes over
link; of prefetch, the larger of the two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks import models
from benchmarks.limits import memmove_gbps
from benchmarks.report import Bar, Report, spread
from benchmarks.ring_floor import ring_seconds
from overspill.machine.device import Link
from overspill.machine.emulated import EmulatedDevice
from overspill.offload.placed import PlacedModel

COLUMNS = (
    "way",
    "link_over_computing_ratio",
    "moved_bytes",
    "computing_ms",
    "link_ms",
    "measured_ms",
    "stalled_ms",
    "over_floor_ratio",
    "over_ring_floor_ratio",
    "over_resident_ratio",
    "cpu_over_resident_ratio",
)
REACH = 1.10
PLAIN, PEER = "transformers alone", "accelerate cpu_offload"
_UNLIMITED = Link(bandwidth=1e15, latency_s=0.0, measured=False)
_SHARE = 0.5  # of the decoder's bytes that uva moves


@dataclass(frozen=True)
class Scale:
    hidden: int
    layers: int
    sequences: int
    factors: tuple[float, ...]
    rounds: int
    passes: int

    @property
    def config(self) -> Any:
        return models.llama(
            self.hidden,
            self.layers,
            intermediate=self.hidden * 11 // 4,
            heads=max(1, self.hidden // 128),
            vocabulary=2048,
            tokens=64,
        )


SCALES = {
    "full": Scale(1024, 12, 32, (0.5, 1.0, 2.0), rounds=7, passes=3),
    "quick": Scale(1024, 8, 32, (1.0,), rounds=3, passes=2),
    "toy": Scale(64, 8, 2, (1.0,), rounds=1, passes=1),
}

PREFETCH = {
    "prefetch, group 1, step 2": (1, 2),
    "prefetch, group 4, step 1": (4, 1),
    "prefetch, group 2, step 2": (2, 2),
}


def measure(scale: Scale, tell: Callable[[str], None]) -> Report:
    """Sets torch to one thread for the rest of the process."""
    torch.set_num_threads(1)
    report = Report("step", "Step time on the emulated link, one thread", COLUMNS)
    memmove = memmove_gbps()
    report.limits["copy, one thread_gbps"] = memmove
    weights = models.random_weights(scale.config, torch.float32)
    ids = torch.arange(scale.sequences).view(-1, 1) % 2048
    for factor in scale.factors:
        tell(f"link time {factor} x computing")
        sides = _sides(scale, weights, ids, factor)
        expected = sides[0].run()
        for side in sides[1:]:
            assert torch.equal(side.run(), expected), f"{side.way}: not the resident model's logits"
        for _ in range(scale.rounds):
            for side in sides:
                side.sample(scale.passes)
        for side in sides:
            report.rows.append(row := _row(side, factor, sides[0], scale))
            if side.way == PEER:
                row["over_resident_ratio"] = _paired(side.samples, sides[-2].samples)
            if (ratio := row.get("over_floor_ratio")) is not None:
                report.bars.append(Bar(f"{side.way}, link {factor} x computing: step over floor", ratio, REACH))
            if side.link is not None and side.link.bandwidth / 1e9 > 0.7 * memmove:
                report.notes.append(f"{side.way}, {factor}: its link is faster than a copy can be relied on to be")
        del sides
    report.notes += [
        "emulated accelerator: ratios carry over to a device, times do not",
        f"{scale.layers} layers of hidden size {scale.hidden}, float32, {scale.sequences} sequences a step; logits of "
        "every row were bit-identical to the resident model's",
        "computing is the resident model's step in the same round, under the same accounting of every operation",
        "cpu over resident is the computing thread's own processor time: what copies beside it, hooks and (uva) the "
        "copying itself cost it; other processes do not show there",
        "the ring floor is what the ring's rule allows with ideal copies: a buffer is refilled only after its layer "
        "has run, so one buffer never copies while its own layer runs",
        "accelerate: cpu_offload with the CPU as execution device, without the emulated accelerator and without a "
        "link, so it has no floor here; its over resident is over transformers alone",
    ]
    return report.finish()


@dataclass
class Side:
    """A row that runs: `forward` makes one pass."""

    way: str
    forward: Callable[[], torch.Tensor]
    placed: PlacedModel | None = None
    link: Link | None = None
    samples: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    moved_bytes: int = 0

    def run(self) -> torch.Tensor:
        return self.forward().clone()

    def sample(self, passes: int) -> None:
        """Append the mean time of `passes` passes that follow one unmeasured one, as they do in a generation.

        What a ring copies ahead for the pass after the last is not waited for, as the first was copied ahead too.
        """
        self.forward()
        before = self.placed.device.traffic.copy() if self.placed is not None else None
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        for _ in range(passes):
            self.forward()
        self.samples.append((time.perf_counter() - begun) / passes)
        self.cpu.append((time.thread_time() - cpu_begun) / passes)
        if self.placed is not None and before is not None:
            moved = self.placed.device.traffic - before
            self.stalls.append(moved.stall_s / passes)
            self.placed.device.synchronize()  # the next row is to have the machine to itself
            self.moved_bytes = _step_bytes(self.placed)


def _sides(scale: Scale, weights: models.Weights, ids: torch.Tensor, factor: float) -> list[Side]:
    """The resident model first; then every other way with a link that takes `factor` times its computing."""
    resident = _side("resident", _place(scale, weights, None, _UNLIMITED), ids)
    link_s = factor * statistics.median(_seconds(resident) for _ in range(5))
    sides = [resident]
    for way, document in _documents(weights).items():
        moved = _step_bytes(_place(scale, weights, document, _UNLIMITED))
        link = Link(moved / link_s, 0.0, measured=False)
        sides.append(_side(way, _place(scale, weights, document, link), ids))
        sides[-1].link = link
    plain = models.assemble(scale.config, _aligned_copy(weights))
    sides.append(Side(PLAIN, _plain(plain, ids)))
    with suppress(ImportError):
        from accelerate import cpu_offload

        offloaded = models.assemble(scale.config, _aligned_copy(weights))
        sides.append(Side(PEER, _plain(cpu_offload(offloaded, "cpu"), ids)))
    return sides


def _seconds(side: Side) -> float:
    begun = time.perf_counter()
    side.forward()
    return time.perf_counter() - begun


def _documents(weights: models.Weights) -> dict[str, dict[str, Any]]:
    decoder = sum(tensor.nbytes for name, tensor in weights.items() if ".layers." in name)
    ways: dict[str, dict[str, Any]] = {
        "uva": {"uva": {"cpu_offload_gb": _SHARE * decoder / (1 << 30), "cpu_offload_params": ["mlp", "self_attn"]}},
    }
    for way, (group, step) in PREFETCH.items():
        ways[way] = {"prefetch": {"offload_group_size": group, "offload_prefetch_step": step}}
    return ways


def _place(scale: Scale, weights: models.Weights, document: dict[str, Any] | None, link: Link) -> PlacedModel:
    device = EmulatedDevice(64 << 30, link)
    return models.place_live(scale.config, weights, document, device, tokens=8, sequences=scale.sequences)


def _step_bytes(placed: PlacedModel) -> int:
    return round(placed.plan.step.link_bytes)


def _side(way: str, placed: PlacedModel, ids: torch.Tensor) -> Side:
    given = placed.device.to_device(ids)

    def forward() -> torch.Tensor:
        with placed.running():
            logits: torch.Tensor = placed.model(given, use_cache=False).logits
        return logits

    return Side(way, forward, placed)


def _plain(model: nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(ids, use_cache=False).logits
        return logits

    return forward


def _aligned_copy(weights: models.Weights) -> models.Weights:
    """torch's own allocations are aligned to 64 bytes, as every tier of ours is."""
    return {name: tensor.clone() for name, tensor in weights.items()}


def _row(side: Side, factor: float, resident: Side, scale: Scale) -> dict[str, Any]:
    row: dict[str, Any] = {
        "way": side.way,
        "link_over_computing_ratio": factor,
        "computing_ms": statistics.median(resident.samples) * 1e3,
        "measured_ms": statistics.median(side.samples) * 1e3,
        "over_resident_ratio": _paired(side.samples, resident.samples),
        "stalled_ms": statistics.median(side.stalls) * 1e3 if side.link is not None else None,
        "cpu_over_resident_ratio": _paired(side.cpu, resident.cpu),
        "spread": spread(side.samples),
        "samples": side.samples,
    }
    if side.link is None:
        return row
    link_s = side.link.seconds(side.moved_bytes, 0)
    floors = [_floor(side, seconds, link_s) for seconds in resident.samples]
    row |= {
        "link_gbps": side.link.bandwidth / 1e9,
        "moved_bytes": side.moved_bytes,
        "link_ms": link_s * 1e3,
        "floor_ms": statistics.median(floors) * 1e3,
        "over_floor_ratio": _paired(side.samples, floors),
    }
    if side.way in PREFETCH:
        group, step = PREFETCH[side.way]
        allowed = [ring_seconds(scale.layers, group, step, seconds, link_s) for seconds in resident.samples]
        row["over_ring_floor_ratio"] = _paired(side.samples, allowed)
    return row


def _floor(side: Side, computing_s: float, link_s: float) -> float:
    return max(computing_s, link_s) if side.way in PREFETCH else computing_s + link_s


def _paired(samples: Sequence[float], limits: Sequence[float]) -> float:
    return statistics.median(sample / limit for sample, limit in zip(samples, limits, strict=True))
