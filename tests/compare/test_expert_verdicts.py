"""Verdicts about routed experts that the CPU computes or that stream: made-up runs, one thing wrong in each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from made_results import COUNTS, EQUAL, MIB, PATHS, evidence, placed, run, streamed

from overspill.compare.answers import AnswerDifference, BlockDifference
from overspill.compare.results import RunResult, SlotState
from overspill.compare.verdicts import Outcome, bytes_moved, device_memory, same_answer
from overspill.offload.expert_slots import SlotCounts

PASS, FAIL, NOT_JUDGED = Outcome.PASS, Outcome.FAIL, Outcome.NOT_JUDGED


def texts(verdict) -> str:
    return "\n".join(check.text for check in verdict.checks)


# -- bytes moved -------------------------------------------------------------------------------------------------------


def test_experts_used_as_planned_pass():
    verdict = bytes_moved([placed()])
    assert [check.outcome for check in verdict.checks] == [PASS] * 3, texts(verdict)
    assert "the CPU computed the experts of 2 layers: 6 calls read 10.00 MiB there" in texts(verdict)
    verdict = bytes_moved([streamed()])
    assert [check.outcome for check in verdict.checks] == [PASS] * 3, texts(verdict)
    assert "5 of 8 experts chosen were in slots, 3 were not (2 fetched, 1 streamed)" in texts(verdict)
    figures = {f.name: f.value for f in verdict.figures}
    assert figures["expert slots, hit rate"] == 5 / 8
    assert (figures["expert slots, prefetch used"], figures["expert slots, evictions"]) == (1, 1)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (placed(), f"{PATHS[1]} was planned on the CPU, and never ran there"),
        (streamed(), f"{PATHS[1]} was planned behind expert slots, and never ran so"),
    ],
)
def test_a_layer_that_never_ran_as_planned_fails(made: RunResult, told: str):
    for experts in ((made.experts[0], replace(made.experts[1], calls=0)), made.experts[:1]):
        verdict = bytes_moved([made, replace(made, experts=experts)])
        assert verdict.outcome is FAIL
        assert verdict.reason == told


def test_a_result_that_did_not_come_back_fails():
    made = placed()
    answer = made.generations[0]
    late = replace(answer.passes[1], link_bytes=64)
    verdict = bytes_moved([replace(made, generations=(replace(answer, passes=(answer.passes[0], late)),))])
    assert verdict.outcome is FAIL
    assert "a pass over 1 token carried 64 bytes over the link, the plan says 128" in verdict.reason


def test_what_crossed_the_link_is_what_the_slots_counted():
    made = streamed()
    for off in (-1, 1):
        answer = replace(made.generations[0], link_bytes=5 * MIB + off)
        verdict = bytes_moved([replace(made, generations=(answer,))])
        assert verdict.outcome is FAIL
        assert f"{5 * MIB + off} bytes crossed" in verdict.reason
        assert f"the plan says {5 * MIB}" in verdict.reason


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hits": 4}, "passes chose 8 experts, 4 hits and 3 misses were counted"),
        ({"streamed": 2, "hits": 4}, f"6 experts of {MIB} to {MIB} bytes came"),
        ({"computed": 1, "hits": 4}, "the CPU computed 1 experts under the policy fetch"),
    ],
)
def test_counts_that_do_not_add_up_fail(change: dict[str, int], told: str):
    verdict = bytes_moved([streamed(replace(COUNTS, **change))])
    assert verdict.outcome is FAIL
    assert "do not add up" in verdict.reason
    assert told in verdict.reason


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (SlotState(3, 3, SlotCounts(fetched=3)), None),
        (SlotState(3, 3, SlotCounts(fetched=4)), "4 came into 3 slots, 0 were evicted, 3 slots are full"),
        (SlotState(3, 4, SlotCounts(fetched=4)), "4 slots are full"),
        (SlotState(3, 3, SlotCounts(prefetched=3, prefetch_used=2, prefetch_wasted=2)), "3 were prefetched, 2 of them"),
        (None, "there are none"),
    ],
)
def test_slots_that_were_lost_fail(state: SlotState | None, told: str | None):
    verdict = bytes_moved([streamed(slots=state)])
    assert verdict.outcome is (PASS if told is None else FAIL)
    assert told is None or told in verdict.reason


def test_a_policy_that_was_not_followed_fails():
    made = streamed()
    by_cpu = replace(made, plan=replace(made.plan, policy="cpu"))
    assert "3 missing experts were fetched under the policy cpu" in bytes_moved([by_cpu]).reason


def test_experts_on_disk_must_have_been_read():
    made = streamed()
    weights = tuple(replace(w, tier="disk") if w.access == "stream" else w for w in made.weights)
    edges = 5 * 4096  # 5 experts came
    for read_bytes, outcome in (
        (5 * MIB, PASS),
        (5 * MIB - 1, FAIL),
        (5 * MIB + edges, PASS),
        (5 * MIB + edges + 1, FAIL),
    ):
        answer = replace(made.generations[0], experts_read_bytes=read_bytes)
        verdict = bytes_moved([replace(made, weights=weights, generations=(answer,))])
        assert verdict.outcome is outcome
        assert "20.00 MiB of weights lie on disk" in verdict.checks[0].text


def test_a_plan_that_moves_nothing_says_why():
    inert = "device placement: 1 override resolves to the engine's own device (cpu), so nothing is placed"
    verdict = bytes_moved([run(notes=(inert,))])
    assert verdict.outcome is FAIL
    assert inert in verdict.reason


def test_slots_are_subtracted_from_what_is_saved():
    verdict = device_memory(evidence(candidate=(streamed(),) * 2))
    assert verdict.outcome is PASS
    assert "net of expert slots" in verdict.reason
    assert {f.name: f.value for f in verdict.figures}["fell by"] == 15 * MIB


# -- same answer -------------------------------------------------------------------------------------------------------

OFF = AnswerDifference(1, 2, 0.5, 1, 1e-6)


def block(nmse: float, *, inputs_equal: bool = True) -> BlockDifference:
    return BlockDifference(PATHS[0], inputs_equal, nmse)


def judged(*blocks: BlockDifference, made: RunResult | None = None, **changes: Any):
    given = {"candidate_differences": ((OFF,), (EQUAL,)), "candidate_blocks": blocks, **changes}
    return same_answer(evidence(candidate=(made or placed(),) * 2, **given))


@pytest.mark.parametrize(
    ("nmse", "outcome"), [(0.0, PASS), (1e-9, PASS), (5e-4, PASS), (5.1e-4, FAIL), (math.nan, FAIL), (math.inf, FAIL)]
)
def test_a_block_on_the_cpu_is_held_against_the_bound(nmse: float, outcome: Outcome):
    verdict = judged(block(0.0), block(nmse))
    assert verdict.outcome is outcome
    assert PATHS[0] in verdict.reason
    assert ("the same bits too" in verdict.reason) is (nmse == 0)


def test_other_tokens_are_told_and_not_judged_where_other_kernels_compute():
    verdict = judged(block(1e-9), block(1e-9))
    assert [check.outcome for check in verdict.checks] == [PASS, NOT_JUDGED]
    assert "equal in 1 of 2 answers, in the others up to token 1 at least" in verdict.checks[1].text
    assert "NMSE 1e-06 at the most, within the usual 0.01" in verdict.checks[1].text
    assert verdict.headline == "NMSE 1e-09"


def test_inputs_that_differ_fail_unless_the_baselines_own_do():
    differing = (block(1e-9), block(1e-9, inputs_equal=False))
    assert "though the same kernels computed all before it" in judged(*differing).reason
    assert judged(*differing).outcome is FAIL
    unsteady = judged(*differing, baseline_blocks=(block(0.0, inputs_equal=False),))
    assert unsteady.outcome is NOT_JUDGED


def test_a_block_that_was_not_observed_is_not_judged():
    assert judged().outcome is NOT_JUDGED


def test_a_baseline_on_the_cpu_also_takes_the_bound():
    found = evidence(
        baseline=(placed(),) * 2,
        candidate=(streamed(),) * 2,
        candidate_differences=((OFF,), (OFF,)),
        candidate_blocks=(block(1e-9),) * 2,
    )
    assert same_answer(found).outcome is PASS


def test_logits_that_are_no_numbers_fail_there_too():
    broken = AnswerDifference(None, 3, math.nan, 0, math.nan)
    assert judged(block(0.0), candidate_differences=((broken,), (EQUAL,))).outcome is FAIL


def test_a_policy_that_left_the_cpu_nothing_to_do_is_said():
    plan = replace(streamed().plan, policy="auto", other_kernels="the CPU may compute experts")
    idle = replace(streamed(), plan=plan)
    assert "no expert came to other kernels" in judged(block(0.0), block(0.0), made=idle).reason
    busy = streamed(replace(COUNTS, computed=1), plan=plan)
    assert "no expert came to other kernels" not in judged(block(0.0), block(0.0), made=busy).reason


def test_streamed_experts_that_differ_by_one_bit_fail():
    bit = AnswerDifference(None, 3, 2.0**-24, 1, 1e-15)
    found = evidence(candidate=(streamed(),) * 2, candidate_differences=((EQUAL,), (bit,)))
    verdict = same_answer(found)
    assert verdict.outcome is FAIL
    assert "should be the same bits" in verdict.reason
