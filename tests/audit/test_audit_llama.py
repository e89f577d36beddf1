from __future__ import annotations

import time
from pathlib import Path

import pytest
from audit_logs import audit_text, audited, ids, text_of, the

from overspill.audit.llama_facts import matches

FOUND = {
    "llama-healthy": {},
    "llama-healthy-cpu-moe": {},
    "llama-real-cpu": {},
    "llama-real-override": {"mmap-with-cpu-experts": "warning"},
    "llama-mmap-experts": {"mmap-with-cpu-experts": "warning"},
    "llama-mmap-experts-2025": {"mmap-with-cpu-experts": "warning"},
    "llama-fit-then-oom": {"out-of-device-memory": "error", "fit-gave-up": "warning"},
    "llama-fit-overrides": {"fit-gave-up": "warning"},
    "llama-context-reduced": {"context-reduced": "note"},
    "llama-override-no-match": {"override-no-match": "error"},
    "llama-override-one-dead": {"override-no-match": "error"},
    "llama-override-refused": {"override-refused": "error"},
    "llama-no-gpu": {"flag-ignored": "error"},
    "llama-whole-layers": {"whole-layers-on-cpu": "warning"},
    "llama-not-needed": {"offload-not-needed": "warning"},
    "llama-uneven": {"devices-uneven": "warning"},
    "llama-held-twice": {"mmap-with-cpu-experts": "warning", "weights-held-twice": "note"},
    "llama-lock-and-pin": {"lock-refused": "warning", "pinning-failed": "warning"},
    "llama-host-oom": {"out-of-host-memory": "error"},
    "llama-truncated": {"start-incomplete": "warning"},
    "llama-restarted": {},
}


@pytest.mark.parametrize("name", FOUND)
def test_each_log_has_its_findings_and_no_others(name: str) -> None:
    audit = audited(name)
    assert audit.engine == "llama.cpp"
    assert ids(audit) == FOUND[name]
    lines = text_of(name).split("\n")
    for finding in audit.findings:
        assert finding.why
        assert finding.remedy
        for line in finding.evidence:
            assert line.number is not None
            assert line.text == lines[line.number - 1]


def test_what_was_asked_and_what_happened() -> None:
    audit = audited("llama-healthy-cpu-moe")
    assert audit.version == "10549 (8c6f21d)"
    assert audit.asked == {
        "model": "/models/Qwen3-30B-A3B-Q4_K_M.gguf",
        "n_gpu_layers": 99.0,
        "n_cpu_moe": 24.0,
    }
    assert audit.happened["layers_on_gpu"] == "49/49"
    assert audit.happened["weights_mib.CUDA_Host"] == 8490.3
    assert audit.happened["kv_mib.CUDA0"] == 768.0
    assert audit.happened["load_mode"] == "none"
    assert audit.happened["experts"] == 128
    assert audit.happened["file"] == "17.28 GiB"
    assert audit.happened["free_mib.CUDA0"] == 23650
    assert audited("llama-fit-overrides").happened["fit"] == "failed"
    assert audited("llama-override-one-dead").happened["tensors_overridden"] == 4
    assert audited("llama-mmap-experts-2025").version == "6123 (8c6f21d)"


def test_a_real_log_says_what_is_not_judged() -> None:
    audit = audited("llama-real-cpu")
    assert audit.happened["weights_mib.CPU_Mapped"] == 6195.09
    assert audit.happened["fit"] == "done"
    assert "llama.cpp does not log its flags" in audit.unjudged[0]


def test_an_override_to_the_cpu_that_left_no_trace() -> None:
    assert "_expz" in the(audited("llama-override-no-match"), "override-no-match").why
    why = the(audited("llama-override-one-dead"), "override-no-match").why
    assert why.startswith("attn_typo matched no tensor")
    assert "ffn_up_exps matched" not in why


def test_without_mapping_or_debug_lines_an_override_is_not_judged(tmp_path: Path) -> None:
    audit = audit_text(
        text_of("llama-override-no-match").replace("load_mode = mmap", "load_mode = none").replace("CPU_Mapped", "CPU"),
        tmp_path,
    )
    assert ids(audit) == {}
    assert any("whether each -ot pattern matched" in missing for missing in audit.unjudged)


def test_cpu_moe_on_a_dense_model_moves_nothing(tmp_path: Path) -> None:
    audit = audit_text(text_of("llama-healthy").replace("-ngl 99", "-ngl 99 -cmoe"), tmp_path)
    assert "cpu_moe matched no tensor" in the(audit, "override-no-match").why


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"blk\.[0-9]\.ffn_up_exps", True),
        ("attn_typo", False),
        ("(a+)+$", None),
        (".*.*.*=", None),
        ("[", None),
        ("a" * 300, None),
    ],
)
def test_a_pattern_of_the_log_is_only_run_where_it_ends(pattern: str, found: bool | None) -> None:
    begun = time.monotonic()
    assert matches(pattern, "blk.0.ffn_up_exps.weight" + "a" * 60) is found
    assert time.monotonic() - begun < 5


def test_why_the_fit_gave_up() -> None:
    assert (
        "any tensor override (-ncmoe and -cmoe are such) is given"
        in the(audited("llama-fit-overrides"), "fit-gave-up").why
    )
    oom = the(audited("llama-fit-then-oom"), "out-of-device-memory")
    assert "after the fit had given up" in oom.why
    assert len(oom.evidence) == 3


def test_a_deficit_with_dense_weights_alone_is_evidence_of_the_fit(tmp_path: Path) -> None:
    line = "with only dense weights in device memory there is still a total deficit of 900 MiB"
    text = text_of("llama-fit-overrides").replace("I cmn  common_init_: fitting", f"I {line}\nfitting")
    assert line in the(audit_text(text, tmp_path), "fit-gave-up").evidence[0].text


@pytest.mark.parametrize(("free", "found"), [(11400, False), (11600, True)])
def test_what_the_fit_leaves_free_is_not_free(free: int, found: bool, tmp_path: Path) -> None:
    """10480 MiB are on the host; 1024 are left free on a device."""
    text = text_of("llama-not-needed").replace("24082 = 14022", f"24082 = {free}")
    assert ("offload-not-needed" in ids(audit_text(text, tmp_path))) == found


@pytest.mark.parametrize(("least", "found"), [("4200.00", False), ("3900.00", True)])
def test_devices_are_uneven_from_half_on(least: str, found: bool, tmp_path: Path) -> None:
    text = text_of("llama-uneven").replace(" 1900.00", f" {least}")
    assert ("devices-uneven" in ids(audit_text(text, tmp_path))) == found


def test_a_process_that_starts_again_before_it_loaded_is_a_new_start(tmp_path: Path) -> None:
    """Its command belongs before a line that was given, though no command was."""
    again = audit_text("0.00.1 I srv init: build_info: b9999-0123456\n" + text_of("llama-healthy"), tmp_path)
    assert (again.starts, again.asked) == (2, audited("llama-healthy").asked)


def test_layers_asked_for_and_none_on_the_gpu(tmp_path: Path) -> None:
    text = text_of("llama-whole-layers").replace("offloaded 20/49", "offloaded 0/49")
    assert the(audit_text(text, tmp_path), "flag-ignored").severity == "error"
    quiet = "\n".join(line for line in text_of("llama-no-gpu").split("\n") if not line.startswith("warning:"))
    assert "flag-ignored" in ids(audit_text(quiet, tmp_path))


def test_the_breakdown_of_the_fit_is_no_measure_of_what_is_free(tmp_path: Path) -> None:
    row = "common_memory_breakdown_print: |   - CUDA0 (RTX 4090)   | 24082 = 23650 + (400 = 400 + 0 + 0) + 32 |\n"
    lines = [line for line in text_of("llama-whole-layers").splitlines(keepends=True) if "breakdown" not in line]
    begin = next(number for number, line in enumerate(lines) if "loading model tensors" in line)
    draft = "loading draft model 'd.gguf'\nload_tensors:        CUDA0 model buffer size =   200.94 MiB\n"
    for tried in ("".join([*lines[:begin], row, *lines[begin:]]), "".join(lines) + row + draft):
        assert ids(audit_text(tried, tmp_path)) == {"whole-layers-on-cpu": "warning"}
    assert "offload-not-needed" in ids(audit_text("".join(lines) + row, tmp_path))


@pytest.mark.parametrize(
    ("line", "id_"),
    [
        ("ggml_vulkan: Device memory allocation failed: ErrorOutOfDeviceMemory", "out-of-device-memory"),
        ("CUDA error: out of memory", "out-of-device-memory"),
        ("[9.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)", "out-of-host-memory"),
        ("/entrypoint.sh: line 3:    31 Killed", "out-of-host-memory"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out-of-host-memory"),
        ("alloc_tensor_range: failed to allocate CPU_REPACK buffer of size 17179869184", "out-of-host-memory"),
    ],
)
def test_a_line_that_is_a_finding(line: str, id_: str, tmp_path: Path) -> None:
    assert ids(audit_text(f"{text_of('llama-healthy')}{line}\n", tmp_path)) == {id_: "error"}


def test_only_the_last_start_counts_and_a_reload_keeps_what_was_asked(tmp_path: Path) -> None:
    audit = audited("llama-restarted")
    assert (audit.starts, audit.asked["n_gpu_layers"]) == (2, 99.0)
    lines = text_of("llama-whole-layers").split("\n")
    reload = [line for line in lines if "- CPU " not in line and "build" not in line and "llama-server" not in line]
    again = audit_text("\n".join([*lines, *reload]), tmp_path)
    assert (again.starts, again.asked["n_gpu_layers"]) == (2, 20.0)
    assert again.happened["weights_mib.CUDA0"] == 7212.0
