"""What a question set advises follows from its tests and intervals alone, and how many questions would decide it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student

from kinject.results import MARGIN, ArmInfo, ArmResult, Contrast
from kinject.stats.advice import advise
from kinject.stats.power import documents_needed
from kinject.types import Advice

ARMS = (
    ArmInfo("plain", "m", "", False),
    ArmInfo("tuned", "m", "", True),
    ArmInfo("tuned, lr=1", "m", "", True, sweep="lr"),
)


def contrast(delta: float, half: float, p: float, **more: Any) -> Contrast:
    fields: dict[str, Any] = {
        "other": "plain", "delta": delta, "low": delta - half, "high": delta + half, "p": p, "p_holm": None,
        "wrong_to_right": 0, "right_to_wrong": 0, "can_lose": True, "test": "sign flips", "n": 120,
        "n_clusters": 40, "n_effective": 40.0, "accuracy": 0.7, "scope": "these models",
    }  # fmt: skip
    return Contrast(**(fields | more))


def result(arm: str = "tuned", question_set: str = "facts", **more: Any) -> ArmResult:
    fields: dict[str, Any] = {
        "model": "m", "arm": arm, "question_set": question_set, "role": "learning", "format": "texts", "shots": 0,
        "k": 0, "n": 120, "by_seed": (0.7,), "accuracy": 0.7, "low": 0.6, "high": 0.8, "interval": "Wilson",
        "chance": 0.25, "to_base": contrast(0.4, 0.1, 1e-6),
    }  # fmt: skip
    return ArmResult(**(fields | more))


def only(*results: ArmResult) -> Advice:
    (found,) = advise(results, ARMS)
    return found


@pytest.mark.parametrize(
    ("to_rag", "first", "reason"),
    [
        ((0.2, 0.1, 0.001), "training", "better"),
        ((-0.2, 0.1, 0.001), "retrieval", "better"),
        ((0.01, 0.03, 0.4), "retrieval", "alike"),
        ((-0.07, 0.12, 0.3), "retrieval", "not shown"),
        ((0.07, 0.12, 0.3), "", "not shown"),
    ],
)
def test_beside_retrieval_test_and_interval_name_the_first_choice(
    to_rag: tuple[float, float, float], first: str, reason: str
) -> None:
    advice = only(result(to_rag=contrast(*to_rag)))
    assert (advice.first, advice.reason, advice.arm) == (first, reason, "tuned")
    assert (advice.n_more > 0) == (reason == "not shown")
    assert advice.points == to_rag[0]


def test_few_documents_decide_nothing_and_the_missing_ones_are_counted() -> None:
    few = contrast(0.3, 0.2, 0.02, n=21, n_clusters=7, n_effective=7.0)
    assert only(result(to_rag=few)) == Advice("m", "facts", "tuned", "", "too few", 0.3, 9, 3)
    # The same where retrieval was not asked.
    assert only(result(to_base=few)).reason == "too few"


def test_without_retrieval_only_what_is_called_learned_is_advised() -> None:
    assert only(result()).reason == "not compared"
    assert only(result(to_base=contrast(0.03, 0.09, 0.5))).reason == "not learned"
    at_guessing = result(low=0.2)
    assert only(at_guessing).reason == "not learned"


def test_what_beats_retrieval_without_having_learned_is_no_first_choice() -> None:
    advice = only(result(low=0.2, to_rag=contrast(0.2, 0.1, 0.001)))
    assert (advice.first, advice.reason, advice.n_more) == ("", "not learned", 0)


@pytest.mark.parametrize(
    ("instead", "to_plain", "first"),
    [
        (contrast(-0.2, 0.1, 0.001), None, "both"),  # better than retrieval, which is better
        (contrast(0.2, 0.1, 0.001), None, "training"),
        (contrast(0.2, 0.1, 0.001), contrast(0.1, 0.05, 0.001), "both"),
        (contrast(-0.2, 0.1, 0.001), contrast(0.01, 0.05, 0.6), "retrieval"),
    ],
)
def test_both_are_taken_only_where_together_they_beat_either(
    instead: Contrast, to_plain: Contrast | None, first: str
) -> None:
    together = result(k=2, to_rag=contrast(0.1, 0.05, 0.001), to_plain=to_plain)
    assert only(result(to_rag=instead), together).first == first


def test_the_most_accurate_arm_of_the_recipe_counts_and_no_point_of_a_sweep() -> None:
    arms = (*ARMS, ArmInfo("other", "m", "", True))
    low = result("other", accuracy=0.5, to_rag=contrast(-0.3, 0.1, 0.001))
    high = result(to_rag=contrast(0.2, 0.1, 0.001))
    swept = result("tuned, lr=1", accuracy=0.9, to_rag=contrast(-0.3, 0.1, 0.001))
    (advice,) = advise([low, high, swept], arms)
    assert (advice.arm, advice.first) == ("tuned", "training")


def test_what_it_forgot_stands_beside_the_advice() -> None:
    kept = result(question_set="older", role="retention", to_base=contrast(-0.2, 0.1, 0.001))
    stayed = result(question_set="oldest", role="retention", to_base=contrast(-0.01, 0.1, 0.9))
    assert only(result(), kept, stayed).forgotten == ("older",)


def test_only_whole_sets_in_their_first_format_count() -> None:
    subject = result(subject="law", to_rag=contrast(0.2, 0.1, 0.001))
    alone = replace(subject, subject="", role="baseline")
    later = replace(subject, subject="", format="letters")
    first = result(to_rag=contrast(-0.2, 0.1, 0.001))
    assert only(alone, first, subject, later).first == "retrieval"
    assert advise([result("plain", to_base=None)], ARMS) == ()


@pytest.mark.parametrize(("delta", "family"), [(-0.08, 1), (-0.08, 6), (-0.005, 1)])
def test_so_many_more_would_be_shown_in_four_of_five_tries(delta: float, family: int) -> None:
    half, n = 0.15, 40
    advice = only(result(to_rag=contrast(delta, half, 0.3, family=family)))
    n_documents = n + advice.n_more_documents
    # By hand: the error falls with the root of the documents; a difference within the margin
    # need not be told apart.
    error = half / student.ppf(0.975, n - 1)
    limit = student.ppf(1 - 0.025 / family, n - 1)
    shown = error * brentq(lambda errors: nct.sf(limit, n - 1, errors) - 0.8, 0.1, 20.0)
    wanted = n * (shown / max(abs(delta), MARGIN)) ** 2
    assert n_documents == math.ceil(wanted)
    assert advice.n_more == 3 * advice.n_more_documents  # three questions on each, as now


def test_one_rule_counts_the_documents_and_never_fewer_than_any_verdict_needs() -> None:
    assert documents_needed((-0.2, 0.2), 50, 50.0, 0.05) > documents_needed(
        (-0.2, 0.2), 50, 50.0, 0.1
    )
    assert documents_needed((-0.01, 0.01), 50, 50.0, 0.9) == 10
