"""Offload never changes an answer: every way of offloading against the resident model, bit by bit, buffers poisoned.

Before that, the zero-copy probe; after it, a ring under load: 200 steps while other work keeps a GPU and its link busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks import models
from benchmarks.report import Bar
from benchmarks.sections import Run
from overspill.errors import OverspillError
from overspill.model.hf import cache_argument, cache_of
from overspill.offload.placed import PlacedModel

TITLE = "Logits with and without offload, bit by bit"
COLUMNS = (
    "model",
    "way",
    "passes",
    "identical",
    "largest_difference",
    "offloaded_bytes",
    "buffer_pool_bytes",
    "copies_out_of_turn",
    "outcome",
)
_CONTEXT = 64
_PROMPT, _DECODED = 24, 3
_LOADED_STEPS = {"full": 200, "quick": 40, "toy": 8}


@dataclass(frozen=True)
class Subject:
    name: str
    config: PretrainedConfig
    dtype: torch.dtype


def subjects(size: str, on_gpu: bool) -> list[Subject]:
    small = models.llama(256, 6, intermediate=704, heads=4, vocabulary=512, tokens=_CONTEXT)
    small_moe = models.qwen3_moe(6, hidden=256, experts=8, intermediate=96, heads=4, vocabulary=512)
    found = [
        Subject("small llama, float32", small, torch.float32),
        Subject("small llama, bfloat16", small, torch.bfloat16),
        Subject("small qwen3_moe, bfloat16", small_moe, torch.bfloat16),
    ]
    if size == "full" and on_gpu:
        middle = models.llama(2048, 12, intermediate=5632, heads=16, vocabulary=32000, tokens=_CONTEXT)
        middle_moe = models.qwen3_moe(8, hidden=1024, experts=64, intermediate=384)
        found.append(Subject("qwen3_moe 0.7 B, bfloat16", middle_moe, torch.bfloat16))
        found.append(Subject("llama 0.8 B, bfloat16", middle, torch.bfloat16))
    elif size == "full":
        middle = models.llama(512, 8, intermediate=1408, heads=4, vocabulary=4096, tokens=_CONTEXT)
        found.append(Subject("llama 30 M, float32", middle, torch.float32))
    return found[2:] if size == "toy" else found


def ways(nbytes: int) -> dict[str, tuple[dict[str, Any] | None, dict[str, str]]]:
    """Document and environment of each way, for a model of `nbytes`."""
    half = {"uva": {"cpu_offload_gb": nbytes / 2 / (1 << 30)}}
    found: dict[str, tuple[dict[str, Any] | None, dict[str, str]]] = {
        "resident, again": (None, {}),
        "uva, half": (half, {}),
        "uva, half, declaration": ({**half, "overspill": {"order": "declaration"}}, {}),
        "uva, everything": ({"uva": {"cpu_offload_gb": 2 * nbytes / (1 << 30)}}, {}),
        "uva, half, DISABLE_UVA": (half, {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}),
        "uva, half, DISABLE_PIN_MEMORY": (half, {"VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"}),
    }
    for group, number, step in ((1, 1, 2), (2, 1, 1), (3, 2, 2), (3, 1, 1)):
        found[f"prefetch, {number} of {group}, step {step}"] = (prefetch(group, number, step), {})
    return found


def prefetch(group: int, number: int, step: int) -> dict[str, Any]:
    return {
        "prefetch": {
            "offload_group_size": group,
            "offload_num_in_group": number,
            "offload_prefetch_step": step,
        }
    }


def measure(run: Run) -> None:
    _probe(run)
    different: list[str] = []
    for subject in subjects(run.size, run.on_gpu):
        weights = models.random_weights(subject.config, subject.dtype)
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        if run.short_of_time(subject.name, 10 + nbytes / 2e8):
            continue
        resident = _passes(_place(run, subject, weights, None, {}))
        for way, (document, environ) in ways(nbytes).items():
            if run.short_of_time(f"{subject.name}: {way}", 3 + nbytes / 1e9):
                continue
            try:
                placed = _place(run, subject, weights, document, environ)
                logits = _passes(placed)
            except OverspillError as error:
                different.append(f"{subject.name}: {way}")
                run.row(model=subject.name, way=way, outcome=f"{type(error).__name__}: {error.message}"[:200])
                continue
            same = all(torch.equal(one, other) for one, other in zip(logits, resident, strict=True))
            if not same:
                different.append(f"{subject.name}: {way}")
            _row(run, subject.name, way, placed, len(logits), same, _difference(logits, resident))
    different += _under_load(run)
    run.report.bars.append(Bar("ways whose logits differ", float(len(different)), 0.0, timed=False))
    run.report.notes += [f"DIFFERENT: {what}" for what in different]
    run.report.notes.append(
        f"a prompt of {_PROMPT} tokens and {_DECODED} decoded ones over its cache; released ring buffers are filled "
        "with NaN; every placement was walked and held against its plan (the ledger) before it ran"
        + ("" if run.on_gpu else "; every read checked by address")
    )


def _probe(run: Run) -> None:
    device = run.make_device(check=True)
    host = device.allocate_host(1 << 20, pinned=True).data
    try:
        view = device.zero_copy(host)
        same = device.host_address(view) == host.data_ptr()
        run.row(model="1 MiB", way="zero-copy probe", identical=same, outcome="the device reads and writes host memory")
    except OverspillError as error:
        run.row(model="1 MiB", way="zero-copy probe", identical=False, outcome=f"{error.message}"[:200])


def _under_load(run: Run) -> list[str]:
    """Steps without a pause between them, compared on the device, so that nothing waits for the host."""
    steps = _LOADED_STEPS[run.size]
    subject = subjects(run.size, run.on_gpu)[-1]
    weights = models.random_weights(subject.config, subject.dtype)
    resident = _place(run, subject, weights, None, {})
    ids = [resident.device.to_device(torch.tensor([[number % 512]])) for number in range(steps)]
    with resident.running():
        expected = [resident.model(one, use_cache=False).logits.clone() for one in ids]
    wrong: list[str] = []
    for group, number, step in ((1, 1, 2), (2, 1, 1), (1, 1, 1))[: 1 if run.size == "toy" else 3]:
        for poison in (False, True):
            how = "under load" if run.on_gpu else "in a row"
            way = f"{steps} steps {how}: prefetch, {number} of {group}, step {step}" + ", poisoned" * poison
            if run.short_of_time(way, 10):
                continue
            placed = _place(run, subject, weights, prefetch(group, number, step), {}, poison=poison)
            given = [placed.device.to_device(one.cpu()) for one in ids]
            with _load(run), placed.running():
                results = [placed.model(one, use_cache=False).logits for one in given]
            placed.device.synchronize()
            same = all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
            if not same:
                wrong.append(f"{subject.name}: {way}")
            _row(run, subject.name, way, placed, steps, same, _difference(results, expected))
    return wrong


@contextmanager
def _load(run: Run) -> Iterator[None]:
    """Other work on the GPU meanwhile, on a stream of its own: products, and copies over the same link."""
    if not run.on_gpu:
        yield
        return
    side: Any = torch.cuda.Stream()
    source = torch.ones(256 << 20, dtype=torch.uint8).pin_memory()
    matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(60):
            target.copy_(source, non_blocking=True)
            for _ in range(20):
                torch.mm(matrix, matrix)
    yield
    side.synchronize()


def _place(
    run: Run,
    subject: Subject,
    weights: models.Weights,
    document: Mapping[str, Any] | None,
    environ: Mapping[str, str],
    *,
    poison: bool = True,
) -> PlacedModel:
    device = run.make_device(check=True)
    return models.place_live(subject.config, weights, document, device, tokens=_CONTEXT, environ=environ, debug=poison)


def _passes(placed: PlacedModel) -> list[torch.Tensor]:
    """Logits of the prompt's pass and of each decoded token's, in host memory."""
    device, model = placed.device, placed.model
    given: dict[str, Any] = {}
    logits = []
    with placed.running():
        for ids in (torch.arange(7, 7 + _PROMPT), *(torch.tensor([11 * n + 5]) for n in range(_DECODED))):
            output = model(device.to_device(ids[None]), use_cache=True, **given)
            given = {cache_argument(model): cache_of(output)}
            logits.append(output.logits.clone())
    device.synchronize()
    return [one.cpu() for one in logits]


def _difference(logits: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(logits, expected, strict=True)
    return max(float((one.cpu().float() - other.cpu().float()).abs().max()) for one, other in pairs)


def _row(run: Run, model: str, way: str, placed: PlacedModel, passes: int, same: bool, difference: float) -> None:
    run.row(
        model=model,
        way=way,
        passes=passes,
        identical=same,
        largest_difference=difference,
        offloaded_bytes=placed.plan.offloaded_bytes,
        buffer_pool_bytes=placed.plan.memory.buffer_pool_bytes,
        copies_out_of_turn=placed.prefetcher.out_of_turn if placed.prefetcher is not None else None,
        outcome="ran",
    )
