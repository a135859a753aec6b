"""Outcomes of answers: which have a score, which are right, and how often written ones are wrong, abstained or answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kinject.eval.correctness import CorrectnessMatrix
from kinject.eval.scores import best_choice, has_answer, outcome_of
from kinject.eval.statistics import bounded_accuracy, make_contrast
from kinject.results import Outcome, OutcomeResult, Scope
from kinject.types import Answer


def is_scored(answer: Answer) -> bool:
    """Return whether the answer was written, or every choice has a finite log-prob, and they are not all equal."""
    return answer.text is not None or best_choice(answer.log_probs) is not None


def is_correct(answer: Answer) -> bool:
    """Return whether the gold choice has the highest summed log-prob (the first of equals); False without a score.

    A written answer is as `rescored` found it.
    """
    return outcome_of(answer) == "right"


def has_outcome(answer: Answer, outcome: Outcome) -> bool:
    """Return whether `answer` has that outcome; answered: of a question without an answer, wrong (`counts_for`)."""
    return outcome_of(answer) == ("wrong" if outcome == "answered" else outcome)


def counts_for(answer: Answer, outcome: Outcome) -> bool:
    """Return whether `answer` has a score, and its question can have that outcome."""
    return is_scored(answer) and (outcome != "answered" or not has_answer(answer))


def other_outcomes(answers: Sequence[Answer]) -> tuple[Outcome, ...]:
    """Return the outcomes beside right that the questions of `answers` can have; () for choices."""
    if not answers or answers[0].text is None:
        return ()
    some: tuple[Outcome, ...] = ("wrong", "abstained") if any(map(has_answer, answers)) else ()
    return some if all(map(has_answer, answers)) else (*some, "answered")


_Matrices = Callable[[Outcome], CorrectnessMatrix]


def outcome_results(
    outcomes: Sequence[Outcome], own: _Matrices, others: Mapping[str, tuple[str, _Matrices]],
    scope: Scope = "these models",
) -> tuple[OutcomeResult, ...]:  # fmt: skip
    """Return the rate of each of `outcomes` with its contrasts: `others` are field -> (name, matrices of another arm)."""
    found = []
    for outcome in outcomes:
        matrix = own(outcome)
        estimate = bounded_accuracy(matrix)
        contrasts: dict[str, Any] = {
            field: make_contrast(matrix, of(outcome), name, scope) for field, (name, of) in others.items()
        }
        found.append(
            OutcomeResult(
                outcome, len(matrix.question_ids), tuple(float(value) for value in matrix.correct.mean(1)),
                estimate.value, estimate.low, estimate.high, matrix.interval_name, **contrasts,
            )
        )  # fmt: skip
    return tuple(found)
