"""Estimates, intervals and tests against the naive way, formulas written out, and simulations with a known truth."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from scipy.stats import bootstrap, t

from kinject.eval.results import correct_families, correctness, summarize_arm
from kinject.results import fewest_for
from kinject.stats import (
    CorrectnessMatrix,
    aligned,
    bootstrap_interval,
    bounded_accuracy,
    bounded_mean,
    chance,
    chance_p,
    correct_contrasts,
    design_effect,
    difference_estimate,
    difference_p,
    flipped_sum_p,
    holm,
    majority_changes,
    make_contrast,
    moderated,
    near_p,
    relative_gain,
    sign_flip_p,
    trend,
    wilson,
)
from kinject.stats.intervals import _detectable
from kinject.types import Answer


def sheet(right: list[list[int]], documents: str) -> CorrectnessMatrix:
    return CorrectnessMatrix(np.array(right, dtype=float), tuple(map(str, range(len(documents)))), tuple(documents))


def simulated(
    seed: int, n_seeds: int, n_documents: int, n_each: int, accuracy: float, spread: float = 0.0
) -> CorrectnessMatrix:
    """Documents whose accuracies differ by `spread`, questions drawn independently within them."""
    random = np.random.default_rng(seed)
    levels = np.clip(accuracy + spread * random.standard_normal(n_documents), 0, 1)
    right = (random.random((n_seeds, n_documents, n_each)) < levels[None, :, None]).astype(float)
    documents = tuple(f"d{index // n_each}" for index in range(n_documents * n_each))
    return CorrectnessMatrix(right.reshape(n_seeds, -1), tuple(map(str, range(len(documents)))), documents)


def alone(values: list[float]) -> CorrectnessMatrix:
    """One seed; no question has a document."""
    return CorrectnessMatrix(np.array([values], dtype=float), tuple(map(str, range(len(values)))), ("",) * len(values))


@pytest.mark.parametrize(
    ("n_correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_equals_the_values_printed_by_newcombe_1998(n_correct, n, low, high):
    # Newcombe, Statistics in Medicine 17:857, table I, method 3
    assert wilson(n_correct, n) == pytest.approx((low, high), abs=5e-5)
    interval = scipy.stats.binomtest(n_correct, n).proportion_ci(0.95, "wilson")
    assert wilson(n_correct, n) == pytest.approx((interval.low, interval.high), abs=1e-12)


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(1, 9, 22 / 1024), (9, 1, 22 / 1024), (0, 5, 2 / 32), (5, 5, 1.0), (0, 0, 1.0)]
)
def test_sign_flips_of_single_questions_are_mcnemars_binomial_tails_counted_by_hand(gained, lost, p):
    after, before = alone([1.0] * gained + [0.0] * lost + [1.0] * 5), alone([0.0] * gained + [1.0] * lost + [1.0] * 5)
    assert sign_flip_p(after, before) == pytest.approx(p)


def test_chance_is_the_mean_over_questions():
    assert chance([4, 2]) == pytest.approx((1 / 4 + 1 / 2) / 2)


def test_no_questions_are_no_knowledge():
    assert wilson(0, 0) == (0.0, 1.0)
    assert chance([]) == 0.0


def test_the_bootstrap_of_single_clusters_equals_scipys():
    values = [1.0, 0.0, 0.0, -1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0] * 6
    expected = bootstrap((values,), np.mean, method="percentile", n_resamples=4000, rng=1).confidence_interval
    interval = bootstrap_interval(values, [""] * len(values))
    assert interval == pytest.approx((expected.low, expected.high), abs=0.035)


def test_questions_on_one_document_count_as_one_observation():
    values = [1.0] * 20 + [0.0] * 20
    alone = bootstrap_interval(values, [""] * 40)
    clustered = bootstrap_interval(values, [f"d{index // 10}" for index in range(40)])
    assert alone is not None
    assert clustered is not None
    # the mean of 4 coins against that of 40: about the root of ten as wide
    assert (clustered[1] - clustered[0]) / (alone[1] - alone[0]) == pytest.approx(10**0.5, rel=0.2)


def test_one_document_alone_gives_no_interval_two_do():
    assert bootstrap_interval([1.0, 0.0], ["d", "d"]) is None
    assert bootstrap_interval([], []) is None
    assert bootstrap_interval([1.0, 0.0], ["d", "e"]) == (0.0, 1.0)


def test_the_same_input_gives_the_same_interval_another_seed_another_one():
    values = np.random.default_rng(1).random(300).tolist()
    assert bootstrap_interval(values, [""] * 300) == bootstrap_interval(values, [""] * 300, seed=0)
    assert bootstrap_interval(values, [""] * 300) != bootstrap_interval(values, [""] * 300, seed=1)


def test_how_many_draws_are_held_at_once_changes_nothing(monkeypatch):
    values, clusters = np.random.default_rng(1).random(300).tolist(), [f"d{i % 70}" for i in range(300)]
    strata = [str(i % 3) for i in range(300)]
    whole = bootstrap_interval(values, clusters, strata)
    monkeypatch.setattr("kinject.stats.intervals._MOST_DRAWS", 1001)
    assert bootstrap_interval(values, clusters, strata) == whole


def test_the_bootstrap_of_many_clusters_holds_few_draws():
    """500 resamples of 12,000 at once, as whole arrays, would hold 144 MB."""
    tracemalloc.start()
    try:
        bootstrap_interval([float(index % 2) for index in range(12_000)], [""] * 12_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 90 << 20


def test_values_and_clusters_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        bootstrap_interval([1.0, 0.0, 1.0], ["d", "e"])


def test_strata_count_alike_whatever_their_size():
    values, strata = [1.0] * 10 + [0.0] * 90, ["a"] * 10 + ["b"] * 90
    assert bootstrap_interval(values, [""] * 100, strata) == (0.5, 0.5)


def test_holm_multiplies_by_what_is_left_and_never_decreases():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_sign_flip_p_is_that_of_all_flips():
    arm = sheet([[1, 1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1]], "aabbccdd")
    other = sheet([[0, 1, 0, 1, 0, 0, 1, 0]], "aabbccdd")
    differences = [
        sum(arm.correct[:, index].mean() - other.correct[0, index] for index in range(8) if arm.clusters[index] == name)
        for name in "abcd"
    ]
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=4)
    ]
    exact = sum(value >= abs(sum(differences)) - 1e-9 for value in flips) / len(flips)
    assert sign_flip_p(arm, other) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("n_changed", [0, 13, 16, 60])
def test_sign_flip_p_is_the_binomial_one_where_every_document_changes_alike(n_changed):
    """One question a document, three of those that changed for the worse: the sign test of scipy."""
    n = 200
    before = np.array([[i % 2 for i in range(n)]], dtype=float)
    after = before.copy()
    changed = [i for i in range(n) if not i % 2][: n_changed - 3] + [i for i in range(n) if i % 2][:3]
    if n_changed:
        after[0, changed] = 1 - after[0, changed]
    ids = tuple(map(str, range(n)))
    p = sign_flip_p(CorrectnessMatrix(after, ids, ids), CorrectnessMatrix(before, ids, ids))
    expected = scipy.stats.binomtest(n_changed - 3, n_changed).pvalue if n_changed else 1.0
    assert p == pytest.approx(expected, rel=1e-9)


def test_the_exact_distribution_is_that_of_random_flips_and_the_transform_agrees_with_it(monkeypatch):
    sizes = [1, 1, 2, 2, 2, 3, 5, 5, 8, 13, 1, 4, 4, 4, 6, 2, 2]
    signs = np.array(list(itertools.product((-1, 1), repeat=len(sizes))), dtype=float)
    sums = np.abs(signs @ sizes)
    exact = {observed: flipped_sum_p(Counter(sizes), observed) for observed in range(0, sum(sizes) + 1, 5)}
    for observed, p in exact.items():
        assert p == pytest.approx(float((sums >= observed - 1e-9).mean()), rel=1e-9)
    monkeypatch.setattr("kinject.stats.intervals._MOST_PRODUCTS", 0)
    for observed, p in exact.items():
        assert flipped_sum_p(Counter(sizes), observed) == pytest.approx(p, abs=1e-12)


def test_a_large_difference_has_a_p_that_any_family_can_find():
    """Random flips could not go below 1 in 20,001; a family of 2,655 comparisons then finds nothing."""
    p = sign_flip_p(simulated(1, 1, 120, 5, 0.95), simulated(2, 1, 120, 5, 0.24))
    assert p < 1e-20


def test_sign_flip_p_is_uniform_where_there_is_no_difference():
    p_values = [
        sign_flip_p(simulated(seed, 1, 40, 2, 0.5), simulated(seed + 1000, 1, 40, 2, 0.5)) for seed in range(150)
    ]
    assert 0.01 <= np.mean([p < 0.05 for p in p_values]) <= 0.10
    assert 0.4 < float(np.mean(p_values)) < 0.6


def test_questions_of_one_document_do_not_count_as_independent():
    """Ten copies of each question say no more than one."""
    arm, other = simulated(3, 1, 20, 1, 0.7), simulated(4, 1, 20, 1, 0.5)

    def copied(of: CorrectnessMatrix) -> CorrectnessMatrix:
        clusters = tuple(name for name in of.clusters for _ in range(10))
        return CorrectnessMatrix(np.repeat(of.correct, 10, axis=1), tuple(map(str, range(200))), clusters)

    assert sign_flip_p(copied(arm), copied(other)) == pytest.approx(sign_flip_p(arm, other))
    clustered, single = difference_estimate(copied(arm), copied(other)), difference_estimate(arm, other)
    assert (clustered.standard_error, clustered.low, clustered.high) == pytest.approx(
        (single.standard_error, single.low, single.high)
    )
    # A document of ten questions is one observation: n / (n - 1) of the variance of one question each.
    assert design_effect(copied(arm)) == pytest.approx(10 * 199 / 200 * 20 / 19)
    assert design_effect(arm) is None


def test_intervals_of_independent_questions_are_those_of_the_textbooks():
    arm, other = alone([1.0] * 30 + [0.0] * 20), alone([1.0] * 18 + [0.0] * 22 + [1.0] * 10)
    accuracy = bounded_accuracy(arm)
    assert (accuracy.low, accuracy.high) == wilson(30, 50)
    gained, lost = 13 / 52, 11 / 52  # 12 and 10 changed, one more each way
    middle, half = gained - lost, t.ppf(0.975, 49) * math.sqrt((gained + lost - (gained - lost) ** 2) / 52)
    # Bonett and Price 2012, but for the quantile; the variance has n - 1 below, so that 49 questions count
    estimate = difference_estimate(arm, other)
    assert (estimate.low, estimate.high) == pytest.approx((middle - half, middle + half), abs=0.004)


def test_an_interval_of_all_right_answers_is_that_of_the_documents():
    low, high = wilson(12, 12)
    estimate = bounded_accuracy(
        CorrectnessMatrix(np.ones((3, 60)), tuple(map(str, range(60))), tuple("abcdefghijkl" * 5))
    )
    assert estimate.value == estimate.high == high == 1.0
    assert low - 0.06 < estimate.low < low  # Student's quantile is a little larger


def test_with_one_document_there_is_no_p_and_nothing_is_bounded():
    arm, other = sheet([[1, 1, 1, 0]], "aaaa"), sheet([[0, 0, 0, 1]], "aaaa")
    contrast = make_contrast(arm, other, "base")
    assert contrast is not None
    assert (contrast.low, contrast.high, contrast.p, contrast.p_holm, contrast.smallest) == (None,) * 5
    assert (contrast.too_few, contrast.is_significant, contrast.unit) == (True, False, "documents")
    assert (bounded_accuracy(arm).low, bounded_accuracy(arm).high) == (0.0, 1.0)
    assert (bounded_mean(arm, -2.0, 3.0).low, bounded_mean(arm, -2.0, 3.0).high) == (-2.0, 3.0)
    assert chance_p(arm) is None
    assert near_p(arm, 0.5) is None
    assert relative_gain(arm, other) is None
    assert trend([other, arm, arm]) is None


def test_nine_documents_are_too_few_whatever_p_is_ten_are_not():
    for n, judged in ((9, False), (10, True)):
        ids, documents = tuple(map(str, range(3 * n))), tuple(str(i // 3) for i in range(3 * n))
        after, before = (CorrectnessMatrix(np.full((1, 3 * n), value), ids, documents) for value in (1.0, 0.0))
        contrast = make_contrast(after, before, "base")
        assert contrast is not None
        assert contrast.p == pytest.approx(2 / 2**n)
        assert contrast.is_significant is judged


def test_variance_of_seeds_counts_in_p_and_interval():
    """The same questions for every seed, and two seeds that know them all: documents say a lot, seeds nothing."""
    n = 200
    ids = tuple(map(str, range(n)))
    base = CorrectnessMatrix(np.array([[0.0] * 100 + [1.0] * 100]), ids, ids)
    seeds = CorrectnessMatrix(np.array([[1.0] * n, [0.0] * 100 + [1.0] * 100, [1.0] * n]), ids, ids)
    contrast = make_contrast(seeds, base, "base")
    assert contrast is not None
    assert contrast.test == "t over documents and seeds"
    assert sign_flip_p(seeds, base) < 1e-20
    variance = np.var([1.0, 0.5, 1.0], ddof=1) / 3
    documents = np.var([2 / 3] * 100 + [0.0] * 100, ddof=1) / n
    df = (variance + documents) ** 2 / (variance**2 / 2 + documents**2 / (n - 1))
    assert contrast.df == pytest.approx(df)
    assert contrast.p == pytest.approx(2 * t.sf((1 / 3) / math.sqrt(variance + documents), df))
    assert contrast.low < 0 < contrast.high


def test_one_clear_seed_each_is_judged_by_documents_alone():
    arm, other = simulated(1, 1, 60, 2, 0.9), simulated(2, 1, 60, 2, 0.5)
    assert difference_p(arm, other) == sign_flip_p(arm, other)
    contrast = make_contrast(arm, other, "base")
    assert contrast is not None
    assert (contrast.test, contrast.n, contrast.n_clusters, contrast.unit) == ("sign flips", 120, 60, "documents")


def test_the_smallest_difference_is_found_with_the_power_it_promises():
    """A t test of normal numbers with 8 degrees of freedom, at the alpha of four comparisons."""
    contrast = make_contrast(simulated(1, 1, 9, 4, 0.7), simulated(2, 1, 9, 4, 0.5), "base")
    assert contrast is not None
    (corrected, *_) = correct_contrasts([contrast] * 4)
    assert corrected.smallest is not None
    assert contrast.standard_error is not None
    effect = corrected.smallest / contrast.standard_error / 3  # in standard deviations of nine numbers
    draws = np.random.default_rng(0).normal(effect, 1.0, (20_000, 9))
    p = scipy.stats.ttest_1samp(draws, 0.0, axis=1).pvalue
    assert float((p < 0.05 / 4).mean()) == pytest.approx(0.8, abs=0.01)
    assert contrast.smallest is not None
    assert contrast.smallest < corrected.smallest


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("df", [1.0, 1.3, 2.0, 5.0, 119.0])
@pytest.mark.parametrize("family", [1, 120, 2655, 100_000])
def test_the_detectable_difference_of_any_family_and_any_degrees_of_freedom_is_a_number(family, df):
    alpha = 0.05 / family
    detectable, quantile = _detectable(alpha, df), t.isf(alpha / 2, df)
    normal, square = np.random.default_rng(1).normal(size=20_000), np.random.default_rng(2).chisquare(df, 20_000) / df
    assert float(((normal + detectable) / np.sqrt(square) > quantile).mean()) == pytest.approx(0.8, abs=0.012)


def test_trend_is_pages_both_ways_and_its_direction_is_not_that_of_the_ends():
    levels = (0.46, 0.60, 0.71, 0.82, 0.86, 0.45)
    bent = trend([simulated(seed, 1, 120, 5, accuracy) for seed, accuracy in enumerate(levels)])
    assert bent is not None
    assert (bent.rises, bent.monotone) == (True, False)
    falling = trend([simulated(seed, 1, 120, 5, accuracy) for seed, accuracy in enumerate((0.88, 0.7, 0.37))])
    assert falling is not None
    assert (falling.rises, falling.monotone) == (False, True)
    assert falling.p < 1e-10


def test_a_trend_that_the_seeds_do_not_bear_is_none():
    """Every document rises, by 3 points a step, but the three seeds of an arm differ by 30."""
    ids = tuple(map(str, range(100)))
    arms = []
    for step in range(4):
        rows = [[float(i < 50 + 3 * step + shift) for i in range(100)] for shift in (-15, 0, 15)]
        arms.append(CorrectnessMatrix(np.array(rows), ids, ids))
    result = trend(arms)
    assert result is not None
    assert result.rises
    assert result.p > 0.2


def test_trend_p_is_pages_l_by_its_normal_approximation():
    sheets = [simulated(seed, 1, 60, 3, accuracy) for seed, accuracy in ((1, 0.50), (2, 0.55), (3, 0.6), (4, 0.62))]
    table = np.stack([s.per_cluster[0].mean(0) / s.per_cluster[1] for s in sheets], axis=1)
    ranks = np.array([[sum(b < a for b in row) + (sum(b == a for b in row) + 1) / 2 for a in row] for row in table])
    n, k = table.shape
    big_l = float((ranks.sum(0) * np.arange(1, k + 1)).sum())
    z = (12 * big_l - 3 * n * k * (k + 1) ** 2) / (k * (k + 1) * math.sqrt(n * (k - 1)))
    wanted = 0.5 * math.erfc(z / math.sqrt(2))
    result = trend(sheets)
    assert result is not None
    assert result.p == pytest.approx(2 * wanted, rel=0.35)


def test_near_chance_needs_evidence_not_ignorance():
    def near(n_seeds: int, n_documents: int, n_each: int, accuracy: float) -> float | None:
        matrix = simulated(1, n_seeds, n_documents, n_each, accuracy)
        return near_p(replace(matrix, chances=(0.25,) * (n_documents * n_each)), 0.1)

    assert near(3, 100, 5, 0.25) < 0.01
    assert near(1, 8, 1, 0.25) is None
    assert near(1, 12, 1, 0.25) > 0.05
    assert near(3, 100, 5, 0.40) > 0.5


def test_equivalence_to_another_arm_is_rarely_found_where_the_arms_differ_by_the_margin():
    """At the margin itself at most 5% of studies may find it, and without a difference most should."""
    n_equivalent = {0.0: 0, 0.1: 0}
    for gap in n_equivalent:
        for seed in range(60):
            arm, other = simulated(seed, 3, 150, 3, 0.6), simulated(1000 + seed, 3, 150, 3, 0.6 + gap)
            p = near_p(arm, 0.1, other)
            n_equivalent[gap] += p is not None and p < 0.05
    assert n_equivalent[0.1] <= 6
    assert n_equivalent[0.0] >= 50


def test_equivalence_is_the_interval_of_90_percent_inside_the_margin():
    arm, other = simulated(1, 3, 100, 2, 0.6), simulated(2, 3, 100, 2, 0.63)
    means = (arm.correct - other.correct).reshape(3, 100, 2).mean(2)
    seeds = sum(np.var(m.correct.mean(1), ddof=1) / 3 for m in (arm, other))
    documents = np.var(means.mean(0), ddof=1) / 100
    df = (documents + seeds) ** 2 / (
        documents**2 / 99 + sum((np.var(m.correct.mean(1), ddof=1) / 3) ** 2 / 2 for m in (arm, other))
    )
    edge = abs(means.mean()) + t.isf(0.05, df) * math.sqrt(documents + seeds)
    assert near_p(arm, edge + 1e-6, other) < 0.05 < near_p(arm, edge - 1e-6, other)


def test_against_chance_each_question_has_its_own():
    matrix = replace(simulated(5, 2, 80, 3, 0.5), chances=(0.5,) * 120 + (0.25,) * 120)
    p_value = chance_p(matrix)
    means = (matrix.correct - np.array([0.5] * 120 + [0.25] * 120)).reshape(2, 80, 3).mean(2)
    documents, seeds = np.var(means.mean(0), ddof=1) / 80, np.var(means.mean(1), ddof=1) / 2
    df = (documents + seeds) ** 2 / (documents**2 / 79 + seeds**2)
    assert p_value == pytest.approx(2 * t.sf(means.mean() / math.sqrt(documents + seeds), df))
    assert p_value < 1e-4


def test_headline_and_the_rest_are_two_families():
    answers = [answered(f"q{i}", -1, -2) for i in range(20)]
    worse = [answered(f"q{i}", -2, -1, arm="ft") for i in range(20)]
    result = summarize_arm(worse, answers, model="base", arm="ft")
    other = replace(result, format="letters")
    second = replace(result, format="hybrid")
    corrected = correct_families([result, other, second])
    p = result.to_base.p
    assert p == pytest.approx(2 / 2**20)
    assert [item.to_base.p_holm for item in corrected] == pytest.approx([p, 2 * p, 2 * p])


def test_changes_count_what_most_seeds_say_and_a_tie_is_none():
    now = sheet([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0]], "abcd")
    before = sheet([[0, 0, 1, 0]], "abcd")
    assert majority_changes(now, before) == (2, 1)
    tied = sheet([[1, 0, 1, 0], [0, 1, 1, 0]], "abcd")
    assert majority_changes(tied, before) == (0, 0)
    assert majority_changes(tied, sheet([[0, 0, 0, 1]], "abcd")) == (1, 1)


def test_memory_does_not_grow_with_the_square_of_documents():
    """A matrix of 3,000 questions by documents would hold 72 MB."""
    arm, other = simulated(1, 1, 3000, 1, 0.6), simulated(2, 1, 3000, 1, 0.5)
    tracemalloc.start()
    try:
        make_contrast(arm, other, "base")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20


def test_a_question_without_a_score_in_one_arm_is_no_pair():
    arm, other = sheet([[1, 0, 1, 1]], "aabb"), sheet([[0, 0, 1, 0]], "aabb")
    first, second = aligned(arm, other.part([0, 2, 3]))
    assert first.question_ids == second.question_ids == tuple(other.question_ids[i] for i in (0, 2, 3))
    assert (first.mean(), second.mean()) == (1.0, pytest.approx(1 / 3))


def answered(question: str, *log_probs: float, gold: int = 0, arm: str = "base") -> Answer:
    return Answer(question, "set", arm, "texts", 0, 0, (), gold, log_probs, (1, 1), (1, 1), n_chars=(1, 1))


def test_questions_without_a_score_are_left_out_of_every_number_and_of_pairs() -> None:
    base = [answered("a", -1, -2), answered("b", -2, -1), answered("c", math.nan, -1), answered("d", -1, -1)]
    tuned = [answered("a", -2, -1), answered("b", -1, -2), answered("c", -1, -2), answered("d", -1, -math.inf)]
    result = summarize_arm(base, None, model="base", arm="base")
    assert (result.n, result.n_unscored, result.n_correct, result.accuracy) == (4, 2, 1, 0.5)
    assert (result.low, result.high) == wilson(1, 2)
    contrast = make_contrast(correctness(tuned), correctness(base), "base")
    assert contrast is not None
    assert (contrast.delta, contrast.wrong_to_right, contrast.right_to_wrong) == (0.0, 1, 1)
    assert contrast.p == 1.0
    assert make_contrast(correctness(tuned[2:]), correctness(base[2:]), "base") is None


def crossed(
    random: np.random.Generator, accuracies: list[float], seed_sd: float | list[float], n_documents: int = 20
) -> list[CorrectnessMatrix]:
    """Three seeds of each arm on documents of five questions, correlated by 0.3, as benchmarks/study/claims.py draws them."""
    level = scipy.stats.norm.ppf(accuracies)
    shared = random.normal(0, math.sqrt(0.3), (n_documents, 1)) + random.normal(0, math.sqrt(0.35), (n_documents, 5))
    of_seeds = np.asarray(seed_sd) / scipy.stats.norm.pdf(level)
    shift = random.normal(0, 1, (len(level), 3)) * of_seeds[:, None] + (level * np.sqrt(1 + of_seeds**2))[:, None]
    noise = random.normal(0, math.sqrt(0.35), (len(level), 3, n_documents, 5))
    right = (shared + noise + shift[:, :, None, None] > 0).reshape(len(level), 3, -1).astype(float)
    ids = tuple(map(str, range(5 * n_documents)))
    documents = tuple(f"d{i // 5}" for i in range(5 * n_documents))
    return [CorrectnessMatrix(rows, ids, documents, (0.25,) * len(ids)) for rows in right]


def test_the_variance_counts_the_noise_of_answers_once_in_the_interval_and_twice_in_the_test():
    """Two crossed factors written out: documents, seeds, and what is left over."""
    arm, other = crossed(np.random.default_rng(4), [0.6, 0.7], 0.08)
    contrast = make_contrast(arm, other, "base", "method")
    assert contrast is not None
    documents = arm.correct.reshape(3, 20, 5).mean(2), other.correct.reshape(3, 20, 5).mean(2)
    between = np.var(documents[0].mean(0) - documents[1].mean(0), ddof=1) / 20
    seeds = sum(np.var(table.mean(1), ddof=1) / 3 for table in documents)
    noise = 0.0
    for table in documents:
        rest = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
        noise += (rest**2).sum() / (2 * 19) / (3 * 20)
    assert seeds > noise
    half = (contrast.high - contrast.low) / 2
    df = (between + seeds - noise) ** 2 / (
        between**2 / 19 + sum((np.var(table.mean(1), ddof=1) / 3) ** 2 / 2 for table in documents)
    )
    assert half == pytest.approx(
        t.ppf(0.975, df) * math.sqrt(between + seeds - noise), rel=0.02
    )  # but for Bonett and Price
    assert contrast.standard_error == pytest.approx(math.sqrt(between + seeds), rel=0.02)


def test_intervals_of_differences_cover_and_null_differences_are_rarely_found():
    """300 studies; 1,000 of other sizes are in docs/studies.md."""
    random, covered, false = np.random.default_rng(11), 0, 0
    for _ in range(300):
        arm, other = crossed(random, [0.6, 0.6], 0.02)
        estimate = difference_estimate(arm, other)
        covered += estimate.low <= 0 <= estimate.high
        false += difference_p(arm, other) < 0.05
    assert 0.93 <= covered / 300 <= 0.985
    assert false / 300 <= 0.05


def test_variances_are_drawn_towards_each_other_as_far_as_they_are_alike():
    """Draws from Smyth's own model: the prior's degrees of freedom come out between few and many as they are."""
    random = np.random.default_rng(0)
    alike = [(float(value), 2.0) for value in 4e-4 * random.chisquare(2, 300) / 2]
    apart = [(float(4e-4 * 3 / random.chisquare(3) * random.chisquare(2) / 2), 2.0) for _ in range(3000)]
    for value, df in moderated(alike)[:5]:
        assert df > 100
        assert value == pytest.approx(4e-4, rel=0.25)
    shrunk = moderated(apart)
    assert shrunk[0][1] == pytest.approx(5, abs=0.8)
    prior = shrunk[0][1] - 2
    assert (shrunk[0][0] * shrunk[0][1] - 2 * apart[0][0]) / prior == pytest.approx(4e-4, rel=0.2)
    assert moderated([(1e-4, 2.0)]) == [(1e-4, 2.0)]
    assert moderated([(0.0, 2.0), (0.0, 2.0)]) == [(0.0, 2.0), (0.0, 2.0)]


def test_seeds_of_other_arms_keep_ten_arms_from_being_found_against_an_untrained_base():
    """Ten arms that are as good as base, seeds apart by SD 4: each variance alone lets 12% of studies show something."""
    random, false = np.random.default_rng(2), {"alone": 0, "pooled": 0}
    for _ in range(100):
        base, *arms = crossed(random, [0.6] * 11, [0.0] + [0.04] * 10, 120)
        base = replace(base, correct=base.correct[:1])
        pooled = moderated([arm.seed_variance for arm in arms])
        for name, variances in (("alone", [None] * 10), ("pooled", pooled)):
            ps = (
                difference_p(replace(arm, pooled=variance), base) for arm, variance in zip(arms, variances, strict=True)
            )
            false[name] += min(p for p in ps if p is not None) * 10 < 0.05
    assert false["pooled"] <= 0.07 * 100
    assert false["pooled"] <= false["alone"]


def test_the_gain_is_fiellers_ratio_above_chance():
    """One seed, no document with two questions: the quadratic of Fieller (1954) written out, one answer more each way."""
    random = np.random.default_rng(3)
    base, arm = (random.random(200) < 0.6).astype(float), (random.random(200) < 0.75).astype(float)
    gain = relative_gain(*(replace(alone(list(v)), chances=(0.25,) * 200) for v in (arm, base)))
    assert gain is not None
    x, y = arm.mean() - 0.25, base.mean() - 0.25
    covariance = np.cov(arm, base) / 200
    effective = [p * (1 - p) / v for p, v in zip((arm.mean(), base.mean()), covariance.diagonal(), strict=True)]
    (v11, v12), (_, v22) = covariance + np.diag([(n + 2) ** -2 for n in effective])
    q = t.ppf(0.975, 199) ** 2
    roots = sorted(np.roots([y**2 - q * v22, -2 * (x * y - q * v12), x**2 - q * v11]))
    assert (gain.value, gain.low, gain.high) == pytest.approx((x / y - 1, roots[0] - 1, roots[1] - 1))


def test_a_base_that_guesses_has_no_gain_over_it_and_each_question_its_own_chance():
    arm = alone([1.0] * 60 + [0.0] * 40)
    base = alone([1.0] * 30 + [0.0] * 70)
    assert relative_gain(replace(arm, chances=(0.25,) * 100), replace(base, chances=(0.25,) * 100)) is None
    assert relative_gain(arm, base) is not None
    chances = (0.5,) * 50 + (0.25,) * 50
    gain = relative_gain(replace(arm, chances=chances), replace(arm, chances=chances))
    assert gain is not None
    assert gain.low < gain.value == 0.0 < gain.high


def test_a_gain_over_a_perfect_base_is_bounded():
    arm, other = (replace(alone([1.0] * 30), chances=(0.25,) * 30) for _ in range(2))
    gain = relative_gain(arm, other)
    assert gain is not None
    assert -0.2 < gain.low < 0.0 < gain.high < 0.2


def test_intervals_of_gains_cover():
    random, covered, n_bounded = np.random.default_rng(6), 0, 0
    for _ in range(400):
        arm, base = crossed(random, [0.75, 0.6], [0.02, 0.0])
        gain = relative_gain(arm, replace(base, correct=base.correct[:1]))
        if gain is not None:
            n_bounded += 1
            covered += gain.low <= 0.5 / 0.35 - 1 <= gain.high
    assert n_bounded > 390
    assert 0.93 <= covered / n_bounded <= 0.985


def test_a_family_too_large_for_the_documents_is_said_to_be_too_few_to_tell():
    """Ten documents that all gain: p is 2 in 1,024, and 30 comparisons of this kind can show nothing."""
    ids = tuple(map(str, range(10)))
    after, before = (CorrectnessMatrix(np.full((1, 10), value), ids, ids) for value in (1.0, 0.0))
    contrast = make_contrast(after, before, "base")
    assert contrast is not None
    few, many = correct_contrasts([contrast] * 20), correct_contrasts([contrast] * 30)
    assert (few[0].family, few[0].is_significant, few[0].too_few) == (20, True, False)
    assert (many[0].family, many[0].is_significant, many[0].too_few) == (30, False, True)
    assert [fewest_for(n) for n in (1, 25, 26, 2655)] == [10, 10, 11, 17]
    for family in (25, 26, 300, 2655):
        n = fewest_for(family)
        assert 2.0 ** (1 - n) * family < 0.05
        assert n == 10 or 2.0 ** (2 - n) * family >= 0.05
