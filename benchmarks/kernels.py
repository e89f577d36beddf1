"""A block of routed experts on the CPU: our kernels beside what memory gives, torch's ways and kt-kernel's.

The shape is Qwen3-30B-A3B's, the weights lie in memory that asks for huge pages, 2 GiB and more in rotation, and every
call of every way finds its experts in no cache. Where the processor has more than AVX2, everything is measured a second
time in a process that is told to use no more: ours, torch's (oneDNN, ATen, MKL) and kt-kernel's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.conditions import ROOT
from benchmarks.kernels_ways import BATCHED, EAGER, GROUPED, KT, OURS, WIDENED, Block, Kt, Shape, choices, compared
from benchmarks.limits import memory_read_gbps
from benchmarks.report import Bar, Report, spread
from overspill.machine.cpu_experts import INSTRUCTION_SET_VARIABLE, instruction_set
from overspill.machine.cpus import usable_cpus

COLUMNS = (
    "instructions",
    "weights",
    "tokens",
    "ours_ms",
    "ours_gbps",
    "of_read_ratio",
    "eager_ms",
    "grouped_mm_ms",
    "batched_mm_ms",
    "widened_ms",
    "kt_ms",
    "over_torch_ratio",
    "over_widened_ratio",
    "over_kt_ratio",
)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
ROTATION_BYTES = 2 << 30
PAUSE_S = 0.06  # in which other ways' threads, which wait for work by spinning (kt-kernel: 50 ms), go to sleep
ENOUGH_S = 5.0  # of one way in one row
AVX2_ONLY = {
    INSTRUCTION_SET_VARIABLE: "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "KT_KERNEL_CPU_VARIANT": "avx2",
}
_SAME = 1e-3  # normalised mean square error: torch rounds what lies between the products to bfloat16


@dataclass(frozen=True)
class Scale:
    shape: Shape
    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    rounds: Callable[[int], int]  # from the number of tokens
    rotation_bytes: int = ROTATION_BYTES


SCALES = {
    "full": Scale(
        Shape(), ("bfloat16", "float32", "float16"), (1, 8, 64, 256), lambda tokens: 40 if tokens == 1 else 9
    ),
    "quick": Scale(Shape(), ("bfloat16",), (1, 8, 64), lambda tokens: 16 if tokens == 1 else 3),
    "toy": Scale(Shape(8, 64, 32, 2), ("bfloat16", "float32"), (1, 8), lambda _: 2, rotation_bytes=1 << 16),
}


def measure(size: str, tell: Callable[[str], None]) -> Report:
    report = Report("kernels", "A block of routed experts on the CPU", COLUMNS)
    report.rows = rows(SCALES[size], tell)
    if instruction_set() not in ("avx2", "portable"):
        tell("the same with AVX2 alone")
        report.rows += _rows_with(AVX2_ONLY, size)
    for row in report.rows:
        report.bars += _bars(row)
    shape = SCALES[size].shape
    report.notes += [
        f"{shape.experts} experts of {shape.intermediate} x {shape.hidden}, {shape.each} chosen for each token; "
        f"{usable_cpus()} threads; hidden states are of the weights' dtype",
        "GB/s count each chosen expert once; of read: beside reading the same memory with the same threads, by turns",
        "eager, grouped_mm, batched_mm: transformers' experts implementations; widened: float32 products after each "
        "expert was widened into memory used again; over torch: against the fastest of the first three",
        "kt: kt-kernel's AVX2BF16_MOE, where installed; it computes on a copy of the weights that it makes",
        "rows of AVX2 alone: ours, ATen, oneDNN, MKL and kt-kernel were told to use no more",
    ]
    return report.finish()


def rows(scale: Scale, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each dtype and number of tokens, in this process."""
    found = []
    for name in scale.dtypes:
        dtype = DTYPES[name]
        block_bytes = scale.shape.experts * scale.shape.expert_values * dtype.itemsize
        blocks = [Block(scale.shape, dtype) for _ in range(max(1, -(-scale.rotation_bytes // block_bytes)))]
        kt = Kt.of(blocks[0], max(scale.tokens)) if name == "bfloat16" else None
        for tokens in scale.tokens:
            tell(f"{instruction_set()}, {name}, {tokens} tokens")
            found.append({"instructions": instruction_set(), "weights": name} | _row(scale, blocks, kt, tokens))
    return found


def _row(scale: Scale, blocks: Sequence[Block], kt: Kt | None, tokens: int) -> dict[str, Any]:
    dtype = blocks[0].up.dtype
    ways = [dict(block.ways(tokens)) for block in blocks]
    if kt is not None:
        for of_block in ways:
            of_block[KT] = kt  # its copy stands for either block: the experts of two calls are still apart
    hidden = torch.randn(tokens, scale.shape.hidden).to(dtype)
    weights = torch.rand(tokens, scale.shape.each).softmax(-1)
    index = choices(scale.shape, tokens, 0)
    results = [way(hidden, index, weights) for way in ways[0].values()]
    assert compared(results[1:], results[0]) < _SAME, "the ways compute different things"

    seconds: dict[str, list[float]] = {name: [] for name in ways[0]}
    ours_gbps, read_gbps = [], []
    calls = 0
    for round_ in range(scale.rounds(tokens)):
        for name in seconds:
            if sum(seconds[name]) > ENOUGH_S:
                continue
            # One after the other they go round the experts, so no way finds what another has brought into the cache.
            index, turn = choices(scale.shape, tokens, calls), calls * scale.shape.each // scale.shape.experts
            calls += 1
            way = ways[(turn if tokens == 1 else calls) % len(ways)][name]
            time.sleep(PAUSE_S)
            begun = time.perf_counter()
            way(hidden, index, weights)
            seconds[name].append(time.perf_counter() - begun)
            if name == OURS:
                used = len(index.unique()) * scale.shape.expert_values * dtype.itemsize
                ours_gbps.append(used / seconds[name][-1] / 1e9)
        read_gbps.append(_read_gbps(blocks[round_ % len(blocks)], round_))

    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    gbps, read = statistics.median(ours_gbps), statistics.median(read_gbps)
    row: dict[str, Any] = {"tokens": tokens} | {f"{name}_ms": taken * 1e3 for name, taken in medians.items()}
    row |= {
        "ours_gbps": gbps,
        "read_gbps": read,
        "of_read_ratio": gbps / read,
        "over_torch_ratio": min(medians[name] for name in (EAGER, GROUPED, BATCHED) if name in medians) / medians[OURS],
        "over_widened_ratio": medians.get(WIDENED, medians[EAGER]) / medians[OURS],
        "over_kt_ratio": medians[KT] / medians[OURS] if KT in medians else None,
        "spread_ms": {name: spread([one * 1e3 for one in taken]) for name, taken in seconds.items()},
        "samples": seconds,
    }
    return row


def _read_gbps(block: Block, number: int) -> float:
    """What memory gives the same threads, over one eighth of the block after the other."""
    time.sleep(PAUSE_S)
    return memory_read_gbps(block.memory.chunk(8)[number % 8])


def _rows_with(environment: dict[str, str], size: str) -> list[dict[str, Any]]:
    program = (
        "import json, sys; from benchmarks import kernels; "
        f"rows = kernels.rows(kernels.SCALES[{size!r}], lambda text: print(text, file=sys.stderr)); "
        "print('\\n' + json.dumps(rows))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])  # kt-kernel writes to stdout as well
    return found


def _bars(row: dict[str, Any]) -> list[Bar]:
    tokens, name = row["tokens"], f"{row['instructions']}, {row['weights']}, {row['tokens']} tokens"
    bars = []
    if tokens == 1:
        bars.append(Bar(f"{name}: share of the read bandwidth", row["of_read_ratio"], 0.8, at_least=True))
        bars.append(Bar(f"{name}: faster than torch's fastest", row["over_torch_ratio"], 1.3, at_least=True))
    if tokens == 8 and row["weights"] == "bfloat16":
        bars.append(Bar(f"{name}: faster than torch's fastest", row["over_torch_ratio"], 3.0, at_least=True))
    if tokens >= 64:
        bars.append(
            Bar(f"{name}: faster than float32 products after widening", row["over_widened_ratio"], 1.0, at_least=True)
        )
    if row["over_kt_ratio"] is not None:
        bars.append(Bar(f"{name}: faster than kt-kernel's AVX2 path", row["over_kt_ratio"], 1.5, at_least=True))
    return bars
