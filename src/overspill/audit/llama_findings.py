"""What can be wrong with a start of llama.cpp: placement that did not happen, or that costs more than it should."""

from __future__ import annotations

from collections.abc import Iterator

from overspill.audit.failures import start_incomplete, told
from overspill.audit.llama_facts import (
    cpu_override_asked,
    host_mib,
    is_sparse,
    mapped,
    matches,
    on_host,
    overrides,
    weights_mib,
)
from overspill.audit.llama_failures import FAILURES
from overspill.audit.records import KEPT_HITS, Facts, Finding, Hit, unique

SPARE_MIB = 1024
"""What llama.cpp's fit leaves free by default."""


def findings(facts: Facts) -> Iterator[Finding]:
    failures = [*told(facts, FAILURES), *_out_of_memory(facts)]
    yield from failures
    for judge in (_no_gpu, _fit, _overrides, _whole_layers, _not_needed, _uneven, _held_twice):
        yield from judge(facts)
    ended = any(one.severity == "error" for one in failures)
    yield from start_incomplete(facts, judged=bool(weights_mib(facts)) or ended)


def _lines(*hits: Hit | None) -> list[Hit]:
    return [hit for hit in hits if hit is not None]


def _out_of_memory(facts: Facts) -> Iterator[Finding]:
    device = facts.fatal("device_oom", "ready", "compute", "draft_compute")
    host = facts.fatal("host_oom", "ready")
    if device is not None:
        gave_up = facts.first("fit_failed")
        yield Finding(
            "out-of-device-memory",
            "error",
            unique(hit.line for hit in _lines(gave_up, device, facts.first("load_failed"))),
            "the device ran out of memory"
            + (", after the fit had given up: its failure is only a warning, and loading goes on." if gave_up else "."),
            "fewer layers (-ngl), more experts on the CPU (-ncmoe), a smaller context (-c), or drop the settings "
            "that keep "
            "--fit from working; overspill refuses a plan that does not fit before it loads",
        )
    if host is not None:
        yield Finding(
            "out-of-host-memory",
            "error",
            (host.line,),
            "host memory, or a control group's, ran out. Weights that are not mapped must fit it whole; the page "
            "cache of "
            "a mapping counts in a control group too.",
            "a smaller quantization, a larger limit, or --load-mode mmap; overspill reads from disk what memory "
            "does not "
            "hold, under a limit that is enforced",
        )


def _no_gpu(facts: Facts) -> Iterator[Finding]:
    layers, none = facts.last("layers"), facts.first("no_gpu")
    asked = facts.asked_number("n_gpu_layers")
    idle = layers is not None and layers.number("on_gpu") == 0
    cpu_only = bool(weights_mib(facts)) and all(on_host(name) for name in weights_mib(facts))
    if none is not None or (asked > 0 and (idle or cpu_only)):
        proof = facts.first("weights") if cpu_only else None
        yield Finding(
            "flag-ignored",
            "error",
            unique((*facts.asked_lines("n_gpu_layers"), *(hit.line for hit in _lines(none, layers, proof)))),
            "layers were asked for on the GPU, and all weights are on the CPU: this build has no backend for the "
            "GPU, or "
            "sees none.",
            "a build with CUDA, ROCm, Vulkan or Metal; `llama-server --list-devices` shows what it sees",
        )


def _fit(facts: Facts) -> Iterator[Finding]:
    failed = facts.last("fit_failed")
    if failed is not None:
        reason = failed.groups.get("reason", "")
        cause = "what it tried did not suffice"
        if "already set by user" in reason:
            cause = "it stops where the layers, the split or any tensor override (-ncmoe and -cmoe are such) is given"
        yield Finding(
            "fit-gave-up",
            "warning",
            unique(hit.line for hit in _lines(facts.first("fit_short"), facts.first("fit_deficit"), failed)),
            f"the fit changed nothing: {cause}. It is only a warning, loading goes on, and memory may run out later "
            "(llama.cpp#27872, #24684).",
            "give all of the placement yourself and --fit off, or none of it; "
            "overspill fits around what was stated, and refuses what cannot work",
        )
    cut = facts.last("fit_context")
    if cut is not None:
        yield Finding(
            "context-reduced",
            "note",
            (cut.line,),
            f"no context was asked for, and the fit reduced it from {cut.groups['before']} to "
            f"{cut.groups['after']} tokens.",
            "-c N for the context you need; the fit then moves weights instead",
        )


def _overrides(facts: Facts) -> Iterator[Finding]:
    """An override without a trace. With debug lines each pattern is tried on the tensors that were overridden."""
    asked = overrides(facts)
    hits = facts.all("override")
    if not weights_mib(facts) or len(hits) == KEPT_HITS:
        return  # not loaded, or more tensors than are held
    if hits:
        names = {hit.groups["tensor"] for hit in hits}
        dead = [text for text, _ in asked if all(matches(text, name) is False for name in names)]
    elif cpu_override_asked(facts) and facts.first("load_mode") and mapped(facts) and not facts.first("mmap_override"):
        dead = [text for text, buffer in asked if buffer.startswith("CPU")]
        dead += [name for name in ("cpu_moe", "n_cpu_moe") if name in facts.asked]
    else:
        return
    if dead:
        yield Finding(
            "override-no-match",
            "error",
            unique((*facts.asked_lines("override_tensor", "cpu_moe", "n_cpu_moe"), *(hit.line for hit in hits[:1]))),
            f"{', '.join(dead)} matched no tensor, and llama.cpp says nothing about it"
            + (
                ": it names each tensor that is overridden, and none is by this."
                if hits
                else ": with a mapping it warns at the first tensor that is overridden to the CPU, and did not."
            )
            + " Patterns are searched in names as blk.7.ffn_up_exps.weight, and the first that matches wins.",
            "look up the names (gguf-dump), and check with -lv 5, which shows each override; "
            "overspill refuses a pattern that matches nothing",
        )


def _whole_layers(facts: Facts) -> Iterator[Finding]:
    layers, experts = facts.last("layers"), facts.last("experts")
    if layers is None or experts is None or not is_sparse(facts) or cpu_override_asked(facts):
        return
    on_gpu, total = layers.number("on_gpu"), layers.number("layers")
    if 0 < on_gpu < total and facts.first("override", "mmap_override") is None:
        yield Finding(
            "whole-layers-on-cpu",
            "warning",
            (experts.line, layers.line),
            f"{total - on_gpu:g} of {total:g} layers are on the CPU whole, of a model with "
            f"{experts.number('count'):g} experts: "
            "their attention, which every token reads, with them.",
            "-ngl 99 -ncmoe N keeps attention on the GPU and moves only experts; overspill does so by itself",
        )


def _not_needed(facts: Facts) -> Iterator[Finding]:
    """Weights on the host beside as much free memory on the devices, as the memory breakdown counts it at the end.

    The fit prints breakdowns too, of what it tries before anything is loaded.
    """
    loaded = [hit for hit in facts.all("weights", "draft_weights") if hit.number("mib") > 0]
    latest = {hit.label: hit for hit in facts.all("breakdown") if loaded and hit.line.follows(loaded[-1].line)}
    layers, held = facts.last("layers"), host_mib(facts)
    partly = layers is not None and 0 < layers.number("on_gpu") < layers.number("layers")
    if not latest or not (partly or cpu_override_asked(facts) or facts.first("mmap_override", "override")):
        return
    free = sum(hit.number("free") for hit in latest.values())
    if held > SPARE_MIB and free >= held + SPARE_MIB * len(latest):
        weights = [hit.line for hit in facts.all("weights") if on_host(hit.label)]
        yield Finding(
            "offload-not-needed",
            "warning",
            unique((*weights[-2:], *(hit.line for hit in latest.values()))),
            f"{free / 1024:.1f} GiB are free on the device, {held / 1024:.1f} GiB of weights are on the host.",
            "a larger -ngl, a smaller -ncmoe, or let --fit choose; overspill says so in its plan",
        )


def _uneven(facts: Facts) -> Iterator[Finding]:
    on_device = {name: mib for name, mib in weights_mib(facts).items() if not on_host(name)}
    if len(on_device) < 2 or not facts.asked_number("n_cpu_moe") > 0:
        return
    least, most = min(on_device, key=on_device.__getitem__), max(on_device, key=on_device.__getitem__)
    if on_device[least] < 0.5 * on_device[most]:
        yield Finding(
            "devices-uneven",
            "warning",
            unique(hit.line for hit in facts.all("weights") if hit.label in (least, most)),
            f"{least} holds {on_device[least]:.0f} MiB, {most} {on_device[most]:.0f} MiB: -ncmoe takes the "
            "experts of the first "
            "layers, which are those of the first device (llama.cpp#15136, #15263).",
            "-ot with the layers spread over the devices, or --tensor-split",
        )


def _held_twice(facts: Facts) -> Iterator[Finding]:
    repacked = [hit for hit in facts.all("weights") if "REPACK" in hit.label and hit.number("mib") > SPARE_MIB]
    if repacked and mapped(facts):
        mapping = next((hit for hit in facts.all("weights") if "_Mapped" in hit.label), None)
        yield Finding(
            "weights-held-twice",
            "note",
            unique(hit.line for hit in _lines(mapping, repacked[0])),
            "repacked weights are a copy beside the mapping they were made from, so host memory holds them twice "
            "(llama.cpp#16761, #19578).",
            "--load-mode none, or -nr to go without repacking",
        )
