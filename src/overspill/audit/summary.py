"""What happened, as the log's figures, and what it has no line for."""

from __future__ import annotations

from overspill.audit import llama_facts, vllm_facts
from overspill.audit.records import Facts, Value


def vllm(facts: Facts) -> dict[str, Value]:
    told: dict[str, Value] = {}
    architecture = facts.first("architecture")
    if architecture is not None:
        told["architecture"] = architecture.groups["name"]
    if facts.first("runner_v2") is not None:
        told["runner"] = "V2"
    offloader = facts.last("offloader")
    told["offloader"] = offloader.groups["name"] if offloader is not None else "none"
    if facts.first("uva_bytes", "prefetch") is not None:
        told["host_gib_per_rank"] = round(vllm_facts.host_gib(facts), 2)
        told["net_gib_per_rank"] = round(vllm_facts.offloaded_gib(facts), 2)
        told["ranks"] = vllm_facts.ranks(facts)
    for line in vllm_facts.prefetch_lines(facts):
        told |= {"prefetch_layers": line.modules, "buffer_pool_gib": round(line.pool_bytes / vllm_facts.GIB, 2)}
    for name, kind in (("checkpoint_gib", "checkpoint"), ("device_gib", "loaded"), ("kv_cache_gib", "kv_memory")):
        hit = facts.last(kind)
        if hit is not None:
            told[name] = hit.number("gib")
    concurrency = facts.last("concurrency")
    if concurrency is not None:
        told["max_concurrency"] = concurrency.number("times")
    told["ready"] = facts.first("ready") is not None
    return told


def vllm_unjudged(facts: Facts) -> tuple[str, ...]:
    missing = _kills(facts)
    if not facts.asked:
        missing.append('what was asked for: no "non-default args" line and no command line')
    budget = vllm_facts.asked_uva_gib(facts) > 0 or facts.asked_number("offload_group_size") > 0
    if budget and facts.first("offloader", "uva_bytes", "prefetch") is None:
        if facts.version is None:
            missing.append("whether the budget took effect: no line says which version of vLLM this is")
        elif vllm_facts.older_than(facts.version, vllm_facts.OLDEST):
            missing.append(
                f"whether the budget took effect: vLLM {facts.version} is older than those whose lines are known "
                f"(0.{vllm_facts.OLDEST} to 0.{vllm_facts.NEWEST})"
            )
    if vllm_facts.beyond(facts.version):
        missing.append(f"what vLLM {facts.version} does otherwise than 0.{vllm_facts.NEWEST}: it is read as that")
    if facts.first("uva_bytes", "prefetch") is not None:
        if facts.first("kv_memory") is None:
            missing.append('whether the offload was needed: no "Available KV cache memory" line')
        if facts.first("uva_bytes") is not None and facts.setting("quantization") and not facts.first("checkpoint"):
            missing.append('whether rebuilt weights stayed on the device: no "Checkpoint size" line')
        if not vllm_facts.is_sparse(facts) and facts.first("architecture") is None:
            missing.append('whether the model is sparse: no "Resolved architecture" line')
    return tuple(missing)


def llama(facts: Facts) -> dict[str, Value]:
    told: dict[str, Value] = {}
    for name, kind, group in (("architecture", "architecture", "name"), ("load_mode", "load_mode", "mode")):
        hit = facts.last(kind)
        if hit is not None:
            told[name] = hit.groups[group]
    experts, layers, size = facts.last("experts"), facts.last("layers"), facts.last("file_size")
    if experts is not None:
        told["experts"] = experts.number("count")
    if size is not None:
        told["file"] = f"{size.groups['size']} {size.groups['unit']}"
    if layers is not None:
        told["layers_on_gpu"] = f"{layers.groups['on_gpu']}/{layers.groups['layers']}"
    for device in facts.per_label("device").values():
        told[f"free_mib.{device.label}"] = device.number("free_mib")
    for model in ("", "draft_"):
        for kind in ("weights", "kv", "compute"):
            for buffer, mib in llama_facts.held_mib(facts, model + kind).items():
                told[f"{model}{kind}_mib.{buffer}"] = round(mib, 2)
    if facts.hits.get("override"):
        told["tensors_overridden"] = len({hit.groups["tensor"] for hit in facts.hits["override"]})
    if facts.first("fit_done", "fit_failed") is not None:
        told["fit"] = "failed" if facts.first("fit_failed") is not None else "done"
    told["ready"] = facts.first("ready") is not None
    return told


def llama_unjudged(facts: Facts) -> tuple[str, ...]:
    missing = _kills(facts)
    if not facts.asked:
        missing.append("what was asked for: llama.cpp does not log its flags, and no command line is in the log")
    tried = facts.first("override") is not None
    if llama_facts.overrides(facts) and not tried and not llama_facts.mapped(facts):
        missing.append("whether each -ot pattern matched: the lines that say so come with -lv 5")
    offloaded = llama_facts.cpu_override_asked(facts) or facts.first("mmap_override", "override") is not None
    if offloaded and facts.first("breakdown") is None:
        missing.append("whether the offload was needed: the memory breakdown is printed when the server ends")
    return tuple(missing)


def _kills(facts: Facts) -> list[str]:
    return [
        f"whether line {hit.line.number} tells of this server's end: {hit.line.quoted}"
        for hit in facts.all("unclaimed_kill")[:1]
    ]
