"""A plan as `overspill serve`: the command that gives this very plan again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from overspill.advice.facts import environment_of
from overspill.advice.record import Advice
from overspill.config import FLAGS, Settings
from overspill.plan import Plan

_SEVERAL = re.compile(r"=\w+,")

_NOTHING = (("cpu_moe", False), ("n_cpu_moe", 0), ("fit", True))
"""What a document may say without changing anything."""


def advise_overspill(plan: Plan, settings: Settings, model_name: str) -> Advice:
    """`engines.advise` for this program itself."""
    command = ["overspill", "serve", model_name, *_offload(document_of(plan)), *_engine(plan, settings)]
    environment = environment_of(settings)
    notes = []
    if settings.engine.max_num_batched_tokens is None:
        notes.append(
            "a server computes prompts in pieces (--max-num-batched-tokens), so its forecast of working memory and KV "
            "cache is another"
        )
        if plan.memory.unified and plan.offloads:
            notes.append("what it leaves on disk depends on those two")
    return Advice(
        "overspill",
        tuple(command),
        environment,
        tuple(notes),
        (),
        plan.memory.host_bytes + plan.memory.staging_bytes,
    )


def document_of(plan: Plan) -> dict[str, Any]:
    """What the plan carries out, defaults left out. Slots that were sized by the room there was are stated."""
    fields: dict[str, Any] = _without_defaults(plan.offload.model_dump(mode="json", exclude_defaults=True))
    stream = plan.offload.extension.expert_stream
    if plan.slots is not None and stream.slots is None and stream.cache_bytes is None:
        streamed = fields.setdefault("overspill", {}).setdefault("expert_stream", {})
        streamed["slots"] = plan.slots.count
        if plan.slots.tier == "disk":
            streamed["tier"] = "disk"
    streamed = fields.get("overspill", {}).get("expert_stream", {})
    if streamed.get("enabled") and len(streamed) > 1:
        del streamed["enabled"]  # implied by the other fields
    return fields


def _without_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is absent or asks for nothing; a False is kept where it forbids something."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if inner := _without_defaults(value):
                kept[name] = inner
        elif (name, value) not in _NOTHING and value is not None and value != []:
            kept[name] = value
    return kept


def _offload(fields: dict[str, Any]) -> list[str]:
    """Flags, where there is one for every field; the document otherwise."""
    paths = {path: flag for flag, path in FLAGS.items()}
    stated = list(_leaves(fields))
    entries = fields.get("overspill", {}).get("placement", {}).get("overrides", ())
    plain = all(_SEVERAL.search(entry["pattern"]) is None for entry in entries)
    if not plain or any(path not in paths for path, _ in stated):
        return ["--offload-config", json.dumps(fields)]
    words: list[str] = []
    for path, value in stated:
        words += _flag(paths[path], value)
    return words


def _leaves(fields: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _flag(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if name == "override_tensor":
        return [f"{option}={entry['pattern']}={entry['device']}" for entry in value]
    if name == "expert_cache":
        return [option, f"{value}B"]
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    return [option, *value] if isinstance(value, list) else [option, str(value)]


def _engine(plan: Plan, settings: Settings) -> list[str]:
    engine = settings.engine
    words = ["--device", engine.device] if engine.device != "auto" else []
    for option, nbytes in (
        ("--device-memory", engine.device_memory_bytes),
        ("--memory-limit", engine.memory_limit_bytes),
        ("--kv-cache-memory-bytes", engine.kv_cache_memory_bytes),
    ):
        words += [option, f"{nbytes}B"] if nbytes is not None else []
    for option, number, unit in (
        ("--link-bandwidth", engine.link_bandwidth, "B/s"),
        ("--link-latency", engine.link_latency_s, "s"),
    ):
        words += [option, f"{Decimal(repr(float(number))):f}{unit}"] if number is not None else []
    words += ["--dtype", engine.dtype] if engine.dtype != "auto" else []
    words += ["--max-model-len", str(plan.context_tokens), "--max-num-seqs", str(plan.sequences)]
    if engine.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    words += ["--revision", engine.revision] if engine.revision is not None else []
    words += ["--seed", str(engine.seed)] if engine.seed else []
    return words + (["--trust-remote-code"] if engine.trust_remote_code else [])
