from __future__ import annotations

from pathlib import Path

import pytest
from audit_logs import audit_text, audited, ids, text_of, the


@pytest.mark.parametrize(
    ("line", "id_", "severity"),
    [
        ("CUDA error: cudaErrorStreamCaptureUnjoined", "graph-capture-broken", "error"),
        ("AliceAI does not support prefetch offloading", "backend-unsupported", "error"),
        ("AliceAI CPU offloading requires UVA", "backend-unsupported", "error"),
        ("AssertionError: Module parameters should not already be on CPU", "backend-unsupported", "error"),
        ("RuntimeError: cudaHostAlloc failed: out of memory", "pinning-failed", "error"),
        (
            "DeepSeek V4 compressor GEMM fusion is incompatible with weight offloading and will remain disabled.",
            "fast-path-off",
            "note",
        ),
        (
            "ValueError: Free memory on device cuda:0 (3.25/23.43 GiB) on startup is less than desired GPU memory "
            "utilization (0.96, 22.49 GiB).",
            "device-busy",
            "error",
        ),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB", "out-of-device-memory", "error"),
        ("Expected all tensors to be on the same device, but found two", "kernel-off-device", "error"),
        ("/entrypoint.sh: line 3:    31 Killed", "out-of-host-memory", "error"),
        ("[9.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)", "out-of-host-memory", "error"),
        ("Process EngineCore finished, exitcode: -9", "out-of-host-memory", "error"),
        ("worker was killed by signal 9", "out-of-host-memory", "error"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "out-of-host-memory", "error"),
        ("RuntimeError: cudaHostRegister failed: 2", "pinning-failed", "error"),
        ("RuntimeError: cudaHostGetDevicePointer failed with unexpected error", "pinning-failed", "error"),
        (
            "ValueError: 6.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.1 GiB).",
            "no-room-for-kv",
            "error",
        ),
        ("UserWarning: UVA offload fields are set but offload_backend='prefetch'.", "budget-overridden", "warning"),
        ("Available KV cache memory: -0.12 GiB", "no-room-for-kv", "error"),
        ("offload_prefetch_step (0) must be >= 1 when prefetch offloading is enabled", "config-refused", "error"),
    ],
)
def test_a_line_that_is_a_finding(line: str, id_: str, severity: str, tmp_path: Path) -> None:
    audit = audit_text(text_of("vllm-healthy") + f"{line}\n", tmp_path)
    finding = the(audit, id_)
    assert finding.severity == severity
    assert finding.evidence[0].number == text_of("vllm-healthy").count("\n") + 1


def test_what_was_asked_and_what_happened() -> None:
    audit = audited("vllm-healthy")
    assert audit.version == "0.33.0"
    assert audit.asked["cpu_offload_gb"] == 20.0
    assert audit.asked["cpu_offload_params"] == ["experts"]
    assert audit.asked["disable_pin_memory"] is True
    assert audit.asked["model"] == "Qwen/Qwen3-30B-A3B"
    assert audit.happened == {
        "architecture": "Qwen3MoeForCausalLM",
        "offloader": "UVAOffloader",
        "host_gib_per_rank": 20.25,
        "net_gib_per_rank": 20.25,
        "ranks": 1,
        "checkpoint_gib": 56.87,
        "device_gib": 36.62,
        "kv_cache_gib": 3.1,
        "max_concurrency": 1.24,
        "ready": True,
    }
    assert audited("vllm-budget-overridden").happened["prefetch_layers"] == 8
    assert audited("vllm-flag-ignored-v2").happened["runner"] == "V2"


def test_what_the_log_has_no_line_for_is_said(tmp_path: Path) -> None:
    lines = text_of("vllm-back-on-device").split("\n")
    bare = [line for line in lines if not any(word in line for word in ("Checkpoint", "KV cache", "Resolved"))]
    told = "\n".join(audit_text("\n".join(bare), tmp_path).unjudged)
    assert "whether the offload was needed" in told
    assert "whether rebuilt weights stayed" in told
    assert "whether the model is sparse" in told
    only = [line for line in lines if "args" not in line and "Initializing" not in line]
    assert "what was asked for" in audit_text("\n".join(only), tmp_path).unjudged[0]


def test_what_users_wrote_is_no_evidence(tmp_path: Path) -> None:
    asked = (
        "(APIServer pid=1) INFO 11-12 09:02:59 [logger.py:40] Received request cmpl-1: prompt: 'CUDA out of memory'\n"
    )
    assert ids(audit_text(text_of("vllm-healthy") + asked, tmp_path)) == {}


def test_the_older_version_line_and_a_command_line(tmp_path: Path) -> None:
    text = (
        "$ python -m vllm.entrypoints.openai.api_server --model m --cpu-offload-gb=4 -tp 2 --cpu-offload-params a b.c\n"
        "INFO 07-24 17:34:57 [api_server.py:1395] vLLM API server version 0.27.0\n"
    )
    audit = audit_text(text, tmp_path)
    assert (audit.version, audit.starts) == ("0.27.0", 1)
    assert audit.asked == {
        "model": "m",
        "cpu_offload_gb": 4.0,
        "tensor_parallel_size": 2.0,
        "cpu_offload_params": ["a", "b.c"],
    }


def test_under_wsl_nothing_is_pinned_and_nothing_rounded(tmp_path: Path) -> None:
    text = text_of("vllm-restarted")
    assert ids(audit_text(text, tmp_path)) == {"host-memory-rounded": "note"}
    wsl = "WARNING 04-19 10:18:36 [interface.py:686] Using 'pin_memory=False' as WSL is detected.\n"
    assert ids(audit_text(text + wsl, tmp_path)) == {}
