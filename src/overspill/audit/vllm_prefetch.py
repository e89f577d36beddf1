"""What can be wrong with vLLM's prefetch: the ring of buffers, and groups without a layer."""

from __future__ import annotations

from collections.abc import Iterator

from overspill.audit.records import Facts, Finding, unique
from overspill.audit.vllm_facts import prefetch_lines, selectors


def findings(facts: Facts) -> Iterator[Finding]:
    yield from _ring(facts)
    yield from _groups(facts)


def _ring(facts: Facts) -> Iterator[Finding]:
    for line in prefetch_lines(facts):
        if line.pool_bytes >= line.saved_bytes or line.step >= line.modules:
            yield Finding(
                "no-net-saving",
                "warning",
                (line.hit.line,),
                f"the ring of buffers takes {line.pool_bytes / 1e9:.4f} GB of the device for "
                f"{line.saved_bytes / 1e9:.4f} GB "
                'that were moved; the log\'s "saved" does not subtract it. '
                f"With prefetch_step={line.step} and {line.modules} offloaded layers each has a buffer of its own.",
                "a smaller --offload-prefetch-step, or more offloaded layers; overspill's plan counts savings net",
            )
        elif line.step < line.num:
            yield Finding(
                "prefetch-step-short",
                "warning",
                (line.hit.line,),
                f"the {line.num} offloaded layers of a group follow each other, and only {line.step} can be "
                "copied ahead: "
                "a buffer is refilled only after the layer before has left it, so the others wait for their copy.",
                f"--offload-prefetch-step {line.num}, or one layer per smaller group; "
                "overspill spreads offloaded layers evenly",
            )
        return


def _groups(facts: Facts) -> Iterator[Finding]:
    offloader = facts.last("offloader")
    if offloader is None or offloader.groups["name"] != "PrefetchOffloader" or facts.first("prefetch") is not None:
        return
    if facts.first("kv_memory", "ready") is None or selectors(facts, "offload_params"):
        return
    size, num = facts.asked_number("offload_group_size"), facts.asked_number("offload_num_in_group", 1)
    yield Finding(
        "group-without-layer",
        "error",
        unique((*facts.asked_lines("offload_group_size"), offloader.line)),
        f'PrefetchOffloader was set and selected no layer (no "[PrefetchOffloader] Initialized" line): with '
        f"offload_group_size={size:g} and offload_num_in_group={num:g} only the last layers of each whole group are "
        "moved, counted on each pipeline rank.",
        "a smaller --offload-group-size",
    )
