"""How far a request's logits in a crowd are from its logits alone, by the dtype computed in.

Not a speed: it backs the bound that the batching engine states (engine/choose.py) and holds each architecture to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import overspill
from benchmarks.report import Bar, Report
from overspill.engine.batching import Batching, Slice
from overspill.engine.choose import NMSE_BOUND, choose_batching
from overspill.engine.requests import Request, RequestParams
from overspill.engine.scheduler import Scheduler
from overspill.engine.sequences import RunningSequence

DTYPES = ("float32", "bfloat16", "float16")
SUBJECTS = (
    "the sea",
    "a clock that runs backwards",
    "seven",
    "why bread rises and cakes fall",
    "Paris",
    "how a lighthouse keeper spends the night, in detail, with everything that he eats",
    "rust",
    "an honest letter to a neighbour about a tree that has grown over the fence",
)

COLUMNS = (
    "dtype",
    "logits",
    "worst NMSE",
    "bound",
    "largest difference",
    "answers that turned",
    "their largest margin",
)
Steps = list[tuple[torch.Tensor, int]]


def measure(gguf: Path, scale: str, tell: Callable[[str], None]) -> Report:
    """Each prompt alone and all at once, in chunks, through the same batching; logits compared while tokens agree."""
    new_tokens = 8 if scale == "quick" else 32
    report = Report("crowd", "Logits in a crowd against logits alone, SmolLM2-135M, CPU", COLUMNS)
    for dtype in DTYPES[:1] if scale == "quick" else DTYPES:
        tell(f"crowd: {dtype}")
        engine = overspill.load(
            gguf, device="cpu", dtype=dtype, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64
        )
        batching = choose_batching(engine.placed, max_num_seqs=8, max_batch_tokens=64)
        prompts = [engine.encode(f"Write about {subject}.") for subject in SUBJECTS]
        alone = [run(batching, [prompt], new_tokens)[0] for prompt in prompts]
        crowd = run(batching, prompts, new_tokens)
        errors, largest, turned = [], 0.0, []
        for one, other in zip(alone, crowd, strict=True):
            for (expected, token), (got, crowd_token) in zip(one, other, strict=True):
                errors.append(float((got - expected).pow(2).mean() / expected.var()))
                largest = max(largest, float((got - expected).abs().max()))
                if token != crowd_token:
                    best = expected.topk(2).values
                    turned.append(float(best[0] - best[1]))
                    break
        bound = NMSE_BOUND[getattr(torch, dtype)]
        report.rows.append(
            {
                "dtype": dtype,
                "logits": str(len(errors)),
                "worst NMSE": f"{max(errors):.1e}",
                "bound": f"{bound:.0e}",
                "largest difference": f"{largest:.1e}",
                "answers that turned": str(len(turned)),
                "their largest margin": f"{max(turned):.1e}" if turned else "-",
                "samples": errors,
            }
        )
        report.bars.append(Bar(f"{dtype}: worst NMSE over its bound", max(errors) / bound, 1.0, timed=False))
        del engine, batching
    report.notes.append(
        "NMSE: mean squared difference over the variance of the logits. An answer turns where the two likeliest tokens "
        "are nearer than rounding; it is compared up to there, and its margin there is shown."
    )
    return report.finish()


def run(batching: Batching, prompts: Sequence[list[int]], new_tokens: int) -> list[Steps]:
    """The logits that each prompt's answer was chosen from, and what was chosen."""
    scheduler = Scheduler(batching)
    logits: dict[Request, list[torch.Tensor]] = {}
    tokens: dict[Request, list[int]] = {}
    for prompt in prompts:
        chosen: list[int] = []
        params = RequestParams(max_tokens=new_tokens, ignore_eos=True)
        request = Request(prompt, params, lambda output, chosen=chosen: chosen.extend(output.token_ids))
        logits[request], tokens[request] = [], chosen
        scheduler.waiting.append(RunningSequence(request, lambda ids: "", ()))
    forward = batching.forward

    def remember(slices: list[Slice]) -> torch.Tensor:
        scores = forward(slices)
        for s, row in zip((s for s in slices if s.ends), scores, strict=True):
            logits[s.sequence.request].append(row.clone())
        return scores

    batching.forward = remember  # type: ignore[method-assign]
    try:
        while scheduler.step() is not None:
            pass
    finally:
        batching.forward = forward  # type: ignore[method-assign]
    return [list(zip(logits[request], tokens[request], strict=True)) for request in logits]
