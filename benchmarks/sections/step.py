"""Step time of a model of some gigabytes against its floor, at several shares of offload, accelerate beside it.

Each way is placed in turn and measured by turns with the resident model, which stays.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks import models
from benchmarks.report import Bar
from benchmarks.ring_floor import ring_seconds
from benchmarks.sections import Run
from benchmarks.sections.correctness import prefetch
from overspill.machine.device import Device
from overspill.offload.placed import PlacedModel
from overspill.plan import Access

TITLE = "Step time against its floor"
COLUMNS = (
    "way",
    "tokens",
    "offloaded_bytes",
    "moved_bytes",
    "computing_ms",
    "link_ms",
    "floor_ms",
    "measured_ms",
    "over_floor_ratio",
    "over_ring_floor_ratio",
    "over_resident_ratio",
)
REACH = 1.10
_ROUNDS = {"full": 5, "quick": 3, "toy": 1}
_PASSES = 3
_MOST_S = 12.0  # for the rounds of one row
_PEERS_S = 40.0  # kept for accelerate
Forward = Callable[[], None]


def measure(run: Run) -> None:
    if not run.on_gpu:
        torch.set_num_threads(1)
    config, dtype = _model(run)
    weights = models.random_weights(config, dtype)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    layers = config.num_hidden_layers
    resident = _place(run, config, weights, None)
    run.report.limits["model_bytes"] = nbytes
    link = resident.device.link
    assert link is not None
    run.report.limits["link_gbps"] = link.bandwidth / 1e9
    run.report.notes += [
        f"{layers} layers, random weights, {dtype}, no KV cache; floor: uva computing + bytes over link, prefetch the "
        "larger of the two; the ring floor is what the ring's rule allows with ideal copies",
        f"computing is the resident model's step in the same round; medians of {_ROUNDS[run.size]} rounds of "
        f"{_PASSES} steps without a pause",
    ]
    for way, document in _ways(nbytes).items():
        if run.short_of_time(way, 5 + nbytes / 4e8 + _PEERS_S):
            continue
        placed = _place(run, config, weights, document)
        for tokens in _tokens(run):
            baseline, measured = _by_turns(run, resident, placed.device, tokens, _forward(placed, tokens))
            row = _against_floors(placed, layers, tokens, baseline, measured)
            run.row(way=way, tokens=tokens, **row, **_times(baseline, measured))
            bar = Bar(f"{way}, {tokens} tokens: step over floor", row["over_floor_ratio"], REACH)
            run.report.bars.append(bar)
        del placed
        gc.collect()
    _accelerate(run, config, weights, resident)


def _model(run: Run) -> tuple[Any, torch.dtype]:
    if run.size == "full" and run.on_gpu:
        wide = models.llama(4096, 24, intermediate=14336, heads=32, vocabulary=32000, tokens=4096)
        return wide, torch.bfloat16
    hidden, layers = {"full": (1024, 8), "quick": (512, 8), "toy": (64, 8)}[run.size]
    small = models.llama(hidden, layers, intermediate=hidden * 11 // 4, heads=4, vocabulary=2048, tokens=64)
    return small, torch.bfloat16 if run.on_gpu else torch.float32


def _tokens(run: Run) -> tuple[int, ...]:
    """A decoded token, and a prompt whose computing takes about as long as the link does."""
    if run.size == "toy":
        return (1,)
    return (1, 2048) if run.on_gpu and run.size == "full" else (1, 32)


def _ways(nbytes: int) -> dict[str, dict[str, Any]]:
    """What says most comes first, should time run short."""

    def uva(share: float) -> dict[str, Any]:
        return {"uva": {"cpu_offload_gb": share * nbytes / (1 << 30)}}

    return {
        "uva, 25%": uva(0.25),
        "prefetch, 1 of 4, step 1": prefetch(4, 1, 1),
        "prefetch, 1 of 2, step 2": prefetch(2, 1, 2),
        "uva, 50%": uva(0.5),
        "prefetch, 1 of 1, step 2": prefetch(1, 1, 2),
        "uva, 12.5%": uva(0.125),
        "prefetch, 1 of 2, step 1": prefetch(2, 1, 1),
    }


def _place(run: Run, config: Any, weights: models.Weights, document: Mapping[str, Any] | None) -> PlacedModel:
    return models.place_live(config, weights, document, run.make_device(), tokens=max(_tokens(run)))


def _against_floors(
    placed: PlacedModel, layers: int, tokens: int, baseline: list[float], measured: list[float]
) -> dict[str, Any]:
    ring, link = placed.plan.ring, placed.device.link
    assert link is not None
    read = [p.weight for p in placed.plan.placements if p.access is Access.ZERO_COPY]
    moved = round(sum(weight.step_bytes(tokens) for weight in read)) + placed.plan.step.prefetch_bytes
    link_s = link.seconds(moved, 0)
    floors = [max(computing, link_s) if ring is not None else computing + link_s for computing in baseline]
    row: dict[str, Any] = {
        "offloaded_bytes": placed.plan.offloaded_bytes,
        "moved_bytes": moved,
        "link_ms": link_s * 1e3,
        "floor_ms": statistics.median(floors) * 1e3,
        "over_floor_ratio": _paired(measured, floors),
    }
    if ring is not None:
        group = layers // len(ring.layers)
        allowed = [ring_seconds(layers, group, ring.step, computing, link_s) for computing in baseline]
        row["over_ring_floor_ratio"] = _paired(measured, allowed)
    return row


def _by_turns(
    run: Run, resident: PlacedModel, device: Device, tokens: int, forward: Forward
) -> tuple[list[float], list[float]]:
    """Seconds a step of the resident model and of `forward`, round by round; fewer rounds where they take long."""
    begun = time.monotonic()
    baseline: list[float] = []
    measured: list[float] = []
    resident_forward = _forward(resident, tokens)
    while not measured or (len(measured) < _ROUNDS[run.size] and time.monotonic() - begun < _MOST_S):
        baseline.append(_seconds(resident.device, resident_forward))
        measured.append(_seconds(device, forward))
    return baseline, measured


def _forward(placed: PlacedModel, tokens: int) -> Forward:
    ids = placed.device.to_device(torch.arange(tokens)[None] % 1000)

    def forward() -> None:
        with placed.running():
            placed.model(ids, use_cache=False, logits_to_keep=1)

    return forward


def _seconds(device: Device, forward: Forward) -> float:
    """A step's seconds among steps that follow each other, after one that is not counted.

    A ring's copies for the step after the last are not waited for, as those for the first were made before it.
    """
    forward()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(_PASSES):
        forward()
    _wait(device)
    seconds = (time.perf_counter() - begun) / _PASSES
    device.synchronize()
    return seconds


def _wait(device: Device) -> None:
    """Until what was computed is done; copies ahead may still be under way."""
    if device.kind == "cuda":
        torch.cuda.current_stream().synchronize()


def _times(baseline: list[float], measured: list[float]) -> dict[str, Any]:
    return {
        "computing_ms": statistics.median(baseline) * 1e3,
        "measured_ms": statistics.median(measured) * 1e3,
        "over_resident_ratio": _paired(measured, baseline),
        "samples": {"computing_s": baseline, "measured_s": measured},
    }


def _paired(samples: list[float], limits: list[float]) -> float:
    return statistics.median(sample / limit for sample, limit in zip(samples, limits, strict=True))


def _accelerate(run: Run, config: Any, weights: models.Weights, resident: PlacedModel) -> None:
    try:
        from accelerate import cpu_offload, dispatch_model
    except ImportError:
        run.report.notes.append("accelerate is not installed here")
        return
    place = 0 if run.on_gpu else "cpu"

    def quarter(model: nn.Module) -> nn.Module:
        layers = {f"model.layers.{n}": "cpu" if n % 4 == 3 else place for n in range(config.num_hidden_layers)}
        others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), place)
        dispatched: nn.Module = dispatch_model(model, {**layers, **others}, main_device=place)
        return dispatched

    peers: dict[str, Callable[[nn.Module], nn.Module]] = {"all layers": lambda model: cpu_offload(model, place)}
    if run.on_gpu:  # on the CPU there is nothing to dispatch between
        peers = {"1 layer of 4": quarter, **peers}
    for name, offload in peers.items():
        if run.short_of_time(f"accelerate, {name}", _PEERS_S / len(peers)):
            continue
        model = offload(models.assemble(config, weights))
        for tokens in _tokens(run):
            ids = (torch.arange(tokens)[None] % 1000).to(resident.device.torch_device)

            def forward(model: nn.Module = model, ids: torch.Tensor = ids) -> None:
                with torch.no_grad():
                    model(ids, use_cache=False, logits_to_keep=1)

            baseline, measured = _by_turns(run, resident, resident.device, tokens, forward)
            label = "" if run.on_gpu else " (no link: the CPU executes)"
            run.row(way=f"accelerate, {name}{label}", tokens=tokens, **_times(baseline, measured))
        del model, forward
        gc.collect()
    run.report.notes.append(
        "accelerate copies within each module's hook, from pageable memory; 1 of 4 are prefetch's layers"
    )
