"""Intervals and paired tests of proportions, from scipy where it has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

POWER = 0.8
"""The probability with which the smallest detectable difference would be found."""

_Z = 1.959963984540054  # 97.5% quantile of the normal distribution
_N_RESAMPLES = 4000
_MOST_DRAWS = 1 << 21
"""Draws held at once, so that memory does not grow with the number of clusters."""


def wilson(n_correct: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of `n_correct` of `n` (Wilson 1927), as (low, high); (0, 1) for n = 0."""
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    interval = binomtest(n_correct, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar(wrong_to_right: int, right_to_wrong: int) -> float:
    """Return the exact two-sided p of McNemar's test from the two discordant counts (binomial, p = 1/2); 1 for none."""
    from scipy.stats import binomtest

    n = wrong_to_right + right_to_wrong
    return float(binomtest(wrong_to_right, n, 0.5).pvalue) if n else 1.0


def counts_interval(wrong_to_right: int, right_to_wrong: int, n: int) -> tuple[float, float]:
    """Return the 95% interval of a paired difference of accuracies (Bonett and Price 2012, adjusted Wald)."""
    gained, lost = (wrong_to_right + 1) / (n + 2), (right_to_wrong + 1) / (n + 2)
    middle, half = gained - lost, _Z * math.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
    return max(-1.0, middle - half), min(1.0, middle + half)


def newcombe_interval(counts: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
    """Return the 95% interval of the difference of two accuracies (n_correct, n), as if the questions differed.

    It is built from the two Wilson intervals (Newcombe 1998). For the same questions it is wider than it need be.
    """
    (accuracy, (low, high)), (accuracy_2, (low_2, high_2)) = ((c / n, wilson(c, n)) for c, n in (counts, other))
    middle = accuracy - accuracy_2
    return (
        middle - math.hypot(accuracy - low, high_2 - accuracy_2),
        middle + math.hypot(high - accuracy, accuracy_2 - low_2),
    )


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


def smallest_difference(n: int, n_discordant: int) -> float | None:
    """Return the smallest paired difference that `n` questions show at 5% (two-sided) with 80% power.

    By Connor (Biometrics 1987) for McNemar's test, with the observed fraction of discordant questions, or the difference
    itself if that is larger. At least six questions must change, all one way, for the exact test to reach 5%. None
    where `n` is too small for any difference.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    z_alpha, z_beta = float(norm.ppf(0.975)), float(norm.ppf(POWER))

    def excess(delta: float) -> float:
        discordant = max(delta, n_discordant / n)
        needed = (z_alpha * math.sqrt(discordant) + z_beta * math.sqrt(discordant - delta**2)) ** 2 / delta**2
        return needed - n

    if n < 6:
        return None
    return max(float(brentq(excess, 1e-9, 1.0)), 6 / n)


def relative_gain(accuracy: float, base: float) -> float | None:
    """Return the paper's gain (L' - L) / L (arXiv 2312.05934, section 5); None for a base of 0."""
    return (accuracy - base) / base if base else None


def seed_interval(deltas: Sequence[float]) -> tuple[float, float, float, float] | None:
    """Return (mean, standard deviation, low, high) of one difference over several seeds: Student's t, 95%.

    None for fewer than two seeds.
    """
    import numpy as np
    from scipy.stats import t

    if len(deltas) < 2:
        return None
    mean, spread = float(np.mean(deltas)), float(np.std(deltas, ddof=1))
    half = float(t.ppf(0.975, len(deltas) - 1)) * spread / math.sqrt(len(deltas))
    return mean, spread, mean - half, mean + half
