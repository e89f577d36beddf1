from __future__ import annotations

from pathlib import Path

import pytest
from audit_logs import audit_text, audited, ids, text_of, the

from overspill.audit.records import LONGEST_QUOTE, Line

ROUNDED = {"host-memory-rounded": "note"}

FOUND = {
    "vllm-healthy": {},
    "vllm-no-offload": {},
    "vllm-flag-ignored-v2": {"flag-ignored": "error"},
    "vllm-moved-nothing": {"flag-ignored": "error"},
    "vllm-moved-0.01": {"flag-ignored": "error"},
    "vllm-budget-overridden": {"budget-overridden": "warning", **ROUNDED},
    "vllm-prefetch-ignored": {"budget-overridden": "warning", **ROUNDED},
    "vllm-selector": {"selector-no-match": "error"},
    "vllm-selector-comma": {"selector-no-match": "warning", **ROUNDED},
    "vllm-selector-prefetch": {"selector-no-match": "error"},
    "vllm-params-without-budget": {"params-without-budget": "error"},
    "vllm-budget-zero": {"budget-zero": "error"},
    "vllm-underspent": {"budget-underspent": "warning", "offload-not-needed": "note", **ROUNDED},
    "vllm-declaration-order": {"declaration-order": "warning"},
    "vllm-tower-rounded": {
        "declaration-order": "warning",
        "host-memory-rounded": "note",
        "budget-overshot": "note",
        "tower-took-budget": "note",
    },
    "vllm-four-ranks": ROUNDED,
    "vllm-back-on-device": {"weights-back-on-device": "warning", **ROUNDED},
    "vllm-not-needed": {"offload-not-needed": "warning", **ROUNDED},
    "vllm-step-short": {"prefetch-step-short": "warning", **ROUNDED},
    "vllm-no-net-saving": {"no-net-saving": "warning", **ROUNDED},
    "vllm-group-without-layer": {"group-without-layer": "error"},
    "vllm-config-refused": {"config-refused": "error"},
    "vllm-device-oom": {"out-of-device-memory": "error", "declaration-order": "warning", **ROUNDED},
    "vllm-host-oom": {"out-of-host-memory": "error", **ROUNDED},
    "vllm-no-kv-room": {"no-room-for-kv": "error"},
    "vllm-two-stacks": {"backend-unsupported": "error"},
    "vllm-unpinned": {"pinning-failed": "error"},
    "vllm-kernel-off-device": {"kernel-off-device": "error", **ROUNDED},
    "vllm-wsl": {"pinning-limited": "warning", **ROUNDED},
    "vllm-truncated": {"start-incomplete": "warning"},
    "vllm-restarted": ROUNDED,
}


@pytest.mark.parametrize("name", FOUND)
def test_each_log_has_its_findings_and_no_others(name: str) -> None:
    audit = audited(name)
    assert audit.engine == "vllm"
    assert ids(audit) == FOUND[name]
    for finding in audit.findings:
        assert finding.why
        assert finding.remedy
        lines = text_of(name).split("\n")
        for line in finding.evidence:
            assert line.number is not None
            assert line.text in lines[line.number - 1].replace("\x1b[1;36m", "").replace("\x1b[0;0m", "")


def test_a_flag_that_the_v2_runner_ignores_is_told_with_its_way_out(tmp_path: Path) -> None:
    finding = the(audited("vllm-flag-ignored-v2"), "flag-ignored")
    assert [line.text.split("] ")[1][:20] for line in finding.evidence] == [
        "non-default args: {'",
        "Using V2 Model Runne",
        "Model loading took 5",
    ]
    assert "cpu_offload_gb=20 was accepted" in finding.why
    assert "V2 model runner of earlier versions installs no offloader" in finding.why
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in finding.remedy
    newer = the(audit_text(text_of("vllm-flag-ignored-v2").replace("0.29.0", "0.33.0"), tmp_path), "flag-ignored")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in newer.remedy


def test_a_noop_offloader_is_no_offloader(tmp_path: Path) -> None:
    text = text_of("vllm-moved-nothing").replace("UVAOffloader", "NoopOffloader")
    assert the(audit_text(text, tmp_path), "flag-ignored").severity == "error"


def test_both_backends_without_a_warning_are_seen_from_the_settings(tmp_path: Path) -> None:
    text = "\n".join(line for line in text_of("vllm-budget-overridden").split("\n") if "UserWarning" not in line)
    finding = the(audit_text(text, tmp_path), "budget-overridden")
    assert "cpu_offload_gb and cpu_offload_params had no effect" in finding.why
    assert "prefetch settings" in the(audited("vllm-prefetch-ignored"), "budget-overridden").why


def test_why_a_selector_is_dead() -> None:
    assert "experts.routed_experts.w2_weight" in the(audited("vllm-selector"), "selector-no-match").why
    assert "a list with commas is one name" in the(audited("vllm-selector-comma"), "selector-no-match").why
    assert "layers cannot be named" in the(audited("vllm-selector-prefetch"), "selector-no-match").why


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        ("*.experts", "no patterns"),
        ("experts.", "a dot at its end"),
        ("w2", "only whole segments"),
        ("0.mlp", "layers"),
    ],
)
def test_selectors_that_can_match_nothing(selector: str, reason: str, tmp_path: Path) -> None:
    text = text_of("vllm-selector").replace("experts.w2_weight", selector)
    assert reason in the(audit_text(text, tmp_path), "selector-no-match").why


def test_the_old_alias_still_matches_before_0_33(tmp_path: Path) -> None:
    text = text_of("vllm-selector-comma").replace("gate_up_proj,down_proj", "experts.w2_weight")
    assert "selector-no-match" not in ids(audit_text(text, tmp_path))


def test_the_selector_of_experts_is_why_the_healthy_log_is_healthy(tmp_path: Path) -> None:
    text = text_of("vllm-healthy")
    assert "declaration-order" in ids(
        audit_text(
            text.replace("'cpu_offload_params': {'experts'}, ", "").replace(" --cpu-offload-params experts", ""),
            tmp_path,
        )
    )
    pinned = audit_text(text.replace("VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 ", ""), tmp_path)
    assert ids(pinned) == ROUNDED


def test_a_dense_model_has_no_order_to_complain_of(tmp_path: Path) -> None:
    text = text_of("vllm-declaration-order").replace("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")
    assert ids(audit_text(text, tmp_path)) == {}
    backend = (
        "INFO 11-12 08:30:59 [unquantized.py:12] Using 'TRITON' Unquantized MoE backend out of potential backends\n"
    )
    assert "declaration-order" in ids(audit_text(backend + text, tmp_path))


def test_several_ranks_count_each_and_the_least_decides() -> None:
    audit = audited("vllm-four-ranks")
    finding = the(audit, "host-memory-rounded")
    assert "20.25 GiB on each of 4 ranks is 81.00 GiB of weights, and takes up to 162.00 GiB" in finding.why
    assert audit.happened["ranks"] == 4
    assert audit.happened["host_gib_per_rank"] == 20.25


def test_a_rank_that_moved_less_is_the_one_that_is_judged(tmp_path: Path) -> None:
    text = text_of("vllm-four-ranks").replace("parameters: 20.0", "parameters: 12.5")
    finding = the(audit_text(text, tmp_path), "budget-underspent")
    assert "Worker_TP2" in finding.evidence[-1].text
    assert "20 GiB were asked for and 12.5 GiB were moved, so 7.50 GiB less" in finding.why


@pytest.mark.parametrize(
    ("asked", "moved", "found"), [("1.0", "1.08", False), ("1.0", "1.2", True), ("20.0", "20.5", False)]
)
def test_a_parameter_over_the_budget_is_told_where_it_is_worth_a_word(
    asked: str, moved: str, found: bool, tmp_path: Path
) -> None:
    text = text_of("vllm-healthy").replace("gb': 20.0", f"gb': {asked}").replace("20.25", moved)
    assert ("budget-overshot" in ids(audit_text(text, tmp_path))) == found


def test_the_quote_of_a_long_line_shows_what_it_is_evidence_for() -> None:
    finding = the(audited("vllm-back-on-device"), "weights-back-on-device")
    assert "'quantization': 'gptq_marlin'" in finding.evidence[0].quoted
    long = Line(1, f"{'a' * 900}quantization=awq, {'b' * 900}", at=900)
    assert long.quoted.startswith("…a")
    assert "quantization=awq" in long.quoted
    assert len(long.quoted) == LONGEST_QUOTE + 2


def test_the_line_of_the_engine_is_quoted_where_the_setting_is(tmp_path: Path) -> None:
    text = text_of("vllm-back-on-device").replace("'quantization': 'gptq_marlin', ", "")
    quoted = the(audit_text(text, tmp_path), "weights-back-on-device").evidence[0].quoted
    assert "quantization=gptq_marlin" in quoted
    assert "Initializing a V1 LLM engine" not in quoted


def test_weights_that_came_back_are_counted() -> None:
    why = the(audited("vllm-back-on-device"), "weights-back-on-device").why
    assert "37.30 GiB of checkpoint for this rank less 10.06 GiB offloaded leaves 27.24 GiB" in why
    assert "loading took 36.95 GiB" in why
    assert "gptq_marlin" in why


def test_an_offload_that_is_not_needed_is_called_out(tmp_path: Path) -> None:
    why = the(audited("vllm-not-needed"), "offload-not-needed").why
    assert "19.02 GiB of the device were left for the KV cache, 12.03 GiB of weights were offloaded" in why
    assert "2.8 requests of 32,768 tokens" in why
    text = text_of("vllm-not-needed")
    assert ids(audit_text(text.replace("7.60x", "2.0x").replace("7.6x", "2.0x"), tmp_path)) == ROUNDED
    without = "\n".join(line for line in text.split("\n") if "Maximum concurrency" not in line)
    assert ids(audit_text(without, tmp_path)) == ROUNDED
    assert "offload-not-needed" in ids(audit_text(without.replace("19.02 GiB", "25.02 GiB"), tmp_path))


def test_savings_are_net_of_the_ring() -> None:
    assert "1.0066" not in the(audited("vllm-step-short"), "prefetch-step-short").why
    assert "--offload-prefetch-step 2" in the(audited("vllm-step-short"), "prefetch-step-short").remedy
    assert "takes 4.0265 GB of the device for 4.0265 GB" in the(audited("vllm-no-net-saving"), "no-net-saving").why
    assert audited("vllm-step-short").happened["net_gib_per_rank"] == pytest.approx(
        (16.1061 - 1.0066) * 1e9 / 2**30, abs=0.01
    )


def test_out_of_memory_says_where() -> None:
    assert "weights of one module come back" in the(audited("vllm-device-oom"), "out-of-device-memory").why
    assert "rounded up to a power of two" in the(audited("vllm-host-oom"), "out-of-host-memory").why


def test_only_the_last_start_counts() -> None:
    audit = audited("vllm-restarted")
    assert (audit.starts, audit.version) == (2, "0.33.0")
    assert audit.asked["cpu_offload_params"] == ["experts"]
    assert all(line.number is not None and line.number > 14 for finding in audit.findings for line in finding.evidence)
