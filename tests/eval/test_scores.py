from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kinject.eval.flips import find_flips, flip_row
from kinject.eval.plan import EvalArm, Plan, QuestionSet
from kinject.eval.prompts import rotate_options
from kinject.eval.results import Evaluation
from kinject.eval.scores import (
    letter_mass,
    merge_rotations,
    rescored,
    scores_of,
    summarize_written,
)
from kinject.recipe.sections import EvalSection
from kinject.types import Answer, Question

ANSWER = Answer(
    "q", "s", "m", "texts", 0, 0, (), 1, (-4.0, -6.0), n_tokens=(1, 3), n_bytes=(4, 12), n_chars=(4, 10)
)  # fmt: skip


@pytest.mark.parametrize(
    ("score", "expected"),
    [("sum", (-4, -6)), ("chars", (-1, -0.6)), ("bytes", (-1, -0.5)), ("tokens", (-4, -2))],
)
def test_scores_divide_by_the_length_they_name(score, expected):
    assert scores_of(ANSWER, score) == pytest.approx(expected)


def rotations(evidence: list[float], priors: list[float]) -> list[Answer]:
    """Answers of a model whose letter log-probs are the option's evidence plus the letter's prior."""
    question = Question("q", "Where?", tuple(f"o{i}" for i in range(len(evidence))), 2)
    answers = []
    for n in range(len(evidence)):
        rotated = rotate_options(question, n)
        log_probs = tuple(
            evidence[int(choice[1:])] + priors[i] for i, choice in enumerate(rotated.choices)
        )
        answers.append(
            Answer(
                "q", "s", "m", "rotations", 0, 0, (), rotated.answer, log_probs, (), (), rotation=n
            )
        )
    return answers


def test_a_letters_prior_drops_out_of_the_rotations_together():
    evidence = [-3.0, -2.5, -1.0, -2.0]
    for priors in ([0.0, 0.0, 0.0, 0.0], [4.0, 0.0, -1.0, 0.5]):
        (merged,) = merge_rotations(rotations(evidence, priors))
        assert (merged.gold, merged.log_probs.index(max(merged.log_probs))) == (2, 2)
        relative = [value - merged.log_probs[0] for value in merged.log_probs]
        assert relative == pytest.approx([value - evidence[0] for value in evidence])


def test_the_mass_on_the_letters_is_their_summed_probability():
    letters = replace(ANSWER, format="letters", log_probs=(math.log(0.3), math.log(0.1)))
    assert letter_mass([letters, replace(letters, log_probs=(math.nan, -1.0))]) == pytest.approx(
        0.4
    )
    assert letter_mass([ANSWER]) is None


def test_graded_answers_are_counted_by_the_rule_too():
    texts = {"Kelm": "correct", "It lies in Kelm.": "wrong", "In Arden, I think.": "correct"}
    answers = [
        Answer(f"q{n}", "s", "a", "generate", 0, 0, (), 0, (), (4,), (), text=text, accepted=("Kelm",), grade=grade)
        for n, (text, grade) in enumerate(texts.items())
    ]  # fmt: skip
    judged = summarize_written(rescored(answers, "judge"))
    ruled = summarize_written(rescored(answers, "match"))
    assert judged is not None
    assert ruled is not None
    assert (judged.by_rule, ruled.by_rule) == (2 / 3, None)


def test_instructions_have_no_f1_and_are_right_by_their_checks():
    asked = replace(ANSWER, format="generate", log_probs=(), n_tokens=(3,))
    checked = [replace(asked, text=text, checks={"min_words": 2}) for text in ("Two words", "One")]
    open_one = replace(asked, text="Ulm on the Danube", accepted=("Ulm",), grade="correct")
    alone, mixed = (
        summarize_written(rescored(answers, "judge")) for answers in (checked, [*checked, open_one])
    )
    assert alone is not None
    assert mixed is not None
    # One word in common of three (the article does not count) and one.
    assert (alone.f1, mixed.f1, mixed.by_rule) == (None, 2 / 4, 2 / 3)


@pytest.mark.parametrize(
    ("seeds", "change", "chosen"),
    [
        ((2, 2, 0, 1, 3, 2, 4), "right to wrong", 0),
        ((2, 4, 4), "right to wrong", 4),
        ((2, 2, 0), "right to right", 2),
    ],
)
def test_a_flip_to_wrong_never_names_the_right_choice(seeds, change, chosen):
    question = Question("q", "Where?", tuple("vwxyz"), 2)
    now, before = (
        [
            replace(ANSWER, gold=2, log_probs=tuple(float(index == best) for index in range(5)))
            for best in bests
        ]
        for bests in (seeds, (2,) * len(seeds))
    )
    row = flip_row(question, now, before)
    assert (row["change"], row["chosen"], row["base_chosen"]) == (change, chosen, 2)


def evaluation_of(
    sums: dict[str, tuple[float, float]], scores: tuple[str, ...], form: str = "texts"
) -> Evaluation:
    """One question of two arms, whose choices of 2 and 8 characters have these log-probs."""
    question = Question("q", "Where?", ("up", "downhill"), 1)
    arms = tuple(EvalArm(name, form, 0, 0) for name in sums)
    asked = QuestionSet("s", "learning", (question,), (), (), arms)
    answers = {
        ("s", arm): [replace(ANSWER, arm=arm.name, log_probs=sums[arm.name], n_chars=(2, 8))]
        for arm in arms
    }
    section = EvalSection(
        models=dict.fromkeys(sums, "a"), questions={"s": "s.jsonl"}, scores=scores
    )
    return Evaluation(Plan((asked,), (), ()), section, answers)


def test_an_answer_changed_by_the_score_that_decides_the_report():
    """Per character the base takes the short choice, the trained arm the long one; the sums of both
    are highest for the short one."""
    evaluation = evaluation_of({"base": (-1.0, -9.0), "ft": (-3.0, -7.0)}, ("chars", "sum"))
    (row,) = find_flips(evaluation)
    assert (row["change"], row["base_chosen"], row["chosen"]) == ("wrong to right", 0, 1)
    assert (row["base_log_probs"], row["log_probs"]) == ([-1.0, -9.0], [-3.0, -7.0])
    by_sum = evaluation_of({"base": (-1.0, -9.0), "ft": (-3.0, -7.0)}, ("sum", "chars"))
    assert list(find_flips(by_sum)) == []


def test_choices_without_the_question_are_no_changed_answers_to_it():
    sums = {"base": (-1.0, -2.0), "ft": (-2.0, -1.0)}
    assert len(list(find_flips(evaluation_of(sums, ("sum",))))) == 1
    assert list(find_flips(evaluation_of(sums, ("sum",), "texts-no-question"))) == []
