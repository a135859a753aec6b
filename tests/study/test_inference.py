"""The study's statistics against the naive way."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import scipy.stats

from kinject.eval.scoring.answers import AnswerStore
from kinject.study.inference import CorrectnessMatrix, aligned, interval, majority_changes, near_p, sign_flip_p, trend_p
from kinject.study.records import AskSetting, Records
from kinject.types import Answer


def sheet(right: list[list[int]], documents: str) -> CorrectnessMatrix:
    return CorrectnessMatrix(np.array(right, dtype=float), tuple(map(str, range(len(documents)))), tuple(documents))


def simulated(
    seed: int, n_seeds: int, n_documents: int, n_each: int, accuracy: float, spread: float = 0.0
) -> CorrectnessMatrix:
    random = np.random.default_rng(seed)
    levels = np.clip(accuracy + spread * random.standard_normal((n_seeds, n_documents)), 0, 1)
    right = (random.random((n_seeds, n_documents, n_each)) < levels[:, :, None]).astype(float)
    documents = tuple(f"d{at // n_each}" for at in range(n_documents * n_each))
    return CorrectnessMatrix(right.reshape(n_seeds, -1), tuple(map(str, range(len(documents)))), documents)


def naive_interval(one: CorrectnessMatrix, other: CorrectnessMatrix | None, n: int = 3000) -> tuple[float, float]:
    """Draw documents and seeds one resample at a time, with loops."""
    random = np.random.default_rng(99)
    documents = sorted(set(one.clusters))
    means = []
    for _ in range(n):
        drawn = random.choice(len(documents), len(documents))
        columns = [at for pick in drawn for at, own in enumerate(one.clusters) if own == documents[pick]]
        value = 0.0
        for sign, own in ((1, one), (-1, other)):
            if own is not None:
                rows = random.choice(own.correct.shape[0], own.correct.shape[0])
                value += sign * own.correct[np.ix_(rows, columns)].mean()
        means.append(value)
    return tuple(np.quantile(means, (0.025, 0.975)))  # type: ignore[return-value]


def test_an_interval_is_that_of_drawing_documents_and_seeds_one_by_one():
    one = simulated(1, 3, 25, 4, 0.7, spread=0.2)
    found, wanted = interval(one), naive_interval(one, None)
    assert found == pytest.approx(wanted, abs=0.015)


def test_the_interval_of_a_difference_draws_the_same_documents_for_both_and_each_ones_own_seeds():
    one, other = simulated(1, 3, 25, 4, 0.8, spread=0.2), simulated(2, 2, 25, 4, 0.6, spread=0.2)
    assert interval(one, other) == pytest.approx(naive_interval(one, other), abs=0.02)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        low, high = interval(simulated(seed, 1, 60, 1, 0.6))
        covered += low <= 0.6 <= high
    assert 0.90 <= covered / 200 <= 0.99


def test_sign_flip_p_is_that_of_all_flips():
    one = sheet([[1, 1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1]], "aabbccdd")
    other = sheet([[0, 1, 0, 1, 0, 0, 1, 0]], "aabbccdd")
    differences = [
        sum(one.correct[:, at].mean() - other.correct[0, at] for at in range(8) if one.clusters[at] == name)
        for name in "abcd"
    ]
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=4)
    ]
    exact = sum(value >= abs(sum(differences)) - 1e-9 for value in flips) / len(flips)
    assert sign_flip_p(one, other) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("n_changed", [0, 13, 16])
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
    assert p == pytest.approx(expected, rel=1e-9 if n_changed <= 14 else 0.25)


@pytest.mark.parametrize("n_changed", [40, 100])
def test_sign_flip_p_of_many_documents_is_near_the_normal_one(n_changed):
    random = np.random.default_rng(5)
    differences = random.normal(0.25, 1.0, n_changed)
    ids = tuple(map(str, range(n_changed)))
    p = sign_flip_p(
        CorrectnessMatrix(differences[None], ids, ids), CorrectnessMatrix(np.zeros((1, n_changed)), ids, ids)
    )
    z = abs(differences.sum()) / np.sqrt((differences**2).sum())
    assert p == pytest.approx(2 * scipy.stats.norm.sf(z), rel=0.15, abs=0.003)


def test_sign_flip_p_is_uniform_where_there_is_no_difference():
    p_values = [
        sign_flip_p(simulated(seed, 1, 40, 2, 0.5), simulated(seed + 1000, 1, 40, 2, 0.5)) for seed in range(150)
    ]
    assert 0.01 <= np.mean([p < 0.05 for p in p_values]) <= 0.10
    assert 0.4 < float(np.mean(p_values)) < 0.6


def test_questions_of_one_document_do_not_count_as_independent():
    """Ten copies of each question say no more than one."""
    one, other = simulated(3, 1, 20, 1, 0.7), simulated(4, 1, 20, 1, 0.5)

    def copied(of: CorrectnessMatrix) -> CorrectnessMatrix:
        return CorrectnessMatrix(
            np.repeat(of.correct, 10, axis=1),
            tuple(map(str, range(200))),
            tuple(name for name in of.clusters for _ in range(10)),
        )

    assert sign_flip_p(copied(one), copied(other)) == pytest.approx(sign_flip_p(one, other))
    assert interval(copied(one), copied(other)) == pytest.approx(interval(one, other))


def test_trend_p_is_pages_l_by_its_normal_approximation():
    sheets = [simulated(seed, 2, 60, 3, accuracy) for seed, accuracy in ((1, 0.50), (2, 0.55), (3, 0.6), (4, 0.62))]
    table = np.stack([s.per_cluster[0].mean(0) / s.per_cluster[1] for s in sheets], axis=1)
    ranks = np.array([[sum(b < a for b in row) + (sum(b == a for b in row) + 1) / 2 for a in row] for row in table])
    n, k = table.shape
    big_l = float((ranks.sum(0) * np.arange(1, k + 1)).sum())
    z = (12 * big_l - 3 * n * k * (k + 1) ** 2) / (k * (k + 1) * math.sqrt(n * (k - 1)))
    wanted = 0.5 * math.erfc(z / math.sqrt(2))
    assert trend_p(sheets) == pytest.approx(wanted, rel=0.35)
    assert trend_p(sheets[::-1]) > 0.5


def test_near_chance_needs_evidence_not_ignorance():
    assert near_p(simulated(1, 3, 100, 5, 0.25), 0.25, 0.1) < 0.01
    assert near_p(simulated(1, 1, 8, 1, 0.25), 0.25, 0.1) > 0.05
    assert near_p(simulated(1, 3, 100, 5, 0.40), 0.25, 0.1) > 0.5


def test_changes_count_what_most_seeds_say():
    now = sheet([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0]], "abcd")
    before = sheet([[0, 0, 1, 0]], "abcd")
    assert majority_changes(now, before) == (2, 1)


def test_how_many_draws_are_held_at_once_changes_nothing(monkeypatch):
    one, other = simulated(1, 3, 90, 2, 0.8), simulated(2, 2, 90, 2, 0.6)
    at_once = interval(one, other), near_p(one, 0.8, 0.02)
    monkeypatch.setattr("kinject.study.inference._MOST_DRAWS", 7777)
    assert (interval(one, other), near_p(one, 0.8, 0.02)) == at_once


def test_signs_of_many_documents_are_those_of_one_matrix():
    n = 150
    signs = np.hstack([np.random.default_rng([0, at]).integers(0, 2, (20_000, 64), dtype=np.int8) for at in range(3)])
    differences = np.random.default_rng(7).normal(0.1, 1.0, n)
    flipped = np.abs((signs[:, :n] * 2.0 - 1.0) @ differences)
    expected = (1 + (flipped >= abs(differences.sum()) - 1e-9).sum()) / 20_001
    ids = tuple(f"{at:03}" for at in range(n))
    assert (
        sign_flip_p(CorrectnessMatrix(differences[None], ids, ids), CorrectnessMatrix(np.zeros((1, n)), ids, ids))
        == expected
    )


def test_memory_does_not_grow_with_the_square_of_documents():
    """All signs of 3,000 documents at once would hold 480 MB, a matrix of questions by documents 72 MB."""
    one, other = simulated(1, 1, 3000, 1, 0.6), simulated(2, 1, 3000, 1, 0.5)
    tracemalloc.start()
    try:
        interval(one, other)
        sign_flip_p(one, other)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 300 << 20


def test_a_question_without_a_score_in_one_arm_is_no_pair():
    one, other = sheet([[1, 0, 1, 1]], "aabb"), sheet([[0, 0, 1, 0]], "aabb")
    first, second = aligned(one, other.part([0, 2, 3]))
    assert first.question_ids == second.question_ids == tuple(other.question_ids[i] for i in (0, 2, 3))
    assert (first.mean(), second.mean()) == (1.0, pytest.approx(1 / 3))


def test_a_seed_that_diverged_is_no_seed_and_a_question_it_has_no_score_for_is_left_out(tmp_path):
    def write(seed, *log_probs):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with AnswerStore(folder / "answers.jsonl") as store:
            for i, value in enumerate(log_probs):
                answer = Answer(
                    f"q{i}", "set", "ft", "texts", 0, 0, (), 0, (value, -1.0), (1, 1), (1, 1), n_chars=(1, 1)
                )
                store.add(f"k{i}", answer)
        records.read("m", "ft", seed, folder)

    records, setting = Records("sum"), AskSetting("set", "texts", 0, 0)
    write(0, -0.5, math.nan, -2.0)
    write(1, -0.5, -0.5, -0.5)
    write(2, math.nan, math.nan, math.nan)
    assert records.seeds("m", "ft") == [0, 1]
    assert records.settings("m", "ft") == [setting]
    assert records.matrix("m", "ft", setting).correct.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert [answer.question_id for answer in records.answers("m", "ft", setting)] == ["q0", "q2"]
    assert records.n_asked("m", "ft", setting) == 3
    assert records.unscored == [("m", "ft", 2, setting, 3)]
