"""Statistics against examples that were worked and printed by others, and against whole distributions counted out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import t

from kinject.stats.intervals import chance_p, difference_estimate, flips_p
from kinject.stats.matrix import CorrectnessMatrix


def _matrix(values: Sequence[float]) -> CorrectnessMatrix:
    """One seed, each value a document of its own."""
    names = tuple(map(str, range(len(values))))
    return CorrectnessMatrix(np.array([values], dtype=float), names, names)


def _flips(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> float:
    return flips_p([(1, matrix), (-1, other)])


def test_flipping_signs_gives_fishers_p_of_darwins_maize() -> None:
    """Fisher 1935, The Design of Experiments, section 21: of 32,768 ways, 863 reach the sum of 314 and 863 its negative."""
    eighths_of_inches = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    p = _flips(_matrix(eighths_of_inches), _matrix([0] * 15))
    signs = (np.arange(2**15)[:, None] >> np.arange(15) & 1) * 2 - 1
    assert (np.abs(signs @ eighths_of_inches) >= 314).sum() == 2 * 863
    assert p == pytest.approx(1726 / 32768, rel=1e-9)


def test_mcnemars_p_is_a_sum_of_binomials_in_whole_numbers() -> None:
    """The first counts are those of Agresti's prime minister (Categorical Data Analysis): 150 approve no more, 86 do now."""
    for gained, lost in ((150, 86), (86, 150), (7, 2), (30, 30)):
        n, least = gained + lost, min(gained, lost)
        tail = Fraction(2 * sum(math.comb(n, k) for k in range(least + 1)), 2**n)
        after, before = (
            _matrix([1.0] * gained + [0.0] * lost),
            _matrix([0.0] * gained + [1.0] * lost),
        )
        assert _flips(after, before) == pytest.approx(min(1.0, float(tail)), rel=1e-9)


def test_nearness_is_two_binomial_tests_in_whole_numbers() -> None:
    """Schuirmann 1987: both one-sided tests at the margins must find; of 100 answers 30 are right."""

    def probability(counts: range, rate: Fraction) -> Fraction:
        ways = (math.comb(100, k) * rate**k * (1 - rate) ** (100 - k) for k in counts)
        return sum(ways, Fraction(0))

    above, below = (
        probability(range(30, 101), Fraction(15, 100)),
        probability(range(31), Fraction(35, 100)),
    )
    matrix = replace(_matrix([1.0] * 30 + [0.0] * 70), chances=(0.25,) * 100)
    assert chance_p(matrix, 0.1) == pytest.approx(float(max(above, below)), rel=1e-9)


@pytest.mark.parametrize(("gained", "lost", "n"), [(12, 4, 80), (0, 7, 40)])
def test_the_interval_of_a_paired_difference_is_bonett_and_prices(
    gained: int, lost: int, n: int
) -> None:
    """Bonett and Price 2012, JEBS 37:479, equation 4, with Student's quantile; each discordant count one more."""
    after = _matrix([1.0] * gained + [0.0] * lost + [1.0] * (n - gained - lost))
    before = _matrix([0.0] * gained + [1.0] * lost + [1.0] * (n - gained - lost))
    p_gained, p_lost = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = float(t.ppf(0.975, n - 1)) * math.sqrt(
        (p_gained + p_lost - (p_gained - p_lost) ** 2) / (n + 2)
    )
    estimate = difference_estimate(after, before)
    assert (estimate.low, estimate.high) == pytest.approx(
        (p_gained - p_lost - half, p_gained - p_lost + half), abs=2 / n**1.5
    )
