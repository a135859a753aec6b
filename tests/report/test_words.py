"""Each word of a report is used only where its test allows it, and the first sentences of odd reports are those read by eye."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from odd_reports import OPENINGS, few_documents, odd_reports, opening_text
from study_results import make_small, make_study
from study_samples import first, make_contrast, make_evaluation, make_report, make_result

from kinject.report.doubts import doubts, limitations
from kinject.report.formatting import (
    Training,
    View,
    format_name,
    format_p,
    format_points,
    join_words,
)
from kinject.report.result_tables import results_table
from kinject.report.tables import claims_table, names_table, small_tables
from kinject.report.words import _TONES, _WORDS, write_opening
from kinject.results import Choice, Perplexity, Recall, Report, Shortcuts
from kinject.stats.comparisons import About, Tag
from kinject.types import Advice, Written

ODD = odd_reports()
BASE, TUNED = first(50, 200), first(90, 200)


def evaluation(contrast: dict[str, Any], role: str = "learning", **changes: Any) -> Report:
    """Return the report of base and one arm whose contrast to base has these fields."""
    results = (
        make_result("base", BASE, None, role=role),
        make_result("cpt", TUNED, BASE, role=role, **changes),
    )
    assert results[1].to_base is not None
    return make_evaluation(
        (results[0], replace(results[1], to_base=replace(results[1].to_base, **contrast)))
    )


def evidence(report: Report) -> list[tuple[str, str]]:
    """Return (tag, text) of everything behind the answers."""
    return [
        (item.tag, item.text)
        for answer in write_opening(View(report)).answers
        for item in answer.evidence
    ]


@pytest.mark.parametrize("name", ODD)
def test_the_first_sentences_of_odd_reports_are_those_that_were_read(name: str) -> None:
    path = OPENINGS / f"{name.replace(', ', '-').replace(' ', '-').lower()}.txt"
    assert opening_text(ODD[name]) == path.read_text("utf-8"), (
        "read it, then run tests/report/odd_reports.py"
    )


def test_there_is_no_opening_without_its_report() -> None:
    assert len(list(OPENINGS.iterdir())) == len(ODD)


def test_every_finding_has_words_and_every_tone_a_tag() -> None:
    judged = (About.LEARNING, About.RETENTION, About.DECLINING, About.INSTEAD, About.ADDED)
    special = {Tag.NOTHING_TO_LOSE, Tag.WITHOUT_QUESTION}
    common = set(Tag) - {Tag.TOO_FEW, Tag.ALONE} - special
    assert {about: set(words) - special for about, words in _WORDS.items()} == dict.fromkeys(
        judged, common
    )
    assert [about for about, words in _WORDS.items() if Tag.WITHOUT_QUESTION in words] == [
        About.LEARNING
    ]
    assert [about for about, words in _WORDS.items() if Tag.NOTHING_TO_LOSE in words] == [
        About.RETENTION
    ]
    tags = {tag for words in _WORDS.values() for tag, _ in words.values()}
    assert set(_TONES) - {"both help"} <= tags


@pytest.mark.parametrize(
    ("role", "contrast", "tag"),
    [
        ("learning", {}, "learned"),
        ("learning", {"p_holm": 0.049}, "learned"),
        ("learning", {"p_holm": 0.051}, "not after Holm"),
        ("learning", {"p": 0.051}, "no learning shown"),
        ("learning", {"delta": -0.2, "low": -0.3, "high": -0.1}, "got worse"),
        ("learning", {"n_clusters": 9, "n_effective": 9}, "too few to tell"),
        ("retention", {}, "gained"),
        ("retention", {"delta": -0.2, "low": -0.3, "high": -0.1}, "forgot"),
        ("retention", {"p": 0.6, "low": -0.02, "high": 0.03, "can_lose": True}, "no large loss"),
        ("retention", {"p": 0.6, "low": -0.12, "high": 0.03, "can_lose": True}, "loss undecided"),
        ("retention", {"p": 0.6, "low": -0.12, "high": 0.03, "can_lose": False}, "nothing to lose"),
        ("unanswerable", {}, "declines more"),
        ("unanswerable", {"delta": -0.2}, "declines less"),
    ],
)
def test_each_comparison_has_only_the_words_that_its_test_allows(
    role: str, contrast: dict[str, Any], tag: str
) -> None:
    tags = [found for found, _ in evidence(evaluation(contrast, role))]
    assert tags[:1] == [tag]


def test_a_gain_that_ends_at_guessing_is_not_called_learning() -> None:
    report = evaluation({}, low=0.2, high=0.5, interval="Wilson over documents and seeds")
    assert evidence(report)[0][0] == "gained, not above guessing"
    assert "cannot be told from guessing" in write_opening(View(report)).answers[0].lead


def test_a_loss_that_remains_possible_is_named_and_a_shown_one_has_its_p() -> None:
    report = evaluation(
        {"p": 0.6, "delta": -0.04, "low": -0.12, "high": 0.03, "can_lose": True}, "retention"
    )
    lead = write_opening(View(report)).answers[1].lead
    assert lead.startswith(
        "In these models: on “new”, too few questions to see a loss below 12.0 points in cpt (−4.0 points)."
    )
    assert "changes of −12.0 to +3.0 points remain possible" in evidence(report)[0][1]
    report = evaluation({"p_holm": 0.003, "family": 2})
    assert "p = 0.003 after Holm" in evidence(report)[0][1]


def test_an_interval_far_from_zero_beside_a_corrected_p_says_that_the_correction_decided() -> None:
    far = {"p": 0.002, "p_holm": 0.13, "family": 65, "delta": 0.59, "low": 0.45, "high": 0.72}
    opening = write_opening(View(evaluation(far, by_seed=(0.3, 0.5, 0.55))))
    assert opening.answers[0].lead == (
        "In these models: on “new”, cpt (+59.0 points) differed from the base in a test by itself (p < 0.05), but not after "
        "Holm's correction for 65 comparisons."
    )
    (item,) = opening.answers[0].evidence
    assert (
        "3 seeds (30.0% to 55.0%): +59.0 points (95% interval +45.0 to +72.0; p = 0.13 after Holm)"
        in item.text
    )
    assert item.text.endswith("; p = 0.002 in a test by itself, and 65 comparisons were made.")
    assert opening.open[0].startswith("On “new”, Holm's correction decides")


def test_too_few_documents_are_the_reason_and_the_number_that_is_needed_is_named() -> None:
    results = [few_documents(make_result(arm, right, base), 8) for arm, right, base in
               (("base", BASE, None), ("cpt", TUNED, BASE), ("sft", first(70, 200), BASE))]  # fmt: skip
    opening = write_opening(View(make_evaluation(results)))
    assert "8 documents" in opening.effect
    assert "none is shown to be the best" not in opening.effect
    assert opening.answers[0].lead.startswith("On “new”, 8 documents are too few for any test of")
    assert opening.open[0] == "On “new”, a test needs questions on at least 10 documents (now 8)."


def test_both_help_only_where_both_beat_either_alone() -> None:
    def tag(**changes: Any) -> str:
        gain = make_contrast(first(190, 200), first(120, 200))
        results = [
            make_result("base", BASE, None),
            make_result("base+rag", first(120, 200), BASE, k=1),
        ]
        both = make_result("cpt", first(190, 200), BASE, k=1, to_plain=replace(gain, **changes))
        report = make_evaluation([*results, make_result("cpt", TUNED, BASE), both])
        return next(
            item for item in evidence(report) if item[0] in ("both help", "adds to retrieval")
        )[0]

    assert (tag(), tag(p=0.2), tag(delta=-0.1)) == (
        "both help",
        "adds to retrieval",
        "adds to retrieval",
    )


def test_where_several_k_were_asked_the_compared_one_is_named() -> None:
    results = [make_result("base", BASE, None), make_result("cpt", TUNED, BASE)]
    results += [
        make_result(arm, first(n, 200), BASE, k=k)
        for arm in ("base", "cpt")
        for k, n in ((1, 180), (3, 60))
    ]
    (answer,) = [
        a
        for a in write_opening(View(make_evaluation(results))).answers
        if a.question.startswith("Would")
    ]
    assert answer.lead == "On “new” with K = 1, retrieval alone did better than cpt (−45.0 points)."
    assert {item.arm for item in answer.evidence} == {"cpt", "cpt with passages, K = 1"}


def test_an_arm_is_the_best_only_if_its_difference_to_every_other_is_shown() -> None:
    report = make_report()
    assert "par did best of these 2 trained models." in write_opening(View(report)).effect

    def of(p: float) -> Report:
        results = (
            replace(r, to_closest=r.to_closest and replace(r.to_closest, p=p))
            for r in report.results
        )
        return replace(report, results=tuple(results))

    assert "none is shown to be the best" in write_opening(View(of(0.2))).effect
    assert (
        "none is shown to be the best" in write_opening(View(of(1e-9))).effect
    )  # each on another set: no ranking


def test_what_went_wrong_is_never_passed_over() -> None:
    view = View(make_report())
    assert doubts(view).lead.startswith("No sign of it")
    cut = {("base", "par"): Training("", 4, 4 / 11, True)}
    assert (
        doubts(View(make_report(), cut)).lead
        == "Yes: a training read a part of its rows only (par)."
    )
    assert "36.4% of its rows" in doubts(View(make_report(), cut)).evidence[0].text
    for changes, words in (
        ({"mass": 0.49}, "letters hold under half of the probability"), ({"n_cut": 3}, "prompts were cut"),
        ({"n_unscored": 3}, "questions have no score"),
    ):  # fmt: skip
        results = tuple(replace(r, **changes) for r in make_report().results)  # type: ignore[arg-type]
        assert words in doubts(View(replace(make_report(), results=results))).lead
    missed = replace(make_report(), recalls=(Recall("new", 3, 50, 100),))
    assert "contexts missed their document (retrieval)" in doubts(View(missed)).lead
    assert "arms failed (ft-syn)" in doubts(View(make_study(n_seeds=1))).lead


def test_unlikely_letters_are_a_mean_and_no_count_of_questions() -> None:
    first, *others = make_report().results
    masses = (replace(first, mass=0.37), *(replace(result, mass=0.41) for result in others))
    (line, *_) = doubts(View(replace(make_report(), results=masses))).evidence
    assert line.text.startswith("the letters have 37.0% on average")
    assert f"of {first.n}" not in line.text


def _effect_with(n_right: dict[str, int]) -> str:
    base = [index < 40 for index in range(200)]
    arms = [
        make_result(name, [index < n for index in range(200)], base) for name, n in n_right.items()
    ]
    results = (make_result("base", base, None), *arms)
    return write_opening(View(make_evaluation(results))).effect


def test_arms_that_are_equally_high_are_all_named_or_counted() -> None:
    two = _effect_with({"lora": 120, "cpt": 131, "sft": 131})
    assert re.search(r"Highest: cpt \(\+45\.5 points, [^)]+\) and sft \(\+45\.5, [^)]+\);", two)
    four = _effect_with({"lora": 120, "cpt": 131, "sft": 131, "dora": 131, "ia3": 131})
    assert "Highest: 4 of them alike; none is shown" in four
    one = _effect_with({"lora": 120, "cpt": 132, "sft": 131})
    assert re.search(r"Highest: cpt \([^)]+\); none", one)


def test_one_document_is_too_few_and_five_are() -> None:
    base = make_result("base", BASE, None)
    tuned = make_result("cpt", TUNED, BASE)
    for n, words in ((1, "1 document is too few for"), (5, "5 documents are too few for")):
        change = replace(tuned.to_base, n_clusters=n, n_effective=n)  # type: ignore[type-var]
        view = View(make_evaluation((base, replace(tuned, to_base=change))))
        learned = write_opening(view).answers[0]
        assert words in learned.lead
        assert words in learned.evidence[0].text


def test_a_difference_that_a_judge_sees_and_the_rule_does_not_is_a_doubt() -> None:
    base_right, tuned_right = [False] * 160 + [True] * 40, [False] * 100 + [True] * 100

    def lead(before: float, after: float) -> str:
        base = make_result("base", base_right, None, written=Written(0.2, 9.0, by_rule=before))
        tuned = make_result(
            "cpt", tuned_right, base_right, written=Written(0.5, 9.0, by_rule=after)
        )
        return doubts(View(make_evaluation((base, tuned)))).lead

    tag = "only the judge sees the difference (cpt)"  # of 30 points
    assert tag in lead(0.35, 0.49)
    assert tag in lead(0.35, 0.20)
    assert tag not in lead(0.35, 0.51)
    assert tag not in lead(0.20, 0.50)


def test_questions_without_a_score_are_in_no_percentage_and_stand_beside_it() -> None:
    base = make_result("base", BASE, None, n=203, n_unscored=3, n_documents=200)
    alone = make_evaluation((base,))
    opening = write_opening(View(alone)).effect
    assert "25.0% of 200 questions “new”" in opening
    assert "3 more have no score" in opening
    tuned = make_result("cpt", TUNED, BASE, n=203, n_unscored=3, n_documents=200)
    both = View(make_evaluation((base, tuned)))
    opening = write_opening(both).effect
    assert "50 of 200 questions “new” before and 90 after training" in opening
    assert "; 3 more have no score)" in opening
    (row,) = (row for row in names_table(both).lines if row[0].text == "“new”")
    assert row[1].text.startswith("203 questions, up to 3 of the questions without a score: ")
    for row in results_table(both).lines:
        assert row[results_table(both).columns.index("n")].text == "200 of 203"
    assert "documents" not in results_table(both).columns  # each question is its own
    several = View(make_evaluation((base, tuned, replace(tuned, arm="ft"))))
    assert "200 questions, 3 more have no score" in write_opening(several).effect


def test_limits_tell_of_choices_and_seeds() -> None:
    choice = Choice(
        "sandbox",
        "trainer.learning_rate",
        "ft-par",
        "new",
        ((1e-4, 0.4, 99), (1e-3, 0.8, 99)),
        1e-3,
        True,
    )
    text = " ".join(limitations(View(make_small(choices=(choice,)))))
    for words in ("end of its grid", "was tuned for ft-par: where other arms take it over"):
        assert words in text


def test_a_claim_declared_late_or_about_one_seed_is_marked() -> None:
    claim = replace(make_study(n_seeds=1).claims[0], declared_late=True, scope="these models")
    (row,) = claims_table([claim]).lines
    assert (row[1].text, row[1].tone) == ("✓ shown in these models", "good")
    assert row[1].below == "declared after test questions were answered"


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (0.0, "p < 0.001"),
        (0.0499, "p < 0.05"),
        (0.0501, "p > 0.05"),
        (0.012, "p = 0.012"),
        (0.5, "p = 0.50"),
    ],
)
def test_p_is_never_shown_as_zero_nor_on_the_wrong_side_of_the_threshold(
    p: float, text: str
) -> None:
    assert format_p(p) == text


def test_names_are_one_clean_line_and_points_are_signed() -> None:
    assert format_name("a\n b\t\u202ec\x00") == "a b \ufffdc\ufffd"
    assert format_name("a long name of a model", 9) == "a lo…odel"
    assert [format_points(value) for value in (0.012, -0.012, 0.0, -0.0001)] == [
        "+1.2",
        "−1.2",
        "0.0",
        "0.0",
    ]
    assert [join_words(list("abc")[:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
    assert join_words(["a", "a, 1", "a, 2"]) == "a; a, 1; and a, 2"


def test_the_opening_says_what_kind_of_questions_were_asked() -> None:
    report = evaluation({})
    kind = (
        "cloze by rule\non the sentences that were trained (one passage each of 9 of 61 documents)."
    )
    opening = write_opening(View(replace(report, about_sets={"new": kind, "gone": "no such set"})))
    assert opening.effect.endswith(
        ". Questions “new”: cloze by rule on the sentences that were trained "
        "(one passage each of 9 of 61 documents)."
    )


@pytest.mark.parametrize(
    ("role", "changes", "perplexity", "missing"),
    [
        ("retention", {}, False, "chat (no such set whose answers are written) and prose (no eval.perplexity_corpus)"),
        ("retention", {"written": Written(0.5, 9.0)}, False, "prose (no eval.perplexity_corpus)"),
        ("retention", {"written": Written(0.5, 9.0)}, True, ""),
        ("learning", {}, True, "knowledge (no set of the role retention) and chat (no such set whose answers are written)"),
        ("learning", {}, False, ""),
    ],
)  # fmt: skip
def test_what_no_number_of_forgetting_shows_is_named(
    role: str, changes: dict[str, Any], perplexity: bool, missing: str
) -> None:
    report = evaluation({}, role, **changes)
    if perplexity:
        item = Perplexity("cpt", "prose", 4, 400, 21.0, 1.5)
        report = replace(report, perplexities=(replace(item, arm="base"), item))
    lead = write_opening(View(report)).answers[1].lead
    assert lead.partition("Not measured: ")[2] == (missing and f"{missing}.")


def test_a_set_that_only_the_base_was_asked_is_not_said_to_be_missing() -> None:
    base = Perplexity("base", "prose", 4, 400, 21.0, 1.5)
    report = make_evaluation((make_result("base", BASE, None, role="retention"),))
    lead = write_opening(View(replace(report, perplexities=(base,)))).answers[1].lead
    assert lead.startswith("Forgetting was not measured: no trained arm")
    assert "no set" not in lead


def test_no_perplexity_is_called_the_base_s_where_the_base_has_none() -> None:
    """The base is behind an endpoint, which gives no perplexity of texts."""
    cpt = Perplexity("cpt", "prose", 4, 400, 21.0, 1.5)
    report = evaluation({}, "retention")
    alone = View(replace(report, perplexities=(cpt, replace(cpt, arm="ft", per_token=42.0))))
    assert "Perplexity" not in write_opening(alone).answers[1].lead
    (table,) = small_tables(alone)
    assert "to base" not in table.columns
    beside = View(replace(report, perplexities=(replace(cpt, arm="base", per_token=14.0), cpt)))
    assert "21.0 for cpt (+50.0%)" in write_opening(beside).answers[1].lead
    (table,) = small_tables(beside)
    assert [row[-2].text for row in table.lines] == ["base", "+50.0%"]


def test_what_a_training_warned_of_is_among_what_went_wrong() -> None:
    warned = Training("texts", 30, 2.0, True, ("the loss rose\nin step 7", "x" * 999))
    answer = doubts(View(evaluation({}), {("base", "cpt"): warned}))
    assert answer.lead == "Yes: a training warned (cpt)."
    assert answer.evidence[0].text == "the loss rose in step 7."
    sentence = Training("texts", 30, 2.0, True, ("It reads a part. Set max_steps to 144.",))
    (line,) = doubts(View(evaluation({}), {("base", "cpt"): sentence})).evidence
    assert line.text == "It reads a part. Set max_steps to 144."
    assert max(len(item.text) for item in answer.evidence) < 450


def test_sets_that_can_be_picked_without_reading_are_named_once() -> None:
    shortcuts = tuple(
        Shortcuts(name, 64, 0.8, 0.78, 0.26, 0.24, longest, 0.24, 0.25)
        for name, longest in (("facts", 0.31), ("fair", 0.29), ("dates", 0.4))
    )
    answer = doubts(View(replace(evaluation({}), shortcuts=shortcuts)))
    assert answer.lead == "Yes: choices can be picked without reading (“facts” and “dates”)."
    assert [line.question_set for line in answer.evidence] == ["“facts”", "“dates”"]
    assert answer.evidence[1].arm == "every arm"
    assert answer.evidence[1].text.startswith("80% of the right and 78% of the wrong choices")
    assert "picks the longest choice has 40% of 64 right" in answer.evidence[1].text


def test_the_advice_stands_behind_the_effect_and_sets_with_the_same_share_a_sentence() -> None:
    report = make_report()
    opening = write_opening(View(report))
    assert opening.paragraphs()[1] == opening.advice
    assert (
        opening.advice
        == "On this evidence: on “new” and “reverse”, retrieval is the better first choice."
    )
    few = Advice("base", "new", "par", "", "too few", 0.1, 6, 2)
    one = Advice("base", "reverse", "par", "", "not shown", 0.1, 1, 1, ("known",))
    assert write_opening(View(replace(report, advice=(few, one)))).advice == (
        "On this evidence: on “new”, nothing can be decided: the documents are too few; 6 more questions on 2 more "
        "documents would allow a test. On “reverse”, neither comes first: that par does better than retrieval is not "
        "shown, and par forgot on “known”; 1 more question would decide."
    )
    many = write_opening(View(replace(report, advice=(few, one, few, one)))).advice
    assert many == "On this evidence, the first choice on 4 sets: open 4."
