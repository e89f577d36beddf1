"""Are the answers the baseline's, bit for bit, or within bounds where other kernels compute?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from overspill.compare.answers import AnswerDifference, format_logit, ids_equal, largest_of, one_token_repeated
from overspill.compare.verdicts.records import Check, Evidence, Figure, Outcome, Verdict

BLOCK_NMSE = 5e-4
"""How far the output of experts on the CPU may be from the resident ones' (design.md, promise 4)."""

LOGITS_NMSE = 1e-2
"""How far logits usually are at the most where blocks are within BLOCK_NMSE; told, and not judged."""


def same_answer(evidence: Evidence) -> Verdict:
    """Whether token ids and logits are those of the baseline, bit for bit where the same kernels computed them.

    Where a side may compute experts with other kernels, the first such block is held against the baseline's instead:
    what it was given is the same bits, so its output differs by the kernels alone.
    """
    if evidence.baseline_missing is not None:
        return Verdict("same answer", "–", (Check(Outcome.NOT_JUDGED, evidence.baseline_missing),))
    differences = [d for run in evidence.candidate_differences for d in run]
    itself = [d for run in evidence.baseline_differences for d in run]
    figures = [
        Figure("largest logit difference", largest_of(differences)),
        Figure("the baseline's own, run to run", largest_of(itself) if itself else None),
        Figure("logit positions compared", sum(d.positions for d in differences)),
    ]
    plans = evidence.candidate[0].plan, evidence.baseline[0].plan
    other_kernels = next((plan.other_kernels for plan in plans if plan.other_kernels is not None), None)
    if math.isnan(largest_of(differences)):
        where = _first(evidence, lambda d: math.isnan(d.largest))
        checks = [Check(Outcome.FAIL, f"logits are not numbers (NaN): {where}")]
        headline = f"{format_logit(math.nan)} apart"
    elif other_kernels is not None:
        checks = [_block(evidence, other_kernels), *_answers(differences)]
        nmse = largest_nmse(evidence)
        headline = "–" if nmse is None else "same bits" if nmse == 0 else f"NMSE {format_logit(nmse)}"
        figures += [
            Figure("NMSE of the first such block", nmse),
            Figure("NMSE of logits", max(d.nmse for d in differences)),
        ]
    else:
        checks = [_bits(evidence, differences, itself)]
        passed = checks[0].outcome is Outcome.PASS
        headline = "identical" if passed else f"{format_logit(largest_of(differences))} apart"
    if one_token_repeated([ids for run in evidence.baseline for ids in run.token_ids]):
        decides = "the logits decide" if other_kernels is None else "the block decides"
        checks.append(
            Check(Outcome.NOT_JUDGED, f"every answer is one token repeated, so ids are no evidence: {decides}")
        )
    return Verdict("same answer", headline, tuple(checks), tuple(figures))


# -- the same kernels --------------------------------------------------------------------------------------------------


def _bits(evidence: Evidence, differences: Sequence[AnswerDifference], itself: Sequence[AnswerDifference]) -> Check:
    largest, own = largest_of(differences), largest_of(itself)
    if _as_unsteady(differences, itself):
        return Check(
            Outcome.NOT_JUDGED,
            f"the baseline does not repeat its own logits (up to {format_logit(own)} apart from run to run), "
            f"and the candidate is no further from it ({format_logit(largest)})",
        )
    if not ids_equal(differences):
        where = _first(evidence, lambda d: d.first_difference is not None)
        return Check(
            Outcome.FAIL, f"another token: {where}; up to there logits are at most {format_logit(largest)} apart"
        )
    if largest > 0:
        where = _first(evidence, lambda d: d.largest == largest)
        return Check(
            Outcome.FAIL,
            f"the token ids are equal but logits are up to {format_logit(largest)} apart ({where}); "
            "the same kernels computed both, so they should be the same bits",
        )
    positions = f"{sum(d.positions for d in differences)} positions in {len(evidence.candidate_differences)} runs"
    return Check(Outcome.PASS, f"token ids and logits are equal at all {positions}: largest difference 0.0")


def _as_unsteady(differences: Sequence[AnswerDifference], itself: Sequence[AnswerDifference]) -> bool:
    """Whether the baseline differs from itself, and the candidate from it no more than that."""
    own = largest_of(itself)
    if ids_equal(itself) and own == 0:
        return False
    return largest_of(differences) <= own and (ids_equal(differences) or not ids_equal(itself))


# -- other kernels -----------------------------------------------------------------------------------------------------


def largest_nmse(evidence: Evidence) -> float | None:
    """Of the observed block in any run of the candidate; NaN wins; None where none was observed."""
    values = [block.nmse for block in evidence.candidate_blocks]
    if not values:
        return None
    return math.nan if any(map(math.isnan, values)) else max(values)


def _block(evidence: Evidence, other_kernels: str) -> Check:
    """Promise 4, where the two sides' inputs are the same: at the first block that other kernels may compute."""
    nmse = largest_nmse(evidence)
    if nmse is None:
        return Check(Outcome.NOT_JUDGED, f"{other_kernels}; no block of them was observed, so none can be judged")
    path = evidence.candidate_blocks[0].path
    if not all(block.inputs_equal for block in evidence.baseline_blocks):
        return Check(
            Outcome.NOT_JUDGED,
            f"the baseline does not repeat the inputs of {path} from run to run, so what comes of them says nothing",
        )
    if not all(block.inputs_equal for block in evidence.candidate_blocks):
        return Check(
            Outcome.FAIL,
            f"what {path} is given differs from the baseline's, though the same kernels computed all before it",
        )
    first = f"the first such block, {path}, was given the same bits as the baseline's"
    if nmse == 0:
        none = "" if _computed_elsewhere(evidence) else " (in these answers no expert came to other kernels)"
        return Check(Outcome.PASS, f"{other_kernels}; {first}, and its output is the same bits too{none}")
    output = f"and its output is within NMSE {format_logit(nmse)} of it ({BLOCK_NMSE:g} allowed)"
    if nmse <= BLOCK_NMSE:
        return Check(Outcome.PASS, f"{other_kernels}; {first}, {output}")
    return Check(
        Outcome.FAIL,
        f"{other_kernels}; {first}, and its output is off by NMSE {format_logit(nmse)}: {BLOCK_NMSE:g} are allowed",
    )


def _computed_elsewhere(evidence: Evidence) -> bool:
    """Whether other kernels had anything to compute: where the policy decides, they need not."""
    sides = evidence.baseline[:1] + evidence.candidate
    return any(
        run.plan.placed or run.device_kind == "cuda" or (run.slot_counts is not None and run.slot_counts.computed)
        for run in sides
    )


def _answers(differences: Sequence[AnswerDifference]) -> list[Check]:
    """What the answers are like; they need not be equal, since an expert's last bits may turn a close decision."""
    equal = sum(d.first_difference is None for d in differences)
    nmse = max(d.nmse for d in differences)
    if equal == len(differences):
        tokens = f"token ids are equal in {equal} of {len(differences)} answers, which other kernels need not reach"
    else:
        agreed = min(d.first_difference for d in differences if d.first_difference is not None)
        tokens = (
            f"token ids are equal in {equal} of {len(differences)} answers, in the others up to token {agreed} at "
            "least; other kernels need not reach more"
        )
    usual = "within" if nmse <= LOGITS_NMSE else "beyond"
    logits = f"logits up to there are off by NMSE {format_logit(nmse)} at the most, {usual} the usual {LOGITS_NMSE:g}"
    return [Check(Outcome.NOT_JUDGED, f"{tokens}; {logits}")]


def _first(evidence: Evidence, chosen: Callable[[AnswerDifference], bool]) -> str:
    """Where the first chosen difference is, in words."""
    for run, by_prompt in enumerate(evidence.candidate_differences):
        for prompt, found in enumerate(by_prompt):
            if chosen(found):
                at = found.first_difference if found.first_difference is not None else found.at
                return f"prompt {prompt + 1}, generated token {(at or 0) + 1}, run {run + 1}"
    raise AssertionError("no such difference")
