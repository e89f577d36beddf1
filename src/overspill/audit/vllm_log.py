"""vLLM's log lines, 0.27 to 0.33."""

from __future__ import annotations

import re

from overspill.audit.patterns import Engine, Flag, pattern

_FIGURE = r"[0-9][0-9.]{0,20}"

TABLE = (
    pattern("version", "vLLM API server version", r"API server version (?P<version>\S{1,60})"),
    pattern("banner", "█  version ", r"█  version (?P<version>\d\S{0,60})"),
    pattern("args", "non-default args: {"),
    pattern("engine", "LLM engine (v", r"LLM engine \(v(?P<version>[^)\s]{1,60})\) with config"),
    pattern("architecture", "Resolved architecture: ", r"Resolved architecture: (?P<name>\w{1,100})"),
    pattern("moe", "MoE backend"),
    pattern("runner_v2", "Using V2 Model Runner"),
    pattern("offloader", "Offloader set to ", r"Offloader set to (?P<name>\w{1,60})"),
    pattern("uva_bytes", "Total CPU offloaded parameters", rf"offloaded parameters: (?P<gib>{_FIGURE})"),
    pattern(
        "prefetch",
        "[PrefetchOffloader] Initialized",
        rf"Initialized (?P<modules>\d{{1,9}}) modules\. Total GPU memory saved: (?P<saved_gb>{_FIGURE}) GB, "
        rf"Static (?:buffer pool|runtime buffers): (?P<pool_gb>{_FIGURE}) GB "
        r"\(group_size=(?P<group>\d{1,9}), num_in_group=(?P<num>\d{1,9}), prefetch_step=(?P<step>\d{1,9})",
    ),
    pattern("checkpoint", "Checkpoint size: ", rf"Checkpoint size: (?P<gib>{_FIGURE}) GiB"),
    pattern("drafter", "Loading drafter model"),
    pattern("loaded", "Model loading took ", rf"Model loading took (?P<gib>{_FIGURE}) GiB"),
    pattern("kv_memory", "Available KV cache memory: ", rf"KV cache memory: (?P<gib>-?{_FIGURE}) GiB"),
    pattern(
        "concurrency",
        "Maximum concurrency for ",
        rf"concurrency for (?P<tokens>[\d,]{{1,20}}) tokens per request: (?P<times>{_FIGURE})x",
    ),
    pattern("ready", "Application startup complete"),
    pattern("engine_failed", "EngineCore failed to start"),
    pattern("both_set", "Both UVA and prefetch offload fields are set"),
    pattern("uva_ignored", "UVA offload fields are set but offload_backend='prefetch'"),
    pattern("prefetch_ignored", "Prefetch offload fields are set but offload_backend='uva'"),
    pattern("refused", "offload_num_in_group (", r"offload_num_in_group \(\d+\) must be <= offload_group_size"),
    pattern("refused", "offload_prefetch_step (", r"offload_prefetch_step \(-?\d+\) must be >= 1"),
    pattern("refused", "validation error", r"validation errors? for (?:UVA|Prefetch)?Offload(?:Config)?"),
    pattern("stack_twice", "wrap_modules should only be called once"),
    pattern("unsupported", "does not support prefetch offloading"),
    pattern("unsupported", "CPU offloading requires UVA"),
    pattern("on_cpu", "Module parameters should not already be on CPU"),
    pattern("unpinned", "is not pinned! non_blocking=True H2D copy"),
    pattern("pin_failed", "cudaHostAlloc failed"),
    pattern("pin_failed", "cudaHostRegister failed"),
    pattern("pin_failed", "cudaHostGetDevicePointer failed"),
    pattern("wrong_device", "Expected all tensors to be on the same device"),
    pattern("wrong_device", "is not on GPU", r"\w{1,60} is not on GPU"),
    pattern("unjoined", "StreamCaptureUnjoined"),
    pattern("fast_path_off", "is incompatible with weight offloading and will remain disabled"),
    pattern("wsl_graphs", "--cpu-offload-gb is enabled with CUDA graphs on WSL2"),
    pattern("no_pinning", "Using 'pin_memory=False' as WSL is detected"),
    pattern("rebuilding", "process_weights_after_loading"),
    pattern("no_kv_room", "No available memory for the cache blocks"),
    pattern("no_kv_room", "KV cache is needed, which is larger than the available KV cache memory"),
    pattern("device_busy", "is less than desired GPU memory utilization"),
    pattern("device_oom", "CUDA out of memory"),
    pattern("device_oom", "CUDA error: out of memory"),
    pattern("device_oom", "OutOfMemoryError", r"torch\.(?:cuda\.)?OutOfMemoryError|HIP out of memory"),
    pattern("host_oom", "Out of memory: Killed process"),
    pattern("host_oom", "oom-kill"),
    pattern("host_oom", "OOMKilled"),
    pattern("host_oom", "exitcode: -9"),
    pattern("host_oom", "exit code 137"),
    pattern("host_oom", "signal 9", r"[Kk]illed by signal 9|signal 9 \(SIGKILL\)"),
    pattern("host_oom", "Killed", r"^(?:.{0,60}\s)?Killed\s*$"),
    pattern("host_oom", "DefaultCPUAllocator: can't allocate memory"),
)


def _number(name: str, short: str = "") -> Flag:
    flag = name.replace("_", "[-_]")
    figure = r"['\"]?(-?[0-9]{1,15}(?:\.[0-9]{0,15})?(?:[eE][-+]?[0-9]{1,3})?)(?![\w.])"
    return Flag(
        name, float, re.compile(rf"(?:(?:--{flag}|(?<!\S)-{short or name})[ =]|\b{name}['\"]?\s?[:=]\s?){figure}")
    )


def _word(name: str) -> Flag:
    flag = name.replace("_", "[-_]")
    return Flag(name, str, re.compile(rf"(?:--{flag}[ =]|\b{name}['\"]?\s?[:=]\s?)['\"]?([\w./:-]{{1,200}})"))


def _names(name: str) -> Flag:
    flag = name.replace("_", "[-_]")
    listed = r"(\{[^{}]{0,2000}\}|\[[^\[\]]{0,2000}\])"
    words = r"((?:[ =](?!-)[^\s=]{1,200}){1,60})"
    return Flag(name, list, re.compile(rf"\b{name}['\"]?\s?[:=]\s?{listed}|--{flag}{words}"))


FLAGS = (
    _word("model"),
    _word("quantization"),
    _word("offload_backend"),
    *(
        _number(name)
        for name in (
            "cpu_offload_gb",
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "gpu_memory_utilization",
            "max_num_seqs",
            "max_model_len",
        )
    ),
    _number("tensor_parallel_size", "tp"),
    _number("pipeline_parallel_size", "pp"),
    _number("data_parallel_size", "dp"),
    _names("cpu_offload_params"),
    _names("offload_params"),
    Flag(
        "disable_pin_memory", bool, re.compile(r"VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY['\"]?\s?[=:]\s?['\"]?(\d)")
    ),
    Flag("disable_uva", bool, re.compile(r"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA['\"]?\s?[=:]\s?['\"]?(\d)")),
)

ENGINE = Engine(
    "vllm",
    TABLE,
    starts={"command": 0, "banner": 1, "version": 1, "args": 2, "engine": 3},
    command_literal="vllm",
    command=re.compile(r"[^\[\](){}]{0,300}?(?:\bvllm serve\s+\S|-m vllm\.entrypoints\.openai\.api_server\b)"),
    flags=FLAGS,
    asked_kinds=("command", "args", "engine"),
    anyones={
        "device_oom",
        "host_oom",
        "ready",
        "moe",
        "wrong_device",
        "pin_failed",
        "unjoined",
        "rebuilding",
    },
)
