from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from scipy.stats import bootstrap, sem, t

from kinject.eval.results import paired_contrast, summarize_arm
from kinject.eval.statistics import (
    bootstrap_interval,
    chance,
    holm,
    mcnemar,
    relative_gain,
    seed_interval,
    smallest_difference,
    wilson,
)
from kinject.types import Answer


@pytest.mark.parametrize(
    ("n_correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_equals_the_values_printed_by_newcombe_1998(n_correct, n, low, high):
    # Newcombe, Statistics in Medicine 17:857, table I, method 3
    assert wilson(n_correct, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("gained", "lost", "p"), [(1, 9, 22 / 1024), (9, 1, 22 / 1024), (0, 5, 2 / 32), (5, 5, 1.0)])
def test_mcnemar_equals_binomial_tails_counted_by_hand(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p)


def test_nothing_discordant_is_no_evidence():
    assert mcnemar(0, 0) == 1.0


def test_chance_is_the_mean_over_questions():
    assert chance([4, 2]) == pytest.approx((1 / 4 + 1 / 2) / 2)


def test_no_questions_are_no_knowledge():
    assert wilson(0, 0) == (0.0, 1.0)
    assert chance([]) == 0.0


def test_the_bootstrap_of_single_clusters_equals_scipys():
    values = [1.0, 0.0, 0.0, -1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0] * 6
    expected = bootstrap((values,), np.mean, method="percentile", n_resamples=4000, rng=1).confidence_interval
    found = bootstrap_interval(values, [""] * len(values))
    assert found == pytest.approx((expected.low, expected.high), abs=0.035)


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
    monkeypatch.setattr("kinject.eval.statistics._MOST_DRAWS", 1001)
    assert bootstrap_interval(values, clusters, strata) == whole


def test_the_bootstrap_of_many_clusters_holds_few_draws():
    """500 resamples of 12,000 at once, as whole arrays, would hold 144 MB."""
    tracemalloc.start()
    try:
        bootstrap_interval([float(at % 2) for at in range(12_000)], [""] * 12_000)
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


def test_the_smallest_difference_is_found_with_the_power_it_promises():
    n, discordant = 400, 80
    delta = smallest_difference(n, discordant)
    assert delta is not None
    gained = (discordant / n + delta) / 2
    random = np.random.default_rng(0)
    draws = random.multinomial(n, [gained, discordant / n - gained, 1 - discordant / n], 2000)
    power = np.mean([((b - c) ** 2 / (b + c)) > 1.959964**2 for b, c, _ in draws])
    assert power == pytest.approx(0.8, abs=0.03)


def test_a_handful_of_questions_can_show_no_difference():
    assert smallest_difference(5, 2) is None
    assert smallest_difference(100, 0) >= 0.06  # six questions, all one way
    assert smallest_difference(6, 2) == 1.0
    assert smallest_difference(7, 2) == 6 / 7


def test_the_gain_is_the_papers():
    assert relative_gain(0.6, 0.5) == pytest.approx(0.2)
    assert relative_gain(0.6, 0.0) is None


def test_seeds_have_students_interval():
    deltas = [0.1, 0.14, 0.12]
    mean, spread, low, high = seed_interval(deltas)
    expected = t.interval(0.95, 2, loc=np.mean(deltas), scale=sem(deltas))
    assert (mean, spread, low, high) == pytest.approx((0.12, 0.02, *expected))
    assert seed_interval([0.1]) is None
    assert seed_interval([0.1, 0.3])[0] == pytest.approx(0.2)


def answered(question: str, *log_probs: float, gold: int = 0, arm: str = "base") -> Answer:
    return Answer(question, "set", arm, "texts", 0, 0, (), gold, log_probs, (1, 1), (1, 1), n_chars=(1, 1))


def test_questions_without_a_score_are_left_out_of_every_number_and_of_pairs() -> None:
    base = [answered("a", -1, -2), answered("b", -2, -1), answered("c", math.nan, -1), answered("d", -1, -1)]
    tuned = [answered("a", -2, -1), answered("b", -1, -2), answered("c", -1, -2), answered("d", -1, -math.inf)]
    result = summarize_arm(base, None, model="base", arm="base")
    assert (result.n, result.n_unscored, result.n_correct, result.accuracy) == (4, 2, 1, 0.5)
    assert (result.low, result.high) == wilson(1, 2)
    contrast = paired_contrast(tuned, base)
    assert contrast is not None
    assert (contrast.delta, contrast.wrong_to_right, contrast.right_to_wrong) == (0.0, 1, 1)
    assert contrast.p == mcnemar(1, 1)
    assert paired_contrast(tuned[2:], base[2:]) is None
