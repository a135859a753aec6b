"""The headline repeats the verdict's findings and adds none; what went wrong stands in the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from study_results import make_paper_study, make_study
from study_samples import first, make_evaluation, make_report, make_result

from kinject.report.headline import render_doubts, render_headline
from kinject.report.verdict import render_verdict
from kinject.report.view import View
from kinject.results import Perplexity, Recall, Report, UnscoredResult
from kinject.types import Written


def headline(report: Report) -> tuple[str, str]:
    view = View(report)
    return render_headline(view, render_verdict(view))


def test_it_is_about_the_arm_that_is_shown_to_be_the_best_with_what_it_lost_and_retrieval() -> None:
    text, sure = headline(make_report())
    assert text == (
        "par is the best of 2 trained arms on new: it learned new (25.7% → 81.8% correct) and got worse on reverse (29.5% → "
        "20.0% correct); no loss is shown on known; retrieval alone does better on new (96.8%) and reverse (86.5%)."
    )
    assert sure == (
        "This is about these models: each arm was trained once, and another training may differ; a difference is named "
        "only if p < 0.05."
    )


def test_without_a_shown_difference_between_the_arms_none_is_called_the_best() -> None:
    report = make_report()
    noisy = tuple(
        replace(result, to_closest=replace(result.to_closest, p=0.2)) if result.to_closest else result
        for result in report.results
    )
    text, _ = headline(replace(report, results=noisy))
    assert text == (
        "None of 2 trained arms is shown to be the best: they learned in 2 and got worse in 1 of 4 comparisons; forgot in 1 "
        "and gained in 0 of 2 comparisons; did worse than retrieval alone in 4 and did better than it in 0 of 4 comparisons."
    )
    texts = [finding.text for finding in render_verdict(View(report))[0].findings if finding.arm == "par"]
    assert "Against reg, the closest trained arm: +2" in texts[0]
    both = tuple(  # each is the best on another set: no ranking
        replace(result, to_closest=replace(result.to_closest, p=1e-9)) if result.to_closest else result
        for result in report.results
    )
    assert {result.arm for result in both if result.to_closest} == {"par", "reg"}
    assert headline(replace(report, results=both))[0].startswith("None of 2 trained arms")


def test_several_arms_on_too_few_questions_cannot_be_told_apart() -> None:
    base = first(0, 9)
    arms = [make_result(name, first(n, 9), base) for name, n in (("par", 1), ("reg", 2))]
    text, _ = headline(make_evaluation([make_result("base", base, None), *arms]))
    assert text == "None of 2 trained arms is shown to be the best: they have too few questions or documents to tell."


def test_a_difference_without_significance_is_not_named_as_one() -> None:
    base, few, some = first(50, 200), first(55, 200), first(48, 200)
    results = [make_result("base", base, None), make_result("base", base, None, question_set="known", role="retention")]
    results += [make_result("cpt", few, base, low=0.2, high=0.4),
                make_result("cpt", some, base, question_set="known", role="retention")]  # fmt: skip
    noisy = [
        result if result.to_base is None else replace(result, to_base=replace(result.to_base, p=0.4))
        for result in results
    ]
    text, _ = headline(make_evaluation(noisy))
    assert text == (
        "cpt is not shown to have learned new (25.0% → 27.5% correct); no loss is shown on known; retrieval was not tried."
    )


def test_where_no_question_asks_what_was_lost_the_perplexity_of_held_out_texts_does() -> None:
    base, tuned = make_result("base", first(50, 200), None), make_result("cpt", first(150, 200), first(50, 200))
    texts = (Perplexity("base", "stories", 9, 900, 4.0, 0.5), Perplexity("cpt", "stories", 9, 900, 800.04, 2.4))
    report = make_evaluation((base, tuned), perplexities=texts)
    assert "; its perplexity of stories went from 4.0 to 800.0; " in headline(report)[0]
    lead = render_verdict(View(report))[1].lead
    assert lead == "Perplexity of stories, without a test: 4.0 for base, 800.0 for cpt (x 200)."
    other_tokens = replace(report, perplexities=(texts[0], replace(texts[1], n_tokens=901)))
    assert "its forgetting was not measured" in headline(other_tokens)[0]


def test_several_base_models_are_counted() -> None:
    report = make_paper_study()
    text, sure = headline(report)
    view = View(report)
    findings = [f for f in render_verdict(view)[0].findings if f.tag in ("learned", "not above chance", "no learning shown",
                                                                      "got worse")]  # fmt: skip
    n_learned = sum(finding.tag == "learned" for finding in findings)
    assert text.startswith(f"The trained arms learned in {n_learned} and got worse in ")
    assert f" of {len(findings)} comparisons" in text
    assert sure.startswith("Each arm was trained 3 times, with different seeds")


def test_without_a_trained_arm_it_names_the_base_and_retrieval() -> None:
    base = first(50, 200)
    results = [make_result("base", base, None), make_result("base", first(180, 200), base, k=3)]
    text, sure = headline(make_evaluation(results))
    assert text == (
        "No trained arm has a score here; the base answers 25.0% of new, 90.0% with passages before the question (guessing "
        "gives 25.0%)."
    )
    assert sure == ""


@pytest.mark.parametrize(
    ("changes", "tag", "lead", "words"),
    [
        ({}, "", "No: every prompt fitted the model's window, and every question has a score.", ""),
        ({"n_cut": 30}, "cut", "Yes: prompts were cut.", "30 of 600, 30 of 400 and 30 of 200 prompts did not fit"),
        (
            {"n_unscored": 3},
            "no score",
            "Yes: questions have no score.",
            "3 of 600, 3 of 400 and 3 of 200 questions have no",
        ),
        (
            {"written": Written(0.5, 0.5, 0.5, 0.0, 9.0, unread=0.1)},
            "unread",
            "Yes: answers name no letter.",
            "60 of 600, 40 of 400 and 20 of 200 written answers name no letter",
        ),
        (
            {"written": Written(0.5, 0.5, 0.5, 0.0, 9.0, thinking_cut=0.0001)},
            "thinking cut",
            "Yes: thinking was cut.",
            "1 of 600, 1 of 400 and 1 of 200 answers were begun by cutting",
        ),
    ],
)
def test_what_weakens_the_numbers_stands_in_the_verdict(
    changes: dict[str, Any], tag: str, lead: str, words: str
) -> None:
    report = make_report()
    doubts = render_doubts(View(replace(report, results=tuple(replace(r, **changes) for r in report.results))))
    assert doubts.lead == lead
    assert [finding.tag for finding in doubts.findings] == ([tag] if tag else [])
    assert all(words in finding.text for finding in doubts.findings)


def test_contexts_that_missed_arms_that_diverged_and_arms_that_failed_stand_there_too() -> None:
    unscored = UnscoredResult("base", "cpt", "new", "learning", "texts", 0, 0, 600)
    report = make_report(recalls=(Recall("new", 3, 450, 600), Recall("new", 1, 1, 600)), unscored=(unscored,))
    doubts = render_doubts(View(report))
    assert doubts.lead == "Yes: questions have no score and contexts missed their document."
    assert [(f.arm, f.tag, f.tone) for f in doubts.findings] == [
        ("cpt", "no score", "bad"),
        ("retrieval", "missed", "bad"),
    ]
    assert "for 150 of 600 questions (25.0%) the document is not among the 3 passages" in doubts.findings[1].text
    failed = render_doubts(View(make_study(n_seeds=1)))
    assert (failed.lead, failed.findings[-1].arm) == ("Yes: arms failed.", "ft-syn")


def test_questions_without_an_answer_have_a_clause_and_a_question_of_their_own() -> None:
    base, more, fewer = first(100, 200), first(180, 200), first(20, 200)
    texts = []
    for after in (more, fewer, first(101, 200)):
        results = [make_result("base", base, None), make_result("cpt", more, base)]
        results += [make_result("base", base, None, question_set="nobody", role="unanswerable"),
                    make_result("cpt", after, base, question_set="nobody", role="unanswerable")]  # fmt: skip
        report = make_evaluation(results)
        verdict = render_verdict(View(report))
        assert [finding.question_set for finding in verdict[0].findings] == ["new", "new"]
        assert verdict[3].question == "Does it answer what no document says?"
        texts.append((headline(report)[0].split("; ")[-1], verdict[3].lead, verdict[3].findings[0].text))
    assert [text for text, _, _ in texts] == [
        "it declines more questions that no document answers, of nobody (50.0% → 90.0%).",
        "it declines fewer questions that no document answers, of nobody (50.0% → 10.0%).",
        "no change in declining what no document answers is shown on nobody (50.0% → 50.5%).",
    ]
    assert texts[1][1] == (
        "On nobody, cpt (−40.0 points) declined less often, and answered questions that no document answers."
    )
    assert texts[1][2].startswith("To decline is correct here: from 50.0% to 10.0% (95% interval ")
    assert "0 questions became right, 80 wrong" in texts[1][2]
