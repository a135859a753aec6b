"""Tests: signs flipped document by document, Student's tails, and Holm's correction."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kinject.stats.matrix import CorrectnessMatrix

if TYPE_CHECKING:
    from kinject.stats.matrix import Floats

_MOST_PRODUCTS = 1 << 28
"""Multiplications of an exact sign-flip distribution; beyond, it is computed by Fourier transform."""
_LEAST_P = 1e-12
"""Below it, rounding of the Fourier transform counts."""


def quantile(probability: float, df: float) -> float:
    """Return the value above which Student's t lies with `probability`; a normal number for infinite `df`."""
    from scipy.special import ndtri, stdtrit  # scipy.stats takes 0.3 s to import

    return -float(ndtri(probability) if math.isinf(df) else stdtrit(df, probability))


def tail(value: float, df: float) -> float:
    """Return the probability that Student's t lies above `value`; a normal number for infinite `df`."""
    from scipy.special import ndtr, stdtr

    return float(ndtr(-value) if math.isinf(df) else stdtr(df, -value))


def flips_p(weighted: Sequence[tuple[int, CorrectnessMatrix]]) -> float:
    """Return the two-sided p of a contrast of arms being 0: signs flipped document by document (Fisher's randomisation).

    Every assignment of signs is counted, whatever their number: documents' sums are whole numbers (over the numbers of
    seeds), so the distribution of their sum is a product of binomials. Seeds are averaged first. For two arms, where no
    document has two questions and each arm one seed, this is McNemar's exact test.
    """
    import numpy as np

    common = math.lcm(*(matrix.n_seeds for _, matrix in weighted))
    scaled = sum(weight * (common // matrix.n_seeds) * matrix.per_cluster[0].sum(0) for weight, matrix in weighted)
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


def holm(p_values: Sequence[float]) -> list[float]:
    """Return `p_values` corrected for their number (Holm 1979), in their order: the familywise error stays below alpha."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
