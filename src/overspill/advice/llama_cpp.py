"""A plan as `llama-server`: what is not on the GPU is computed on the CPU there, whatever way this plan has for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath

from overspill.advice.facts import (
    by_access,
    dtype_name,
    few,
    gguf_file,
    is_gguf,
    off_device,
    stored_bytes,
    total_bytes,
    unified,
)
from overspill.advice.gguf_names import gguf_names
from overspill.advice.llama_rules import CpuFlags, cpu_flags
from overspill.advice.record import Advice
from overspill.config import MIB, Settings, format_bytes
from overspill.model.weights import Role, Weight
from overspill.plan import Access, Plan, Tier


def advise_llama_cpp(plan: Plan, settings: Settings, model_name: str) -> Advice:
    """`engines.advise` for llama.cpp."""
    file, notes = _file(plan, model_name)
    command = ["llama-server", "-m", file, "-c", str(plan.context_tokens * plan.sequences), "-np", str(plan.sequences)]
    if plan.sequences > 1:
        notes.append(f"-c is shared by {plan.sequences} slots of {plan.context_tokens} tokens")
    command += ["-fit", "off"]
    if unified(plan):
        return _on_the_cpu(plan, (*command, "-ngl", "0"), notes)
    moved = {p.weight.full for p in off_device(plan) if not looked_up(p.weight)}
    found = cpu_flags(plan.model, moved, gguf_names(plan.model))
    command += found.flags
    cannot = [*_other_ways(plan), *_unnamed(plan, found)]
    if moved:
        told, flags = _mapping(plan)
        notes += told
        command += flags
    embedding = [w for w in plan.model if looked_up(w)]
    taken = _size(plan, [w for w in plan.model if w.full in moved and w not in found.unnamed]) + _size(plan, embedding)
    available = plan.memory.available_host_bytes
    if taken > available:
        cannot.append(
            f"hold its part in host memory: {format_bytes(taken)}, and {format_bytes(available)} are available"
        )
    if embedding:
        notes.append(
            f"token_embd ({format_bytes(_size(plan, embedding))}) lies on the CPU whatever is asked; its rows are "
            "looked up there"
            + (", and it lies on the GPU a second time as the head" if any(w.aliases for w in embedding) else "")
        )
    return Advice("llama.cpp", tuple(command), {}, tuple(notes), tuple(cannot), taken)


def _size(plan: Plan, weights: Sequence[Weight]) -> int:
    """What llama.cpp holds of them: a GGUF file's tensors as they lie there."""
    return sum(map(stored_bytes, weights)) if is_gguf(plan) else total_bytes(weights)


def _file(plan: Plan, model_name: str) -> tuple[str, list[str]]:
    if is_gguf(plan):
        packed, here = (format_bytes(nbytes) for nbytes in (_size(plan, plan.model.weights), plan.model.nbytes))
        return gguf_file(plan, model_name), [
            f"llama.cpp computes from the file's tensors as they lie, {packed} in all, and sizes here are of those; "
            f"this plan decodes them to {dtype_name(plan)}, {here}"
        ]
    name = PurePath(model_name).name
    if not name.strip("."):
        name = Path(model_name).resolve().name or "model"
    kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(dtype_name(plan), "auto")
    convert = ["python", "convert_hf_to_gguf.py", f"FOLDER_OF_{name}", "--outtype", kind, "--outfile", f"{name}.gguf"]
    return f"{name}.gguf", [
        f"a GGUF file is needed: {shlex.join(convert)} (of llama.cpp's repository); sizes here are of that type, a "
        "quantized file takes less"
    ]


def looked_up(weight: Weight) -> bool:
    """Whether it is the table of token embeddings, tied to the head or not."""
    tied = any("embed" in name.full for name in weight.names)
    return weight.name.layer is None and (weight.role is Role.EMBEDDING or (weight.role is Role.HEAD and tied))


def lies_on_cpu(weight: Weight) -> bool:
    """Whether the GPU holds nothing of it whatever is asked: a table that is no head as well."""
    return looked_up(weight) and not weight.aliases


def _other_ways(plan: Plan) -> list[str]:
    """What this plan does with weights off the device that llama.cpp computes with on the CPU instead."""
    lines = []
    for access, what in (
        (Access.ZERO_COPY, "read weights in host memory from the GPU (zero-copy)"),
        (Access.PREFETCH, "copy weights to the GPU ahead of their layer (prefetch)"),
        (Access.STREAM, "fetch experts into slots on the GPU as they are chosen"),
    ):
        if weights := [weight for weight in by_access(plan, access) if not looked_up(weight)]:
            line = f"{what}, {format_bytes(_size(plan, weights))}: it computes on the CPU what is not on the GPU"
            if access is Access.STREAM:
                pool = plan.memory.expert_slots_bytes // MIB
                line += f"; newer builds have a cache of such experts, --moe-cache-mib {max(1, pool)}, off by default"
            lines.append(line)
    if on_disk := [p.weight for p in plan.on(Tier.DISK) if p.access is not Access.IN_PLACE]:
        lines.append(
            f"read weights from disk into buffers, {format_bytes(_size(plan, on_disk))}: the nearest is a mapped file, "
            "which the page cache holds as far as it can"
        )
    return lines


def _unnamed(plan: Plan, found: CpuFlags) -> list[str]:
    if not found.unnamed:
        return []
    names = few([weight.full for weight in found.unnamed])
    nbytes = format_bytes(_size(plan, found.unnamed))
    return [f"be told here of {names} ({nbytes}): their GGUF names are not known, and they stay on the GPU"]


def _mapping(plan: Plan) -> tuple[list[str], list[str]]:
    """Notes and flags about mapped files beside weights on the CPU."""
    if plan.mapped:
        return [
            "weights on the CPU are mapped, as in this plan: llama.cpp warns of it (prompts go several times slower "
            "than with --no-mmap where memory is short)"
        ], []
    if plan.on(Tier.DISK):
        return ["the file stays mapped, since this plan leaves weights on disk; a prompt reads it slowly"], []
    return [
        "--no-mmap (newer: --load-mode none) reads CPU weights into memory, repacked or pinned where llama.cpp can; "
        "mapped, prompts are several times slower"
    ], ["--no-mmap"]


def _on_the_cpu(plan: Plan, command: tuple[str, ...], notes: list[str]) -> Advice:
    """The device is the CPU: everything is computed there, from a mapped file unless memory holds it all."""
    cannot = _other_ways(plan)
    if plan.on(Tier.DISK):
        notes.append("the file is mapped (llama.cpp's default): what memory does not hold is read again from it")
    else:
        command = (*command, "--no-mmap")
    return Advice("llama.cpp", command, {}, tuple(notes), tuple(cannot), _size(plan, plan.model.weights))
