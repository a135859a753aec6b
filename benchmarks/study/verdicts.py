"""Simulated studies with a known truth: how often verdicts are wrong, intervals cover, and true differences are found.

Draws are nested: a document's level (beta), a question's level around it (beta), an arm's own change of a document, a seed's
change (symmetric, or skewed downwards, or a collapse to guessing), and the answer. A part of an arm's answers are the base's.

    python benchmarks/study/verdicts.py [--studies 1000] [--seed 0]    # about five minutes
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq

from kinject.results import ALPHA, FEWEST
from kinject.stats.comparisons import lead, make_contrast, trend
from kinject.stats.intervals import (
    Estimate,
    bounded_accuracy,
    chance_p,
    difference_estimate,
    equivalence_p,
    family_variances,
    holm,
)
from kinject.stats.matrix import CorrectnessMatrix

CHANCE = 0.25
Random = np.random.Generator


@dataclass(frozen=True)
class ArmDesign:
    """An arm: its change in logits, the SD of its seeds, whether that is skewed, how often a seed collapses, its seeds.

    `own` is the SD of its own change of a document, in logits; of its questions, `kept` are answered as the base does.
    """

    shift: float = 0.0
    seed_sd: float = 0.1
    skewed: bool = False
    collapse: float = 0.0
    n_seeds: int = 3
    own: float = 0.3
    kept: float = 0.3


BASE = ArmDesign(seed_sd=0.0, n_seeds=1, own=0.0, kept=1.0)


@dataclass(frozen=True)
class Design:
    """The questions of each document, the mean accuracy, and how far the levels of documents and questions spread.

    `spread` is the variance of documents' levels over the largest possible; that of questions around them is half of it.
    """

    sizes: tuple[int, ...] = (5,) * 100
    level: float = 0.6
    spread: float = 0.25

    def draw(self, arms: Sequence[ArmDesign], random: Random) -> list[CorrectnessMatrix]:
        """Return the answers of the arms, with the variances of seeds as a study informs them."""
        documents = np.repeat(np.arange(len(self.sizes)), self.sizes)
        n = len(documents)
        logits = self._levels(documents, random)
        base = random.random(n) < _sigmoid(logits)
        names, ids = tuple(f"d{i}" for i in documents), tuple(f"q{i:05d}" for i in range(n))
        matrices = []
        for arm in arms:
            kept = random.random(n) < arm.kept
            own = arm.shift + arm.own * random.standard_normal(len(self.sizes))[documents]
            changes = _changes(arm, arm.n_seeds, random)[:, None]
            right = random.random((arm.n_seeds, n)) < _sigmoid(logits + own + changes)
            right = np.where(kept, base, right)
            guessed = random.random((arm.n_seeds, n)) < CHANCE
            collapsed = random.random((arm.n_seeds, 1)) < arm.collapse
            rows = np.where(collapsed, guessed, right).astype(float)
            matrices.append(CorrectnessMatrix(rows, ids, names, (CHANCE,) * n))
        several = [i for i, matrix in enumerate(matrices) if matrix.n_seeds > 1]
        for i, variance in zip(
            several, family_variances([matrices[i].seed_variance for i in several]), strict=True
        ):
            matrices[i] = replace(matrices[i], pooled=variance)
        return matrices

    def _levels(self, documents: Any, random: Random) -> Any:
        """Return the logit of each question's level."""
        of_documents = _beta(np.full(int(documents.max()) + 1, self.level), self.spread, random)
        levels = _beta(of_documents[documents], self.spread / 2, random)
        return np.log(levels / (1 - levels))

    def truth(self, arm: ArmDesign) -> float:
        """Return the accuracy of an arm over all documents and seeds, from 200,000 draws."""
        random = np.random.default_rng(1)
        logits = self._levels(np.arange(200_000), random)
        own = arm.own * random.standard_normal(logits.shape) + _changes(arm, len(logits), random)
        accuracy = float(_sigmoid(logits + arm.shift + own).mean())
        return arm.collapse * CHANCE + (1 - arm.collapse) * (
            arm.kept * self.level + (1 - arm.kept) * accuracy
        )

    def like(self, arm: ArmDesign, gain: float = 0.0) -> ArmDesign:
        """Return the arm with the shift that makes its true accuracy the base's, or more by `gain`."""
        shift = brentq(
            lambda value: self.truth(replace(arm, shift=value)) - self.level - gain,
            -4,
            4,
            xtol=1e-3,
        )
        return replace(arm, shift=float(shift))


def _beta(levels: Any, spread: float, random: Random) -> Any:
    """Return draws with these means, whose variance is `spread` of the largest possible."""
    concentration, safe = 1 / spread - 1, np.clip(levels, 1e-3, 1 - 1e-3)
    return np.clip(random.beta(safe * concentration, (1 - safe) * concentration), 1e-6, 1 - 1e-6)


def _sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


def _changes(arm: ArmDesign, n: int, random: Random) -> Any:
    """Return the changes of `n` seeds in logits, of mean 0: normal, or a few far below the others."""
    return arm.seed_sd * (
        1 - random.exponential(size=n) if arm.skewed else random.standard_normal(n)
    )


class Rates:
    """Counts of studies by figure, printed as percentages with their Monte-Carlo error."""

    def __init__(self) -> None:
        self.counts: dict[str, list[bool]] = {}

    def add(self, figure: str, happened: bool) -> None:
        """Count one study."""
        self.counts.setdefault(figure, []).append(bool(happened))

    def show(self) -> None:
        """Print a row for each figure and forget them."""
        for figure, seen in self.counts.items():
            rate = sum(seen) / len(seen)
            error = math.sqrt(max(rate * (1 - rate), 1 / len(seen) / 4) / len(seen))
            print(
                f"| {figure} | {100 * rate:.1f} ({100 * error:.1f}) | {len(seen):,} |", flush=True
            )
        self.counts.clear()


def contradicts(estimate: Estimate) -> bool:
    """Return whether p and the interval disagree on 0."""
    assert estimate.low is not None and estimate.high is not None and estimate.p is not None  # noqa: PT018
    return (estimate.p < ALPHA) == (estimate.low <= 0 <= estimate.high)


def leaders(rates: Rates, random: Random) -> None:
    """Two to four arms, in any order of questions, each without a score for some, mostly those that it does not know."""
    n = int(random.integers(2, 5))
    levels = [
        ArmDesign(shift=random.normal(0, 0.7), n_seeds=int(random.integers(1, 4))) for _ in range(n)
    ]
    matrices = Design((2,) * 40).draw(levels, random)
    parts = []
    for matrix in matrices:
        lost = random.random(matrix.correct.shape[1]) < random.choice([0, 0.02, 0.5]) * (
            1 - matrix.correct.mean(0)
        )
        parts.append(matrix.part(list(random.permutation(np.flatnonzero(~lost)))))
    found = lead(parts, [str(i) for i in range(n)], "method")
    if found is not None:
        first, contrast = found
        shared = set.intersection(*(set(part.question_ids) for part in parts))
        accuracies = [np.mean([part.correct.mean(0)[i] for i, name in enumerate(part.question_ids) if name in shared])
                      for part in parts]  # fmt: skip
        worse = contrast.is_significant and max(accuracies) > accuracies[first] + 1e-9
        rates.add("a leader that is worse on the common questions", worse)


def known(rates: Rates, random: Random) -> None:
    """Ten ways to ask 600 questions, of which the base knows a third; the tuned model has forgotten nothing."""
    knows = random.random(600) < 1 / 3
    prompts = np.where(
        knows[:, None], random.random((600, 10)) < 0.95, random.random((600, 10)) < CHANCE
    )
    after = np.where(knows, random.random(600) < 0.95, random.random(600) < CHANCE)
    selected = prompts[:, ::2].mean(1) > CHANCE
    ids = tuple(map(str, np.flatnonzero(selected)))
    for name, before in (
        ("a prompt of the selection", prompts[:, 0]),
        ("a prompt of the other half", prompts[:, 1]),
    ):
        matrices = [
            CorrectnessMatrix(of[selected][None].astype(float), ids, ids) for of in (after, before)
        ]
        contrast = make_contrast(*matrices, "base")
        assert contrast is not None
        rates.add(
            f"nothing forgotten, and “forgot” by {name}",
            contrast.is_significant and contrast.delta < 0,
        )


def few_documents(rates: Rates, random: Random) -> None:
    """Sizes of documents from equal to one that has most questions; one and three seeds; an arm that guesses."""
    for label, sizes in (
        ("one of 200 questions, 19 of 2", (200,) + (2,) * 19), ("12 of 5", (5,) * 12),
        ("30, sizes 1 to 30", tuple(range(1, 31))),
    ):  # fmt: skip
        for n_seeds in (1, 3):
            arm = ArmDesign(n_seeds=n_seeds)
            guess = Design(sizes, CHANCE).draw([replace(arm, seed_sd=0.0, own=0.0)], random)[0]
            design, name = Design(sizes), f"{label}, {n_seeds} seed{'s' * (n_seeds > 1)}"
            if guess.n_effective < FEWEST:
                rates.add(f"{name}: judged", False)
                continue
            bounds, p = bounded_accuracy(guess), chance_p(guess)
            rates.add(
                f"{name}: coverage of an accuracy of 25%", bounds.low <= CHANCE <= bounds.high
            )
            rates.add(
                f"{name}: a guesser above chance",
                p is not None and p < ALPHA and bounds.value > CHANCE,
            )
            fair = _like(design, replace(arm, kept=0.7))
            trained, base = design.draw([fair, BASE], random)
            estimate, accuracy = difference_estimate(trained, base), bounded_accuracy(trained)
            assert estimate.low is not None
            assert estimate.high is not None
            rates.add(
                f"{name}: coverage of an accuracy of 60%", accuracy.low <= 0.6 <= accuracy.high
            )
            rates.add(f"{name}: coverage of a difference of 0", estimate.low <= 0 <= estimate.high)
            gained, base = design.draw([_like(design, arm, 0.15), BASE], random)
            estimate = difference_estimate(gained, base)
            assert estimate.low is not None
            assert estimate.high is not None
            rates.add(
                f"{name}: coverage of a difference of 15 points",
                estimate.low <= 0.15 <= estimate.high,
            )


@lru_cache
def _like(design: Design, arm: ArmDesign, gain: float = 0.0) -> ArmDesign:
    return design.like(arm, gain)


def families(rates: Rates, random: Random) -> None:
    """Ten arms of the same accuracy against the base, whose seeds differ little, much, or skewed."""
    for name, arm in (
        ("SD 0", ArmDesign(seed_sd=0.0)), ("SD 2", ArmDesign(seed_sd=0.12)), ("SD 4", ArmDesign(seed_sd=0.25)),
        ("SD 4, skewed", ArmDesign(seed_sd=0.25, skewed=True)), ("a tenth of seeds collapse", ArmDesign(collapse=0.1)),
    ):  # fmt: skip
        design = Design()
        fair, better = _like(design, arm), _like(design, arm, 0.06)
        base, *arms, gained = design.draw([BASE, *[fair] * 10, better], random)
        found = [difference_estimate(of, base) for of in arms]
        rates.add(
            f"any of ten null arms, seeds: {name}", min(holm([e.p or 0.0 for e in found])) < ALPHA
        )
        first = found[0]
        assert first.low is not None
        assert first.high is not None
        rates.add(f"coverage of a difference, seeds: {name}", first.low <= 0 <= first.high)
        rates.add(f"p and interval disagree on 0, seeds: {name}", any(map(contradicts, found)))
        p = difference_estimate(gained, base).p
        rates.add(f"a gain of 6 points is found alone, seeds: {name}", p is not None and p < ALPHA)


def unstable(rates: Rates, random: Random) -> None:
    """Thirty arms against the base: the seeds of one differ by 13 points, those of the others by 2; nine gain 7 points."""
    design = Design()
    for n_seeds in (3, 2):
        wild, calm = (_like(design, ArmDesign(seed_sd=sd, n_seeds=n_seeds)) for sd in (0.85, 0.12))
        better = _like(design, ArmDesign(seed_sd=0.12, n_seeds=n_seeds), 0.07)
        base, *arms = design.draw([BASE, wild, *[calm] * 20, *[better] * 9], random)
        p = [difference_estimate(arm, base).p or 0.0 for arm in arms]
        name = f"one unstable arm among 30, {n_seeds} seeds"
        rates.add(f"{name}: it differs, by itself", p[0] < ALPHA)
        rates.add(f"{name}: any null arm differs, after Holm", min(holm(p)[:21]) < ALPHA)
        rates.add(f"{name}: a gain of 7 points is found, after Holm", holm(p)[-1] < ALPHA)


def equivalence(rates: Rates, random: Random) -> None:
    """An arm that answers as the base does but for whole documents, lost at the rate of the margin."""
    for name, n_documents, n_each, margin in (
        ("100 of 5", 100, 5, 0.05),
        ("300 single", 300, 1, 0.02),
        ("30 of 4", 30, 4, 0.1),
    ):
        n = n_documents * n_each
        base = np.ones(n)
        lost = np.repeat(random.random(n_documents) < margin, n_each)
        ids, documents = tuple(map(str, range(n))), tuple(str(i // n_each) for i in range(n))
        arm, other = (
            CorrectnessMatrix(of[None].astype(float), ids, documents) for of in (base * ~lost, base)
        )
        p = equivalence_p(arm, other, margin)
        rates.add(
            f"equivalence at the margin, rare whole losses, {name}", p is not None and p < ALPHA
        )


def trends(rates: Rates, random: Random) -> None:
    """Five arms of one accuracy along a sweep."""
    for n_seeds in (1, 3):
        design, level = Design((3,) * 60), ArmDesign(n_seeds=n_seeds)
        p = trend(design.draw([level] * 5, random))[0].p
        rates.add(
            f"a trend where there is none, {n_seeds} seed{'s' * (n_seeds > 1)}",
            p is not None and p < ALPHA,
        )


PARTS: Sequence[tuple[Callable[[Rates, Random], None], int]] = (
    (leaders, 2), (known, 1), (few_documents, 1), (families, 1), (unstable, 1), (equivalence, 1), (trends, 1),
)  # fmt: skip
"""What is simulated, and how many times as many studies."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random, rates = np.random.default_rng(arguments.seed), Rates()
    print("| of simulated studies | % (Monte-Carlo error) | studies |\n|---|---|---|")
    for part, times in PARTS:
        for _ in range(times * arguments.studies):
            part(rates, random)
        rates.show()


if __name__ == "__main__":
    main()
