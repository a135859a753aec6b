"""A study's verdict says what the corrected p and the intervals allow, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from study_results import make_paper_study, make_small

from kinject.report.limitations import render_limitations
from kinject.report.verdict import render_verdict
from kinject.report.view import View
from kinject.results import ArmResult, Contrast, Report

SMALL = make_small()


def with_score(pick: Any, **changes: Any) -> Report:
    """Return the small study with every score that `pick` takes changed; a contrast's values may be given with ``__``."""
    scores = []
    for score in SMALL.results:
        if pick(score):
            plain = {key: value for key, value in changes.items() if "__" not in key}
            for key, value in changes.items():
                if "__" in key:
                    name, field = key.split("__")
                    contrast = getattr(score, name)
                    assert isinstance(contrast, Contrast)
                    plain[name] = replace(plain.get(name, contrast), **{field: value})
            score = replace(score, **plain)
        scores.append(score)
    return replace(SMALL, results=tuple(scores))


def tags(result: Report, question: int) -> dict[str, str]:
    """Return arm -> tag of the findings on one of the three questions."""
    return {claim.arm: claim.tag for claim in render_verdict(View(result))[question].findings}


def trained(score: ArmResult) -> bool:
    return score.arm == "ft-par" and not score.k


@pytest.mark.parametrize(
    ("p_holm", "delta", "low", "tag"),
    [(0.049, 0.3, 0.5, "learned"), (0.051, 0.3, 0.5, "no learning shown"), (0.001, -0.1, 0.5, "got worse"),
     (0.001, 0.3, 0.2, "not above chance")],
)  # fmt: skip
def test_learning_needs_holms_p_and_an_interval_above_chance(p_holm: float, delta: float, low: float, tag: str) -> None:
    result = with_score(trained, to_base__p_holm=p_holm, to_base__delta=delta, low=low)
    assert tags(result, 0)["ft-par"] == tag


@pytest.mark.parametrize(
    ("p_holm", "delta", "tag"), [(0.01, -0.1, "forgot"), (0.2, -0.1, "no loss shown"), (0.01, 0.1, "gained")]
)
def test_forgetting_needs_holms_p(p_holm: float, delta: float, tag: str) -> None:
    result = with_score(trained, to_base__p_holm=p_holm, to_base__delta=delta)
    assert tags(result, 1)["ft-par"] == tag


@pytest.mark.parametrize(
    ("p_rag", "p_plain", "tag"),
    [(0.01, 0.01, "both help"), (0.01, 0.3, "adds to retrieval"), (0.3, 0.01, "no addition shown")],
)
def test_both_help_only_where_both_beat_either_alone(p_rag: float, p_plain: float, tag: str) -> None:
    changes = {"to_rag__p_holm": p_rag, "to_rag__delta": 0.05, "to_plain__p_holm": p_plain, "to_plain__delta": 0.05}
    result = with_score(lambda s: s.arm == "ft-par" and s.k and s.question_set == "new", **changes)
    assert tags(result, 2)["ft-par+rag"] == tag


def test_without_a_paired_test_retrieval_is_not_judged() -> None:
    result = with_score(lambda score: score.arm == "ft-par", to_rag=None)
    assert tags(result, 2)["ft-par"] == "not tested"
    assert any("without a paired test: ft-par and ft-par+rag" in line for line in render_limitations(View(result)))


def test_what_is_not_shown_says_how_large_it_could_be() -> None:
    result = with_score(trained, to_base__p_holm=0.9, to_base__smallest=0.0625)
    (claim,) = [claim for claim in render_verdict(View(result))[1].findings if claim.arm == "ft-par"]
    assert "a difference under 6.2 points would likely go unseen" in claim.text


def test_a_base_at_chance_leaves_nothing_to_forget_and_the_limits_say_so() -> None:
    result = with_score(lambda s: s.arm == "base" and s.role == "retention", low=0.2, accuracy=0.25, high=0.3)
    assert "a loss could not show here" in render_verdict(View(result))[1].findings[0].text
    assert any("so forgetting could not show" in line for line in render_limitations(View(result)))


def test_many_sets_and_models_are_counted_and_what_is_shown_comes_first() -> None:
    verdict = render_verdict(View(make_paper_study()))[0]
    assert verdict.lead.startswith("ft-reg, on 18 sets: ")
    shown = [claim for claim in verdict.findings if claim.tag == "learned"]
    assert f"learned {len(shown)}" in verdict.lead
    assert list(verdict.findings[: len(shown)]) == shown


def test_a_way_of_asking_that_says_the_opposite_is_named() -> None:
    extra = []
    for score in SMALL.results:
        if trained(score) and score.question_set == "new":
            assert score.to_base is not None
            extra.append(replace(score, format="letters", to_base=replace(score.to_base, delta=-0.2, p_holm=0.001)))
    result = replace(SMALL, results=(*SMALL.results, *extra))
    assert any("moved the other way" in line for line in render_limitations(View(result)))
