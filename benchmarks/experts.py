"""A model of routed experts, offloaded in every way: `overspill compare` for each, against nothing offloaded.

Shaped as Qwen3-30B-A3B (hidden 2048, 128 experts of 768, 8 chosen) with a few layers and a smaller vocabulary; weights
are random, so its router likes all experts about equally, which no trained one does: a cache of slots is worth more in
life. Every way but the last two frees the bytes of all experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import overspill
from benchmarks import models
from benchmarks.limits import read_gbps
from benchmarks.report import Bar, Report, spread
from overspill.compare.results import RunResult, total_counts
from overspill.config import GIB
from overspill.config.sizes import parse_bandwidth
from overspill.model.weights import Role

COLUMNS = (
    "way",
    "device_bytes",
    "step_bytes",
    "hit_rate",
    "link_ms",
    "host_ms",
    "step_ms",
    "over_resident_ratio",
    "prompt_ms",
    "verdicts",
)
RESIDENT = "nothing offloaded"


@dataclass(frozen=True)
class Scale:
    hidden: int
    experts: int
    intermediate: int
    top_k: int
    layers: int
    vocabulary: int
    prompt: int
    tokens: int
    repeat: int
    link: str = "4GB/s"

    @property
    def config(self) -> Any:
        return models.qwen3_moe(
            self.layers,
            hidden=self.hidden,
            experts=self.experts,
            intermediate=self.intermediate,
            top_k=self.top_k,
            heads=max(2, self.hidden // 128),
            vocabulary=self.vocabulary,
        )


SCALES = {
    "full": Scale(2048, 128, 768, 8, layers=3, vocabulary=32000, prompt=64, tokens=24, repeat=2),
    "quick": Scale(1024, 64, 384, 8, layers=3, vocabulary=8000, prompt=32, tokens=12, repeat=1),
    "toy": Scale(64, 16, 32, 4, layers=2, vocabulary=512, prompt=8, tokens=4, repeat=1),
}


def ways(expert_bytes: int, experts: int) -> dict[str, dict[str, Any]]:
    """Documents by name. `expert_bytes` are those of all `experts`, over all layers."""
    budget = {"cpu_offload_gb": expert_bytes / GIB}
    quarter = max(1, experts // 4)

    def stream(**fields: Any) -> dict[str, Any]:
        return {"overspill": {"expert_stream": fields}}

    return {
        "declaration order": {"uva": budget, "overspill": {"order": "declaration"}},
        "prefetch, all layers": {"prefetch": {"offload_group_size": 1, "offload_params": ["experts"]}},
        "experts only": {"uva": {**budget, "cpu_offload_params": ["experts"]}},
        "placed on the CPU": {"overspill": {"placement": {"cpu_moe": True}}},
        "slots for a quarter, fetch": stream(slots=quarter, policy="fetch"),
        "slots for a quarter, auto": stream(slots=quarter, policy="auto"),
        "slots for a quarter, from disk": stream(slots=quarter, tier="disk"),
    }


def measure(scale: Scale, cache: Path, tell: Callable[[str], None]) -> Report:
    report = Report("experts", "Routed experts on the emulated link", COLUMNS)
    folder = models.checkpoint(scale.config, torch.bfloat16, cache)
    planned = overspill.plan(folder, device="emulated", device_memory_bytes=64 << 30)
    sizes = [p.weight.nbytes for p in planned.placements if p.weight.role is Role.ROUTED_EXPERT]
    report.limits["host read, all threads_gbps"] = bandwidth = read_gbps()
    prompt = [7 * token % scale.vocabulary for token in range(1, scale.prompt + 1)]
    shown = False
    for way, document in ways(sum(sizes), scale.experts * scale.layers).items():
        tell(way)
        result = overspill.compare(
            folder,
            candidate=document,
            prompts=[prompt],
            max_tokens=scale.tokens,
            repeat=scale.repeat,
            device="emulated",
            device_memory_bytes=64 << 30,
            link_bandwidth=scale.link,
        )
        assert result.baseline is not None
        baseline = statistics.median(decode_ms(result.baseline.runs))
        if not shown:
            report.rows.append(_row(RESIDENT, result.baseline.runs, baseline, bandwidth, scale))
            shown = True
        row = _row(way, result.candidate.runs, baseline, bandwidth, scale)
        row["verdicts"] = "failed: " + ", ".join(v.name for v in result.failed) if result.failed else "pass"
        report.rows.append(row)
        report.bars.append(Bar(f"{way}: verdicts failed", len(result.failed), 0, timed=False))
    report.notes += [
        f"link {scale.link}, emulated: ratios carry over to a device, times do not",
        f"{scale.layers} layers, {scale.experts} experts of {scale.intermediate}, {scale.top_k} chosen, hidden size "
        f"{scale.hidden}, vocabulary {scale.vocabulary}, bfloat16; a prompt of {scale.prompt} tokens, {scale.tokens} "
        f"generated, {scale.repeat} runs a side by turns, medians",
        "step bytes: over the link (or from disk) for one decoded token, on average; link and host are the least that "
        "these bytes, and the chosen experts' bytes read in host memory, take",
        "nothing offloaded is run again beside every way; over resident is against the one beside it",
    ]
    return report.finish()


def decode_ms(runs: tuple[RunResult, ...]) -> list[float]:
    return [p.seconds * 1e3 for run in runs for generation in run.generations for p in generation.decode]


def _row(way: str, runs: tuple[RunResult, ...], baseline_ms: float, bandwidth: float, scale: Scale) -> dict[str, Any]:
    top_k, link = scale.top_k, parse_bandwidth(scale.link, field="link")
    run = runs[0]
    steps = decode_ms(runs)
    decode = [p for r in runs for g in r.generations for p in g.decode]
    step_bytes = statistics.mean(p.link_bytes for p in decode)
    placed = [use for use in run.experts if use.access == "in_place"]
    chosen = top_k * sum(use.expert_bytes for use in placed)
    counts = total_counts(runs)
    return {
        "way": way,
        "device_bytes": run.weights_and_pool_bytes,
        "step_bytes": step_bytes,
        "hit_rate": f"{counts.hits / counts.lookups:.0%}" if counts is not None and counts.lookups else None,
        "link_ms": step_bytes / link * 1e3 if step_bytes else None,
        "host_ms": chosen / (bandwidth * 1e9) * 1e3 if chosen else None,
        "step_ms": statistics.median(steps),
        "over_resident_ratio": statistics.median(steps) / baseline_ms,
        "prompt_ms": statistics.median(g.passes[0].seconds * 1e3 for r in runs for g in r.generations),
        "spread": spread(steps),
        "samples": steps,
    }
