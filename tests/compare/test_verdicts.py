from __future__ import annotations

import math
from dataclasses import replace

import pytest
from made_results import EQUAL, LAYER_BYTES, MIB, evidence, from_disk, generation, mapped, run, weights

from overspill.compare.answers import AnswerDifference
from overspill.compare.results import Pass
from overspill.compare.verdicts import Outcome, bytes_moved, device_memory, judge, same_answer, time_per_token

PASS, FAIL, NOT_JUDGED = Outcome.PASS, Outcome.FAIL, Outcome.NOT_JUDGED
OFFLOADED = 2 * LAYER_BYTES
MISSING = "the baseline does not fit: 90 GiB are needed"


def texts(verdict) -> str:
    return "\n".join(check.text for check in verdict.checks)


@pytest.mark.parametrize("access", ["zero_copy", "prefetch"])
def test_all_is_well(access):
    verdicts = judge(evidence(access))
    assert [v.name for v in verdicts] == ["bytes moved", "device memory", "same answer", "time per token"]
    assert [v.outcome for v in verdicts] == [PASS, PASS, PASS, NOT_JUDGED]
    assert all(check.outcome is PASS for v in verdicts[:3] for check in v.checks)


def test_a_later_check_that_fails_fails_the_verdict_and_gives_its_reason():
    found = evidence()
    wrong = replace(found.candidate[0].memory, kv_cache_peak_bytes=9 * MIB)
    verdict = device_memory(replace(found, candidate=(replace(found.candidate[0], memory=wrong),) * 2))
    assert verdict.checks[0].outcome is PASS
    assert verdict.outcome is FAIL
    assert "forecast" in verdict.reason


# -- bytes moved -------------------------------------------------------------------------------------------------------


def test_no_byte_moved_fails():
    verdict = bytes_moved([run()])
    assert verdict.outcome is FAIL
    assert "nothing was offloaded" in verdict.reason


@pytest.mark.parametrize(
    ("read_bytes", "outcome"),
    [
        (0, FAIL),
        (2 * LAYER_BYTES - 1, FAIL),
        (2 * LAYER_BYTES, PASS),
        (2 * LAYER_BYTES + 8192, PASS),
        (2 * LAYER_BYTES + 8193, FAIL),
    ],
)
def test_layers_on_disk_are_read_as_planned_and_no_more(read_bytes: int, outcome: Outcome):
    verdict = bytes_moved([from_disk(), from_disk(read_bytes)])
    assert verdict.outcome is outcome
    told = f"{3 * read_bytes} bytes were read from disk for layers in 3 passes, the plan says {3 * 2 * LAYER_BYTES}"
    assert (told in verdict.reason) is (outcome is FAIL)


def test_what_no_plan_reads_from_disk_fails():
    made = run()
    stray = replace(made.generations[0], layers_read_bytes=1)
    checks = bytes_moved([replace(made, generations=(stray,))]).checks
    assert any(check.outcome is FAIL and "1 bytes were read from disk" in check.text for check in checks)


def test_another_number_of_bytes_than_planned_fails_in_any_run():
    short = run("zero_copy", weights=weights("zero_copy")[:-1])
    verdict = bytes_moved([run("zero_copy"), short])
    assert verdict.outcome is FAIL
    assert str(LAYER_BYTES) in verdict.reason
    assert str(OFFLOADED) in verdict.reason


def test_one_byte_too_few_over_the_link_fails():
    right = generation(OFFLOADED)
    late = replace(right.passes[2], link_bytes=OFFLOADED - 1)
    wrong = replace(right, passes=(*right.passes[:2], late))
    verdict = bytes_moved([run("zero_copy", generations=(right, wrong))])
    assert verdict.outcome is FAIL
    assert str(OFFLOADED - 1) in verdict.reason


def test_copies_that_run_ahead_are_counted_over_the_answer():
    """The last copy of a step may be counted in the next one; the sum is what must agree."""
    even = generation(OFFLOADED)
    first, second, third = even.passes
    uneven = (replace(first, link_bytes=OFFLOADED + 64), replace(second, link_bytes=OFFLOADED - 64), third)
    verdict = bytes_moved([run("prefetch", generations=(replace(even, passes=uneven),))])
    assert verdict.outcome is PASS
    assert "whole answers" in texts(verdict)
    missed = replace(even, link_bytes=even.link_bytes - 64)
    assert bytes_moved([run("prefetch", generations=(missed,))]).outcome is FAIL


def test_a_prompt_pass_over_routed_experts_has_bounds_and_a_decode_step_none():
    step = Pass(1, 0.02, 500, 0.0, 500.0, 500.0)
    passes = [Pass(7, 0.02, moved, 0.0, 500.0, 2000.0) for moved in (499, 500, 1234, 2000, 2001)]
    plan = replace(run("zero_copy").plan, zero_copy_bytes=500.0)

    def judged(first: Pass):
        routed = replace(generation(), passes=(first, step, step))
        return bytes_moved([run("zero_copy", plan=plan, generations=(routed,))])

    assert [judged(p).outcome for p in passes] == [FAIL, PASS, PASS, PASS, FAIL]
    assert "bounds" in texts(judged(passes[2]))
    assert "500 to 2000" in judged(passes[0]).reason


def test_zero_copy_on_a_gpu_is_not_judged_by_traffic_but_by_the_ledger():
    silent = generation(0)
    verdict = bytes_moved([run("zero_copy", device_kind="cuda", zero_copy_counted=False, generations=(silent,))])
    assert [check.outcome for check in verdict.checks] == [PASS, NOT_JUDGED]
    assert verdict.outcome is PASS
    assert {f.name: f.value for f in verdict.figures}["over the link per token, counted"] is None


# -- device memory -----------------------------------------------------------------------------------------------------


def held(result, weight_bytes: int, pool_bytes: int = 0):
    memory = replace(result.memory, held_bytes={**result.memory.held_bytes, "weights": weight_bytes})
    if pool_bytes:
        memory.held_bytes["buffer_pool"] = pool_bytes
    return replace(result, memory=memory)


def test_memory_may_differ_from_the_plan_by_alignment_only():
    candidate = run("zero_copy")
    tolerance = 64 * len(candidate.weights)
    for extra, outcome in ((0, PASS), (tolerance, PASS), (tolerance + 1, FAIL), (-tolerance - 1, FAIL)):
        off = held(candidate, 40 * MIB + extra)
        assert device_memory(evidence(candidate=(candidate, off))).outcome is outcome, extra


def test_the_forecast_of_a_mapped_model_is_that_of_its_mappings_too():
    made = mapped()
    filled = replace(made, memory=replace(made.memory, kv_cache_peak_bytes=MIB * 9 // 10))
    verdict = device_memory(evidence(candidate=(filled,) * 2))
    assert verdict.outcome is PASS
    assert "the forecast of weights, mapped files, buffer pool and KV cache" in verdict.checks[1].text
    fewer = replace(filled, weights=filled.weights[1:])
    assert device_memory(evidence(candidate=(fewer,) * 2)).checks[1].outcome is FAIL


def test_memory_that_did_not_fall_fails():
    verdict = device_memory(evidence(candidate=(held(run("zero_copy"), 60 * MIB),) * 2))
    assert verdict.outcome is FAIL
    assert "0 B more" in verdict.checks[0].text


def test_the_pool_is_subtracted():
    verdict = device_memory(evidence("prefetch"))
    figures = {f.name: f.value for f in verdict.figures}
    assert figures["fell by"] == figures["planned to fall by"] == OFFLOADED - LAYER_BYTES
    assert "net of the buffer pool" in verdict.reason


def test_two_offloads_compared_may_hold_more_where_that_is_planned():
    both = evidence(baseline=(run("zero_copy"),) * 2, candidate=(run("prefetch"),) * 2)
    verdict = device_memory(both)
    assert verdict.outcome is PASS
    assert "10.00 MiB more" in verdict.reason


def test_a_forecast_more_than_five_percent_off_fails():
    candidate = run("zero_copy")
    measured = 41 * MIB  # 40 of weights, 1 of cache
    for factor, outcome in ((1.04, PASS), (1.06, FAIL), (0.96, PASS), (0.94, FAIL)):
        weight_bytes = int(measured * factor) - MIB
        plan = replace(candidate.plan, weights_bytes=weight_bytes)
        assert device_memory(evidence(candidate=(replace(candidate, plan=plan),) * 2)).outcome is outcome, factor


def test_a_cache_that_was_not_filled_is_left_out_and_said():
    candidate = run("zero_copy")
    plan = replace(candidate.plan, context_tokens=4096, kv_cache_bytes=400 * MIB)
    verdict = device_memory(evidence(candidate=(replace(candidate, plan=plan),) * 2))
    assert verdict.outcome is PASS
    assert "filled 9 of the KV cache's 4096 tokens" in texts(verdict)


def test_a_cache_larger_than_its_forecast_counts_though_it_was_not_filled():
    candidate = run("zero_copy")
    plan = replace(candidate.plan, context_tokens=4096)
    memory = replace(candidate.memory, kv_cache_peak_bytes=30 * MIB)
    verdict = device_memory(evidence(candidate=(replace(candidate, plan=plan, memory=memory),) * 2))
    assert verdict.outcome is FAIL


# -- same answer -------------------------------------------------------------------------------------------------------


def apart(largest: float, *, first: int | None = None) -> AnswerDifference:
    return AnswerDifference(first, 3, largest, 1, largest)


def test_another_token_fails_and_says_where():
    verdict = same_answer(evidence(candidate_differences=((EQUAL,), (apart(0.5, first=2),))))
    assert verdict.outcome is FAIL
    assert "prompt 1, generated token 3, run 2" in verdict.reason


def test_equal_ids_with_other_logits_fail():
    verdict = same_answer(evidence(candidate_differences=((apart(1e-6),), (EQUAL,))))
    assert verdict.outcome is FAIL
    assert "1e-06" in verdict.reason
    assert "same kernels" in verdict.reason


def test_logits_that_are_no_numbers_fail():
    verdict = same_answer(evidence(candidate_differences=((apart(math.nan),), (EQUAL,))))
    assert verdict.outcome is FAIL
    assert "NaN" in verdict.reason


@pytest.mark.parametrize(
    ("own", "other", "outcome"),
    [
        (apart(1e-3), apart(1e-4), NOT_JUDGED),
        (apart(1e-3), apart(1e-2), FAIL),
        (apart(1e-3), apart(1e-4, first=1), FAIL),
        (apart(1e-3, first=1), apart(1e-4, first=1), NOT_JUDGED),
        (EQUAL, apart(1e-9), FAIL),
    ],
)
def test_a_baseline_that_does_not_repeat_itself_is_no_measure_for_less(own, other, outcome):
    found = evidence(baseline_differences=((own,),), candidate_differences=((other,), (EQUAL,)))
    assert same_answer(found).outcome is outcome


def test_one_token_over_and_over_is_no_evidence():
    repeated = run(generations=(generation(ids=(5, 5, 5)),))
    verdict = same_answer(evidence(baseline=(repeated,) * 2))
    assert verdict.outcome is PASS
    assert "one token repeated" in texts(verdict)
    assert "one token repeated" not in texts(same_answer(evidence()))


# -- time per token ----------------------------------------------------------------------------------------------------


def timed(access: str | None, seconds: float):
    right = generation(OFFLOADED if access else 0)
    slow = replace(right, passes=tuple(replace(p, seconds=seconds) for p in right.passes))
    return run(access, generations=(slow,))


def test_the_ratio_is_taken_run_by_run_and_judged_only_against_a_limit():
    found = evidence(
        runs=3,
        baseline=(timed(None, 0.010), timed(None, 0.020), timed(None, 0.010)),
        candidate=(timed("zero_copy", 0.020), timed("zero_copy", 0.030), timed("zero_copy", 0.040)),
    )
    verdict = time_per_token(found)
    figures = {f.name: f.value for f in verdict.figures}
    assert [figures[f"ratio, {name}"] for name in ("least", "median", "most")] == pytest.approx([1.5, 2.0, 4.0])
    assert figures["link floor"] == pytest.approx(OFFLOADED / 4e9)
    assert verdict.outcome is NOT_JUDGED
    assert "not a GPU's time" in verdict.reason
    assert time_per_token(found, max_slowdown=2.5).outcome is PASS
    assert time_per_token(found, max_slowdown=1.9).outcome is FAIL


@pytest.mark.parametrize(("access", "least_ms"), [("zero_copy", "15.2"), ("prefetch", "10.0")])
def test_zero_copy_adds_to_the_computing_and_prefetch_runs_beside_it(access, least_ms):
    found = evidence(access, runs=1, baseline=(timed(None, 0.010),), candidate=(timed(access, 0.030),))
    assert f"at least {least_ms} ms" in texts(time_per_token(found))


def test_answers_of_one_token_have_no_decode_step():
    short = evidence(candidate=(run("zero_copy", generations=(generation(OFFLOADED, ids=(4,)),)),) * 2)
    assert time_per_token(short, max_slowdown=2).outcome is NOT_JUDGED


# -- a baseline that does not fit --------------------------------------------------------------------------------------


def test_without_a_baseline_only_what_needs_none_is_judged():
    alone = evidence(baseline=(), baseline_differences=(), candidate_differences=((EQUAL,),), baseline_missing=MISSING)
    moved, memory, answer, seconds = judge(alone, max_slowdown=2)
    assert moved.outcome is PASS
    assert [v.outcome for v in (memory, answer, seconds)] == [NOT_JUDGED] * 3
    assert all(MISSING in v.reason for v in (memory, answer, seconds))
    assert memory.checks[1].outcome is PASS  # the forecast still is
