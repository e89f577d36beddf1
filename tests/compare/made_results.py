"""Made-up results of runs, right in every respect until a test changes one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overspill.compare.answers import AnswerDifference
from overspill.compare.results import (
    Allocation,
    Forecast,
    Generation,
    Memory,
    Pass,
    PlacedWeight,
    RunResult,
)
from overspill.compare.verdicts import Evidence

MIB = 1 << 20
LAYERS = 4
LAYER_BYTES = 10 * MIB
EQUAL = AnswerDifference(first_difference=None, positions=3, largest=0.0, at=None)


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
            backend={None: None, "zero_copy": "uva", "prefetch": "prefetch"}[access],
            offloaded_bytes=offloaded,
            saved_bytes=offloaded - pool,
            weights_bytes=held,
            buffer_pool_bytes=pool,
            kv_cache_bytes=MIB,
            working_bytes=2 * MIB,
            host_bytes=offloaded,
            context_tokens=10,
            sequences=1,
            zero_copy_bytes=float(zero_copy),
            prefetch_bytes=prefetch,
            zero_copy_floor_s=zero_copy / 4e9,
            prefetch_floor_s=prefetch / 4e9,
        ),
        weights=weights(access),
        blocks=tuple(blocks),
        memory=Memory(
            held_bytes={"weights": held, "buffer_pool": pool, "kv_cache": 0, "working": 0},
            kv_cache_peak_bytes=MIB,
            peak_bytes=held + pool + 3 * MIB,
            budget_bytes=128 * MIB,
            process_peak_bytes=500 * MIB,
        ),
        load_seconds=1.5,
        read_bytes=60 * MIB,
        generations=(generation(offloaded),),
        notes=(),
        versions={"overspill": "0.1.0", "torch": "2.13.0"},
        threads=2,
    )
    return replace(result, **changes)


def evidence(access: str = "zero_copy", *, runs: int = 2, **changes: Any) -> Evidence:
    """`runs` runs a side, equal in every answer. `changes` are fields of Evidence."""
    found = Evidence(
        baseline=(run(),) * runs,
        candidate=(run(access),) * runs,
        baseline_differences=((EQUAL,),) * (runs - 1),
        candidate_differences=((EQUAL,),) * runs,
    )
    return replace(found, **changes)
