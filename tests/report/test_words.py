"""Words that claim something appear only where the numbers allow them: every kind of result, one after another."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from study_samples import first, make_contrast, make_evaluation, make_result

from kinject.recipe.study_section import ClaimSection
from kinject.report.details import claims_table
from kinject.report.headline import render_headline
from kinject.report.limitations import render_limitations
from kinject.report.summary import render_summary
from kinject.report.tables import numbers_tables
from kinject.report.verdict import Finding, render_verdict
from kinject.report.view import View
from kinject.results import (
    FEWEST,
    Choice,
    Report,
    Role,
    Scope,
    Sweep,
    SweepPoint,
    UnscoredResult,
    fewest_for,
)
from kinject.study.analysis import _Tested, _with_verdict

UP = {
    "learned",
    "gained",
    "retrieval helps",
    "better than retrieval",
    "adds to retrieval",
    "both help",
    "not above chance",
}
DOWN = {"got worse", "forgot", "retrieval hurts", "retrieval better", "hurts retrieval"}
NOT_SHOWN = {"no learning shown", "no loss shown", "no help shown", "no difference shown", "no addition shown"}
TOO_FEW = {"too few questions to tell", "too few documents to tell"}
STRONG_WORDS = re.compile(r"\b(learned|forgot|better|worse|gained|helps?)\b")
SCOPES: tuple[Scope, ...] = ("method", "these models")
KINDS = list(itertools.product(
    (1, 9, 10, 16, 200), (1, 2655), (None, 0.0001, 0.2), (-0.3, 0.3), (0.2, 0.5), SCOPES, ("learning", "retention")
))  # fmt: skip
"""Documents, size of the family, Holm's p, difference, lower end of the interval (chance is 0.25), scope, role."""


def made(n: int, family: int, p: float | None, delta: float, low: float, scope: Scope, role: Role) -> Report:
    """Return an evaluation of base and ft, with passages and without, whose every contrast has these numbers."""
    right = first(3 * n // 5, n)
    base = make_result("base", right, None, role=role, n_documents=n)
    contrast = replace(
        make_contrast(right, right), delta=delta, p=p, p_holm=p, family=family, scope=scope, n=2 * n, n_clusters=n, n_effective=n,
        low=None if p is None else delta - 0.1, high=None if p is None else delta + 0.1,
    )  # fmt: skip
    ft = replace(make_result("ft", right, right, role=role, n_documents=n), low=low, high=0.9, to_base=contrast)
    beside = {"to_rag": contrast, "to_base": contrast}
    results = (
        base, replace(ft, to_rag=contrast), replace(base, k=1, to_base=contrast),
        replace(ft, k=1, **beside, to_plain=contrast),
    )  # fmt: skip
    report = make_evaluation(results)
    kept = zip(report.results, results, strict=True)
    return replace(report, results=tuple(replace(new, to_rag=old.to_rag, chosen_k=new.k > 0) for new, old in kept))


def judged(report: Report) -> tuple[list[Finding], str]:
    """Return the findings that judge a difference, and all leads."""
    verdict = render_verdict(View(report))
    findings = [f for answered in verdict for f in answered.findings if f.tag in UP | DOWN | NOT_SHOWN | TOO_FEW]
    return findings, " ".join(answered.lead for answered in verdict)


def test_every_kind_of_difference_has_only_the_words_that_it_bears() -> None:
    seen = set()
    for n, family, p, delta, low, scope, role in KINDS:
        if n == 1 and p is not None:
            continue  # one document has no p
        report = made(n, family, p, delta, low, scope, role)  # type: ignore[arg-type]
        findings, leads = judged(report)
        assert findings
        shown = n >= FEWEST and p is not None and p < 0.05
        enough = shown or n >= fewest_for(family)
        allowed = (UP if delta > 0 else DOWN) if shown else NOT_SHOWN if enough else TOO_FEW
        assert {finding.tag for finding in findings} <= allowed, (n, family, p, delta)
        assert ("learned" in {f.tag for f in findings}) <= (low > 0.25)
        assert bool(STRONG_WORDS.search(leads)) == shown
        assert ("in these models" in leads) == (scope == "these models")
        for finding in findings:
            assert ("in these models" in finding.text) == (shown and scope == "these models")
            assert ("are too few to tell" in finding.text) <= (not enough)
        headline, sure = render_headline(View(report), render_verdict(View(report)))
        claimed = re.sub(
            "not shown to have learned|has the role learning|no loss|no difference|its forgetting was not", "", headline
        )
        assert not shown or role != "learning" or STRONG_WORDS.search(claimed)
        assert shown or not re.search(r"\b(learned|forgot|better|worse|gained|lost)\b", claimed)
        assert "these models" in sure or role != "learning"  # the report has one seed
        assert headline.startswith("No question set has the role learning") == (role == "retention")
        seen |= {finding.tag for finding in findings}
        tables = "".join(table.subtitle for table in numbers_tables(View(report)))
        assert ("in these models" in tables) == (scope == "these models")
        assert any("Too many comparisons" in line for line in render_limitations(View(report))) == (
            FEWEST <= n < fewest_for(family)
        )
    assert seen == (UP - {"adds to retrieval"}) | DOWN | NOT_SHOWN | {"too few documents to tell"}


def test_many_sets_in_one_line_are_those_of_these_models_too() -> None:
    single = made(200, 1, 0.0001, 0.3, 0.5, "these models", "learning")
    results = [replace(result, question_set=f"set {i}") for i in range(6) for result in single.results]
    lead = render_verdict(View(replace(single, results=tuple(results))))[0].lead
    assert lead.startswith("ft, on 6 sets, in these models: learned 6")


def test_one_arm_with_one_seed_beside_others_is_marked() -> None:
    single = made(200, 1, 0.0001, 0.3, 0.5, "method", "learning")
    base, ft = single.results[:2]
    assert ft.to_base is not None
    alone = replace(ft, arm="alone", to_base=replace(ft.to_base, scope="these models"))
    report = make_evaluation((base, ft, alone))
    lead = render_verdict(View(report))[0].lead
    assert lead == "On new, ft (+30.0 points) and alone (+30.0 points, this model only) learned."


def test_too_few_questions_do_not_tell_a_base_from_chance() -> None:
    base = make_result("base", first(9, 9), None, n_documents=9)
    finding = render_verdict(View(make_evaluation((base,))))[0].findings[0]
    assert finding.tag == "too few to tell from chance"
    assert "above" not in finding.text


def test_a_seed_that_diverged_is_named_and_a_model_without_a_score_is_not_said_to_forget() -> None:
    report = made(200, 1, 0.2, -0.3, 0.5, "method", "retention")
    lost = UnscoredResult("base", "ft", "new", "retention", "texts", 0, 0, 200, seed=2)
    lead = render_verdict(View(replace(report, unscored=(lost,))))[1].lead
    assert lead == "On new, no loss is shown for ft (−30.0 points); ft (seed 2) diverged: no question has a score."
    diverged = replace(report, results=report.results[:1], unscored=(lost,))
    assert render_verdict(View(diverged))[1].lead == "On new, ft diverged: no question has a score."


@pytest.mark.parametrize("late", [False, True])
def test_every_verdict_of_a_claim_has_only_the_words_that_it_bears(late: bool) -> None:
    section = ClaimSection(statement="s", test="difference", question_set="new", arm="ft", baseline="base")
    claims = []
    for p, as_claimed, scope, documents, family in itertools.product(
        (None, 0.001, 0.049, 0.051, 0.9), (True, False), SCOPES, (None, 10, 16, 200), (1, 40)
    ):
        tested = _Tested("numbers", 0.1, 0.0, 0.2, p, as_claimed, scope, documents)
        claim = replace(_with_verdict("name", section, tested, p, family), declared_late=late)
        few = documents is not None and documents < fewest_for(family)
        shown = p is not None and p < 0.05
        verdict = ("shown" if as_claimed else "opposite shown") if shown else "not shown"
        assert claim.verdict == ("cannot be tested" if p is None or (few and not shown) else verdict)
        assert claim.words == claim.verdict + (" in these models" if shown and scope == "these models" else "")
        assert ("are needed" in claim.finding) == (few and p is not None and not shown)
        claims.append(claim)
    for claim, row in zip(claims, claims_table(claims).lines, strict=True):
        cell = row.cells[1]
        assert ("in these models" in cell.text) == (claim.words != claim.verdict)
        assert (cell.below == "declared after test questions were answered") == late
    report = replace(made(200, 1, 0.2, 0.3, 0.5, "method", "learning"), kind="study", claims=tuple(claims))
    text = render_summary(report)
    assert text.count("in these models") == sum(claim.words != claim.verdict for claim in claims) + 1
    assert ("(declared late)" in text) == late


def test_what_was_tuned_and_whose_model_chose_is_said_with_its_numbers() -> None:
    report = made(200, 1, 0.0001, 0.3, 0.5, "method", "learning")
    choice = Choice("base", "trainer.learning_rate", "ft", "new", ((0.1, 0.7, 50), (0.2, 0.8, 50)), 0.2, True,
                    inherited_by=("other", "point"), reported_seeds=(0,))  # fmt: skip
    base, ft = report.results[:2]
    ft = replace(ft, by_seed=(0.8, 0.7, 0.72), accuracy=0.74)
    other, point = replace(ft, arm="other"), replace(ft, arm="point")
    evaluation = make_evaluation((base, ft, other, point), seeds=(0, 1, 2), choices=(choice,))
    arms = tuple(replace(arm, sweep="s" if arm.name == "point" else "") for arm in evaluation.arms)
    sweep = Sweep("s", "key", "base", "", False, False, (SweepPoint(1, "1", 1.0, "point"),))
    lines = render_limitations(View(replace(evaluation, arms=arms, sweeps=(sweep,))))
    (optimism,) = [line for line in lines if line.startswith("Optimism")]
    assert optimism.endswith("expect a little less of other seeds. On new: 80.0%, the other seeds 71.0%.")
    assert (
        "trainer.learning_rate 0.2 was tuned for ft only and taken over by other and 1 point of sweeps: a difference to ft may "
        "be one of tuning."
    ) in lines


def test_a_significant_mark_needs_documents_enough() -> None:
    for n, marked in ((9, False), (10, True)):
        text = render_summary(replace(made(n, 1, 0.0001, 0.3, 0.5, "method", "learning"), kind="study"))
        assert ("0.90)+" in text) == marked
