"""Answers to results: accuracy with its interval, by subject too, and the paired difference to the base arm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kinject.eval.scores import letter_mass, rescored
from kinject.eval.statistics import (
    bootstrap_interval,
    chance,
    holm,
    mcnemar,
    relative_gain,
    smallest_difference,
    wilson,
)
from kinject.types import Answer, Cell, Difference, Subject


def is_scored(answer: Answer) -> bool:
    """Return whether every choice got a finite log-prob."""
    return all(math.isfinite(value) for value in answer.log_probs)


def is_right(answer: Answer) -> bool:
    """Return whether the gold choice has the highest summed log-prob (the first of equals); unscored is wrong."""
    return is_scored(answer) and max(range(len(answer.log_probs)), key=answer.log_probs.__getitem__) == answer.gold


def make_cell(
    answers: Sequence[Answer], *, role: str, model: str, base: Sequence[Answer] | None, score: str = "sum"
) -> Cell:
    """Return the result of one arm on one question set; `base` are the base arm's answers, None for the base itself.

    Answers come with the numbers to compare in `log_probs` (`kinject.eval.scores.rescored`); `score` says which.
    """
    merged = rescored(answers, "sum")
    first = merged[0]
    n_correct = sum(map(is_right, merged))
    low, high = wilson(n_correct, len(merged))
    subjects = _subjects(merged)
    return Cell(
        question_set=first.question_set,
        role=role,
        arm=first.arm,
        model=model,
        format=first.format,
        shots=first.shots,
        k=first.k,
        n=len(merged),
        n_unscored=sum(not is_scored(answer) for answer in merged),
        n_correct=n_correct,
        accuracy=n_correct / len(merged),
        low=low,
        high=high,
        chance=chance([len(answer.log_probs) for answer in merged]),
        difference=None if base is None else compare(answers, base),
        score=score,
        mass=letter_mass(answers),
        subjects=subjects,
        macro=_macro(merged, subjects),
    )


def compare(answers: Sequence[Answer], base: Sequence[Answer]) -> Difference:
    """Return the difference of `answers` to `base`, paired by question; both hold the same questions."""
    before = {answer.question_id: is_right(answer) for answer in rescored(base, "sum")}
    after = rescored(answers, "sum")
    changes = [is_right(answer) - before[answer.question_id] for answer in after]
    wrong_to_right, right_to_wrong = changes.count(1), changes.count(-1)
    # in the order of ids, so that the resampled interval does not depend on the order in which answers came
    ordered = sorted(zip((a.question_id for a in after), changes, (a.document_id for a in after), strict=True))
    interval = bootstrap_interval([change for _, change, _ in ordered], [cluster for *_, cluster in ordered])
    n_right = sum(before[answer.question_id] for answer in after)
    return Difference(
        base_arm=base[0].arm,
        delta=(wrong_to_right - right_to_wrong) / len(after),
        wrong_to_right=wrong_to_right,
        right_to_wrong=right_to_wrong,
        p=mcnemar(wrong_to_right, right_to_wrong),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        relative=relative_gain(sum(map(is_right, after)) / len(after), n_right / len(after)),
        smallest=smallest_difference(len(after), wrong_to_right + right_to_wrong),
    )


def correct_family(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return `cells` with `p_holm` of each difference: corrected for all comparisons among them."""
    corrected = iter(holm([cell.difference.p for cell in cells if cell.difference is not None]))
    return tuple(
        cell if cell.difference is None else replace(cell, difference=replace(cell.difference, p_holm=next(corrected)))
        for cell in cells
    )


def _subjects(answers: Sequence[Answer]) -> tuple[Subject, ...]:
    """Return one entry a subject, in the order of the answers; () where there are not several."""
    right: dict[str, list[bool]] = {}
    for answer in answers:
        right.setdefault(answer.subject, []).append(is_right(answer))
    if len(right) < 2:
        return ()
    return tuple(
        Subject(name, len(own), sum(own), sum(own) / len(own), *wilson(sum(own), len(own)))
        for name, own in right.items()
    )


def _macro(answers: Sequence[Answer], subjects: Sequence[Subject]) -> tuple[float, float, float] | None:
    """Return the mean of the subjects' accuracies with its bootstrap bounds (documents drawn within each subject)."""
    if not subjects:
        return None
    ordered = sorted((a.question_id, float(is_right(a)), a.document_id, a.subject) for a in answers)
    values, clusters, strata = ([row[1] for row in ordered], [row[2] for row in ordered], [row[3] for row in ordered])
    interval = bootstrap_interval(values, clusters, strata)
    mean = math.fsum(subject.accuracy for subject in subjects) / len(subjects)
    return None if interval is None else (mean, *interval)
