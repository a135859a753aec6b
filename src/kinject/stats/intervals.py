"""Estimates with their 95% intervals: questions come in source documents, training in seeds, and both count.

An interval and the p of the same difference use one variance, so that they never contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kinject.stats.matrix import CorrectnessMatrix, SeedVariance
from kinject.stats.tests import flips_p, quantile, tail

_ROUNDING = 1e-12
_UNLIKE = 0.02
"""p of the F test below which an arm keeps its own variance: at 5% ten alike arms lose 6 points of power, at 2% they lose 2."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """An estimate of a mean over documents and seeds with its 95% bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A difference (or a contrast) of accuracies with its 95% bounds and its two-sided p; all None with one document.

    The bounds are `middle` minus and plus Student's quantile times `error`; where the exact test does not exclude 0, they
    reach it.
    """

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    middle: float = 0.0
    error: float = 0.0
    df: float = 1.0
    effective: float = 0.0
    """The effective number of questions."""


class Variance(NamedTuple):
    """The variance of a sum of weighted accuracies: its parts between documents and between seeds, its degrees of freedom."""

    documents: float
    seeds: float
    df: float

    @property
    def total(self) -> float:
        """The variance."""
        return self.documents + self.seeds


def variance_of(weighted: Sequence[tuple[float, CorrectnessMatrix]]) -> Variance | None:
    """Return the variance of the sum of weighted accuracies on the same questions; None for one document.

    The variance between documents is that of the seeds' mean, linearised, since documents differ in size, with the
    effective number of documents for their number. Each arm's variance between seeds is added. Both hold the noise of
    single answers, so that the sum is rather too large: three seeds estimate their own variance badly. Degrees of freedom:
    Satterthwaite (1946); an arm with a variance of its own (`family_variances`) has no more than its seeds give.
    """
    counts, n = weighted[0][1].per_cluster[1], weighted[0][1].n_effective
    if len(counts) < 2:
        return None
    sums = sum(weight * matrix.per_cluster[0].mean(0) for weight, matrix in weighted)
    residuals = sums - sums.sum() / counts.sum() * counts
    documents = n / (n - 1) / float(counts.sum()) ** 2 * float(residuals @ residuals)
    seeds, below, most = 0.0, documents**2 / max(n - 1, 1), math.inf
    for weight, matrix in weighted:
        if matrix.n_seeds > 1:
            of_arm = matrix.pooled or matrix.seed_variance
            part = weight**2 * of_arm.value / matrix.n_seeds
            seeds, below = seeds + part, below + part**2 / of_arm.df
            most = min(most, of_arm.df) if of_arm.alone else most
    if documents + seeds < _ROUNDING**2:
        return Variance(0.0, 0.0, max(n - 1, 1.0))
    return Variance(documents, seeds, min(max((documents + seeds) ** 2 / below, 1.0), most))


def family_variances(variances: Sequence[SeedVariance]) -> list[SeedVariance]:
    """Return the variances of a study's arms: one for all that are alike, with the degrees of freedom of all.

    From the largest downwards, an arm that an F test at 2% tells from those below it keeps its own.
    """
    from scipy.special import fdtrc

    order = sorted(range(len(variances)), key=lambda i: variances[i].value)
    pooled = list(variances)
    while len(order) > 1:
        *rest, last = order
        df = sum(variances[i].df for i in rest)
        mean = sum(variances[i].df * variances[i].value for i in rest) / df
        largest = variances[last]
        if largest.value <= mean or (mean and float(fdtrc(largest.df, df, largest.value / mean)) >= _UNLIKE):
            break
        pooled[last] = largest._replace(alone=True)
        order = rest
    df = sum(variances[i].df for i in order)
    for i in order:
        pooled[i] = SeedVariance(sum(variances[j].df * variances[j].value for j in order) / df, df)
    return pooled


def contrast_estimate(weighted: Sequence[tuple[int, CorrectnessMatrix]]) -> Estimate:
    """Return the weighted sum of accuracies on the same questions, scaled like a difference, with interval and p.

    An adjusted Wald interval (Bonett and Price 2012: one more question changed each way, by one seed) for the effective
    number of questions, with the variance of seeds and Student's t. p is the larger of the one that belongs to this interval
    and that of the exact sign-flip test by document.
    """
    unit = 2 / sum(abs(weight) for weight, _ in weighted)
    changes = unit * sum(weight * matrix.correct.mean(0) for weight, matrix in weighted)
    value, squares = float(changes.mean()), float((changes**2).mean())
    variance = variance_of([(unit * weight, matrix) for weight, matrix in weighted])
    if variance is None:
        return Estimate(value)
    effective = _effective(squares - value**2, variance.documents, weighted[0][1])
    middle = value * effective / (effective + 2)
    added = 2 / max(matrix.n_seeds for _, matrix in weighted) ** 2
    documents = ((squares * effective + added) / (effective + 2) - middle**2) / (effective + 2)
    error = math.sqrt(max(documents, variance.documents) + variance.seeds)
    p = max(2 * tail(abs(middle) / error, variance.df), flips_p(weighted))
    half = quantile(0.025, variance.df) * error
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    if p >= 0.05:
        low, high = min(low, 0.0), max(high, 0.0)
    return Estimate(value, low, high, min(p, 1.0), middle, error, variance.df, effective)


def difference_estimate(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> Estimate:
    """Return the difference of two accuracies on the same questions with its interval and p."""
    return contrast_estimate([(1, matrix), (-1, other)])


def _effective(spread: float, documents: float, matrix: CorrectnessMatrix) -> float:
    """Return how many independent questions have the variance `documents`; the effective documents where nothing varies."""
    if documents < _ROUNDING**2 or spread < _ROUNDING:
        return matrix.n_effective
    return min(spread / documents, float(len(matrix.question_ids)))


def bounded_mean(matrix: CorrectnessMatrix, lowest: float, highest: float) -> Bounded:
    """Return the mean of any values, bounded by Student's t.

    One document bounds nothing: `lowest` to `highest`.
    """
    variance, value = variance_of([(1.0, matrix)]), matrix.mean()
    if variance is None:
        return Bounded(value, lowest, highest)
    half = quantile(0.025, variance.df) * math.sqrt(variance.total)
    return Bounded(value, value - half, value + half)


def bounded_accuracy(matrix: CorrectnessMatrix) -> Bounded:
    """Return an accuracy with Wilson's score interval for the effective number of questions (Dean and Pagano 2015).

    That number is p (1 - p) over the variance, and the normal quantile is Student's; for one seed and no document with
    two questions it is the plain interval of Wilson (1927). Where all answers are right, or all wrong, the effective
    number is that of the documents. One document bounds nothing: 0 to 1.
    """
    value, (n, df) = matrix.mean(), _accuracy_size(matrix)
    return Bounded(value, *wilson(value, n, quantile(0.025, df))) if n else Bounded(value, 0.0, 1.0)


def _accuracy_size(matrix: CorrectnessMatrix) -> tuple[float, float]:
    """Return the effective number of questions of an accuracy and its degrees of freedom; 0 questions for one document."""
    variance, value = variance_of([(1.0, matrix)]), matrix.mean()
    if variance is None:
        return 0.0, 1.0
    if matrix.is_plain:
        return float(len(matrix.question_ids)), math.inf
    return _effective(value * (1 - value), variance.total, matrix), variance.df


def wilson(rate: float, n: float, limit: float = 1.959963984540054) -> tuple[float, float]:
    """Return Wilson's score interval of a `rate` of `n` (Wilson 1927), as (low, high); (0, 1) for n = 0."""
    if not n:
        return 0.0, 1.0
    shift = limit**2 / n
    middle = (rate + shift / 2) / (1 + shift)
    half = math.sqrt(shift * rate * (1 - rate) + shift**2 / 4) / (1 + shift)
    return (max(0.0, middle - half) if rate > 0 else 0.0), (min(1.0, middle + half) if rate < 1 else 1.0)


def chance_p(matrix: CorrectnessMatrix) -> float | None:
    """Return the two-sided p that the accuracy is that of guessing: the score test of `bounded_accuracy`'s interval.

    Guessing has the mean of the questions' own chances. None with one document.
    """
    tails = [_score_p(matrix, matrix.chance, sign) for sign in (1, -1)]
    return None if None in tails else min(1.0, 2 * min(p for p in tails if p is not None))


def near_chance_p(matrix: CorrectnessMatrix, margin: float) -> float | None:
    """Return the p of two one-sided score tests that the accuracy is within `margin` of guessing (Schuirmann 1987)."""
    tails = (_score_p(matrix, matrix.chance - margin, 1), _score_p(matrix, matrix.chance + margin, -1))
    return None if None in tails else max(p for p in tails if p is not None)


def _score_p(matrix: CorrectnessMatrix, rate: float, sign: int) -> float | None:
    """Return the one-sided p that the accuracy is `rate`, and not above it (`sign` 1) or below it (-1)."""
    n, df = _accuracy_size(matrix)
    if not 0 < rate < 1:
        return 0.0 if sign * (matrix.mean() - rate) > 0 else 1.0
    return tail(sign * (matrix.mean() - rate) / math.sqrt(rate * (1 - rate) / n), df) if n else None


def equivalence_p(matrix: CorrectnessMatrix, other: CorrectnessMatrix, margin: float) -> float | None:
    """Return the p of two one-sided tests that two arms differ by less than `margin` (Schuirmann 1987); None for one document.

    It is below 0.05 where the interval of 90% lies inside the margin. Its error is that of `difference_estimate`, and at least
    the error of a difference as large as the margin: where losses are rare, few were seen and their variance with them.
    """
    found = difference_estimate(matrix, other)
    if found.p is None:
        return None
    error = max(found.error, math.sqrt(margin * (1 - margin) / found.effective))
    return max(tail((margin + sign * found.value) / error, found.df) for sign in (1, -1))


def relative_gain(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> Bounded | None:
    """Return the difference of two arms over `other`'s accuracy above chance, with its 95% interval (Fieller 1954).

    Each question counts with its own chance. The interval holds the variance of both accuracies, their covariance, and
    one more answer of each, so that 100% is bounded too. None where `other` is not above chance (then any gain is
    possible) or with fewer than two documents.
    """
    arm, base = matrix.above_chance, other.above_chance
    x, y = arm.mean(), base.mean()
    of_arm, of_base, of_both = (variance_of(of) for of in ([(1.0, arm)], [(1.0, base)], [(1.0, arm), (-1.0, base)]))
    if y <= 0 or of_arm is None or of_base is None or of_both is None:
        return None
    joint = variance_of([(1.0, arm), (-x / y, base)]) or of_both
    square = quantile(0.025, joint.df) ** 2
    shared = square * (of_arm.documents + of_base.documents - of_both.documents) / 2
    of_x, of_y = (
        of.total + 1 / (m.n_seeds * (_effective(m.mean() * (1 - m.mean()), of.documents, m) + 2)) ** 2
        for of, m in ((of_arm, matrix), (of_base, other))
    )
    a, b, c = y**2 - square * of_y, x * y - shared, x**2 - square * of_x
    if a <= 0:
        return None
    root = math.sqrt(max(0.0, b**2 - a * c))
    return Bounded(x / y - 1, (b - root) / a - 1, (b + root) / a - 1)


def stratified_mean(matrix: CorrectnessMatrix, strata: Sequence[str]) -> Bounded | None:
    """Return the mean of the strata's accuracies, each counting alike, with its 95% interval; None for one document."""
    import numpy as np

    _, index = np.unique(strata, return_inverse=True)
    sizes = np.bincount(index)
    means = np.bincount(index, matrix.correct.mean(0)) / sizes
    centred = (matrix.correct - means[index]) * (len(index) / len(sizes) / sizes)[index]
    variance = variance_of([(1.0, replace(matrix, correct=centred, chances=(), pooled=None))])
    if variance is None:
        return None
    value, half = float(means.mean()), quantile(0.025, variance.df) * math.sqrt(variance.total)
    return Bounded(value, max(0.0, value - half), min(1.0, value + half))


def fit_line(xs: Sequence[float], matrices: Sequence[CorrectnessMatrix]) -> tuple[Bounded, float, float | None]:
    """Return (slope, intercept, r squared) of least squares over log2 of `xs` of the accuracies, on the same questions.

    The slope's 95% interval holds the variance between documents and what single seeds leave over from the line. Where all
    accuracies are the same r squared is None.
    """
    import numpy as np

    x = np.log2(xs)
    weights = (x - x.mean()) / float(((x - x.mean()) ** 2).sum())
    accuracies = [matrix.correct.mean(1) for matrix in matrices]
    means = np.array([of_arm.mean() for of_arm in accuracies])
    slope = float(weights @ means)
    intercept = float(means.mean() - slope * x.mean())
    rest = np.concatenate([of_arm - intercept - slope * at for of_arm, at in zip(accuracies, x, strict=True)])
    singles = np.concatenate(accuracies)
    spread, df = float(((singles - singles.mean()) ** 2).sum()), len(singles) - 2
    weighted = [(float(weight), matrix) for weight, matrix in zip(weights, matrices, strict=True)]
    documents, left = variance_of(weighted), float((rest**2).sum()) / df
    seeds = left * float((weights**2 / [matrix.n_seeds for matrix in matrices]).sum())
    parts = [(seeds, df)] + (
        [] if documents is None else [(documents.documents, max(matrices[0].n_effective - 1, 1.0))]
    )
    total = sum(part for part, _ in parts)
    below = sum(part**2 / part_df for part, part_df in parts)
    half = quantile(0.025, total**2 / below) * math.sqrt(total) if below else 0.0
    r_squared = None if spread < _ROUNDING else 1 - float((rest**2).sum()) / spread
    return Bounded(slope, slope - half, slope + half), intercept, r_squared
