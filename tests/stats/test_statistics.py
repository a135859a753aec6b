"""Estimates, intervals and tests against the naive way, formulas written out, and simulations with a known truth."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from scipy.optimize import brentq
from scipy.stats import t

from kinject.eval.results import correct_families, correctness, summarize_arm
from kinject.results import fewest_for
from kinject.stats.comparisons import (
    Tag,
    _tag,
    correct_contrasts,
    lead,
    majority_changes,
    make_contrast,
    trend,
)
from kinject.stats.intervals import (
    _unseen_p,
    bounded_accuracy,
    chance_p,
    difference_estimate,
    equivalence_p,
    family_variances,
    flipped_sum_p,
    flips_p,
    holm,
    variance_of,
    wilson,
)
from kinject.stats.matrix import CorrectnessMatrix, SeedVariance, aligned
from kinject.types import Answer


def sheet(right: list[list[int]], documents: str) -> CorrectnessMatrix:
    return CorrectnessMatrix(
        np.array(right, dtype=float), tuple(map(str, range(len(documents)))), tuple(documents)
    )


def simulated(
    seed: int, n_seeds: int, n_documents: int, n_each: int, accuracy: float, spread: float = 0.0
) -> CorrectnessMatrix:
    """Documents whose accuracies differ by `spread`, questions drawn independently within them."""
    random = np.random.default_rng(seed)
    levels = np.clip(accuracy + spread * random.standard_normal(n_documents), 0, 1)
    right = (random.random((n_seeds, n_documents, n_each)) < levels[None, :, None]).astype(float)
    documents = tuple(f"d{index // n_each}" for index in range(n_documents * n_each))
    return CorrectnessMatrix(
        right.reshape(n_seeds, -1), tuple(map(str, range(len(documents)))), documents
    )


def alone(values: list[float]) -> CorrectnessMatrix:
    """One seed; no question has a document."""
    return CorrectnessMatrix(
        np.array([values], dtype=float), tuple(map(str, range(len(values)))), ("",) * len(values)
    )


def sign_flip_p(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> float:
    return flips_p([(1, matrix), (-1, other)])


def guessed(matrix: CorrectnessMatrix, chance: float = 0.25) -> CorrectnessMatrix:
    return replace(matrix, chances=(chance,) * len(matrix.question_ids))


@pytest.mark.parametrize(
    ("n_correct", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_values_printed_by_newcombe_1998(n_correct, n, low, high):
    # Newcombe, Statistics in Medicine 17:857, table I, method 3
    assert wilson(n_correct / n, n) == pytest.approx((low, high), abs=5e-5)
    interval = scipy.stats.binomtest(n_correct, n).proportion_ci(0.95, "wilson")
    assert wilson(n_correct / n, n) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_holm_multiplies_by_what_is_left_and_never_decreases():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_sign_flip_p_is_that_of_all_flips():
    arm = sheet([[1, 1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1]], "aabbccdd")
    other = sheet([[0, 1, 0, 1, 0, 0, 1, 0]], "aabbccdd")
    differences = [
        sum(
            arm.correct[:, index].mean() - other.correct[0, index]
            for index in range(8)
            if arm.clusters[index] == name
        )
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
    changed = [i for i in range(n) if not i % 2][: n_changed - 3] + [i for i in range(n) if i % 2][
        :3
    ]
    if n_changed:
        after[0, changed] = 1 - after[0, changed]
    ids = tuple(map(str, range(n)))
    p = sign_flip_p(CorrectnessMatrix(after, ids, ids), CorrectnessMatrix(before, ids, ids))
    expected = scipy.stats.binomtest(n_changed - 3, n_changed).pvalue if n_changed else 1.0
    assert p == pytest.approx(expected, rel=1e-9)


def test_the_exact_distribution_is_that_of_random_flips_and_the_transform_agrees_with_it(
    monkeypatch,
):
    sizes = [1, 1, 2, 2, 2, 3, 5, 5, 8, 13, 1, 4, 4, 4, 6, 2, 2]
    signs = np.array(list(itertools.product((-1, 1), repeat=len(sizes))), dtype=float)
    sums = np.abs(signs @ sizes)
    exact = {
        observed: flipped_sum_p(Counter(sizes), observed)
        for observed in range(0, sum(sizes) + 1, 5)
    }
    for observed, p in exact.items():
        assert p == pytest.approx(float((sums >= observed - 1e-9).mean()), rel=1e-9)
    monkeypatch.setattr("kinject.stats.intervals._MOST_PRODUCTS", 0)
    for observed, p in exact.items():
        assert flipped_sum_p(Counter(sizes), observed) == pytest.approx(p, abs=1e-12)


def test_questions_of_one_document_do_not_count_as_independent():
    """Ten copies of each question say no more than one."""
    arm, other = simulated(3, 1, 20, 1, 0.7), simulated(4, 1, 20, 1, 0.5)

    def copied(of: CorrectnessMatrix) -> CorrectnessMatrix:
        clusters = tuple(name for name in of.clusters for _ in range(10))
        return CorrectnessMatrix(
            np.repeat(of.correct, 10, axis=1), tuple(map(str, range(200))), clusters
        )

    assert sign_flip_p(copied(arm), copied(other)) == pytest.approx(sign_flip_p(arm, other))
    clustered, single = (
        difference_estimate(copied(arm), copied(other)),
        difference_estimate(arm, other),
    )
    assert (clustered.error, clustered.low, clustered.high) == pytest.approx(
        (single.error, single.low, single.high)
    )


def test_an_interval_of_all_right_answers_is_that_of_the_documents():
    low, high = wilson(1.0, 12)
    estimate = bounded_accuracy(
        CorrectnessMatrix(np.ones((3, 60)), tuple(map(str, range(60))), tuple("abcdefghijkl" * 5))
    )
    assert estimate.value == estimate.high == high == 1.0
    assert low - 0.06 < estimate.low < low  # Student's quantile is a little larger


def test_with_one_document_there_is_no_p_and_nothing_is_bounded():
    arm, other = sheet([[1, 1, 1, 0]], "aaaa"), sheet([[0, 0, 0, 1]], "aaaa")
    contrast = make_contrast(arm, other, "base")
    assert contrast is not None
    assert (contrast.low, contrast.high, contrast.p, contrast.p_holm) == (None,) * 4
    assert (contrast.too_few, contrast.is_significant, contrast.unit) == (True, False, "documents")
    assert (bounded_accuracy(arm).low, bounded_accuracy(arm).high) == (0.0, 1.0)
    assert chance_p(guessed(arm)) is None
    assert chance_p(guessed(arm), 0.5) is None
    assert equivalence_p(arm, other, 0.5) is None
    assert trend([other, arm, arm])[0].p is None


def test_nine_documents_are_too_few_whatever_p_is_ten_are_not():
    for n, judged in ((9, False), (10, True)):
        ids, documents = tuple(map(str, range(3 * n))), tuple(str(i // 3) for i in range(3 * n))
        after, before = (
            CorrectnessMatrix(np.full((1, 3 * n), value), ids, documents) for value in (1.0, 0.0)
        )
        contrast = make_contrast(after, before, "base")
        assert contrast is not None
        assert contrast.p == pytest.approx(2 / 2**n)
        assert contrast.is_significant is judged


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


def test_a_question_without_a_score_in_one_arm_is_no_pair():
    arm, other = sheet([[1, 0, 1, 1]], "aabb"), sheet([[0, 0, 1, 0]], "aabb")
    first, second = aligned(arm, other.part([0, 2, 3]))
    assert (
        first.question_ids == second.question_ids == tuple(other.question_ids[i] for i in (0, 2, 3))
    )
    assert (first.mean(), second.mean()) == (1.0, pytest.approx(1 / 3))


def answered(question: str, *log_probs: float, gold: int = 0, arm: str = "base") -> Answer:
    return Answer(
        question, "set", arm, "texts", 0, 0, (), gold, log_probs, (1, 1), (1, 1), n_chars=(1, 1)
    )


def test_questions_without_a_score_are_left_out_of_every_number_and_of_pairs() -> None:
    base = [
        answered("a", -1, -2),
        answered("b", -2, -1),
        answered("c", math.nan, -1),
        answered("d", -1, -1),
    ]
    tuned = [
        answered("a", -2, -1),
        answered("b", -1, -2),
        answered("c", -1, -2),
        answered("d", -1, -math.inf),
    ]
    result = summarize_arm(base, None, model="base", arm="base")
    assert (result.n, result.n_unscored, result.n_correct, result.accuracy) == (4, 2, 1, 0.5)
    assert (result.low, result.high) == pytest.approx(wilson(0.5, 2))
    contrast = make_contrast(correctness([tuned]), correctness([base]), "base")
    assert contrast is not None
    assert (contrast.delta, contrast.wrong_to_right, contrast.right_to_wrong) == (0.0, 1, 1)
    assert contrast.p == 1.0
    assert make_contrast(correctness([tuned[2:]]), correctness([base[2:]]), "base") is None


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


def interaction(rows: np.ndarray, df: float) -> float:
    """Documents within rows: what is left of [rows, documents] without the means of both, over rows' `df`, of one mean."""
    rest = rows - rows.mean(0) - rows.mean(1)[:, None] + rows.mean()
    n = rows.shape[1]
    return float((rest**2).sum() / df / (n - 1) / n)


def test_interval_and_p_are_those_of_bonett_and_price_with_the_variance_of_documents_and_seeds():
    """Three seeds, 60 documents of two questions, written out: documents, and each arm's seeds less the noise of answers."""
    arm, other = simulated(1, 3, 60, 2, 0.75, 0.2), simulated(2, 3, 60, 2, 0.6, 0.2)
    by_question = arm.correct.mean(0) - other.correct.mean(0)
    documents = np.var(by_question.reshape(60, 2).mean(1), ddof=1) / 60
    seeds = [np.var(m.correct.mean(1), ddof=1) / 3 for m in (arm, other)]
    noise = [interaction(m.correct.reshape(3, 60, 2).mean(2), 2) / 3 for m in (arm, other)]
    net = sum(max(0.0, of_arm - part) for of_arm, part in zip(seeds, noise, strict=True))
    assert 0 < net < sum(seeds)
    n = min(np.var(by_question) / documents, 120)
    middle = by_question.mean() * n / (n + 2)
    adjusted = (((by_question**2).mean() * n + 2 / 9) / (n + 2) - middle**2) / (n + 2)
    parts = [(documents, 59), (seeds[0], 2), (seeds[1], 2)]
    half = sum(part * t.isf(0.025, df) for part, df in parts) / sum(part for part, _ in parts)
    df = brentq(lambda df: t.isf(0.025, df) - half, 1, 59)  # Cochran and Cox 1950
    error = math.sqrt(max(adjusted, documents) + net)
    found = difference_estimate(arm, other)
    assert (found.middle, found.error, found.df) == pytest.approx((middle, error, df))
    half = t.isf(0.025, df) * error
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half))
    assert found.p == pytest.approx(max(2 * t.sf(middle / error, df), sign_flip_p(arm, other)))


def test_the_seeds_of_an_arm_tell_nothing_of_questions_that_a_base_of_one_seed_got_right():
    """The base has all of 30 right, four seeds of the arm all but one answer of one."""
    names = tuple(f"q{i}" for i in range(30))
    right = np.ones((4, 30))
    right[2, 7] = 0.0
    base = CorrectnessMatrix(np.ones((1, 30)), names, ("",) * 30)
    found = difference_estimate(CorrectnessMatrix(right, names, ("",) * 30), base)
    changes = right.mean(0) - 1
    n = 29  # the effective questions: variance of a question over that of the mean
    middle = changes.mean() * n / (n + 2)
    added = 1 + 1 / 16  # a question of the base, a quarter of one of the arm, squared
    documents = (((changes**2).mean() * n + added) / (n + 2) - middle**2) / (n + 2)
    assert (found.middle, found.error) == pytest.approx((middle, math.sqrt(documents)), rel=1e-3)
    # Another base of this kind may have one of the 30 wrong.
    assert found.low < -1 / 30 < 1 / 30 < found.high


def test_a_p_below_5_percent_and_an_interval_without_0_are_the_same():
    """Studies of every shape: few and many documents, one and several seeds, pooled variances, whole documents lost."""
    random, n_shown = np.random.default_rng(0), 0
    for study in range(400):
        n_seeds, n_documents, n_each = (
            int(random.integers(*ends)) for ends in ((1, 4), (4, 40), (1, 5))
        )
        arm, other = (
            simulated(2 * study + i, n_seeds, n_documents, n_each, 0.5 + 0.3 * i, 0.3)
            for i in (0, 1)
        )
        if n_seeds > 1 and study % 2:
            arm = replace(
                arm, pooled=SeedVariance(random.random() * 4e-3, 20.0, bool(study % 4 == 1))
            )
        found = difference_estimate(arm, other)
        assert (found.p < 0.05) == (not found.low <= 0 <= found.high)
        n_shown += found.p < 0.05
    assert 100 < n_shown < 300


def learned_whole(
    random: np.random.Generator, n_documents: int, n_each: int
) -> tuple[CorrectnessMatrix, CorrectnessMatrix]:
    """An arm that learns an eighth of the documents whole, and loses as much on the others."""
    documents = tuple(f"d{i // n_each}" for i in range(n_documents * n_each))
    ids = tuple(map(str, range(len(documents))))
    base = random.random(len(ids)) < 0.5
    whole = np.repeat(random.random(n_documents) < 1 / 8, n_each)
    lost = random.random(len(ids)) < 1 / 7
    rows = [of[None].astype(float) for of in (whole | (base & ~lost), base)]
    arm, other = (CorrectnessMatrix(row, ids, documents) for row in rows)
    return arm, other


def test_documents_that_change_whole_and_are_few_decide_no_family():
    """Of 60 studies of eight equal arms, each on 16 documents of 12; a third was false by t and sign flips alone."""
    random, n_false, n_by_t = np.random.default_rng(7), 0, 0
    for _ in range(60):
        pairs = [learned_whole(random, 16, 12) for _ in range(8)]
        found = [difference_estimate(*pair) for pair in pairs]
        n_false += min(holm([of.p for of in found])) < 0.05
        n_by_t += min(holm([2 * t.sf(abs(of.middle) / of.error, of.df) for of in found])) < 0.05
        assert all((of.p < 0.05) != (of.low <= 0 <= of.high) for of in found)
    assert n_by_t > 12
    assert n_false <= 3


@pytest.mark.parametrize("n_seen", [0, 1])
def test_a_loss_may_be_of_documents_that_gain_whole_and_were_not_drawn(n_seen):
    """Of 34 documents of nine, 25 lose a question, and none or one gains the five that it had wrong."""
    before = np.array(
        [[float(i < 4 + (document < 25)) for i in range(9)] for document in range(34)]
    )
    after = np.array([[float(i < 4) for i in range(9)] for _ in range(34)])
    after[34 - n_seen :] = 1.0
    ids, documents = tuple(map(str, range(306))), tuple(f"d{i // 9}" for i in range(306))
    arm, other = (CorrectnessMatrix(of.reshape(1, 306), ids, documents) for of in (after, before))
    found = difference_estimate(arm, other)
    whole = min(before.mean(), 1 - after.mean())
    seen = 5 * n_seen / 306
    noise = math.sqrt(found.error**2 - n_seen * seen**2)

    def no_more_of_them(fraction: float) -> float:
        explained = (34 - n_seen) / 34 * whole * fraction / (1 - fraction)
        of_others = t.sf((seen - found.middle - explained) / noise, 33)
        return -scipy.stats.binom.cdf(n_seen, 34, fraction) * of_others

    largest = scipy.optimize.minimize_scalar(no_more_of_them, bounds=(0, 0.4), method="bounded")
    unseen = _unseen_p([(1.0, arm), (-1.0, other)], found.middle, found.error, 33.0)
    assert unseen == pytest.approx(-largest.fun, rel=1e-3)
    assert found.p >= unseen > 2 * t.sf(-found.middle / found.error, 33)
    assert sign_flip_p(arm, other) < unseen
    assert (found.p < 0.05) != (found.low <= 0 <= found.high)


def test_a_skewed_loss_has_the_p_of_halls_cubic():
    """Two of 60 documents gain all of six questions, the others lose one in five; seeds are one."""
    random = np.random.default_rng(3)
    before = (random.random((60, 6)) < 0.6).astype(float)
    after = before * (random.random((60, 6)) > 0.2)
    before[:2], after[:2] = 0.0, 1.0
    ids, documents = tuple(map(str, range(360))), tuple(f"d{i // 6}" for i in range(360))
    arm, other = (CorrectnessMatrix(of.reshape(1, 360), ids, documents) for of in (after, before))
    found = difference_estimate(arm, other)
    sums = (after - before).sum(1)
    skewness = ((sums - sums.mean()) ** 3).sum() / (360 * found.error) ** 3
    ratio = found.middle / found.error
    cubic = ((1 + skewness * ratio / 3) ** 3 - 1) / skewness + skewness / 6
    assert skewness > 0.1
    assert ratio < cubic < 0
    assert found.p == pytest.approx(2 * t.sf(-cubic, 59))


def test_an_arm_whose_variance_is_not_the_familys_keeps_its_own():
    """An F test against those below it, from the largest downwards; the rest share one variance, of a cut distribution."""
    alike, wild = (
        [SeedVariance(value, 2.0) for value in (1e-4, 2e-4, 3e-4, 4e-4)],
        SeedVariance(9e-3, 2.0),
    )
    cut = scipy.stats.f.isf(0.05, 2, 6)
    assert 4e-4 / 2e-4 < cut < scipy.stats.f.isf(0.05, 2, 4) < 9e-3 / 2.5e-4
    left = 1 - cut * math.exp(-cut) / (
        1 - math.exp(-cut)
    )  # the mean of an exponential number below `cut`
    for variance in (*family_variances(alike), *family_variances([*alike, wild])[:-1]):
        assert variance == pytest.approx((2.5e-4 / left, 8.0, False, 0.0))
    assert family_variances([*alike, wild])[-1] == wild._replace(alone=True)
    assert family_variances([SeedVariance(0.0, 4.0)] * 2) == [SeedVariance(0.0, 8.0)] * 2
    assert family_variances([wild]) == [wild]
    of_three_seeds = [SeedVariance(2e-4, 2.0), SeedVariance(1e-4, 2.0)]
    assert family_variances(of_three_seeds) == of_three_seeds  # too few to be told apart
    assert family_variances([*of_three_seeds, wild]) == [*of_three_seeds, wild._replace(alone=True)]
    arm, base = simulated(1, 3, 50, 2, 0.6), simulated(2, 1, 50, 2, 0.6)
    assert difference_estimate(replace(arm, pooled=wild._replace(alone=True)), base).df == 2
    assert difference_estimate(replace(arm, pooled=SeedVariance(1e-4, 8.0)), base).df > 8


@pytest.mark.parametrize("n_seeds", [3, 2])
def test_of_two_trained_arms_an_unstable_one_is_seldom_false(n_seeds):
    """400 studies: seeds of one arm differ by 1.5 points, of the other by 10, and neither differs from the base.

    With the variance of both, as an F test of so few seeds leaves it, the unstable arm is false in 11.5%, with its own in
    5.5% (2 seeds: 3.5%).
    """
    random, found = np.random.default_rng(n_seeds), []
    documents = tuple(f"d{i // 4}" for i in range(400))
    ids = tuple(map(str, range(400)))
    for _ in range(400):
        levels = np.repeat(np.clip(random.normal(0.5, 0.15, 100), 0, 1), 4)
        base, calm, wild = (
            CorrectnessMatrix(
                (random.random((n, 400)) < levels + random.normal(0, sd, (n, 1))).astype(float),
                ids,
                documents,
            )
            for n, sd in ((1, 0.0), (n_seeds, 0.015), (n_seeds, 0.1))
        )
        variances = [arm.seed_variance for arm in (calm, wild)]
        own = family_variances(variances)
        of_both = SeedVariance(
            sum(of.value for of in variances) / 2,
            2.0 * (n_seeds - 1),
            noise=sum(of.noise for of in variances) / 2,
        )
        found.append(
            [
                difference_estimate(replace(arm, pooled=variance), base).p < 0.05
                for arm, variance in ((wild, of_both), (wild, own[1]), (calm, own[0]))
            ]
        )
    pooled, unstable, stable = np.mean(found, axis=0)
    assert pooled > 0.09
    assert max(unstable, stable) < 0.07


def test_documents_count_as_far_as_they_have_questions_of_their_own():
    """One document of 200 questions and 19 of two: effectively 1.4 documents, which judge nothing (Kish 1965)."""
    documents = ("d",) * 200 + tuple(f"d{i // 2}" for i in range(38))
    ids = tuple(map(str, range(238)))
    after, before = (
        CorrectnessMatrix(np.full((1, 238), value), ids, documents) for value in (1.0, 0.0)
    )
    contrast = make_contrast(after, before, "base")
    assert contrast is not None
    assert contrast.n_effective == pytest.approx(238**2 / (200**2 + 19 * 4))
    assert (contrast.n_clusters, contrast.too_few, contrast.is_significant) == (20, True, False)


def test_a_few_large_documents_beside_single_questions_count_as_few():
    """500 studies of three documents of 40 questions beside 120 single ones, whose levels differ: an interval of 95%.

    With Kish's number for degrees of freedom it covers 89.0% of true accuracies, with those of the documents 96.4%.
    """
    random, covers = np.random.default_rng(0), []
    sizes = (40,) * 3 + (1,) * 120
    names = tuple(f"d{i}" for i, size in enumerate(sizes) for _ in range(size))
    ids = tuple(map(str, range(240)))
    for _ in range(500):
        levels = np.repeat(random.beta(1.4, 0.6, 123), sizes)
        right = (random.random((1, 240)) < levels).astype(float)
        matrix = CorrectnessMatrix(right, ids, names)
        value, variance = matrix.mean(), variance_of([(1.0, matrix)])
        n = value * (1 - value) / variance.documents
        by_kish = wilson(value, min(n, 240), t.isf(0.025, matrix.n_effective - 1))
        bounds = bounded_accuracy(matrix)
        covers.append([by_kish[0] <= 0.7 <= by_kish[1], bounds.low <= 0.7 <= bounds.high])
    assert np.mean(covers, axis=0)[0] < 0.925 < np.mean(covers, axis=0)[1]


@pytest.mark.parametrize(("together", "expected"), [(False, 16.3), (True, 1.2)])
def test_degrees_of_freedom_are_those_of_documents_as_far_as_their_answers_go_together(
    together, expected
):
    """Two documents of 50 questions beside 200: independent answers 300² / 5,200 less one, alike ones (Σn²)² / Σn⁴ less one."""
    documents = ("a",) * 50 + ("b",) * 50 + tuple(f"s{i}" for i in range(200))
    right = np.tile([1.0, 0.0], 150)
    if together:
        right[:100] = np.repeat([1.0, 0.0], 50)
    matrix = CorrectnessMatrix(right[None], tuple(map(str, range(300))), documents)
    assert variance_of([(1.0, matrix)]).df == pytest.approx(expected, abs=0.05)
    assert variance_of([(1.0, simulated(1, 1, 20, 6, 0.5, 0.3))]).df == pytest.approx(19)


def test_against_chance_independent_questions_have_the_binomial_test_others_that_of_the_interval():
    plain = guessed(alone([1.0] * 40 + [0.0] * 60))
    assert chance_p(plain) == pytest.approx(scipy.stats.binomtest(40, 100, 0.25).pvalue)
    for seed in range(60):
        matrix = guessed(simulated(seed, 1 + seed % 3, 20, 2, 0.35, 0.2))
        bounds = bounded_accuracy(matrix)
        assert type(bounds.low) is type(bounds.high) is float
        assert (chance_p(matrix) < 0.05) == (not bounds.low <= 0.25 <= bounds.high)


def test_against_chance_every_number_of_right_answers_has_the_p_of_the_binomial_and_an_interval_with_it():
    """Also where the normal approximation is too small, as for 6 of 23 questions of eight choices: 0.049 for 0.059."""
    for n, chance in ((12, 0.25), (23, 0.125), (16, 0.1), (40, 0.5)):
        for right in range(n + 1):
            matrix = guessed(alone([1.0] * right + [0.0] * (n - right)), chance)
            p, bounds = chance_p(matrix), bounded_accuracy(matrix)
            score = (right / n - chance) / math.sqrt(chance * (1 - chance) / n)
            exact = scipy.stats.binomtest(right, n, chance).pvalue
            assert p == pytest.approx(max(exact, 2 * scipy.stats.norm.sf(abs(score))))
            assert (p < 0.05) == (not bounds.low <= matrix.chance <= bounds.high)


def test_against_chance_questions_of_several_numbers_of_choices_count_each_with_its_own():
    """Every outcome of six questions of two choices and four of five, by enumeration."""
    chances = (0.5,) * 6 + (0.2,) * 4
    of_sum = np.zeros(11)
    for outcome in itertools.product((0, 1), repeat=10):
        of_sum[sum(outcome)] += math.prod(
            chance if right else 1 - chance for right, chance in zip(outcome, chances, strict=True)
        )
    for right in (0, 3, 7, 8, 10):
        matrix = replace(alone([1.0] * right + [0.0] * (10 - right)), chances=chances)
        exact = of_sum[of_sum <= of_sum[right] * (1 + 1e-9)].sum()
        score = (right / 10 - 0.38) / math.sqrt(0.38 * 0.62 / 10)
        assert chance_p(matrix) == pytest.approx(max(exact, 2 * scipy.stats.norm.sf(abs(score))))


def test_a_guesser_of_few_questions_is_seldom_called_above_chance():
    """4,000 guessers of 13 questions of eight choices: the score test alone calls 6.9% above chance, the exact one 1.6%."""
    random = np.random.default_rng(0)
    right, counts = random.binomial(13, 0.125, 4000), np.arange(14)
    score = (counts / 13 - 0.125) / math.sqrt(0.125 * 0.875 / 13)
    above_by_score = 2 * scipy.stats.norm.sf(score) < 0.05
    matrices = [guessed(alone([1.0] * n + [0.0] * (13 - n)), 0.125) for n in counts]
    above = np.array([chance_p(matrix) < 0.05 and matrix.mean() > 0.125 for matrix in matrices])
    assert above_by_score[right].mean() > 0.06
    assert above[right].mean() < 0.025
    assert scipy.stats.binom.pmf(counts, 13, 0.125)[above].sum() < 0.05


def test_near_chance_is_the_exact_test_of_both_ends_for_independent_questions():
    for n, right, chance, margin in ((30, 6, 0.25, 0.1), (200, 41, 0.2, 0.05), (60, 2, 0.1, 0.15)):
        matrix = guessed(alone([1.0] * right + [0.0] * (n - right)), chance)
        below = scipy.stats.binom.cdf(right, n, chance + margin)
        above = scipy.stats.binom.sf(right - 1, n, chance - margin)
        if chance < margin:  # no accuracy is below 0
            above = 0.0
        assert chance_p(matrix, margin) == pytest.approx(max(above, below))


def test_a_guesser_whose_documents_all_come_out_alike_is_not_above_chance():
    """Each document has one of four right: no variance between them, and yet no certainty."""
    matrix = guessed(sheet([[1, 0, 0, 0] * 12], "".join(c * 4 for c in "abcdefghijkl")), 0.2)
    assert chance_p(matrix) > 0.5


def test_near_chance_and_equivalence_need_evidence_not_ignorance():
    assert chance_p(guessed(simulated(1, 3, 100, 5, 0.25)), 0.1) < 0.01
    assert chance_p(guessed(simulated(1, 1, 12, 1, 0.25)), 0.1) > 0.05
    assert chance_p(guessed(simulated(1, 3, 100, 5, 0.40)), 0.1) > 0.5
    same = simulated(3, 1, 200, 1, 0.6)
    assert equivalence_p(same, same, 0.05) < 0.01  # identical answers are alike
    assert equivalence_p(same, same, 0.01) > 0.05
    same, other = simulated(3, 3, 100, 2, 0.6), simulated(2, 3, 100, 2, 0.63)
    found = difference_estimate(same, other)
    edge = (
        abs(found.value) + t.isf(0.05, found.df) * found.error
    )  # the far end of the interval of 90%
    assert found.error > math.sqrt(edge * (1 - edge) / found.effective)
    assert equivalence_p(same, other, edge + 1e-6) < 0.05 < equivalence_p(same, other, edge - 1e-6)


def test_a_trend_is_a_linear_contrast_of_accuracies():
    """Documents that rise do not outweigh questions that fall; a curve that bends has a direction, and is not monotone."""
    levels = (0.46, 0.60, 0.71, 0.82, 0.86, 0.45)
    bent, monotone = trend(
        [simulated(seed, 1, 120, 5, accuracy) for seed, accuracy in enumerate(levels)]
    )
    assert bent.value > 0
    assert not monotone
    falling, monotone = trend(
        [simulated(seed, 1, 120, 5, accuracy) for seed, accuracy in enumerate((0.88, 0.7, 0.37))]
    )
    assert falling.value < 0
    assert monotone
    assert falling.p < 1e-10
    documents = tuple("abcdefghijkl") + tuple(f"d{i // 10}" for i in range(60))
    arms = [
        CorrectnessMatrix(np.array([[float(i < 2 * step) for i in range(12)] + [float(i >= 15 * step) for i in range(60)]]),
                          tuple(map(str, range(72))), documents)
        for step in range(4)
    ]  # fmt: skip
    assert [arm.mean() for arm in arms] == sorted((arm.mean() for arm in arms), reverse=True)
    assert trend(arms)[0].value < 0
    assert trend(arms)[0].value == pytest.approx(
        sum(w * arm.mean() for w, arm in zip((-3, -1, 1, 3), arms, strict=True)) / 4
    )


def test_a_trend_that_the_seeds_do_not_bear_is_none():
    """Every document rises, by 3 points a step, but the three seeds of an arm differ by 30."""
    ids = tuple(map(str, range(100)))
    arms = []
    for step in range(4):
        rows = [[float(i < 50 + 3 * step + shift) for i in range(100)] for shift in (-15, 0, 15)]
        arms.append(CorrectnessMatrix(np.array(rows), ids, ids))
    estimate, _ = trend(arms)
    assert estimate.value > 0
    assert estimate.p > 0.2


def test_the_leader_is_best_on_the_questions_of_all_whatever_each_has_a_score_for():
    """The worse arm has no score for the questions that it cannot answer, so that its own accuracy is the higher one."""
    good, bad = alone([1.0] * 60 + [0.0] * 40), alone([1.0] * 40 + [0.0] * 60)
    flattered = bad.part(range(50))
    assert flattered.mean() > good.mean()
    found = lead([flattered, good], ["bad", "good"], "these models")
    assert found is not None
    first, contrast = found
    assert (first, contrast.other, contrast.scope) == (1, "bad", "these models")
    assert contrast.delta == pytest.approx(0.2)
    assert lead([bad.part([0, 1]), good.part([2, 3])], ["bad", "good"], "method") is None


def test_arms_in_another_order_of_questions_are_brought_into_one():
    arm = alone([1.0, 0.0, 1.0, 0.0])
    turned = arm.part([3, 1, 0, 2])
    assert [matrix.question_ids for matrix in aligned(turned, arm)] == [turned.question_ids] * 2
    assert make_contrast(turned, arm, "base").wrong_to_right == 0


@pytest.mark.parametrize(
    ("delta", "half", "p", "effective", "tag"),
    [
        (0.2, 0.1, 0.001, 50, Tag.BETTER), (-0.2, 0.1, 0.001, 50, Tag.WORSE), (0.2, 0.1, 0.001, 9, Tag.TOO_FEW),
        (-0.01, 0.03, 0.5, 50, Tag.ALIKE), (-0.25, 0.3, 0.1, 12, Tag.UNDECIDED), (-0.015, 0.011, 0.06, 300, Tag.ALIKE),
        (-0.04, 0.03, 0.06, 300, Tag.UNDECIDED), (0.2, None, None, 1, Tag.TOO_FEW),
    ],
)  # fmt: skip
def test_a_difference_that_is_not_shown_is_alike_only_inside_the_margin(
    delta, half, p, effective, tag
):
    one = alone([1.0] * 20)
    contrast = make_contrast(one, one, "base")
    bounds = (
        {"low": None, "high": None} if half is None else {"low": delta - half, "high": delta + half}
    )
    assert _tag(replace(contrast, delta=delta, p=p, n_effective=effective, **bounds)) is tag
