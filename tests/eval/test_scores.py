from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kinject.errors import InputError
from kinject.eval.prompts import rotate_options
from kinject.eval.scores import letter_mass, letter_priors, merge_rotations, rescored, scores_of
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


def test_pmi_takes_away_what_the_choice_has_without_the_question():
    without = replace(ANSWER, log_probs=(-1.0, -5.0))
    assert scores_of(ANSWER, "pmi", without) == (-3.0, -1.0)
    with pytest.raises(InputError, match="pmi needs the answer to the prompt without the question"):
        scores_of(ANSWER, "pmi")


def rotations(evidence: list[float], priors: list[float]) -> list[Answer]:
    """Answers of a model whose letter log-probs are the option's evidence plus the letter's prior."""
    question = Question("q", "Where?", tuple(f"o{i}" for i in range(len(evidence))), 2)
    answers = []
    for n in range(len(evidence)):
        rotated = rotate_options(question, n)
        log_probs = tuple(evidence[int(choice[1:])] + priors[i] for i, choice in enumerate(rotated.choices))
        answers.append(Answer("q", "s", "m", "rotations", 0, 0, (), rotated.answer, log_probs, (), (), rotation=n))
    return answers


def test_a_letters_prior_drops_out_of_the_rotations_together():
    evidence = [-3.0, -2.5, -1.0, -2.0]
    for priors in ([0.0, 0.0, 0.0, 0.0], [4.0, 0.0, -1.0, 0.5]):
        (merged,) = merge_rotations(rotations(evidence, priors))
        assert (merged.gold, merged.log_probs.index(max(merged.log_probs))) == (2, 2)
        relative = [value - merged.log_probs[0] for value in merged.log_probs]
        assert relative == pytest.approx([value - evidence[0] for value in evidence])


def test_the_prior_of_each_letter_is_found():
    fractions = [0.4, 0.3, 0.2, 0.1]
    priors = letter_priors(rotations([-3.0, -2.5, -1.0, -2.0], [math.log(fraction) for fraction in fractions]))
    assert priors == pytest.approx(fractions)


def test_the_mass_on_the_letters_is_their_summed_probability():
    letters = replace(ANSWER, format="letters", log_probs=(math.log(0.3), math.log(0.1)))
    assert letter_mass([letters, replace(letters, log_probs=(math.nan, -1.0))]) == pytest.approx(0.4)
    assert letter_mass([ANSWER]) is None


def test_scores_of_a_set_are_paired_by_question():
    answers = [ANSWER, replace(ANSWER, question_id="p", log_probs=(-2.0, -1.0))]
    without = [replace(ANSWER, question_id="p", log_probs=(-0.5, 0.0)), replace(ANSWER, log_probs=(-1.0, -1.0))]
    assert [item.log_probs for item in rescored(answers, "pmi", without)] == [(-3.0, -5.0), (-1.5, -1.0)]
