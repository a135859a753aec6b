"""The verdict says what the results say, no more."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from scipy.stats import binomtest
from study_samples import ARMS, first, make_answers, make_evaluation, make_report, make_result

from kinject.report.formatting import format_name, format_p, format_points, join_words
from kinject.report.verdict import AnsweredQuestion, Finding, render_verdict
from kinject.report.view import View
from kinject.results import ArmResult, UnscoredResult


def finding_of(answered: AnsweredQuestion, arm: str, question_set: str = "new") -> Finding:
    (finding,) = [c for c in answered.findings if (c.arm, c.question_set) == (arm, question_set)]
    return finding


def verdict_on(*results: ArmResult) -> tuple[AnsweredQuestion, AnsweredQuestion, AnsweredQuestion]:
    learned, forgot, retrieval = render_verdict(View(make_evaluation(results)))
    return learned, forgot, retrieval


@pytest.mark.parametrize(("question_set", "section"), [("new", 0), ("reverse", 0), ("known", 1)])
@pytest.mark.parametrize("arm", ["reg", "par"])
def test_numbers_of_the_verdict_agree_with_the_answers(arm: str, question_set: str, section: int) -> None:
    right = make_answers()
    before, after = right[question_set, "base"], right[question_set, arm]
    gained = sum(a and not b for a, b in zip(after, before, strict=True))
    lost = sum(b and not a for a, b in zip(after, before, strict=True))
    p = binomtest(gained, gained + lost).pvalue
    text = finding_of(render_verdict(View(make_report()))[section], arm, question_set).text
    n = len(after)
    assert f"from {100 * sum(before) / n:.1f}% to {100 * sum(after) / n:.1f}%" in text
    assert f"{100 * (gained - lost) / n:+.1f} points".replace("-", "−").replace("+0.0", "0.0") in text
    assert f"{gained} question{'' if gained == 1 else 's'} became right, {lost} wrong" in text
    assert ("p < 0.001" in text) == (p < 0.001)
    assert ("Not significant" in text) == (p >= 0.05)


def test_tags_follow_significance_and_chance() -> None:
    base, n = first(50, 200), 200
    results = [make_result("base", base, None)]
    results += [make_result("learner", first(150, n), base), make_result("same", first(53, n), base)]
    results += [make_result("worse", first(20, n), base)]
    learned, _, _ = verdict_on(*results)
    assert [finding.tag for finding in learned.findings] == ["at chance", "learned", "no learning shown", "got worse"]
    assert learned.lead == (
        "On new, learner (+50.0 points) learned; no learning is shown for same (+1.5 points); "
        "worse (−15.0 points) got worse."
    )


def test_a_gain_from_below_chance_up_to_chance_is_not_called_learning() -> None:
    base = first(10, 200)
    learned, _, _ = verdict_on(make_result("base", base, None), make_result("up", first(52, 200), base))
    assert [finding.tag for finding in learned.findings] == ["below chance", "not above chance"]
    assert "learned" not in learned.lead


def test_base_is_told_from_chance_by_its_wilson_interval() -> None:
    for n_right in range(0, 201, 5):
        result = make_result("base", first(n_right, 200), None)
        tag = verdict_on(result)[0].findings[0].tag
        expected = "above chance" if result.low > 0.25 else "below chance" if result.high < 0.25 else "at chance"
        assert tag == expected


def test_unscored_questions_are_owned_up_to() -> None:
    learned, _, _ = verdict_on(make_result("base", first(50, 200), None, n_unscored=12))
    assert "12 of its questions have no score and are left out" in learned.findings[0].text


def test_an_arm_without_a_score_diverged_and_is_not_said_to_forget() -> None:
    lost = UnscoredResult("base", "ft", "known", "retention", "texts", 0, 0, 200)
    report = make_evaluation((make_result("base", first(190, 200), None, question_set="known", role="retention"),))
    _, forgot, _ = render_verdict(View(replace(report, unscored=(lost,))))
    assert forgot.lead == "On known, ft diverged: no question has a score."
    _, alone, _ = render_verdict(View(replace(report, results=(), unscored=(lost,))))
    assert alone.lead == "On known, ft diverged: no question has a score."


def test_retention_says_what_loss_remains_possible() -> None:
    base = first(196, 200)
    results = [make_result("base", base, None, question_set="known", role="retention")]
    results += [make_result("par", first(194, 200), base, question_set="known", role="retention")]
    learned, forgot, retrieval = verdict_on(*results)
    contrast = results[1].to_base
    assert contrast is not None
    low, high = contrast.low, contrast.high
    assert finding_of(forgot, "par", "known").tag == "no loss shown"
    assert f"changes of {format_points(low)} to {format_points(high)} points remain possible" in forgot.findings[1].text
    assert learned.lead.startswith("This evaluation cannot say")
    assert retrieval.lead.startswith("This evaluation cannot say")


def test_without_a_retention_set_the_verdict_says_that_it_cannot_say() -> None:
    base = first(50, 200)
    _, forgot, _ = verdict_on(make_result("base", base, None), make_result("par", first(150, 200), base))
    assert "retention" in forgot.lead
    assert not forgot.findings


def test_one_model_only_makes_no_claim_of_learning() -> None:
    learned, forgot, retrieval = verdict_on(make_result("base", first(50, 200), None))
    assert all(answered.lead.startswith("This evaluation cannot say") for answered in (learned, forgot, retrieval))
    assert [finding.arm for finding in learned.findings] == ["base"]


def test_retrieval_is_compared_with_training_by_its_own_contrast() -> None:
    base = first(50, 200)
    results = [make_result("base", base, None), make_result("base+rag", first(190, 200), base, k=3)]
    results += [make_result("par", first(150, 200), base), make_result("par+rag", first(192, 200), base, k=3)]
    results += [make_result("best", first(200, 200), base)]
    _, _, retrieval = verdict_on(*results)
    assert finding_of(retrieval, "base+rag").tag == "retrieval helps"
    assert finding_of(retrieval, "par").tag == "retrieval better"
    assert finding_of(retrieval, "par+rag").tag == "no addition shown"
    assert finding_of(retrieval, "best").tag == "better than retrieval"
    assert "75.0% against 95.0% for base+rag: −20.0 points" in finding_of(retrieval, "par").text


def test_nine_questions_are_too_few_to_judge_whatever_the_change() -> None:
    base = first(0, 9)
    results = [make_result("base", base, None), make_result("par", first(9, 9), base)]
    learned, _, _ = verdict_on(*results)
    assert finding_of(learned, "par").tag == "too few questions to tell"
    assert learned.lead == "On new, par (+100.0 points) cannot be judged: the questions are too few to tell."
    assert "9 questions are too few to tell; 10 are needed." in finding_of(learned, "par").text
    known = [replace(result, question_set="known", role="retention") for result in results]
    _, forgot, _ = verdict_on(*known)
    assert "no loss" not in forgot.lead
    contrast = results[1].to_base
    assert contrast is not None
    clustered = replace(results[1], n=90, to_base=replace(contrast, n=90, test="sign flips"))
    learned, _, _ = verdict_on(results[0], clustered)
    assert finding_of(learned, "par").tag == "too few documents to tell"


def test_the_headline_is_the_first_way_of_asking_and_the_others_are_summed_up() -> None:
    base, better = first(50, 200), first(120, 200)
    results = [make_result("base", base, None), make_result("par", better, base)]
    results += [
        make_result("base", base, None, format="letters"),
        make_result("par", first(51, 200), base, format="letters"),
    ]
    results += [make_result("base", base, None, shots=5), make_result("par", first(90, 200), base, shots=5)]
    learned, _, _ = verdict_on(*results)
    assert "from 25.0% to 60.0%" in finding_of(learned, "par").text
    assert "In the other 2 formats: +0.5 to +20.0 points, significant in 1 of 2." in finding_of(learned, "par").text


def test_several_k_are_several_arms_and_the_first_is_the_headline() -> None:
    base = first(50, 200)
    results = [make_result("base", base, None)]
    results += [
        make_result("base+rag", first(180, 200), base, k=1),
        make_result("base+rag", first(190, 200), base, k=5),
    ]
    results += [make_result("par", first(100, 200), base)]
    _, _, retrieval = verdict_on(*results)
    assert [finding.arm for finding in retrieval.findings] == ["base+rag, K = 1", "par"]
    assert "with 1 passage before" in retrieval.findings[0].text


def test_many_arms_are_counted_in_the_lead_and_named_below() -> None:
    base = first(50, 200)
    results = [make_result("base", base, None), *(make_result(f"m{i}", first(100 + i, 200), base) for i in range(12))]
    learned, _, _ = verdict_on(*results)
    assert learned.lead == "On new, 12 arms (+25.0 to +30.5 points) learned."
    assert [finding.arm for finding in learned.findings] == ["base", *(f"m{i}" for i in range(12))]


@pytest.mark.parametrize(
    ("p", "text"),
    [(0.0, "p < 0.001"), (1e-200, "p < 0.001"), (0.00099, "p < 0.001"), (0.012, "p = 0.012"), (0.0499, "p < 0.05"),
     (0.0501, "p > 0.05"), (0.05, "p = 0.050"), (0.21, "p = 0.21"), (1.0, "p = 1.00")],
)  # fmt: skip
def test_p_is_never_shown_as_zero_nor_on_the_wrong_side_of_the_threshold(p: float, text: str) -> None:
    assert format_p(p) == text


def test_points_are_signed_and_nothing_has_no_sign() -> None:
    assert [format_points(d) for d in (0.012, -0.3, 0.0, -0.0001)] == ["+1.2", "−30.0", "0.0", "0.0"]


def test_names_are_one_clean_line() -> None:
    assert format_name("a\nb\x00\x1b[31m\u202ec\ud800") == "a b\ufffd\ufffd[31m\ufffdc\ufffd"
    assert format_name("abcdefghij" * 4, 11) == "abcde…fghij"
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c"]) == "a, b and c"


def test_every_lead_tag_has_its_wording() -> None:
    text = " ".join(answered.lead for answered in render_verdict(View(make_report())))
    assert not re.search(r"[{}]", text)
    assert all(arm in text for arm in ARMS if arm not in ("base", "base+rag"))
