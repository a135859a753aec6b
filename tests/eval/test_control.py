"""The control without the question: what a report calls learned is the gain beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kinject.errors import InputError
from kinject.eval.results import (
    answers_without_question,
    control_correctness,
    correct_families,
    summarize_arm,
)
from kinject.eval.scores import rescored
from kinject.results import ArmResult
from kinject.stats.comparisons import About, Tag, find
from kinject.types import Answer
from small import quick

N_DOCUMENTS = 128


def answers(
    arm: str, chosen: Sequence[int], golds: Sequence[int], *, alone: bool, sets: Sequence[str] = ()
) -> list[Answer]:
    """Return an answer for each question: four choices, of which `chosen` has the highest log-prob."""
    return [
        Answer(
            f"q{i:03}", "new", arm, "texts-no-question" if alone else "texts", 0, 0, (), gold,
            tuple(-1.0 if choice == pick else -2.0 for choice in range(4)), (1,) * 4, (1,) * 4,
            document_id=f"d{i // 4:03}", choice_set=sets[i] if alone and sets else "",
        )
        for i, (pick, gold) in enumerate(zip(chosen, golds, strict=True))
    ]  # fmt: skip


def compare(
    arm: list[Answer], arm_alone: list[Answer], base: list[Answer], base_alone: list[Answer]
) -> ArmResult:
    control = answers_without_question(arm, arm_alone)
    assert control is not None
    control = replace(control, base=answers_without_question(base, base_alone))
    (result,) = correct_families(
        [summarize_arm(arm, base, model="base", arm="arm", control=control)]
    )
    return result


def test_the_net_gain_is_the_gain_less_the_gain_without_the_question():
    golds = [0, 1, 2, 3] * 4
    base = answers("base", [0] * 16, golds, alone=False)  # 4 of 16 right
    base_alone = answers("base", [0, 1, 0, 0] * 4, golds, alone=True)  # 8 of 16
    arm = answers("arm", [0, 1, 2, 0] * 4, golds, alone=False)  # 12 of 16
    arm_alone = answers("arm", [0, 1, 2, 0] * 2 + [0, 1, 0, 0] * 2, golds, alone=True)  # 10 of 16
    result = compare(arm, arm_alone, base, base_alone)
    assert (result.accuracy, result.to_base.delta) == (0.75, 0.5)
    control = result.control
    assert (control.accuracy, control.to_base.delta, control.net.delta) == pytest.approx(
        (0.625, 0.125, 0.375)
    )
    assert result.without_question == pytest.approx(0.25)
    assert control.net.accuracy == 0.75, "the accuracy with the question"
    # Pencil and paper: per document the net changes are 1, 1, 2 and 2 of 4 questions; of 16 signs of four documents, two
    # (all plus, all minus) reach their sum.
    assert control.net.p == pytest.approx(2 / 16)


def test_questions_with_the_same_choices_share_one_control():
    """Each of four choices is right once: whatever a model prefers without the question, it is right once in four."""
    golds = [0, 1, 2, 3]
    for preferred in range(4):
        alone = answers("arm", [preferred] * 4, golds, alone=True, sets=["s"] * 4)
        assert control_correctness([alone]).correct.tolist() == [[0.25] * 4]
    single = answers("arm", [0] * 4, golds, alone=True)
    assert control_correctness([single]).correct.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    unequal = answers("arm", [0, 0, 0, 1], [0, 0, 1, 1], alone=True, sets=["s", "s", "s", "t"])
    assert control_correctness([unequal]).correct.tolist() == [[2 / 3, 2 / 3, 2 / 3, 1.0]]


def test_mutual_information_takes_off_what_a_choice_has_without_the_question():
    (asked,) = answers("arm", [0], [1], alone=False)
    (alone,) = answers("arm", [0], [1], alone=True)
    asked = replace(asked, log_probs=(-2.0, -2.5, -9.0, -9.0))
    alone = replace(alone, log_probs=(-1.0, -4.0, -9.0, -8.0))
    (scored,) = rescored([asked], "pmi", [alone])
    assert scored.log_probs == (-1.0, 1.5, 0.0, -1.0)
    with pytest.raises(InputError, match="'q000': pmi needs its choices without the question"):
        rescored([asked], "pmi")


def _tag(result: ArmResult) -> Tag:
    assert result.gain is not None
    return find(About.LEARNING, result, result.gain).tag


def recognised(random: np.random.Generator) -> ArmResult:
    """Return the result of a model that only knows which strings stand in the documents: the right one, and a third of others.

    With the question it picks another of these strings for half of the questions.
    """
    n = 4 * N_DOCUMENTS
    golds = random.integers(0, 4, n)
    stands = random.random((n, 4)) < 1 / 3
    stands[np.arange(n), golds] = True

    def pick() -> np.ndarray:
        return np.where(stands, random.random((n, 4)), -1.0).argmax(1)

    alone = pick()
    asked = np.where(random.random(n) < 0.5, alone, pick())
    base, base_alone = random.integers(0, 4, n), random.integers(0, 4, n)
    return compare(
        answers("arm", asked, golds, alone=False), answers("arm", alone, golds, alone=True),
        answers("base", base, golds, alone=False), answers("base", base_alone, golds, alone=True),
    )  # fmt: skip


@pytest.mark.parametrize("n", quick((40, 150), 40))
def test_a_model_that_recognises_strings_is_given_no_learning(n: int):
    random = np.random.default_rng(1)
    results = [recognised(random) for _ in range(n)]
    assert min(result.to_base.delta for result in results) > 0.1, "it gains a lot"
    assert sum(result.to_base.is_significant for result in results) > 0.96 * n
    assert [result for result in results if _tag(result) is Tag.BETTER] == []


def known(random: np.random.Generator, gain: float) -> tuple[bool, bool]:
    """Return whether learning is shown with the control and without it, for a model that knows `gain` more answers.

    Each choice is right for one of the four questions that share it; without the question, both models prefer any.
    """
    n = 4 * N_DOCUMENTS
    order = random.permutation(n)
    sets, golds = np.empty(n, dtype=int), np.empty(n, dtype=int)
    sets[order], golds[order] = np.arange(n) // 4, np.arange(n) % 4
    names = [f"s{i}" for i in sets]
    base = random.integers(0, 4, n)
    asked = np.where(random.random(n) < gain / 0.75, golds, base)
    alone, base_alone = (random.integers(0, 4, n // 4)[sets] for _ in range(2))
    result = compare(
        answers("arm", asked, golds, alone=False), answers("arm", alone, golds, alone=True, sets=names),
        answers("base", base, golds, alone=False), answers("base", base_alone, golds, alone=True, sets=names),
    )  # fmt: skip
    plain = replace(result, control=None)
    return _tag(result) is Tag.BETTER, _tag(plain) is Tag.BETTER


@pytest.mark.parametrize("n", quick((40, 120), 40))
def test_a_model_that_knows_keeps_its_power(n: int):
    random = np.random.default_rng(2)
    shown = np.array([known(random, 0.015) for _ in range(n)])
    with_control, without = shown.mean(0)
    assert 0.3 < without < 0.97, "a power that could fall"
    assert with_control >= 0.95 * without
