"""Whose line it is: prefixes of what runs a server, several servers in one log, and other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from audit_logs import audit_text, audited, audits_of, ids, text_of, under

from overspill.audit.sources import unwrapped

PREFIXES = {
    "compose": "vllm-1  | ",
    "compose with times": "vllm-1  | 2026-11-30T10:00:00.000000000Z ",
    "docker logs -t": "2026-11-30T10:00:00.000000000Z ",
    "CRI": "2026-11-30T10:00:00.000000000+00:00 stderr F ",
    "kubectl --prefix": "[pod/vllm-0/vllm] ",
    "journalctl": "Nov 30 11:38:01 gpu-node vllm[4711]: ",
    "journalctl -o short-iso": "2026-11-30T11:38:01+0000 gpu-node vllm[4711]: ",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=list(PREFIXES))
@pytest.mark.parametrize("name", ["llama-override-no-match", "llama-uneven", "vllm-healthy", "vllm-tower-rounded"])
def test_a_prefix_changes_nothing(prefix: str, name: str, tmp_path: Path) -> None:
    plain, prefixed = audited(name), audit_text(under(prefix, text_of(name)), tmp_path)
    assert (prefixed.asked, prefixed.happened, prefixed.findings) == (plain.asked, plain.happened, plain.findings)


def test_docker_s_json_changes_nothing(tmp_path: Path) -> None:
    rows = (
        json.dumps({"log": f"\x1b[1m{line}\x1b[0m\n", "stream": "stderr"})
        for line in text_of("llama-uneven").split("\n")
    )
    assert audit_text("\n".join(rows), tmp_path).findings == audited("llama-uneven").findings


@pytest.mark.parametrize(
    ("line", "source", "text"),
    [
        ("2026-05-14 22:13:25.196 | ggml_cuda_init: found", "", "2026-05-14 22:13:25.196 | ggml_cuda_init: found"),
        ("a-1  | b  | c", "a-1", "b  | c"),
        ("a-1  | [ 8081] text", "a-1 [8081]", "text"),
        ('{"log": 3}', "", '{"log": 3}'),
        ('{"log', "", '{"log'),
        ("[9.1] oom-kill", "", "[9.1] oom-kill"),
        ("Nov 30 11:38:01 node kernel: Out of memory", "", "Out of memory"),
        ("|   - CUDA0 (RTX 4090)   | 24082", "", "|   - CUDA0 (RTX 4090)   | 24082"),
    ],
)
def test_the_source_of_a_line(line: str, source: str, text: str) -> None:
    assert unwrapped(line) == (source, text)


def _interleaved(*logs: str) -> str:
    rows = [log.splitlines() for log in logs]
    return (
        "\n".join(held[number] for number in range(max(map(len, rows))) for held in rows if number < len(held)) + "\n"
    )


def test_each_server_of_a_log_is_judged_by_itself(tmp_path: Path) -> None:
    text = _interleaved(
        under("vllm-a-1  | ", text_of("vllm-healthy")),
        under("vllm-b-1  | ", text_of("vllm-flag-ignored-v2")),
        under("llama-1   | ", text_of("llama-uneven")),
        under("nginx-1   | ", "upstream timed out\n"),
    )
    audits = {audit.server: audit for audit in audits_of(text, tmp_path)}
    assert {name: (audit.engine, audit.version, ids(audit)) for name, audit in audits.items()} == {
        "vllm-a-1": ("vllm", "0.33.0", {}),
        "vllm-b-1": ("vllm", "0.29.0", {"flag-ignored": "error"}),
        "llama-1": ("llama.cpp", "10549 (8c6f21d)", {"devices-uneven": "warning"}),
    }


def test_both_engines_in_one_file_are_both_judged(tmp_path: Path) -> None:
    filler = "INFO 11-12 09:00:16 [loggers.py:257] Engine 000: Running: 3 reqs\n" * 600
    for text in (
        _interleaved(text_of("vllm-healthy"), text_of("llama-uneven")),
        text_of("vllm-healthy") + filler + text_of("llama-uneven"),
    ):
        found = {audit.engine: ids(audit) for audit in audits_of(text, tmp_path)}
        assert found == {"vllm": {}, "llama.cpp": {"devices-uneven": "warning"}}


def test_a_line_that_looks_alike_is_no_second_server(tmp_path: Path) -> None:
    (audit,) = audits_of(text_of("vllm-healthy") + "my tool: loading model 'x'\n", tmp_path)
    assert audit.engine == "vllm"


def test_each_child_of_a_router_is_judged_with_what_the_router_was_asked_for(tmp_path: Path) -> None:
    def child(port: int, name: str) -> str:
        return under(f"[{port:5}] ", "\n".join(text_of(name).split("\n")[1:]))

    text = (
        "+ llama-server --models-dir /models -ngl 99\n"
        "0.00.1 I srv init: build_info: b10549-8c6f21d\n"
        "0.00.2 I srv init: listening on http://127.0.0.1:8080\n"
    ) + _interleaved(child(8081, "llama-healthy"), child(34353, "llama-mmap-experts"))
    audits = audits_of(text, tmp_path)
    assert {audit.server: ids(audit) for audit in audits} == {
        "[8081]": {},
        "[34353]": {"mmap-with-cpu-experts": "warning"},
    }
    assert all(audit.asked["n_gpu_layers"] == 99 for audit in audits)


@pytest.mark.parametrize(
    "text",
    [
        "[2026-05-01 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', cpu_offload_gb=10)\n"
        "[2026-05-01 10:00:05] Load weight begin. avail mem=23.1 GB\n"
        "  File layers/quantization/fp8.py, in process_weights_after_loading\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
        "app: CUDA out of memory. Tried to allocate\nKilled\nINFO:     Application startup complete.\n",
    ],
)
def test_what_any_program_writes_makes_it_no_server_of_ours(text: str, tmp_path: Path) -> None:
    audit = audit_text(text, tmp_path)
    assert (audit.engine, ids(audit)) == (None, {"nothing-to-judge": "warning"})


def test_a_kill_that_the_kernel_tells_of_is_the_only_server_s(tmp_path: Path) -> None:
    kill = "Nov 30 11:39:01 node kernel: Out of memory: Killed process 4711 (python3)\n"
    one = under("Nov 30 11:38:01 node vllm[4711]: ", text_of("vllm-healthy"))
    other = under("Nov 30 11:38:01 node llama[4712]: ", text_of("llama-healthy"))
    assert ids(audit_text(one + kill, tmp_path)) == {"out-of-host-memory": "error"}
    assert ids(audit_text(kill + one, tmp_path)) == {}
    loading = under("Nov 30 11:38:01 node vllm[4711]: ", text_of("vllm-truncated"))
    assert ids(audit_text(kill + loading, tmp_path)) == {"start-incomplete": "warning"}
    assert ids(audit_text(f"{one}app-1  | Killed\n", tmp_path)) == {}
    for audit in audits_of(one + other + kill, tmp_path):
        assert ids(audit) == {}
        assert "Killed process 4711" in audit.unjudged[0]
    named = {a.server: ids(a) for a in audits_of(one + other + kill.replace("python3", "vllm"), tmp_path)}
    assert named == {"vllm": {"out-of-host-memory": "error"}, "llama": {}}


def test_a_command_that_another_program_shows_is_no_server(tmp_path: Path) -> None:
    sudo = "Nov 30 11:37:01 node sudo[7]: root : COMMAND=/usr/bin/vllm serve m --cpu-offload-gb 9\n"
    assert ids(audit_text(sudo, tmp_path)) == {"start-incomplete": "warning"}
    (audit,) = audits_of(sudo + under("Nov 30 11:38:01 node vllm[8]: ", text_of("vllm-healthy")), tmp_path)
    assert ids(audit) == {}


def test_a_log_of_very_many_containers_is_held_in_little(tmp_path: Path) -> None:
    noise = "".join(f"app-{number}  | hello\n" for number in range(500))
    (audit,) = audits_of(noise + under("vllm-1  | ", text_of("vllm-flag-ignored-v2")) + noise, tmp_path)
    assert ids(audit) == {"flag-ignored": "error"}


def test_windows_command_line_is_read(tmp_path: Path) -> None:
    text = text_of("llama-uneven").replace("/app/llama-server", ".\\llama-server.exe")
    assert audit_text(text, tmp_path).asked == audited("llama-uneven").asked
