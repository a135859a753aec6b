"""Power against simulated studies, and the cheapest change by a search that tries them all."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from kinject.results import MARGIN
from kinject.stats.intervals import difference_estimate
from kinject.stats.matrix import CorrectnessMatrix
from kinject.stats.power import Design, Spread, cheapest, detectable, spread_of


def simulated(
    random: np.random.Generator, n_documents: int, n_questions: int, n_seeds: int, gain: float
) -> tuple[CorrectnessMatrix, CorrectnessMatrix]:
    """Return two arms: documents are learned more or less, trainings succeed more or less."""
    n = n_documents * n_questions
    ids = tuple(f"q{i:04}" for i in range(n))
    clusters = tuple(f"d{i // n_questions:03}" for i in range(n))
    of_document = np.repeat(random.normal(0, 0.15, n_documents), n_questions)
    of_seed = random.normal(0, 0.02, (n_seeds, 1))
    rates = np.clip(0.4 + gain + of_document + of_seed, 0, 1)
    arm = (random.random((n_seeds, n)) < rates).astype(float)
    base = (random.random((1, n)) < 0.4).astype(float)
    return CorrectnessMatrix(arm, ids, clusters), CorrectnessMatrix(base, ids, clusters)


@pytest.mark.parametrize(
    ("n_documents", "n_questions", "n_seeds"), [(60, 4, 3), (128, 4, 1), (40, 8, 2)]
)
def test_the_detectable_difference_is_shown_four_times_in_five(
    n_documents: int, n_questions: int, n_seeds: int
) -> None:
    random = np.random.default_rng(0)
    pilots = [
        spread_of(*simulated(random, n_documents, n_questions, n_seeds, 0.1)) for _ in range(40)
    ]
    found = [spread for spread in pilots if spread is not None]
    assert len(found) == 40
    spread = Spread(
        float(np.mean([s.question for s in found])), float(np.mean([s.within for s in found])),
        float(np.mean([s.seed for s in found])) if n_seeds > 1 else 0.0,
        float(np.mean([s.answer for s in found])), assumed=False,
    )  # fmt: skip
    design = Design(n_documents, n_questions, n_seeds, 1, 1)
    gain = detectable(design, spread)
    shown = [
        (difference_estimate(*simulated(random, n_documents, n_questions, n_seeds, gain)).p or 1)
        < 0.05
        for _ in range(300)
    ]
    assert 0.68 < np.mean(shown) < 0.9


def test_a_larger_family_and_fewer_questions_tell_less() -> None:
    design = Design(128, 4, 3, 2, 1)
    smallest = detectable(design, Spread())
    for other in (
        Design(128, 4, 3, 2, 9),
        Design(64, 4, 3, 2, 1),
        Design(128, 2, 3, 2, 1),
        Design(128, 4, 2, 2, 1),
    ):
        assert detectable(other, Spread()) > smallest


def test_arms_that_are_trained_as_often_inform_one_variance_between_seeds() -> None:
    design = Design(128, 12, 3, 2, 1)
    spread = Spread(0.4, 0.1, 0.0004, 0.15)
    # Pencil and paper: two trained arms of three seeds differ by 2 points, each answer varies.
    documents, seeds = 0.4 * (1 + 11 * 0.1) / (128 * 12), 0.0004 / 3
    answers = 2 * 0.15 / (128 * 12) / 3
    for n_alike, df in ((1, 2), (2, 2), (3, 6), (8, 16)):
        # Cochran and Cox: the quantile of the sum is the weighted mean of the parts' own.
        of_parts = scipy.stats.t.isf(0.025, [127, df])
        quantile = np.average(of_parts, weights=[documents, seeds + answers])
        effective = scipy.optimize.brentq(
            lambda x, wanted=quantile: scipy.stats.t.isf(0.025, x) - wanted, 1, 200
        )
        errors = detectable(replace(design, n_alike=n_alike), spread) / (documents + seeds) ** 0.5
        assert scipy.stats.nct.sf(quantile, effective, errors) == pytest.approx(0.8)


def test_the_noise_of_answers_is_that_between_trainings() -> None:
    """Answers at random, each with 0.4: what trainings differ by comes from single answers."""
    arm, base = simulated(np.random.default_rng(3), 300, 4, 4, 0.0)
    spread = spread_of(arm, base)
    assert spread is not None
    # The clip of rates between 0 and 1 and the documents' part: 0.24 - 0.15 ** 2.
    assert spread.answer == pytest.approx(0.2175, abs=0.015)


@pytest.mark.parametrize(("n_documents", "family"), [(2, 1), (3, 9), (12, 40), (300, 26)])
def test_a_detectable_difference_is_shown_in_four_fifths_by_the_noncentral_t(
    n_documents: int, family: int
) -> None:
    """Few documents, or many claims: there a sum of two quantiles shows less."""
    spread = Spread(0.3, 0.0)
    gain = detectable(Design(n_documents, 5, 1, 0, family), spread)
    error = (0.3 / (5 * n_documents)) ** 0.5
    df = n_documents - 1
    limit = scipy.stats.t.isf(0.025 / family, df)
    random = np.random.default_rng(1)
    squares = random.chisquare(df, 40_000) / df
    shown = (random.normal(size=40_000) + gain / error) / squares**0.5 > limit
    assert shown.mean() == pytest.approx(0.8, abs=0.01)


def test_with_one_seed_the_difference_is_that_of_these_models_and_falls_with_the_questions() -> (
    None
):
    """As the test of answers has it: trainings do not count, so their assumed difference does not either."""
    sizes = [detectable(Design(100, n, 1, 2, 5), Spread()) for n in (1, 2, 4, 12)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == detectable(Design(100, 1, 1, 0, 5), Spread())
    # Pencil and paper: 100 questions, variance 0.4, t of 99 degrees at 0.5%.
    errors = sizes[0] / (0.4 / 100) ** 0.5
    assert scipy.stats.nct.sf(2.6264, 99, errors) == pytest.approx(0.8, abs=1e-4)


def test_the_cheapest_change_is_questions_then_documents_then_seeds() -> None:
    few = Design(120, 3, 3, 1, 1)
    spread = Spread(0.4, 0.02, 0.0001)
    words = cheapest(few, spread, 0.05)
    n = int(words.split()[0])
    assert words.endswith("questions a document")
    assert (
        detectable(Design(120, n, 3, 1, 1), spread)
        <= 0.05
        < detectable(Design(120, n - 1, 3, 1, 1), spread)
    )
    alike = Spread(0.4, 0.9, 0.0001)  # more questions on a document tell nothing new
    assert re.fullmatch(
        r"12 questions on each of [\d,]+ documents( and . seeds)?", cheapest(few, alike, 0.05)
    )
    lucky = Spread(0.4, 0.02, 0.01)  # trainings differ by ten points
    words = cheapest(Design(2000, 12, 2, 1, 1), lucky, 0.05)
    n_documents, n_seeds = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", words)[1:])
    assert words.endswith("seeds")
    assert detectable(Design(n_documents, 12, n_seeds, 1, 1), lucky) <= 0.05
    assert cheapest(Design(2000, 12, 3, 1, 1), spread, MARGIN) == ""
