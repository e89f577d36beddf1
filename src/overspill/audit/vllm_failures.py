"""What vLLM says by itself when an offload fails, 0.27 to 0.33."""

from __future__ import annotations

from overspill.audit.failures import Failure

FAILURES = (
    Failure(
        "refused",
        "config-refused",
        "error",
        "vLLM refused the offload settings, and did not start. The check of the prefetch fields runs with every "
        "backend.",
        "offload_num_in_group must be at most offload_group_size, and offload_prefetch_step at least 1",
    ),
    Failure(
        "stack_twice",
        "backend-unsupported",
        "error",
        "prefetch takes one stack of layers; an encoder beside a decoder, or a drafter, is a second (0.27 to 0.33).",
        "--cpu-offload-gb instead, or start without the drafter; overspill keeps a ring per stack",
    ),
    Failure(
        "unsupported",
        "backend-unsupported",
        "error",
        "this model refuses the backend that was asked for.",
        "the other backend (--offload-backend); `overspill support` says what runs there",
    ),
    Failure(
        "on_cpu",
        "backend-unsupported",
        "error",
        "prefetch found parameters that were built on the CPU, which it does not take.",
        "--cpu-offload-gb instead, or another quantization",
    ),
    Failure(
        "unpinned",
        "pinning-failed",
        "error",
        "prefetch copies only from pinned memory, and a weight's is not: a weight of no elements (vllm#47380), or "
        "pinning that does not work here (confidential computing, WSL).",
        "--cpu-offload-gb instead, or VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 with --enforce-eager",
    ),
    Failure(
        "pin_failed",
        "pinning-failed",
        "error",
        "the driver gave no pinned memory: the host has too little, or the limit of WSL, or of a single registration "
        "of 512 GiB, is reached.",
        "a smaller budget; VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1 together with "
        "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 uses pageable memory, and is slower",
    ),
    Failure(
        "unjoined",
        "graph-capture-broken",
        "error",
        "a copy that was begun while a CUDA graph was captured was not joined to it (vllm#51710).",
        "--enforce-eager, or a newer version",
    ),
    Failure(
        "wsl_graphs",
        "pinning-limited",
        "warning",
        "under WSL2 about half of the memory can be pinned, for all processes together; CUDA graphs need the offloaded "
        "weights pinned, and the host can freeze.",
        "--enforce-eager, or a budget well below half of the memory",
    ),
    Failure(
        "fast_path_off",
        "fast-path-off",
        "note",
        "the model's code turns a fused operation off where weights are offloaded.",
        "nothing to do; it costs a little speed",
    ),
    Failure(
        "no_kv_room",
        "no-room-for-kv",
        "error",
        "with the weights on the device no room was left for the KV cache. vLLM does not fit the offload to it.",
        "a larger --cpu-offload-gb, a smaller --max-model-len, or a larger --gpu-memory-utilization; "
        "overspill counts the KV cache in the budget, and fits the rest",
    ),
    Failure(
        "device_busy",
        "device-busy",
        "error",
        "when it started less memory was free on the device than --gpu-memory-utilization claims: others hold it.",
        "end what holds the memory, or lower --gpu-memory-utilization",
    ),
)
