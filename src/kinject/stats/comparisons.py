"""Comparisons of arms, before and after the correction for their number; trends, and who leads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from kinject.results import Contrast, Scope, Test
from kinject.stats.intervals import Estimate, bounded_accuracy, contrast_estimate, difference_estimate
from kinject.stats.matrix import CorrectnessMatrix, aligned
from kinject.stats.tests import holm


def make_contrast(
    matrix: CorrectnessMatrix, other: CorrectnessMatrix, name: str, scope: Scope = "these models"
) -> Contrast | None:
    """Return the difference of two arms on the questions of both, before any correction; None if they share none.

    `name` is the other's, `scope` the difference's (`kinject.results.Scope`).
    """
    matrix, other = aligned(matrix, other)
    if not matrix.question_ids:
        return None
    found, bounds = difference_estimate(matrix, other), bounded_accuracy(other)
    gained, lost = majority_changes(matrix, other)
    plain, one_seed = matrix.is_plain and other.is_plain, max(matrix.n_seeds, other.n_seeds) == 1
    test: Test = "McNemar" if plain else "sign flips" if one_seed else "t over documents and seeds"
    return Contrast(
        other=name, delta=found.value, low=found.low, high=found.high, p=found.p, p_holm=None, wrong_to_right=gained,
        right_to_wrong=lost, can_lose=bounds.low > other.chance, test=test, scope=scope, n=len(matrix.question_ids),
        n_clusters=matrix.n_documents, n_effective=matrix.n_effective, accuracy=matrix.mean(),
    )  # fmt: skip


def majority_changes(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> tuple[int, int]:
    """Return how many questions most seeds of `other` had wrong and most of `matrix` correct, and the reverse.

    A question that half of the seeds answer is neither.
    """
    now, before = matrix.correct.mean(0), other.correct.mean(0)
    return int(((now > 0.5) & (before < 0.5)).sum()), int(((before > 0.5) & (now < 0.5)).sum())


def correct_contrasts(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return `contrasts` corrected as one family (Holm 1979); those without a p are none of it."""
    corrected = iter(holm([contrast.p for contrast in contrasts if contrast.p is not None]))
    family = max(1, sum(contrast.p is not None for contrast in contrasts))
    return [
        replace(contrast, p_holm=None if contrast.p is None else next(corrected), family=family)
        for contrast in contrasts
    ]


def lead(matrices: Sequence[CorrectnessMatrix], names: Sequence[str], scope: Scope) -> tuple[int, Contrast] | None:
    """Return which of several arms is best on the questions of all, and its comparison with the closest other.

    None where they share no question. The largest two-sided p of the best against the others holds its level although the
    data chose the best (Hung and Fithian, arXiv 1610.03944). Not significant: the arms are not told apart.
    """
    common = aligned(*matrices)
    first = max(range(len(common)), key=lambda i: common[i].mean() if common[i].question_ids else 0.0)
    contrasts = [make_contrast(common[first], of, names[i], scope) for i, of in enumerate(common) if i != first]
    found = [contrast for contrast in contrasts if contrast is not None]
    return (first, max(found, key=lambda contrast: 2 if contrast.p is None else contrast.p)) if found else None


def trend(matrices: Sequence[CorrectnessMatrix]) -> tuple[Estimate, bool]:
    """Return the linear contrast of accuracies along `matrices` (the later over the earlier ones), on the same questions.

    And whether no step goes against its sign.
    """
    last = len(matrices) - 1
    estimate = contrast_estimate([(2 * i - last, matrix) for i, matrix in enumerate(matrices)])
    steps = [after.mean() - before.mean() for before, after in pairwise(matrices)]
    return estimate, all(step >= 0 if estimate.value > 0 else step <= 0 for step in steps)
