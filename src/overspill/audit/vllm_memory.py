"""Where vLLM's bytes went: host memory, weights that came back, offload without need, memory that ran out."""

from __future__ import annotations

from collections.abc import Iterator

from overspill.audit.failures import start_incomplete, told
from overspill.audit.records import Facts, Finding, unique
from overspill.audit.vllm_facts import (
    asked_uva_gib,
    checkpoint_gib,
    host_gib,
    offloaded_gib,
    ranks,
    selectors,
    sharding,
    was_loaded,
)
from overspill.audit.vllm_failures import FAILURES

LEAST_GIB = 0.5
"""Of less no finding on where it went is worth reading."""


def findings(facts: Facts) -> Iterator[Finding]:
    failures = [*told(facts, FAILURES), *_out_of_memory(facts), *_off_device(facts), *_kv_negative(facts)]
    yield from failures
    yield from _rounded(facts)
    yield from _back_on_device(facts)
    yield from _not_needed(facts)
    yield from _tower_first(facts)
    ended = facts.first("engine_failed") is not None or any(one.severity == "error" for one in failures)
    yield from start_incomplete(facts, judged=was_loaded(facts) or ended)


def _offload_asked(facts: Facts) -> bool:
    return asked_uva_gib(facts) > 0 or facts.asked_number("offload_group_size") > 0


def _out_of_memory(facts: Facts) -> Iterator[Finding]:
    device = facts.fatal("device_oom", "ready")
    if device is not None:
        rebuilding = facts.first("rebuilding")
        why = "the device ran out of memory. vLLM's advice at that point does not name the offload."
        if rebuilding is not None and _offload_asked(facts):
            why = (
                "the device ran out of memory while weights were rebuilt after loading: the weights of one module come "
                "back to the device for it, as large as they are (vllm#21864)."
            )
        elif facts.first("loaded") is None:
            why += " It happened while loading: what was not offloaded does not fit."
        lines = [hit.line for hit in (device, rebuilding) if hit is not None]
        yield Finding(
            "out-of-device-memory",
            "error",
            unique(lines),
            why,
            "a larger --cpu-offload-gb, a lower --gpu-memory-utilization or --max-model-len, or a checkpoint that is "
            "quantized already; `overspill plan` says what fits before anything is loaded",
        )
    host = facts.fatal("host_oom", "ready")
    if host is not None:
        why = "a process was killed, which is what the system does when host memory, or a control group's, runs out."
        if _offload_asked(facts):
            why += (
                " Offloaded weights are pinned, tensor by tensor rounded up to a power of two, on every rank, and vLLM "
                "checks neither free memory nor the limit (0.27 to 0.33)."
            )
        yield Finding(
            "out-of-host-memory",
            "error",
            (host.line,),
            why,
            "a smaller budget, a larger limit, or VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1, which takes the "
            "exact size "
            "with the uva backend; overspill refuses a plan that the host does not hold, before it loads",
        )


def _kv_negative(facts: Facts) -> Iterator[Finding]:
    for hit in facts.all("kv_memory"):
        if hit.number("gib") <= 0 and facts.first("no_kv_room") is None:
            yield Finding(
                "no-room-for-kv",
                "error",
                (hit.line,),
                "nothing is left for the KV cache after weights and working memory.",
                "a larger --cpu-offload-gb or --gpu-memory-utilization, or a smaller --max-model-len",
            )
            return


def _off_device(facts: Facts) -> Iterator[Finding]:
    hit = facts.first("wrong_device")
    if hit is not None and _offload_asked(facts):
        yield Finding(
            "kernel-off-device",
            "error",
            (hit.line,),
            "a kernel was given a weight that is on the host: something captured the parameter outside its module, "
            "which the offload without UVA moves only within it (vllm#15196, #37883, #43453).",
            "leave VLLM_WEIGHT_OFFLOADING_DISABLE_UVA unset, or use another quantization kernel",
        )


def _rounded(facts: Facts) -> Iterator[Finding]:
    held = host_gib(facts)
    pageable = facts.setting("disable_pin_memory") is True or facts.first("no_pinning") is not None
    if held < LEAST_GIB or pageable:
        return
    count = ranks(facts)
    least, most = held * count, 2 * held * count
    told = facts.last("uva_bytes") or facts.last("prefetch")
    yield Finding(
        "host-memory-rounded",
        "note",
        unique((*facts.asked_lines("tensor_parallel_size"), *([told.line] if told is not None else []))),
        f"{held:.2f} GiB on each of {count} rank{'s' if count > 1 else ''} is {least:.2f} GiB of weights, and "
        "takes up to "
        f"{most:.2f} GiB of host memory: each tensor is pinned by an allocator that rounds up to a power of two "
        "(0.27 to 0.33; measured 1.15 to 1.87 times, by shapes).",
        "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 takes the exact size with the uva backend; --pid shows what was "
        "taken; overspill pins exact sizes",
    )


def _back_on_device(facts: Facts) -> Iterator[Finding]:
    """More on the device than the checkpoint less what was offloaded: rebuilt weights stayed there."""
    loaded, checkpoint, told_bytes = facts.first("loaded"), facts.first("checkpoint"), facts.last("uva_bytes")
    quantization = facts.setting("quantization")
    if loaded is None or checkpoint is None or told_bytes is None or quantization is None:
        return
    share = checkpoint_gib(facts) / sharding(facts)
    moved = told_bytes.number("gib")
    back = loaded.number("gib") + moved - share
    if not back > max(0.5, 0.25 * moved, 0.1 * share):
        return
    yield Finding(
        "weights-back-on-device",
        "warning",
        unique((*facts.asked_lines("quantization"), checkpoint.line, told_bytes.line, loaded.line)),
        f"{share:.2f} GiB of checkpoint for this rank less {moved:.2f} GiB offloaded leaves "
        f"{max(0.0, share - moved):.2f} "
        f"GiB, and loading took {loaded.number('gib'):.2f} GiB of the device. Weights that {quantization} "
        "rebuilds after "
        "loading with another shape, type or layout stay on the device though they are counted as offloaded "
        "(read in 0.33.0; vllm#21864, #32991, #57215).",
        "offload only what is not rebuilt, or use a checkpoint in the kernel's own layout; overspill walks every "
        "weight "
        "after loading, and ends a start in which one is not where the plan says",
    )


def _not_needed(facts: Facts) -> Iterator[Finding]:
    moved, kv = offloaded_gib(facts), facts.all("kv_memory")
    if moved < LEAST_GIB or not kv:
        return
    tightest = min(kv, key=lambda hit: hit.number("gib"))
    free = tightest.number("gib")
    concurrency = facts.last("concurrency")
    left, rest = (2.0, "") if free >= 2 * moved else (0.0, "")
    if concurrency is not None and concurrency.number("times") > 0 and free > 0:
        left = (free - moved) * concurrency.number("times") / free
        rest = f" With the weights back it would hold {left:.1f} requests of {concurrency.groups['tokens']} tokens."
    if not left >= 1:
        return
    offload = facts.last("uva_bytes") or facts.last("prefetch")
    assert offload is not None  # something was moved
    lines = [offload.line, tightest.line, *([concurrency.line] if concurrency is not None else [])]
    yield Finding(
        "offload-not-needed",
        "warning" if left >= 2 else "note",
        unique(lines),
        f"{free:.2f} GiB of the device were left for the KV cache, {moved:.2f} GiB of weights were offloaded: the "
        "model "
        f"fits without.{rest} One report was 19 times slower for it (vllm#57771).",
        "drop the offload, or lower it until the KV cache is as large as you need it; overspill says so in its plan",
    )


def _tower_first(facts: Facts) -> Iterator[Finding]:
    """Two growing figures of one writer: a vision tower was wrapped before the language model.

    A drafter's comes after weights were read.
    """
    if selectors(facts, "cpu_offload_params"):
        return
    reading = facts.first("checkpoint", "drafter")
    told_bytes = [hit for hit in facts.all("uva_bytes") if reading is None or reading.line.follows(hit.line)]
    own = [hit for hit in told_bytes if hit.label == told_bytes[0].label]
    if len(own) > 1 and own[-1].number("gib") > own[0].number("gib") > 0:
        yield Finding(
            "tower-took-budget",
            "note",
            (own[0].line, own[-1].line),
            f"the first {own[0].number('gib'):g} GiB of the budget went to what is built before the language model "
            "(a vision tower): without selectors the budget is spent in the order of building.",
            "--cpu-offload-params with names of the decoder's weights",
        )
