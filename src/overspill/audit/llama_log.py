"""llama.cpp's log lines: those of 2026, and the older spellings that the same lines had."""

from __future__ import annotations

import re

from overspill.audit.patterns import Engine, Flag, pattern

_FIGURE = r"[0-9][0-9.]{0,20}"

TABLE = (
    pattern("build_info", "build_info: ", r"build_info: (?P<version>\S{1,60})"),
    pattern("build", "build: ", r"\bbuild: (?P<version>\d{1,9} \(\w{1,40}\))"),
    pattern("build_print", "print_info: build ", r"print_info: build (?P<version>\d{1,9} \(\w{1,40}\))"),
    pattern("loading", "loading model '", r"loading model '(?P<path>[^']{1,400})'"),
    pattern("draft", "loading draft model '"),
    pattern("draft", "creating MTP draft context"),
    pattern(
        "device", "using device ", r"using device (?P<label>\w{1,40}) \(.{1,200}? - (?P<free_mib>\d{1,9}) MiB free"
    ),
    pattern(
        "device", "MiB free)", r"  - (?P<label>\w{1,40})\s*: .{1,200}?\(\d{1,9} MiB, (?P<free_mib>\d{1,9}) MiB free\)"
    ),
    pattern("file_size", "file size ", rf"file size\s+= (?P<size>{_FIGURE}) (?P<unit>[MG]iB)"),
    pattern("architecture", "print_info: arch ", r"print_info: arch\s+= (?P<name>\S{1,60})"),
    pattern("experts", "n_expert ", r"n_expert\s+= (?P<count>\d{1,9})"),
    pattern("load_mode", "(load_mode = ", r"\(load_mode = (?P<mode>[\w+]{1,40})\)"),
    pattern("layers", " layers to GPU", r"offloaded (?P<on_gpu>\d{1,6})/(?P<layers>\d{1,6}) layers to GPU"),
    pattern("weights", "model buffer size", rf"(?P<label>\S{{1,60}})\s+model buffer size\s*=\s*(?P<mib>{_FIGURE}) MiB"),
    pattern("kv", "KV buffer size", rf"(?P<label>\S{{1,60}})\s+KV buffer size\s*=\s*(?P<mib>{_FIGURE}) MiB"),
    pattern(
        "compute", "compute buffer size", rf"(?P<label>\S{{1,60}})\s+compute buffer size\s*=\s*(?P<mib>{_FIGURE}) MiB"
    ),
    pattern(
        "override",
        "buffer type overridden to",
        r"tensor (?P<tensor>\S{1,200}) \((?P<mib>\d{1,9}) MiB .{1,20}?\) buffer type overridden to (?P<label>\S{1,60})",
    ),
    pattern("mmap_override", "tensor overrides to CPU are used with mmap enabled"),
    pattern("unknown_buffer", "unknown buffer type"),
    pattern("no_gpu", "no usable GPU found"),
    pattern("fit_short", "cannot meet free memory target"),
    pattern("fit_deficit", "there is still a total deficit of"),
    pattern("fit_context", "context size reduced from ", r"reduced from (?P<before>\d{1,9}) to (?P<after>\d{1,9})"),
    pattern("fit_failed", "failed to fit params to free device memory", r"device memory(?:: (?P<reason>.{1,300}))?$"),
    pattern("fit_done", "successfully fit params"),
    pattern(
        "breakdown",
        "memory_breakdown_print: |   - ",
        r"\|   - (?P<label>\w{1,40}) .{0,120}?\|\s*\d{1,12}\s*=\s*(?P<free>\d{1,12})\s*\+\s*\(",
    ),
    pattern("mlock_failed", "failed to mlock"),
    pattern("pin_failed", "of pinned memory", r"failed to allocate (?P<mib>[0-9.]{1,20}) MiB of pinned memory"),
    pattern("device_oom", "cudaMalloc failed: out of memory"),
    pattern("device_oom", "CUDA error: out of memory"),
    pattern("device_oom", "ErrorOutOfDeviceMemory"),
    pattern("device_oom", "buffer of size", r"failed to allocate (?:CUDA|ROCm|Vulkan|SYCL)\d{1,3} buffer of size"),
    pattern("device_oom", "unable to allocate ", r"unable to allocate (?:CUDA|ROCm|Vulkan|SYCL)\d{1,3} buffer"),
    pattern("load_failed", "error loading model"),
    pattern("load_failed", "exiting due to model loading error"),
    pattern("host_oom", "Out of memory: Killed process"),
    pattern("host_oom", "oom-kill"),
    pattern("host_oom", "OOMKilled"),
    pattern("host_oom", "exit code 137"),
    pattern("host_oom", "std::bad_alloc"),
    pattern("host_oom", "Killed", r"^(?:.{0,60}\s)?Killed\s*$"),
    pattern("host_oom", "buffer of size", r"failed to allocate CPU\w{0,20} buffer of size"),
    pattern("ready", "listening on http"),
    pattern("ready", "server is listening"),
)


def _flag(name: str, spellings: str, value: str, kind: type[float] | type[str] | type[bool] | type[list[str]]) -> Flag:
    return Flag(name, kind, re.compile(rf"(?:^|\s)(?:{spellings}){value}"))


_NUMBER = r"[ =](-?\d{1,9})(?!\S)"
_QUOTED = r"[ =](?:'([^']{1,2000})'|\"([^\"]{1,2000})\"|([^\s'\"]{1,2000}))"

FLAGS = (
    _flag("model", "-m|--model", _QUOTED, str),
    _flag("n_gpu_layers", "-ngl|--gpu-layers|--n-gpu-layers", _NUMBER, float),
    _flag("n_cpu_moe", "-ncmoe|--n-cpu-moe", _NUMBER, float),
    _flag("cpu_moe", r"-cmoe(?!\S)|--cpu-moe(?!\S)", "", bool),
    _flag("override_tensor", "-ot|--override-tensor", _QUOTED, list),
    _flag("ctx_size", "-c|--ctx-size", _NUMBER, float),
    _flag("load_mode", "-lm|--load-mode", _QUOTED, str),
    _flag("no_mmap", r"--no-mmap(?!\S)", "", bool),
    _flag("fit", "-fit|--fit", r"[ =](on|off)(?!\S)", str),
)

ENGINE = Engine(
    "llama.cpp",
    TABLE,
    starts={"command": 0, "build_info": 1, "build": 1, "build_print": 1, "loading": 2},
    command_literal="llama-",
    command=re.compile(r"[^\[\](){}:]{0,200}?\bllama-(?:server|cli|bench|completion)(?:\.exe)?\s+-"),
    flags=FLAGS,
    asked_kinds=("command",),
    anyones={"device_oom", "host_oom", "ready"},
    once=("mmap_override",),
    models={"architecture", "experts", "file_size", "load_mode", "layers", "weights", "kv", "compute", "override"},
)
