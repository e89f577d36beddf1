"""Logs of servers with which nothing is wrong, whatever they may look like."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_logs import audit_text, audited, ids, text_of, the, with_line

ROUNDED = {"host-memory-rounded": "note"}
ENGINE = "(EngineCore pid=207) INFO 11-12 08:30:12"


def test_a_version_that_does_not_tell_of_offloading_is_not_judged_by_what_it_does_not_say(tmp_path: Path) -> None:
    known = text_of("vllm-moved-nothing").replace(f"{ENGINE[:-2]}09 [base.py:121] Offloader set to UVAOffloader\n", "")
    assert ids(audit_text(known, tmp_path)) == {"flag-ignored": "error"}
    version = audited("vllm-moved-nothing").version or ""
    old = audit_text(known.replace(version, "0.11.0"), tmp_path)
    assert ids(old) == {}
    assert old.unjudged == (
        "whether the budget took effect: vLLM 0.11.0 is older than those whose lines are known (0.27 to 0.33)",
    )
    unknown = audit_text("\n".join(line for line in known.split("\n") if version not in line), tmp_path)
    assert ids(unknown) == {}
    assert "no line says which version" in unknown.unjudged[0]


@pytest.mark.parametrize(("version", "told"), [("0.33.1", False), ("0.34.0", True), ("1.2.0", True)])
def test_a_newer_version_is_judged_with_a_word(version: str, told: bool, tmp_path: Path) -> None:
    audit = audit_text(text_of("vllm-healthy").replace("0.33.0", version), tmp_path)
    assert ids(audit) == {}
    assert any("does otherwise than 0.33" in missing for missing in audit.unjudged) == told


@pytest.mark.parametrize(
    "log",
    [
        "+ VLLM_LOGGING_LEVEL=WARNING vllm serve m --cpu-offload-gb 20 --cpu-offload-params experts\n"
        "(APIServer pid=1) INFO:     Application startup complete.\n",
        "+ llama-server -m m.gguf -ngl 99 -lv 1\nmain: server is listening on http://127.0.0.1:8080\n",
    ],
)
def test_a_server_that_is_ready_and_says_nothing_is_not_accused(log: str, tmp_path: Path) -> None:
    audit = audit_text(log, tmp_path)
    assert ids(audit) == {"nothing-to-judge": "warning"}
    assert "at the level of INFO" in the(audit, "nothing-to-judge").remedy


def test_what_is_available_once_weights_are_pinned_is_not_held_against_them(tmp_path: Path) -> None:
    text = text_of("vllm-restarted").replace("Available RAM: 251.2", "Available RAM: 18.0")
    assert "Available RAM: 18.0" in text
    assert ids(audit_text(text, tmp_path)) == ROUNDED


def _quantized(checkpoint: str, loaded: str, moved: str = "4.03") -> str:
    text = (
        text_of("vllm-back-on-device").replace("10.06", moved).replace("cpu_offload_gb': 10.0", "cpu_offload_gb': 4.0")
    )
    return text.replace("size: 37.3 GiB", f"size: {checkpoint} GiB").replace("took 36.95", f"took {loaded}")


def test_each_copy_of_the_data_parallel_ranks_is_a_whole_one(tmp_path: Path) -> None:
    text = _quantized("17.20", "13.20").replace("data_parallel_size=1", "data_parallel_size=2")
    assert ids(audit_text(text, tmp_path)) == ROUNDED
    shared = text.replace("tensor_parallel_size=1", "tensor_parallel_size=2")
    assert "weights-back-on-device" in ids(audit_text(shared, tmp_path))


@pytest.mark.parametrize(("drafter", "loaded"), [("2.20", "15.40"), ("17.20", "13.60")])
def test_a_drafter_is_not_what_came_back(drafter: str, loaded: str, tmp_path: Path) -> None:
    """A checkpoint of its own is counted; layers from the model's own (MTP) are in it already."""
    line = f"Model loading took {loaded} GiB"
    reading = f"{ENGINE} [weight_utils.py:904] Checkpoint size: {drafter} GiB. Available RAM: 9.0 GiB."
    text = _quantized("17.20", loaded).replace(line, f"Loading drafter model...\n{reading}\n{ENGINE} {line}")
    assert ids(audit_text(text, tmp_path)) == ROUNDED
    assert "weights-back-on-device" in ids(audit_text(text.replace(f"took {loaded}", "took 19.9"), tmp_path))


@pytest.mark.parametrize(("loaded", "found"), [("102.5", False), ("107.5", True)])
def test_a_tenth_of_a_large_checkpoint_may_differ(loaded: str, found: bool, tmp_path: Path) -> None:
    assert ("weights-back-on-device" in ids(audit_text(_quantized("100.0", loaded), tmp_path))) == found


@pytest.mark.parametrize(
    ("name", "after", "line"),
    [
        (
            "llama-healthy",
            "KV buffer size",
            "alloc_buffer: allocating 808.35 MiB on device 1: cudaMalloc failed: out of memory",
        ),
        ("vllm-healthy", "Model loading took", f"{ENGINE} [tuner.py:9] skipped a tactic: CUDA out of memory."),
        ("vllm-healthy", "version 0.33.0", "/entrypoint.sh: line 3:    31 Killed"),
        ("llama-healthy", "build_info", "/entrypoint.sh: line 3:    31 Killed"),
    ],
)
def test_what_was_survived_is_no_end(name: str, after: str, line: str, tmp_path: Path) -> None:
    assert ids(audit_text(with_line(name, after, line), tmp_path)) == {}
    assert list(ids(audit_text(f"{text_of(name)}{line}\n", tmp_path)).values()) == ["error"]


def test_an_allocation_that_was_tried_again_with_less_needs_no_server_to_be_survived(tmp_path: Path) -> None:
    line = "ggml_gallocr_reserve_n_impl: failed to allocate CUDA1 buffer of size 847618048"
    bench = "\n".join(
        row for row in with_line("llama-healthy", "KV buffer size", line).split("\n") if "listening" not in row
    )
    assert ids(audit_text(bench, tmp_path)) == {}


def test_a_warning_that_a_process_writes_once_counts_for_what_it_loads_next(tmp_path: Path) -> None:
    lines = text_of("llama-mmap-experts").split("\n")
    begin = next(number for number, line in enumerate(lines) if "loading model '" in line)
    again = [line for line in lines[begin:] if "mmap enabled" not in line]
    audit = audit_text("\n".join([*lines, *again]), tmp_path)
    assert (audit.starts, ids(audit)) == (2, {"mmap-with-cpu-experts": "warning"})


def test_a_draft_model_is_not_the_model(tmp_path: Path) -> None:
    draft = (
        "common_speculative_init_result: loading draft model '/models/draft.gguf'",
        "print_info: n_expert              = 0",
        "load_tensors: offloaded 10/29 layers to GPU",
        "load_tensors:   CPU_Mapped model buffer size =   400.03 MiB",
        "load_tensors:        CUDA0 model buffer size =   200.94 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =    96.00 MiB",
    )
    audit = audit_text(with_line("llama-healthy", "compute buffer size", *draft), tmp_path)
    assert ids(audit) == {}
    assert audit.happened["layers_on_gpu"] == "49/49"
    assert audit.happened["experts"] == 128
    assert (audit.happened["weights_mib.CUDA0"], audit.happened["draft_weights_mib.CUDA0"]) == (17524.42, 200.94)
    assert (audit.happened["kv_mib.CUDA0"], audit.happened["draft_kv_mib.CUDA0"]) == (768.0, 96.0)
    lines = with_line("llama-healthy", "compute buffer size", *draft).split("\n")
    begin = next(number for number, line in enumerate(lines) if "loading model '" in line)
    again = audit_text("\n".join([*lines, *lines[begin:]]), tmp_path)
    assert again.starts == 2
    assert again.happened.items() <= audit.happened.items()
    assert again.happened["weights_mib.CUDA0"] == 17524.42


def test_the_caches_of_the_model_and_of_its_mtp_layer() -> None:
    audit = audited("llama-real-mtp")
    assert ids(audit) == {}
    assert (audit.happened["kv_mib.CUDA0"], audit.happened["draft_kv_mib.CUDA0"]) == (4352.0, 272.0)
    assert (audit.happened["compute_mib.CUDA0"], audit.happened["draft_compute_mib.CUDA0"]) == (495.0, 743.1)


def test_several_caches_of_one_buffer_are_added(tmp_path: Path) -> None:
    window = "llama_kv_cache:      CUDA0 KV buffer size =   132.00 MiB"
    assert audit_text(with_line("llama-healthy", "KV buffer size", window), tmp_path).happened["kv_mib.CUDA0"] == 900.0


@pytest.mark.parametrize(
    "rest", ["2>&1 | tee server.log", "| tee server.log", "> server.log &", "; echo ended", "&& x -y"]
)
def test_what_the_shell_does_with_the_output_is_not_asked_of_the_server(rest: str, tmp_path: Path) -> None:
    command = "vllm serve m --served-model-name 'a | b' --cpu-offload-gb 20 --cpu-offload-params experts"
    rows = [line for line in text_of("vllm-restarted").split("\n")[15:] if "non-default args" not in line]
    audit = audit_text("\n".join([f"{command} {rest}", *rows]), tmp_path)
    assert audit.asked["cpu_offload_params"] == ["experts"]
    assert ids(audit) == ROUNDED


def test_a_total_that_grows_with_a_drafter_is_no_tower(tmp_path: Path) -> None:
    dense = text_of("vllm-declaration-order").replace("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")
    more = f"{ENGINE} [uva.py:65] Total CPU offloaded parameters: 20.9\n"
    before, sign, after = dense.partition("(EngineCore pid=207) INFO 11-12 08:30:13")
    assert sign
    assert "tower-took-budget" not in ids(audit_text(before + more + sign + after, tmp_path))
    unread = before.replace("Checkpoint size", "size") + "Loading drafter model...\n" + more + sign + after
    assert "tower-took-budget" not in ids(audit_text(unread, tmp_path))
    early, sign, late = dense.partition("(EngineCore pid=207) INFO 11-12 08:30:12")
    assert "tower-took-budget" in ids(audit_text(early + more + sign + late, tmp_path))


def test_ranks_that_ray_started_are_told_apart(tmp_path: Path) -> None:
    line = "(EngineCore pid=207) INFO 11-12 08:30:11 [uva.py:65] Total CPU offloaded parameters: 20.01"
    text = text_of("vllm-declaration-order").replace("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")
    assert line in text
    ranks = "\n".join(
        f"(EngineCore pid=207) (RayWorkerProc pid={pid}, ip=10.0.0.{pid}) Total CPU offloaded parameters: {gib}"
        for pid, gib in ((31, 20.02), (32, 20.25))
    )
    audit = audit_text(text.replace(line, ranks), tmp_path)
    assert "tower-took-budget" not in ids(audit)
    assert audit.happened["ranks"] == 2
