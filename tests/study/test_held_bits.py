"""The bits that a model holds, where the answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from study_samples import make_result

from kinject.results import ArmResult
from kinject.study.analysis import make_held_bits


def knows(n_known: int, n: int, n_choices: int) -> ArmResult:
    """Return the result of a model that knows `n_known` of `n` facts and guesses each `n_choices`th of the rest."""
    rest = n - n_known
    right = [True] * n_known + [i % n_choices == 0 for i in range(rest)]
    return make_result("base", right, None, chance=1 / n_choices)


def head(question_set: str) -> tuple[str, int]:
    return "texts", 0


@pytest.mark.parametrize(
    ("n_known", "n", "n_choices", "bits"),
    [
        (40, 120, 4, 40 * 2),
        (0, 64, 8, 0),
        (64, 64, 8, 64 * 3),
        (300, 1000, 2, 300),
        (7, 167, 16, 7 * 4),
    ],
)
def test_a_known_fact_is_worth_the_logarithm_of_its_choices_and_a_guess_nothing(
    n_known, n, n_choices, bits
):
    small, large = knows(n_known, n, n_choices), replace(knows(0, n, n_choices), model="large")
    found, other = make_held_bits([small, large], {"base": 500, "large": 9_000}, head)
    assert found.bits == pytest.approx(bits)
    assert found.most == pytest.approx(n * {2: 1, 4: 2, 8: 3, 16: 4}[n_choices])
    assert 0 <= found.low <= found.bits <= found.high <= found.most * (1 + 1e-9)
    assert found.bits / found.n_parameters == pytest.approx(bits / 500)
    assert (other.model, other.n_parameters) == ("large", 9_000)


def test_only_the_deciding_format_without_passages_counts_and_only_models_of_several_sizes():
    result = knows(10, 40, 4)
    others = [
        replace(result, k=3), replace(result, format="letters"), replace(result, shots=5),
        replace(result, subject="a part"), replace(result, model="unknown"), replace(result, chance=0.0),
    ]  # fmt: skip
    sizes = {"base": 1_000, "large": 2_000}
    assert len(make_held_bits([result, *others], sizes, head)) == 1
    assert make_held_bits([result], {"base": 1_000, "large": 1_000}, head) == []


def test_fewer_than_guessing_hold_nothing():
    (found,) = make_held_bits(
        [make_result("base", [False] * 30, None)], {"base": 10, "large": 20}, head
    )
    assert (found.bits, found.low) == (0.0, 0.0)
