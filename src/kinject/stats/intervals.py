"""Estimates, intervals and tests of accuracies: questions come in source documents, training in seeds, and both count.

Arrays are float64, [seeds, questions], 1 if the answer was correct. The same input gives the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, NamedTuple

from kinject.results import ALPHA, FEWEST, Contrast, Scope, Test
from kinject.stats.matrix import CorrectnessMatrix, aligned

if TYPE_CHECKING:
    from kinject.stats.matrix import Floats

POWER = 0.8
"""The probability with which the smallest detectable difference would be found."""

_N_RESAMPLES = 4000
_Z = NormalDist().inv_cdf(0.975)
_MOST_DRAWS = 1 << 21
"""Draws held at once, so that memory does not grow with the number of clusters."""
_MOST_PRODUCTS = 1 << 28
"""Multiplications of an exact sign-flip distribution; beyond, it is computed by Fourier transform."""
_LEAST_P = 1e-12
"""Below it, rounding of the Fourier transform counts."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """An estimate of a mean over documents and seeds with its 95% bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DifferenceEstimate:
    """A difference of means over documents and seeds with its 95% bounds.

    `standard_error` and its degrees of freedom `df` (Satterthwaite 1946) hold the variance of documents and, of arms with
    several seeds, that of seeds. All but `value` are None with fewer than two documents.
    """

    value: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    df: float | None = None


class _Variance(NamedTuple):
    """The variance of a sum of weighted accuracies: its parts between documents and between seeds, degrees of freedom of both."""

    documents: float
    seeds: float
    df: float

    @property
    def total(self) -> float:
        return self.documents + self.seeds


_Seeds = Literal["own", "net", "pooled"]


def _variance(weighted: Sequence[tuple[float, CorrectnessMatrix]], seeds: _Seeds = "own") -> _Variance | None:
    """Return the variance of the sum of weighted accuracies on the same questions; None for one document.

    The variance between documents is that of the seeds' mean (linearised: documents may differ in size); that between
    seeds is added for each arm. Both hold the noise of single answers: with `seeds` "own" it counts twice, so that the
    sum is too large rather than too small; "net" takes it out once, as in two crossed random factors (Cameron, Gelbach
    and Miller 2011). "pooled" is "own" with the information of a study's other arms on an arm's seeds.
    """
    counts = weighted[0][1].per_cluster[1]
    n = len(counts)
    if n < 2:
        return None
    scale = n / (n - 1) / float(counts.sum()) ** 2
    sums = sum(weight * matrix.per_cluster[0].mean(0) for weight, matrix in weighted)
    residuals = sums - sums.sum() / counts.sum() * counts
    documents, noise, parts = scale * float(residuals @ residuals), 0.0, []
    for weight, matrix in weighted:
        if matrix.n_seeds > 1:
            variance, df = (matrix.pooled if seeds == "pooled" else None) or matrix.seed_variance
            parts.append((weight**2 * variance / matrix.n_seeds, df))
            by_seed = matrix.per_cluster[0] - matrix.correct.mean(1)[:, None] * counts
            squares = float(((by_seed - by_seed.mean(0)) ** 2).sum())
            noise += weight**2 * scale * squares / matrix.n_seeds / (matrix.n_seeds - 1)
    of_seeds = sum(variance for variance, _ in parts)
    if seeds == "net":
        of_seeds = max(0.0, of_seeds - noise)
        parts = parts if of_seeds else []  # nothing to be seen of seeds: the documents' degrees of freedom
    total = documents + of_seeds
    if total < 1e-24:  # rounding
        return _Variance(0.0, 0.0, n - 1)
    df = total**2 / (documents**2 / (n - 1) + sum(variance**2 / df for variance, df in parts))
    return _Variance(documents, of_seeds, max(df, 1.0))


def moderated(variances: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return variances of arms, each with its degrees of freedom, drawn towards each other as far as they are alike.

    Smyth (2004): the arms' true variances have a scaled inverse chi-squared distribution, whose scale and degrees of freedom
    come from the logarithms of `variances`; these degrees of freedom are at most those of all arms together.
    """
    import numpy as np
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    if len(variances) < 2:
        return list(variances)
    values, df = (np.array(column, dtype=np.float64) for column in zip(*variances, strict=True))
    if not values.any():
        return list(variances)
    floored = np.maximum(values, np.median(values[values > 0]) / 100)  # few questions may hide the variance of seeds
    logs = np.log(floored) - digamma(df / 2) + np.log(df / 2)
    excess = float(logs.var(ddof=1) - polygamma(1, df / 2).mean())
    prior, scale = float(df.sum()), float((df * values).sum() / df.sum())
    if excess > float(polygamma(1, prior / 2)):
        prior = 2 * float(brentq(lambda half: float(polygamma(1, half)) - excess, 1e-3, prior / 2))
        scale = math.exp(float(logs.mean()) + float(digamma(prior / 2)) - math.log(prior / 2))
    return [((prior * scale + arm_df * value) / (prior + arm_df), prior + arm_df) for value, arm_df in variances]


def _quantile(tail: float, df: float) -> float:
    from scipy.special import stdtrit  # scipy.stats takes 0.3 s to import

    return -float(stdtrit(df, tail))


def _tail(value: float, df: float) -> float:
    """Return the probability that Student's t lies above `value`."""
    from scipy.special import stdtr

    return float(stdtr(df, -value))


def bounded_mean(matrix: CorrectnessMatrix, lowest: float, highest: float) -> Bounded:
    """Return the mean of any values, bounded by Student's t.

    One document bounds nothing: `lowest` to `highest`.
    """
    variance, value = _variance([(1.0, matrix)]), matrix.mean()
    if variance is None:
        return Bounded(value, lowest, highest)
    half = _quantile(0.025, variance.df) * math.sqrt(variance.total)
    return Bounded(value, value - half, value + half)


def bounded_accuracy(matrix: CorrectnessMatrix) -> Bounded:
    """Return an accuracy with Wilson's score interval for the effective number of questions (Dean and Pagano 2015).

    That number is p (1 - p) over the variance, and the normal quantile is Student's; for one seed and no document with
    two questions it is the plain interval of Wilson (1927). Where all answers are right, or all wrong, the effective
    number is that of the documents. One document bounds nothing: 0 to 1.
    """
    value, n = matrix.mean(), matrix.members[1]
    variance = _variance([(1.0, matrix)])
    if variance is None:
        return Bounded(value, 0.0, 1.0)
    if matrix.is_plain:
        return Bounded(value, *wilson(round(value * n), n))
    effective = value * (1 - value) / variance.total if variance.total and 0 < value < 1 else n
    shift = _quantile(0.025, variance.df) ** 2 / effective
    middle = (value + shift / 2) / (1 + shift)
    half = math.sqrt(shift * value * (1 - value) + shift**2 / 4) / (1 + shift)
    return Bounded(value, max(0.0, middle - half), min(1.0, middle + half))


def design_effect(matrix: CorrectnessMatrix) -> float | None:
    """Return how many times as large documents make the variance of an accuracy as independent questions have it.

    The mean over seeds (Kish 1965); None where no document has two questions, or all answers are right or all wrong.
    """
    import numpy as np

    n, ratios = len(matrix.question_ids), []
    for row in matrix.correct if matrix.members[1] < n else ():
        variance = _variance([(1.0, replace(matrix, correct=row[None]))])
        if variance is not None and 0 < row.mean() < 1:
            ratios.append(variance.total * (n - 1) / (row.mean() * (1 - row.mean())))
    return float(np.mean(ratios)) if ratios else None


def difference_estimate(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> DifferenceEstimate:
    """Return the difference of two accuracies on the same questions with its 95% interval.

    An adjusted Wald interval (Bonett and Price 2012: one more question changed each way, by one seed) for the effective
    number of questions, with the variance of seeds and Student's t; for one seed and no document with two questions it
    is theirs but for the quantile. The interval counts the noise of answers once, the standard error of the test twice
    (`_variance`): at the small alpha of a family, few seeds estimate their own variance badly.
    """
    differences = matrix.correct.mean(0) - other.correct.mean(0)
    value = float(differences.mean())
    weighted = [(1.0, matrix), (-1.0, other)]
    net, tested = _variance(weighted, "net"), _variance(weighted, "pooled")
    if net is None or tested is None:
        return DifferenceEstimate(value)
    squares = float((differences**2).mean())
    naive = squares - value**2
    effective = naive / net.documents if net.documents and naive > 1e-12 else float(matrix.members[1])
    middle = value * effective / (effective + 2)
    added = 2 / max(matrix.n_seeds, other.n_seeds) ** 2
    documents = max(0.0, ((squares * effective + added) / (effective + 2) - middle**2) / (effective + 2))
    half = _quantile(0.025, net.df) * math.sqrt(documents + net.seeds)
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    return DifferenceEstimate(value, low, high, math.sqrt(documents + tested.seeds), tested.df)


def difference_p(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> float | None:
    """Return the two-sided p of no difference between two arms on the same questions; None with fewer than two documents.

    The exact sign-flip test by document; where an arm has several seeds, the larger of that and Student's t with the
    variance of documents and seeds, so that p speaks of the method, not of the models that these seeds gave.
    """
    variance = _variance([(1.0, matrix), (-1.0, other)], "pooled")
    if variance is None:
        return None
    if max(matrix.n_seeds, other.n_seeds) == 1:
        return sign_flip_p(matrix, other)
    return max(sign_flip_p(matrix, other), _t_p(matrix.mean() - other.mean(), variance))


def _t_p(value: float, variance: _Variance) -> float:
    if not variance.total:
        return 1.0 if value == 0 else 0.0
    return 2 * _tail(abs(value) / math.sqrt(variance.total), variance.df)


def sign_flip_p(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> float:
    """Return the two-sided p of the mean difference being 0: signs flipped document by document (Fisher's randomisation).

    Every assignment of signs is counted, whatever their number: documents' differences are whole numbers (over the numbers
    of seeds), so the distribution of their sum is a product of binomials. Seeds are averaged first. Where no document
    has two questions and each arm one seed, this is McNemar's exact test.
    """
    import numpy as np

    scaled = matrix.per_cluster[0].sum(0) * other.n_seeds - other.per_cluster[0].sum(0) * matrix.n_seeds
    differences = np.rint(scaled).astype(np.int64)
    differences //= max(1, int(np.gcd.reduce(differences)))
    return flipped_sum_p(Counter(map(int, np.abs(differences[differences != 0]))), abs(int(differences.sum())))


def flipped_sum_p(sizes: Counter[int], observed: int) -> float:
    """Return the probability that numbers of these sizes (size -> how many) with random signs sum to +-`observed` or more."""
    import numpy as np
    from scipy.signal import fftconvolve

    total, exact = sum(size * count for size, count in sizes.items()), True
    distribution = np.ones(1)  # of the sum of those with a plus
    for size, count in sorted(sizes.items(), key=lambda item: -item[1]):
        of_size = np.zeros(size * count + 1)
        of_size[::size] = _heads(count)
        if len(of_size) * len(distribution) <= _MOST_PRODUCTS:
            distribution = np.convolve(distribution, of_size)
        else:
            distribution, exact = np.maximum(fftconvolve(distribution, of_size), 0), False
    sums = 2 * np.arange(total + 1) - total
    p = float(distribution[np.abs(sums) >= observed].sum())
    return min(1.0, p if exact else max(p, _LEAST_P))


@lru_cache(maxsize=1024)
def _heads(n: int) -> Floats:
    """Return the probabilities of 0 to `n` heads of `n` coins."""
    import numpy as np
    from scipy.stats import binom

    return np.asarray(binom.pmf(np.arange(n + 1), n, 0.5))


def chance_p(matrix: CorrectnessMatrix) -> float | None:
    """Return the two-sided p that the accuracy is that of guessing, by each question's own chance, from Student's t.

    Its variance holds documents and seeds. None with fewer than two documents.
    """
    variance = _variance([(1.0, matrix.above_chance)], "pooled")
    return None if variance is None else _t_p(matrix.above_chance.mean(), variance)


def near_p(matrix: CorrectnessMatrix, margin: float, other: CorrectnessMatrix | None = None) -> float | None:
    """Return the p of two one-sided t tests that accuracy is within `margin` of guessing, or of `other`'s (Schuirmann 1987).

    Each question has its own chance. None with fewer than `FEWEST` documents: ignorance is no equivalence.
    """
    weighted = [(1.0, matrix.above_chance)] if other is None else [(1.0, matrix), (-1.0, other)]
    variance, value = _variance(weighted, "pooled"), sum(weight * term.mean() for weight, term in weighted)
    if variance is None or not variance.total or matrix.members[1] < FEWEST:
        return None
    error = math.sqrt(variance.total)
    above, below = ((value + sign * margin) / error for sign in (1, -1))
    return max(_tail(above, variance.df), _tail(-below, variance.df))


@dataclass(frozen=True, slots=True)
class Trend:
    """Whether accuracy rises along arms: `p` is two-sided, `rises` the direction, `monotone` that no step goes against it."""

    p: float
    rises: bool
    monotone: bool


def trend(matrices: Sequence[CorrectnessMatrix]) -> Trend | None:
    """Return the trend of accuracy along `matrices` by Page's test (1963), documents as blocks; None for fewer than two.

    Where arms have several seeds, p is the larger of Page's and that of a linear contrast whose variance holds documents
    and seeds.
    """
    import numpy as np
    from scipy.stats import page_trend_test

    counts = matrices[0].per_cluster[1]
    if len(counts) < 2:
        return None
    blocks = np.stack([matrix.per_cluster[0].mean(0) / counts for matrix in matrices], axis=1)
    up, down = (float(page_trend_test(columns).pvalue) for columns in (blocks, blocks[:, ::-1]))
    steps = np.diff([matrix.mean() for matrix in matrices])
    rises, p = up <= down, min(1.0, 2 * min(up, down))
    if max(matrix.n_seeds for matrix in matrices) > 1:
        weights = np.arange(len(matrices)) - (len(matrices) - 1) / 2
        weighted = [(float(weight), matrix) for weight, matrix in zip(weights, matrices, strict=True)]
        value = sum(weight * matrix.mean() for weight, matrix in weighted)
        variance = _variance(weighted, "pooled")
        p = max(p, 1.0 if variance is None or (value > 0) != rises else _t_p(value, variance))
    return Trend(p, rises, bool((steps >= 0).all() if rises else (steps <= 0).all()))


def majority_changes(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> tuple[int, int]:
    """Return how many questions most seeds of `other` had wrong and most of `matrix` correct, and the reverse.

    A question that half of the seeds answer is neither.
    """
    now, before = matrix.correct.mean(0), other.correct.mean(0)
    return int(((now > 0.5) & (before < 0.5)).sum()), int(((before > 0.5) & (now < 0.5)).sum())


def make_contrast(
    matrix: CorrectnessMatrix, other: CorrectnessMatrix, name: str, scope: Scope = "these models"
) -> Contrast | None:
    """Return the difference of two arms on the questions of both, before any correction; None if they share none.

    `scope` is its scope (`kinject.results.Scope`).
    """
    matrix, other = aligned(matrix, other)
    if not matrix.question_ids:
        return None
    estimate, gain = difference_estimate(matrix, other), relative_gain(matrix, other)
    relative = (None, None, None) if gain is None else (gain.value, gain.low, gain.high)
    gained, lost = majority_changes(matrix, other)
    plain, one_seed = matrix.is_plain and other.is_plain, max(matrix.n_seeds, other.n_seeds) == 1
    test: Test = "McNemar" if plain else "sign flips" if one_seed else "t over documents and seeds"
    return correct_contrast(
        Contrast(
            other=name, delta=matrix.mean() - other.mean(), low=estimate.low, high=estimate.high,
            p=difference_p(matrix, other), p_holm=None, wrong_to_right=gained, right_to_wrong=lost,
            relative=relative[0], relative_low=relative[1], relative_high=relative[2], smallest=None, test=test, scope=scope,
            n=len(matrix.question_ids), n_clusters=matrix.members[1], standard_error=estimate.standard_error, df=estimate.df,
            accuracy=matrix.mean(), effective=matrix.n_effective,
        ), None, 1,
    )  # fmt: skip


def correct_contrast(contrast: Contrast, p_holm: float | None, family: int) -> Contrast:
    """Return `contrast` as one of `family` comparisons: with Holm's p, and the smallest difference at the corrected alpha."""
    if contrast.standard_error is None or contrast.df is None:
        return replace(contrast, p_holm=p_holm, family=family)
    smallest = _detectable(ALPHA / family, contrast.df) * contrast.standard_error
    return replace(contrast, p_holm=p_holm, smallest=min(1.0, smallest), family=family)


@lru_cache(maxsize=4096)
def _detectable(alpha: float, df: float) -> float:
    """Return how many standard errors a difference must have to be found with `POWER` by a two-sided t test."""
    from scipy.optimize import brentq
    from scipy.stats import chi2, nct

    quantile = _quantile(alpha / 2, df)
    if quantile > 100:  # scipy's noncentral t does not converge; the error of the numerator counts for nothing there
        return quantile * math.sqrt(chi2.ppf(POWER, df) / df)
    return float(brentq(lambda effect: float(nct.sf(quantile, df, effect)) - POWER, 0.0, 4 * quantile + 4))


def correct_contrasts(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return `contrasts` corrected as one family (Holm 1979); those without a p are none of it."""
    tested = [contrast.p for contrast in contrasts if contrast.p is not None]
    corrected = iter(holm(tested))
    return [
        correct_contrast(contrast, None if contrast.p is None else next(corrected), max(1, len(tested)))
        for contrast in contrasts
    ]


def wilson(n_correct: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of `n_correct` of `n` (Wilson 1927), as (low, high); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    rate, more = n_correct / n, _Z**2 / n
    half = _Z * math.sqrt(rate * (1 - rate) / n + more / (4 * n))
    low, high = ((rate + more / 2 + end) / (1 + more) for end in (-half, half))
    return (low if n_correct else 0.0), (high if n_correct < n else 1.0)


def chance(n_choices: list[int]) -> float:
    """Return the accuracy of guessing evenly: the mean of 1 / number of choices over questions; 0 for none."""
    return sum(1 / n for n in n_choices) / len(n_choices) if n_choices else 0.0


def bootstrap_interval(
    values: Sequence[float], clusters: Sequence[str], strata: Sequence[str] | None = None, *, seed: int = 0
) -> tuple[float, float] | None:
    """Return the 95% percentile bootstrap interval of the mean of `values`, whole clusters drawn with replacement.

    A value with the cluster "" is a cluster of its own. With `strata` the statistic is the mean of the strata's means,
    and clusters are drawn within each. The same input gives the same interval. None where fewer than two clusters
    could be drawn in every stratum: there is nothing to resample.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    groups: dict[str, dict[str, list[float]]] = {}
    for index, (value, cluster) in enumerate(zip(values, clusters, strict=True)):
        stratum = strata[index] if strata is not None else ""
        groups.setdefault(stratum, {}).setdefault(cluster or f"\0{index}", []).append(value)
    if max((len(group) for group in groups.values()), default=0) < 2:
        return None
    means = np.zeros(_N_RESAMPLES)
    for group in groups.values():
        sums = np.array([math.fsum(part) for part in group.values()])
        counts = np.array([len(part) for part in group.values()])
        for part in np.array_split(means, -(-_N_RESAMPLES * len(sums) // _MOST_DRAWS)):
            drawn = random.integers(0, len(sums), (len(part), len(sums)))  # [resamples, clusters]
            part += sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means / len(groups), (0.025, 0.975))
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return `p_values` corrected for their number (Holm 1979), in their order: the familywise error stays below alpha."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def format_p(p: float) -> str:
    """Return `p` with three digits, "< 0.001" below."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def relative_gain(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> Bounded | None:
    """Return the difference of two arms over `other`'s accuracy above chance, with its 95% interval (Fieller 1954).

    Each question counts with its own chance. The interval holds the variance of both accuracies, their covariance, and
    one more answer of each, so that 100% is bounded too. None where `other` is not above chance (then any gain is
    possible) or with fewer than two documents.
    """
    arm, base = matrix.above_chance, other.above_chance
    x, y = arm.mean(), base.mean()
    parts = [_variance(of, "net") for of in ([(1.0, arm)], [(1.0, base)], [(1.0, arm), (-1.0, base)])]
    if y <= 0 or None in parts:
        return None
    of_arm, of_base, of_both = (part for part in parts if part is not None)
    joint = _variance([(1.0, arm), (-x / y, base)], "net")
    square = _quantile(0.025, joint.df if joint else of_both.df) ** 2
    shared = square * (of_arm.documents + of_base.documents - of_both.documents) / 2
    of_x, of_y = of_arm.total + _one_more(matrix, of_arm.documents), of_base.total + _one_more(other, of_base.documents)
    a, b, c = y**2 - square * of_y, x * y - shared, x**2 - square * of_x
    if a <= 0:
        return None
    root = math.sqrt(max(0.0, b**2 - a * c))
    return Bounded(x / y - 1, (b - root) / a - 1, (b + root) / a - 1)


def _one_more(matrix: CorrectnessMatrix, documents: float) -> float:
    """Return the variance that one more answer of one seed adds, as in Bonett and Price's interval of a difference."""
    spread = matrix.mean() * (1 - matrix.mean())
    effective = spread / documents if documents and spread > 1e-12 else matrix.members[1]
    return float(1 / (matrix.n_seeds * (effective + 2)) ** 2)
