"""Are the answers the baseline's, bit for bit?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from overspill.compare.answers import AnswerDifference, format_logit, ids_equal, largest_of, one_token_repeated
from overspill.compare.verdicts.records import Check, Evidence, Figure, Outcome, Verdict


def same_answer(evidence: Evidence) -> Verdict:
    """Whether token ids and logits are those of the baseline, bit for bit: the same kernels computed them."""
    if evidence.baseline_missing is not None:
        return Verdict("same answer", "–", (Check(Outcome.NOT_JUDGED, evidence.baseline_missing),))
    differences = [d for run in evidence.candidate_differences for d in run]
    itself = [d for run in evidence.baseline_differences for d in run]
    largest, own = largest_of(differences), largest_of(itself)
    figures = (
        Figure("largest logit difference", largest),
        Figure("the baseline's own, run to run", own if itself else None),
        Figure("logit positions compared", sum(d.positions for d in differences)),
    )
    positions = f"{sum(d.positions for d in differences)} positions in {len(evidence.candidate_differences)} runs"
    if math.isnan(largest):
        checks = [
            Check(
                Outcome.FAIL,
                f"logits are not numbers (NaN): {_first(evidence, lambda d: math.isnan(d.largest))}",
            )
        ]
    elif _as_unsteady(differences, itself):
        checks = [
            Check(
                Outcome.NOT_JUDGED,
                f"the baseline does not repeat its own logits (up to {format_logit(own)} apart from run to run), "
                f"and the candidate is no further from it ({format_logit(largest)})",
            )
        ]
    elif not ids_equal(differences):
        where = _first(evidence, lambda d: d.first_difference is not None)
        checks = [
            Check(Outcome.FAIL, f"another token: {where}; up to there logits are at most {format_logit(largest)} apart")
        ]
    elif largest > 0:
        where = _first(evidence, lambda d: d.largest == largest)
        checks = [
            Check(
                Outcome.FAIL,
                f"the token ids are equal but logits are up to {format_logit(largest)} apart ({where}); "
                "the same kernels computed both, so they should be the same bits",
            )
        ]
    else:
        checks = [Check(Outcome.PASS, f"token ids and logits are equal at all {positions}: largest difference 0.0")]
    if one_token_repeated([ids for run in evidence.baseline for ids in run.token_ids]):
        checks.append(
            Check(
                Outcome.NOT_JUDGED,
                "every answer is one token repeated, so ids are no evidence: the logits decide",
            )
        )
    headline = "identical" if checks[0].outcome is Outcome.PASS else f"{format_logit(largest)} apart"
    return Verdict("same answer", headline, tuple(checks), figures)


def _as_unsteady(differences: Sequence[AnswerDifference], itself: Sequence[AnswerDifference]) -> bool:
    """Whether the baseline differs from itself, and the candidate from it no more than that."""
    own = largest_of(itself)
    if ids_equal(itself) and own == 0:
        return False
    return largest_of(differences) <= own and (ids_equal(differences) or not ids_equal(itself))


def _first(evidence: Evidence, chosen: Callable[[AnswerDifference], bool]) -> str:
    """Where the first chosen difference is, in words."""
    for run, by_prompt in enumerate(evidence.candidate_differences):
        for prompt, found in enumerate(by_prompt):
            if chosen(found):
                at = found.first_difference if found.first_difference is not None else found.at
                return f"prompt {prompt + 1}, generated token {(at or 0) + 1}, run {run + 1}"
    raise AssertionError("no such difference")
