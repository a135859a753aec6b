"""Statistics against examples that were worked and printed by others, and against whole distributions counted out.

A resampled number is held to its exact distribution within what 4,000 draws leave to chance; the draws are seeded, so that
a test which passes once passes always.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom, t

from kinject.stats import (
    CorrectnessMatrix,
    bootstrap_interval,
    bounded_mean,
    difference_estimate,
    near_p,
    sign_flip_p,
    trend,
)


def _matrix(values: Sequence[float]) -> CorrectnessMatrix:
    """One seed, each value a document of its own."""
    names = tuple(map(str, range(len(values))))
    return CorrectnessMatrix(np.array([values], dtype=float), names, names)


def _exact_bootstrap(values: Sequence[int], n: int | None = None) -> dict[float, float]:
    """Return the distribution of the mean of len(values) draws with replacement: mean -> probability."""
    size = len(values) if n is None else n
    sums: Counter[int] = Counter({0: 1})
    for _ in range(size):
        longer: Counter[int] = Counter()
        for total, n_ways in sums.items():
            for value in values:
                longer[total + value] += n_ways
        sums = longer
    whole = len(values) ** size
    return {total / size: float(Fraction(n_ways, whole)) for total, n_ways in sorted(sums.items())}


def test_students_interval_is_that_of_his_own_sleep_data() -> None:
    """Gosset 1908, Biometrika 6:20: mean 1.58, t = 4.0621; the 95% interval (0.7001, 2.4599) as R's ?t.test prints it."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    estimate = bounded_mean(_matrix(hours), -9, 9)
    assert estimate.value == pytest.approx(1.58)
    assert (estimate.low, estimate.high) == pytest.approx((0.7001142, 2.4598858), abs=5e-7)


def test_flipping_signs_gives_fishers_p_of_darwins_maize() -> None:
    """Fisher 1935, The Design of Experiments, section 21: of 32,768 ways, 863 reach the sum of 314 and 863 its negative."""
    eighths_of_inches = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    p = sign_flip_p(_matrix(eighths_of_inches), _matrix([0] * 15))
    signs = (np.arange(2**15)[:, None] >> np.arange(15) & 1) * 2 - 1
    assert (np.abs(signs @ eighths_of_inches) >= 314).sum() == 2 * 863
    assert p == pytest.approx(1726 / 32768, rel=1e-9)


def test_mcnemars_p_is_a_sum_of_binomials_in_whole_numbers() -> None:
    """The first counts are those of Agresti's prime minister (Categorical Data Analysis): 150 approve no more, 86 do now."""
    for gained, lost in ((150, 86), (86, 150), (7, 2), (30, 30)):
        n, least = gained + lost, min(gained, lost)
        tail = Fraction(2 * sum(math.comb(n, k) for k in range(least + 1)), 2**n)
        after, before = _matrix([1.0] * gained + [0.0] * lost), _matrix([0.0] * gained + [1.0] * lost)
        assert sign_flip_p(after, before) == pytest.approx(min(1.0, float(tail)), rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_bootstrap_of_efrons_mice_is_the_exact_one_within_its_draws(seed: int) -> None:
    """Efron and Tibshirani 1993, table 2.1: the seven treated mice; their ideal bootstrap, all 7^7 samples counted."""
    days = [94, 197, 16, 38, 99, 141, 23]
    exact = _exact_bootstrap(days)
    means, cumulative = np.array(list(exact)), np.cumsum(list(exact.values()))
    low, high = bootstrap_interval(days, [""] * 7, seed=seed)  # type: ignore[misc]
    for bound, quantile in ((low, 0.025), (high, 0.975)):
        slack = 4 * math.sqrt(quantile * (1 - quantile) / 4000)
        bounds = np.interp([quantile - slack, quantile + slack], cumulative, means)
        assert bounds[0] <= bound <= bounds[1]
    variance = sum(weight * mean**2 for mean, weight in exact.items()) - (sum(days) / 7) ** 2
    assert math.sqrt(variance) == pytest.approx(23.36, abs=0.005)  # as their table 6.1 has it for endless resamples


@pytest.mark.parametrize(("n_right", "n"), [(60, 100), (3, 40), (290, 300)])
def test_intervals_of_right_and_wrong_are_binomial(n_right: int, n: int) -> None:
    """Drawing n of n answers with replacement draws a binomial number of right ones."""
    values = [1.0] * n_right + [0.0] * (n - n_right)
    low, high = bootstrap_interval(values, [""] * n)  # type: ignore[misc]
    for bound, tail in ((low, 0.025), (high, 0.975)):
        slack = 4 * math.sqrt(tail * (1 - tail) / 4000)
        least, most = (binom.ppf(tail + sign * slack, n, n_right / n) for sign in (-1, 1))
        assert least <= round(bound * n, 6) <= most


def test_nearness_is_two_t_tests() -> None:
    """Schuirmann 1987: both one-sided tests at the margins must find; Student's t of a mean of 100 answers, 30 right."""
    values = [1.0] * 30 + [0.0] * 70
    error = math.sqrt(0.3 * 0.7 / 99)
    expected = max(t.sf((0.3 - 0.15) / error, 99), t.cdf((0.3 - 0.35) / error, 99))
    assert near_p(replace(_matrix(values), chances=(0.25,) * 100), 0.1) == pytest.approx(expected)


def test_pages_p_is_that_of_every_order_counted() -> None:
    """Page 1963, JASA 58:216: four conditions, six documents without ties; his table has L = 163 at 5%."""
    ranks = [(1, 2, 3, 4), (1, 3, 2, 4), (2, 1, 3, 4), (1, 2, 4, 3), (3, 1, 2, 4), (2, 3, 1, 4)]
    sheets = [_matrix([row[index] / 4 for row in ranks]) for index in range(4)]
    of_row = _exact_l(1)
    counts = _exact_l(6)
    seen = sum(column * rank for row in ranks for column, rank in enumerate(row, 1))
    exact = sum(n for total, n in counts.items() if total >= seen) / sum(counts.values())
    assert sum(of_row.values()) == 24
    result = trend(sheets)
    assert result is not None
    assert result.rises
    assert result.p == pytest.approx(2 * exact, rel=1e-9)
    tail = {least: sum(n for total, n in counts.items() if total >= least) / 24**6 for least in (162, 163)}
    assert tail[163] <= 0.05 < tail[162]


def _exact_l(n_blocks: int) -> Counter[int]:
    from itertools import permutations

    of_row = Counter(sum(column * rank for column, rank in enumerate(order, 1)) for order in permutations(range(1, 5)))
    counts: Counter[int] = Counter({0: 1})
    for _ in range(n_blocks):
        longer: Counter[int] = Counter()
        for a, n in counts.items():
            for b, m in of_row.items():
                longer[a + b] += n * m
        counts = longer
    return counts


@pytest.mark.parametrize(("gained", "lost", "n"), [(12, 4, 80), (0, 7, 40)])
def test_the_interval_of_a_paired_difference_is_bonett_and_prices(gained: int, lost: int, n: int) -> None:
    """Bonett and Price 2012, JEBS 37:479, equation 4, with Student's quantile; each discordant count one more."""
    after = _matrix([1.0] * gained + [0.0] * lost + [1.0] * (n - gained - lost))
    before = _matrix([0.0] * gained + [1.0] * lost + [1.0] * (n - gained - lost))
    p_gained, p_lost = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = float(t.ppf(0.975, n - 1)) * math.sqrt((p_gained + p_lost - (p_gained - p_lost) ** 2) / (n + 2))
    estimate = difference_estimate(after, before)
    assert (estimate.low, estimate.high) == pytest.approx(
        (p_gained - p_lost - half, p_gained - p_lost + half), abs=2 / n**1.5
    )
