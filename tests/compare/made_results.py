"""Made-up results of runs, right in every respect until a test changes one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overspill.compare.answers import AnswerDifference
from overspill.compare.results import (
    Allocation,
    ExpertUse,
    Forecast,
    Generation,
    Memory,
    Pass,
    PlacedWeight,
    RunResult,
    SlotState,
)
from overspill.compare.verdicts import Evidence
from overspill.offload.expert_slots import SlotCounts

MIB = 1 << 20
LAYERS = 4
LAYER_BYTES = 10 * MIB
PATHS = ("model.layers.2.mlp.experts", "model.layers.3.mlp.experts")
COUNTS = SlotCounts(hits=5, fetched=2, streamed=1, prefetched=2, prefetch_used=1, evictions=1, bytes=5 * MIB)
EQUAL = AnswerDifference(first_difference=None, positions=3, largest=0.0, at=None, nmse=0.0)


def weights(access: str | None = None) -> tuple[PlacedWeight, ...]:
    """An embedding of 20 MiB and four layers of 10 MiB; with `access` layers 2 and 3 are off the device."""

    def weight(name: str, layer: int | None, nbytes: int) -> PlacedWeight:
        off = access is not None and layer is not None and layer >= 2
        return PlacedWeight(
            name=name,
            aliases=(),
            stack=None if layer is None else "model.layers",
            layer=layer,
            role="embedding" if layer is None else "dense_mlp",
            dtype="float32",
            bytes=nbytes,
            tier="host" if off else "device",
            access=(access or "") if off else "resident",
            reason="because" if off else "not offloaded",
            address=4096,
            host_address=8192 if off else None,
        )

    layers = [weight(f"model.layers.{i}.mlp.up_proj.weight", i, LAYER_BYTES) for i in range(LAYERS)]
    return (weight("model.embed_tokens.weight", None, 20 * MIB), *layers)


def generation(link_bytes: int = 0, *, prompt: int = 7, ids: tuple[int, ...] = (11, 12, 13)) -> Generation:
    """One pass for each of `ids`; every pass carries `link_bytes`, as planned."""
    passes = tuple(
        Pass(prompt if i == 0 else 1, 0.020 + 0.001 * i, link_bytes, 0.0, float(link_bytes), float(link_bytes))
        for i in range(len(ids))
    )
    return Generation(tuple(range(prompt)), ids, "", "length", passes, link_bytes * len(ids))


def run(access: str | None = None, **changes: Any) -> RunResult:
    """A run without offload, or with layers 2 and 3 off the device by `access`. `changes` are fields."""
    backend = {"zero_copy": "uva", "prefetch": "prefetch"}.get(access or "")
    offloaded = 2 * LAYER_BYTES if access is not None else 0
    pool = LAYER_BYTES if access == "prefetch" else 0
    held = 60 * MIB - offloaded
    zero_copy = offloaded if access == "zero_copy" else 0
    prefetch = offloaded if access == "prefetch" else 0
    blocks = [Allocation("weights", "device", held, held, False)]
    if offloaded:
        blocks.append(Allocation("host", "host", offloaded, offloaded, False))
    if pool:
        blocks.append(Allocation("buffer_pool", "device", pool, pool, False))
    result = RunResult(
        device_kind="emulated",
        device_name="emulated accelerator on the CPU",
        zero_copy_counted=True,
        plan=Forecast(
            backend=backend,
            ways=() if backend is None else (backend,),
            offloaded_bytes=offloaded,
            saved_bytes=offloaded - pool,
            weights_bytes=held,
            mapped_bytes=0,
            buffer_pool_bytes=pool,
            expert_slots_bytes=0,
            kv_cache_bytes=MIB,
            working_bytes=2 * MIB,
            host_bytes=offloaded,
            staging_bytes=0,
            context_tokens=10,
            sequences=1,
            zero_copy_bytes=float(zero_copy),
            prefetch_bytes=prefetch,
            in_place_bytes=0,
            stream_bytes=0.0,
            disk_bytes=0,
            disk_most_bytes=0,
            expert_edges_bytes=4096,
            zero_copy_floor_s=zero_copy / 4e9,
            prefetch_floor_s=prefetch / 4e9,
            in_place_floor_s=0.0,
            placed=(),
            streamed=(),
            slots=0,
            policy=None,
            other_kernels=None,
        ),
        weights=weights(access),
        blocks=tuple(blocks),
        memory=Memory(
            held_bytes={"weights": held, "buffer_pool": pool, "expert_slots": 0, "kv_cache": 0, "working": 0},
            kv_cache_peak_bytes=MIB,
            peak_bytes=held + pool + 3 * MIB,
            budget_bytes=128 * MIB,
            process_peak_bytes=500 * MIB,
        ),
        load_seconds=1.5,
        read_bytes=60 * MIB,
        generations=(generation(offloaded),),
        experts=(),
        slots=None,
        notes=(),
        versions={"overspill": "0.1.0", "torch": "2.13.0"},
        threads=2,
    )
    return replace(result, **changes)


def placed(**changes: Any) -> RunResult:
    """Layers 2 and 3 are computed on the CPU: 3 passes, 64 bytes of result a token from each of them."""
    made = run("in_place")
    answer = generation(128)
    first = replace(answer.passes[0], link_bytes=128 * 7, planned_low=128.0 * 7, planned_high=128.0 * 7)
    answer = replace(answer, passes=(first, *answer.passes[1:]), link_bytes=128 * 9)
    plan = replace(
        made.plan,
        ways=("experts on the CPU",),
        in_place_bytes=128,
        placed=PATHS,
        other_kernels="the CPU computes the routed experts of 2 layers",
    )
    uses = tuple(ExpertUse(path, "in_place", MIB, 3, 9, 5 * MIB) for path in PATHS)
    return replace(made, **{"plan": plan, "generations": (answer,), "experts": uses, **changes})


def streamed(counts: SlotCounts = COUNTS, **changes: Any) -> RunResult:
    """Layers 2 and 3 go through three slots, all of them full: 8 experts were chosen, and 5 came."""
    made = run("stream")
    answer = replace(generation(0), link_bytes=5 * MIB, slots=counts)
    plan = replace(
        made.plan,
        ways=("expert slots",),
        expert_slots_bytes=5 * MIB,
        saved_bytes=made.plan.offloaded_bytes - 5 * MIB,
        stream_bytes=2.0 * MIB,
        streamed=PATHS,
        slots=3,
        policy="fetch",
    )
    held = {**made.memory.held_bytes, "expert_slots": 5 * MIB}
    given = {
        "plan": plan,
        "generations": (answer,),
        "experts": tuple(ExpertUse(path, "stream", MIB, 3, 9, 4 * MIB) for path in PATHS),
        "slots": SlotState(3, 3, SlotCounts(fetched=2, prefetched=2, prefetch_used=1, evictions=1)),
        "memory": replace(made.memory, held_bytes=held),
        "blocks": (*made.blocks, Allocation("expert_slots", "device", 5 * MIB, 5 * MIB, False)),
    }
    return replace(made, **{**given, **changes})


def from_disk(read_bytes: int | None = None, **changes: Any) -> RunResult:
    """Layers 2 and 3 are read from disk by the CPU, `read_bytes` in each of 3 passes: 8 KiB of edges beside them."""
    made = run("prefetch")
    planned = made.plan.offloaded_bytes
    plan = replace(
        made.plan,
        backend=None,
        ways=("layers from disk",),
        prefetch_bytes=0,
        host_bytes=0,
        disk_bytes=planned,
        disk_most_bytes=planned + 8192,
    )
    weights_there = tuple(replace(w, tier="disk") if w.access == "prefetch" else w for w in made.weights)
    read_bytes = planned + 8192 if read_bytes is None else read_bytes
    answer = replace(generation(0), layers_read_bytes=3 * read_bytes)
    given = {"device_kind": "cpu", "plan": plan, "weights": weights_there, "generations": (answer,)}
    return replace(made, **{**given, **changes})


def mapped(**changes: Any) -> RunResult:
    """The CPU uses all weights in mapped files; 256 bytes of buffers are beside them."""
    made = run()
    there = tuple(replace(w, tier="disk", access="in_place", reason="mmap") for w in made.weights)
    offloaded = sum(w.bytes for w in there)
    plan = replace(
        made.plan,
        ways=("mapped files",),
        offloaded_bytes=offloaded,
        saved_bytes=offloaded,
        weights_bytes=256,
        mapped_bytes=offloaded,
    )
    held = {**made.memory.held_bytes, "weights": 256}
    given = {"device_kind": "cpu", "plan": plan, "weights": there, "memory": replace(made.memory, held_bytes=held)}
    return replace(made, **{**given, **changes})


def evidence(access: str = "zero_copy", *, runs: int = 2, **changes: Any) -> Evidence:
    """`runs` runs a side, equal in every answer. `changes` are fields of Evidence."""
    found = Evidence(
        baseline=(run(),) * runs,
        candidate=(run(access),) * runs,
        baseline_differences=((EQUAL,),) * (runs - 1),
        candidate_differences=((EQUAL,),) * runs,
    )
    return replace(found, **changes)
