"""Estimates with their 95% intervals: questions come in source documents, training in seeds, and
both count.

An interval and the p of the same difference use one variance, so that they never contradict each
other. First the tests: signs flipped document by document, Student's tails, and Holm's correction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kinject.results import ALPHA
from kinject.stats.matrix import CorrectnessMatrix, SeedVariance

if TYPE_CHECKING:
    from kinject.stats.matrix import Floats


_MOST_PRODUCTS = 1 << 28
"""Multiplications of an exact sign-flip distribution; beyond, it is computed by Fourier transform.
"""
_LEAST_P = 1e-12
"""Below it, rounding of the Fourier transform counts."""


def quantile(probability: float, df: float) -> float:
    """Return the value above which Student's t lies with `probability`; a normal number for
    infinite `df`."""
    from scipy.special import ndtri, stdtrit  # scipy.stats takes 0.3 s to import

    if math.isinf(df):
        return -float(ndtri(probability))
    return -float(stdtrit(df, probability))


def tail(value: float, df: float) -> float:
    """Return the probability that Student's t lies above `value`; a normal number for infinite
    `df`."""
    from scipy.special import ndtr, stdtr

    if math.isinf(df):
        return float(ndtr(-value))
    return float(stdtr(df, -value))


def flips_p(weighted: Sequence[tuple[int, CorrectnessMatrix]]) -> float:
    """Return the two-sided p of a contrast of arms being 0: signs flipped document by document
    (Fisher's randomisation).

    Every assignment of signs is counted, whatever their number: documents' sums are whole numbers
    (over the numbers of seeds), so the distribution of their sum is a product of binomials. Seeds
    are averaged first. For two arms, where no document has two questions and each arm one seed,
    this is McNemar's exact test.
    """
    import numpy as np

    common = math.lcm(*(matrix.n_seeds for _, matrix in weighted))
    scaled = sum(
        weight * (common // matrix.n_seeds) * matrix.per_cluster[0].sum(0)
        for weight, matrix in weighted
    )
    differences = np.rint(scaled * _parts_of(scaled)).astype(np.int64)
    # Without a common divisor the distribution below is short.
    differences //= max(1, int(np.gcd.reduce(differences)))
    # Counted out: 20,000 random flips have no p below 1 in 20,001.
    return flipped_sum_p(
        Counter(map(int, np.abs(differences[differences != 0]))), abs(int(differences.sum()))
    )


def _parts_of(sums: Floats) -> int:
    """Return by what to multiply documents' sums so that they are whole numbers, or nearly.

    Controls hold means over the questions that share their choices: quarters where four do, and
    rarely other parts.
    """
    import numpy as np

    for parts in (1, 2, 3, 4, 6, 12):
        if np.allclose(sums * parts, np.rint(sums * parts), atol=1e-6):
            return parts
    return 60


def flipped_sum_p(sizes: Counter[int], observed: int) -> float:
    """Return the probability that numbers of these sizes (size -> how many) with random signs sum
    to +-`observed` or more."""
    import numpy as np
    from scipy.signal import fftconvolve

    exact = True
    distribution = np.ones(1)  # of the sum of those with a plus
    # The most frequent sizes come first, while the distribution is short.
    for size, count in sorted(sizes.items(), key=_count_of, reverse=True):
        of_size = np.zeros(size * count + 1)
        of_size[::size] = _successes(count, 0.5)
        if len(of_size) * len(distribution) <= _MOST_PRODUCTS:
            distribution = np.convolve(distribution, of_size)
        else:
            distribution, exact = np.maximum(fftconvolve(distribution, of_size), 0), False
    total = len(distribution) - 1
    sums = 2 * np.arange(total + 1) - total
    p = float(distribution[np.abs(sums) >= observed].sum())
    if not exact:
        p = max(p, _LEAST_P)
    return min(1.0, p)


def _count_of(item: tuple[int, int]) -> int:
    return item[1]


@lru_cache(maxsize=1024)
def _successes(n: int, chance: float) -> Floats:
    """Return the probabilities of 0 to `n` successes in `n` trials."""
    import numpy as np
    from scipy.stats import binom

    return np.asarray(binom.pmf(np.arange(n + 1), n, chance))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return `p_values` corrected for their number (Holm 1979), in their order: the familywise
    error stays below alpha."""
    n = len(p_values)
    order = sorted(range(n), key=p_values.__getitem__)
    corrected, largest = [0.0] * n, 0.0
    for rank, index in enumerate(order):
        # No p is smaller than one before it: a claim is not shown where a stronger one is not.
        largest = max(largest, min(1.0, (n - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


_ROUNDING = 1e-12
_UNLIKE = 0.05
"""p of the F test below which an arm keeps its own variance."""
FEWEST_DF = 4
"""Degrees of freedom of the others below which an arm keeps its own variance anyway: of two arms
with three seeds, an F test misses one in four that differ eight times as much."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """An estimate of a mean over documents and seeds with its 95% bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A difference (or a contrast) of accuracies with its 95% bounds and its two-sided p; all None
    with one document.

    The bounds are `middle` minus and plus Student's quantile times `error`; where another test of
    `contrast_estimate` does not exclude 0, they reach it.
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
    """The variance of a sum of weighted accuracies: its parts between documents and between seeds,
    its degrees of freedom."""

    documents: float
    seeds: float
    df: float


def variance_of(weighted: Sequence[tuple[float, CorrectnessMatrix]]) -> Variance | None:
    """Return the variance of the sum of weighted accuracies on the same questions; None for one
    document.

    The variance between documents is that of the seeds' mean, linearised, since documents differ in
    size, with the effective number of documents for their number. It holds the noise of single
    answers, so each arm's variance between seeds is added without it. Degrees of freedom: those of
    `cochran_df`, from the variances before the noise is taken off; an arm with a variance of its
    own (`family_variances`) has no more than its seeds give.
    """
    counts, n = weighted[0][1].per_cluster[1], weighted[0][1].n_effective
    if len(counts) < 2:
        return None
    residuals = _residuals(weighted)
    documents = n / (n - 1) / float(counts.sum()) ** 2 * float(residuals @ residuals)
    seeds, most = 0.0, math.inf
    document_df = _document_df(weighted, residuals)
    parts = [(documents, document_df)]
    for weight, matrix in weighted:
        if matrix.n_seeds == 1:
            continue
        of_arm = matrix.pooled or matrix.seed_variance
        seeds += weight**2 * of_arm.net / matrix.n_seeds
        parts.append((weight**2 * of_arm.value / matrix.n_seeds, of_arm.df))
        if of_arm.alone:
            most = min(most, of_arm.df)
    if documents + seeds < _ROUNDING**2:
        return Variance(0.0, 0.0, document_df)
    return Variance(documents, seeds, min(cochran_df(parts), most))


def _residuals(weighted: Sequence[tuple[float, CorrectnessMatrix]]) -> Floats:
    """Return by how much the sum of weighted accuracies on each document, seeds averaged, differs
    from what the document's size lets expect [documents]."""
    counts = weighted[0][1].per_cluster[1]
    sums: Floats = sum(weight * matrix.per_cluster[0].mean(0) for weight, matrix in weighted)
    residuals: Floats = sums - sums.sum() / counts.sum() * counts
    return residuals


def _document_df(weighted: Sequence[tuple[float, CorrectnessMatrix]], residuals: Floats) -> float:
    """Return the degrees of freedom of the variance between documents, whose sums differ from their
    expectation by `residuals` [documents].

    Satterthwaite's (1946), less one, for sums whose variance grows with the size of a document as
    far as answers on it go together: between the number by Kish, where they do not, and that of the
    large documents, where all answers on one are alike. Of documents of one size it is their
    number.
    """
    import numpy as np

    first = weighted[0][1]
    counts = first.per_cluster[1]
    changes = sum(weight * matrix.correct.mean(0) for weight, matrix in weighted)
    squares = (changes - changes.mean()) ** 2
    n_pairs = float((counts * (counts - 1)).sum())
    together = 0.0
    if n_pairs and squares.sum() > _ROUNDING:
        products = float(residuals @ residuals - squares.sum()) / n_pairs
        together = min(1.0, max(0.0, products / float(squares.mean())))
    of_sums = counts * (1 + (counts - 1) * together)
    return max(1.0, float(np.sum(of_sums) ** 2 / np.sum(of_sums**2)) - 1)


_TAIL = 0.025
"""Of a 95% interval, by whose quantiles degrees of freedom are found."""


def cochran_df(parts: Sequence[tuple[float, float]]) -> float:
    """Return the degrees of freedom of a sum of estimated variances, (variance, degrees of freedom)
    each: those of the Student's t whose 95% quantile is the mean of the parts' own, weighted by
    their variances (Cochran and Cox 1950).

    Satterthwaite's number (1946) takes a variance that few seeds happen to put too low for a
    well-known one.
    """
    from scipy.special import stdtridf

    total = math.fsum(variance for variance, _ in parts)
    wanted = math.fsum(variance / total * quantile(_TAIL, df) for variance, df in parts)
    largest = max(df for _, df in parts)
    if wanted <= quantile(_TAIL, largest):
        return largest
    return max(1.0, float(stdtridf(1 - _TAIL, wanted)))


def family_variances(variances: Sequence[SeedVariance]) -> list[SeedVariance]:
    """Return the variances of a study's arms: one for all that are alike, with the degrees of
    freedom of all.

    From the largest downwards, an arm that an F test at 5% tells from those below it keeps its own;
    all that are left keep theirs where an F test of so few seeds would tell nothing.
    The largest of an alike family is cut off too at times, so the mean of the others is divided by
    that of a chi-squared number below the limit.
    """
    from scipy.special import chdtr, fdtri

    by_size = sorted((of.value, i) for i, of in enumerate(variances))
    order = [i for _, i in by_size]
    pooled, limit = list(variances), math.inf
    while len(order) > 1:
        rest, of = [variances[i] for i in order[:-1]], variances[order[-1]]
        df, mean = _pooled_value(rest)
        if df < FEWEST_DF:
            return pooled
        # An unstable arm of 30: 4.8% false by this test, 42.8% with one variance (docs/LOG.md).
        limit = float(fdtri(of.df, df, 1 - _UNLIKE))
        if of.value <= limit * mean:
            break
        pooled[order.pop()] = of._replace(alone=True)
    if not order:
        return pooled
    alike = [variances[i] for i in order]
    df, value = _pooled_value(alike)
    noise = sum(of.df * of.noise for of in alike) / df
    if len(order) > 1:
        each = df / len(order)
        value /= float(chdtr(each + 2, each * limit) / chdtr(each, each * limit))
    for i in order:
        pooled[i] = SeedVariance(value, df, noise=noise)
    return pooled


def _pooled_value(variances: Sequence[SeedVariance]) -> tuple[float, float]:
    """Return the degrees of freedom of several variances together, and their mean by these."""
    df = sum(of.df for of in variances)
    return df, sum(of.df * of.value for of in variances) / df


def contrast_estimate(weighted: Sequence[tuple[int, CorrectnessMatrix]]) -> Estimate:
    """Return the weighted sum of accuracies on the same questions, scaled like a difference, with
    interval and p.

    An adjusted Wald interval (Bonett and Price 2012: one more question changed each way, once by a
    seed of each arm) for the effective number of questions, with the variance of seeds and
    Student's t. p is the largest of the one that belongs to this interval, that of the exact
    sign-flip test by document, and those of `_skewed_p` and `_unseen_p`.
    """
    unit = 2 / sum(abs(weight) for weight, _ in weighted)
    scaled = [(unit * weight, matrix) for weight, matrix in weighted]
    changes = sum(weight * matrix.correct.mean(0) for weight, matrix in scaled)
    value, squares = float(changes.mean()), float((changes**2).mean())
    variance = variance_of(scaled)
    if variance is None:
        return Estimate(value)
    effective = _effective(squares - value**2, variance.documents, weighted[0][1])
    middle = value * effective / (effective + 2)
    # A fifth of a question for five seeds, a whole one for the base's one: by the fifth alone the
    # interval held 84% of differences of 40 questions near 100%, of ten seeds 68%; now 98 or more.
    added = sum(abs(weight) / matrix.n_seeds**2 for weight, matrix in scaled)
    documents = ((squares * effective + added) / (effective + 2) - middle**2) / (effective + 2)
    error = math.sqrt(max(documents, variance.documents) + variance.seeds)
    of_interval = 2 * tail(abs(middle) / error, variance.df)
    skewed = _skewed_p(scaled, middle / error, error, variance.df)
    unseen = _unseen_p(scaled, middle, error, variance.df)
    p = max(of_interval, flips_p(weighted), skewed, unseen)
    half = quantile(0.025, variance.df) * error
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    if p >= 0.05:
        low, high = min(low, 0.0), max(high, 0.0)
    return Estimate(value, low, high, min(p, 1.0), middle, error, variance.df, effective)


def _skewed_p(
    weighted: Sequence[tuple[float, CorrectnessMatrix]], ratio: float, error: float, df: float
) -> float:
    """Return the two-sided p of Student's `ratio` of a contrast to its `error`, with the skewness
    of documents' sums taken off by Hall's cubic (1992, JRSS B 54:221).

    Where few documents gain much and the others lose little, the ratio is too often far below 0: of
    ten equal arms that learn a tenth of 100 documents whole, 8% were false without it, 5% with it.
    """
    residuals, n_questions = _residuals(weighted), len(weighted[0][1].question_ids)
    skewness = float((residuals**3).sum()) / (n_questions * error) ** 3
    straight = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / 6
    # What the skewness turns around, it explains.
    if straight * ratio <= 0:
        return 1.0
    return 2 * tail(abs(straight), df)


_EXPLAINED = 1.5
"""The largest part of a difference, of itself, that documents which nobody drew may explain."""
_STEPS = 151
_WHOLE = 0.75
"""The part of what may change of a document from which on it counts as changed whole: from a half
on, noise counts too, and 9 points of power are lost on 100 documents; from all on, few ever do."""


def _unseen_p(
    weighted: Sequence[tuple[float, CorrectnessMatrix]], middle: float, error: float, df: float
) -> float:
    """Return the probability of a contrast of this size, or a larger one, where some documents
    change whole against it and no more of them were drawn than were seen.

    It is that of the fraction of such documents at which it is largest; the other documents differ
    by as much the other way. Of a document no more changes than the better side has right and the
    worse side wrong. No variance shows what was not drawn: of ten equal arms that learn a tenth of
    20 / 40 documents whole, 35 / 12% were false without this test; with it 0 / 6%, and no gain is
    missed by itself (after Holm 3 to 7 points of power on 20 documents; docs/LOG.md).
    """
    import numpy as np
    from scipy.special import betainc, stdtr

    better = math.fsum(weight * matrix.mean() for weight, matrix in weighted if weight > 0)
    worse = math.fsum(-weight * matrix.mean() for weight, matrix in weighted if weight < 0)
    whole = min(max(better, worse), 1 - min(better, worse))
    # Net gains may be below 0, where nothing is left to lose.
    if whole <= 0:
        return 0.0
    counts, n = weighted[0][1].per_cluster[1], weighted[0][1].n_effective
    sums = sum(weight * matrix.per_cluster[0].mean(0) for weight, matrix in weighted)
    against = -math.copysign(1.0, middle) * sums
    is_whole = against >= _WHOLE * whole * counts
    # Of the questions; the others have the rest of the difference, and of its variance.
    n_seen = n * float(counts[is_whole].sum() / counts.sum())
    seen = against[is_whole] / counts.sum()
    of_others = abs(middle) + float(seen.sum())
    noise = math.sqrt(error**2 - float(seen @ seen))
    explained = float(seen.sum()) + abs(middle) * np.linspace(0, _EXPLAINED, _STEPS)
    fraction = explained / (explained + (1 - n_seen / n) * whole)
    so_few = betainc(n - n_seen, n_seen + 1, 1 - fraction)  # a binomial tail of any number
    return float((so_few * stdtr(df, (explained - of_others) / noise)).max())


def difference_estimate(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> Estimate:
    """Return the difference of two accuracies on the same questions with its interval and p."""
    return contrast_estimate([(1, matrix), (-1, other)])


def _effective(spread: float, documents: float, matrix: CorrectnessMatrix) -> float:
    """Return how many independent questions have the variance `documents`; the effective documents
    where nothing varies."""
    if documents < _ROUNDING**2 or spread < _ROUNDING:
        return matrix.n_effective
    return min(spread / documents, float(len(matrix.question_ids)))


def bounded_accuracy(matrix: CorrectnessMatrix) -> Bounded:
    """Return an accuracy with Wilson's score interval for the effective number of questions (Dean
    and Pagano 2015).

    That number is p (1 - p) over the variance, and the normal quantile is Student's; for one seed
    and no document with two questions it is the plain interval of Wilson (1927), which reaches
    guessing where `chance_p` does not exclude it. Where all answers are right, or all wrong, the
    effective number is that of the documents. One document bounds nothing: 0 to 1.
    """
    value, (n, df) = matrix.mean(), _accuracy_size(matrix)
    if not n:
        return Bounded(value, 0.0, 1.0)
    low, high = wilson(value, n, quantile(0.025, df))
    if matrix.is_plain and matrix.chances and _exact_chance_p(matrix) >= ALPHA:
        low, high = min(low, matrix.chance), max(high, matrix.chance)
    return Bounded(value, low, high)


def _accuracy_size(matrix: CorrectnessMatrix) -> tuple[float, float]:
    """Return the effective number of questions of an accuracy and its degrees of freedom; 0
    questions for one document."""
    variance, value = variance_of([(1.0, matrix)]), matrix.mean()
    if variance is None:
        return 0.0, 1.0
    if matrix.is_plain:
        return float(len(matrix.question_ids)), math.inf
    n = _effective(value * (1 - value), variance.documents + variance.seeds, matrix)
    return float(n), variance.df  # a number of numpy would not go into report.json


def wilson(rate: float, n: float, limit: float = 1.959963984540054) -> tuple[float, float]:
    """Return Wilson's score interval of a `rate` of `n` (Wilson 1927), as (low, high)."""
    shift = limit**2 / n
    middle = (rate + shift / 2) / (1 + shift)
    half = math.sqrt(shift * rate * (1 - rate) + shift**2 / 4) / (1 + shift)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    # Exactly the ends, where rounding may leave a little beside them.
    if rate <= 0:
        low = 0.0
    if rate >= 1:
        high = 1.0
    return low, high


def difference_bounds(one: Bounded, other: Bounded) -> tuple[float, float]:
    """Return the interval of `one` - `other`, two accuracies of different answers, from their own
    intervals (Newcombe 1998, method 10)."""
    difference = one.value - other.value
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return max(-1.0, difference - below), min(1.0, difference + above)


def chance_p(matrix: CorrectnessMatrix, margin: float | None = None) -> float | None:
    """Return the two-sided p that the accuracy is that of guessing: the score test of
    `bounded_accuracy`'s interval; for independent questions the exact binomial test, if larger.

    With a `margin`: of two one-sided tests that it is not within that of guessing (Schuirmann
    1987), exact for independent questions. Guessing has the mean of the questions' own chances.
    None with one document.
    """
    if variance_of([(1.0, matrix)]) is None:
        return None
    if margin is not None:
        above = _one_sided_p(matrix, matrix.chance - margin, exact=matrix.is_plain)
        below = _one_sided_p(matrix, matrix.chance + margin, below=True, exact=matrix.is_plain)
        return max(above, below)
    above = _one_sided_p(matrix, matrix.chance)
    below = _one_sided_p(matrix, matrix.chance, below=True)
    p = min(1.0, 2 * min(above, below))
    if matrix.is_plain:
        p = max(p, _exact_chance_p(matrix))
    return p


def _one_sided_p(
    matrix: CorrectnessMatrix, rate: float, *, below: bool = False, exact: bool = False
) -> float:
    """Return the probability, at a true accuracy of `rate`, of an accuracy as high as that of
    `matrix` or higher; with `below`, as low or lower."""
    from scipy.special import bdtr, bdtrc

    excess = matrix.mean() - rate
    if below:
        excess = -excess
    variance = rate * (1 - rate)
    # At the ends, or beyond them by a margin, no other accuracy is possible.
    if variance <= 0:
        return float(excess <= 0)
    if not exact:
        n, df = _accuracy_size(matrix)
        return tail(excess / math.sqrt(variance / n), df)
    n_correct, n_questions = round(float(matrix.correct.sum())), len(matrix.question_ids)
    if below:
        return float(bdtr(n_correct, n_questions, rate))
    return float(bdtrc(n_correct - 1, n_questions, rate))


_AS_LIKELY = 1 + 1e-7
"""Ratio of probabilities that rounding tells apart, as scipy.stats.binomtest has it."""


def _exact_chance_p(matrix: CorrectnessMatrix) -> float:
    """Return the probability that guessing gets a number of questions right that is as unlikely as
    that of `matrix`, or more; questions are independent, each with its own chance."""
    import numpy as np

    distribution = np.ones(1)
    for chance, n in sorted(Counter(matrix.chances).items()):
        distribution = np.convolve(distribution, _successes(n, chance))
    if not matrix.chances:
        distribution = np.eye(1, len(matrix.question_ids) + 1)[0]  # guessing is never right
    likely = distribution[round(float(matrix.correct.sum()))] * _AS_LIKELY
    return min(1.0, float(distribution[distribution <= likely].sum()))


def equivalence_p(
    matrix: CorrectnessMatrix, other: CorrectnessMatrix, margin: float
) -> float | None:
    """Return the p of two one-sided tests that two arms differ by less than `margin` (Schuirmann
    1987); None for one document.

    It is below 0.05 where the interval of 90% lies inside the margin. Its error is that of
    `difference_estimate`, and at least the error of a difference as large as the margin: where
    losses are rare, few were seen and their variance with them.
    """
    found = difference_estimate(matrix, other)
    if found.p is None:
        return None
    # Arms that differ by the margin are called alike in 2.0 to 4.4% (docs/figures.md).
    error = max(found.error, math.sqrt(margin * (1 - margin) / found.effective))
    return max(tail((margin + sign * found.value) / error, found.df) for sign in (1, -1))
