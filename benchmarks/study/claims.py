"""Simulated studies with a known truth: how often verdicts are wrong, intervals cover, and true differences are found.

A question is answered correctly if a normal number exceeds a threshold: the sum of a document's part (its share of the
variance is the intra-class correlation), a question's, an arm's seed's, and an answer's own.

    python benchmarks/study/claims.py [--studies 1000] [--seed 0]    # 1,000 studies of each kind

`variances.py` beside it compares ways to estimate the variance.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.stats import norm

from kinject.results import ALPHA
from kinject.stats import (
    CorrectnessMatrix,
    bounded_accuracy,
    correct_contrast,
    difference_estimate,
    difference_p,
    holm,
    make_contrast,
    moderated,
    relative_gain,
)


@dataclass(frozen=True)
class Design:
    """`n_documents` of `n_each` questions, `n_seeds` of each arm, whose accuracies have the standard deviation `seed_sd`."""

    n_documents: int = 120
    n_each: int = 5
    n_seeds: int = 1
    seed_sd: float = 0.0
    correlation: float = 0.3

    def draw(
        self, accuracies: Sequence[float], random: np.random.Generator, *, untrained: bool = False
    ) -> list[CorrectnessMatrix]:
        """Return the answers of one arm for each of the true `accuracies`; the first without seeds if it is `untrained`.

        As in a study, the variance of each arm's seeds is informed by the other arms.
        """
        shape = (len(accuracies), self.n_seeds, self.n_documents, self.n_each)
        rest = (1 - self.correlation) / 2
        document = random.normal(0, math.sqrt(self.correlation), (self.n_documents, 1))
        question = random.normal(0, math.sqrt(rest), (self.n_documents, self.n_each))
        noise = random.normal(0, math.sqrt(rest), shape)
        level = norm.ppf(accuracies)
        of_seeds = self.seed_sd / norm.pdf(level)  # on the scale of the normal numbers
        seeds = random.normal(0, 1, shape[:2]) * of_seeds[:, None]
        if untrained:
            seeds[0], of_seeds[0] = 0.0, 0.0
        threshold = level * np.sqrt(1 + of_seeds**2)  # the accuracy, averaged over seeds, stays
        right = document + question + noise + (seeds + threshold[:, None])[:, :, None, None] > 0
        ids, documents, chances = _names(self.n_documents, self.n_each)
        arms = [
            CorrectnessMatrix(arm.reshape(self.n_seeds, len(ids)).astype(float), ids, documents, chances)
            for arm in right
        ]
        first = [replace(arms[0], correct=arms[0].correct[:1])] if untrained else []
        trained = arms[1:] if untrained else arms
        if self.n_seeds > 1:
            pooled = moderated([arm.seed_variance for arm in trained])
            trained = [replace(arm, pooled=variance) for arm, variance in zip(trained, pooled, strict=True)]
        return [*first, *trained]


@lru_cache
def _names(n_documents: int, n_each: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[float, ...]]:
    """Return the questions' ids, documents and chances."""
    n = n_documents * n_each
    return tuple(map(str, range(n))), tuple(str(i // n_each) for i in range(n)), (0.25,) * n


def p_of(arm: CorrectnessMatrix, other: CorrectnessMatrix) -> float:
    """Return the p of a difference between arms of many documents."""
    p = difference_p(arm, other)
    assert p is not None
    return p


def rate_of(decide: Callable[[], bool], n: int) -> str:
    """Return the percentage of `n` trials that `decide`, with its Monte-Carlo error."""
    rate = sum(decide() for _ in range(n)) / n
    return f"{100 * rate:.1f} ({100 * math.sqrt(max(rate * (1 - rate), 1 / n) / n):.1f})"


def false_family(design: Design, random: np.random.Generator, untrained: bool = False) -> bool:
    """Return whether any of ten arms that are as good as the control (the `untrained` base) is said to differ from it."""
    control, *arms = design.draw([0.6] * 11, random, untrained=untrained)
    return min(holm([p_of(arm, control) for arm in arms])) < ALPHA


def covers(design: Design, accuracy: float, other: float, of: str, random: np.random.Generator) -> bool:
    """Return whether the interval of the accuracy, the difference, or the gain over base above chance, holds the truth."""
    arm, base = design.draw([accuracy, other], random, untrained=of == "gain")
    if of == "gain":
        gain = relative_gain(base, arm)
        return gain is None or gain.low <= (other - accuracy) / (accuracy - 0.25) <= gain.high
    if of == "accuracy":
        bounded = bounded_accuracy(arm)
        return bounded.low <= accuracy <= bounded.high
    estimate = difference_estimate(base, arm)
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= other - accuracy <= estimate.high


def detectable(design: Design, family: int, random: np.random.Generator, n: int = 200) -> float:
    """Return the mean smallest detectable difference of studies without one."""
    sizes_found = []
    for _ in range(n):
        contrast = make_contrast(*design.draw([0.6, 0.6], random), "base")
        assert contrast is not None
        sizes_found.append(correct_contrast(contrast, None, family).smallest or 1.0)
    return float(np.mean(sizes_found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    n, random = arguments.studies, np.random.default_rng(arguments.seed)

    print("| a false difference, % of studies (Monte-Carlo error) | |\n|---|---|")
    for sd in (0.0, 0.02, 0.04):
        design = Design(n_seeds=3, seed_sd=sd)
        rate = rate_of(lambda design=design: false_family(design, random), n)
        print(f"| among ten null claims, 3 seeds, seed SD {100 * sd:.0f} points | {rate} |", flush=True)
        rate = rate_of(lambda design=design: false_family(design, random, True), n)
        print(f"| the same ten against the untrained base, seed SD {100 * sd:.0f} | {rate} |", flush=True)
    for correlation in (0.0, 0.1, 0.3):
        design = Design(correlation=correlation)
        rate = rate_of(lambda design=design: p_of(*design.draw([0.6, 0.6], random)) < ALPHA, n)
        print(f"| eval and compare, 120 documents x 5 questions, ICC {correlation} | {rate} |", flush=True)

    print("\n| coverage of 95% intervals, % | accuracy .6 | difference 0 | difference .6 to .8 | gain .6 to .8 |")
    print("|---|---|---|---|---|")
    for n_documents in (10, 20, 120):
        for n_seeds, sd in ((1, 0.0), (3, 0.02)):
            design = Design(n_documents=n_documents, n_seeds=n_seeds, seed_sd=sd)
            cells = [
                rate_of(lambda d=design, o=other, w=of: covers(d, 0.6, o, w, random), n)
                for other, of in ((0.6, "accuracy"), (0.6, "difference"), (0.8, "difference"), (0.8, "gain"))
            ]
            print(f"| {n_documents} documents, {n_seeds} seeds, SD {100 * sd:.0f} | {' | '.join(cells)} |", flush=True)

    print("\n| power | difference, points | found, % |\n|---|---|---|")
    for name, design, family in (
        ("detectable: 1,000 single questions", Design(1000, 1), 1),
        ("detectable: 120 x 5, 1 seed", Design(), 1),
        ("detectable: 120 x 5, 3 seeds, SD 2", Design(n_seeds=3, seed_sd=0.02), 1),
        ("detectable: 120 x 5, 3 seeds, SD 2, ten claims", Design(n_seeds=3, seed_sd=0.02), 10),
    ):
        size = detectable(design, family, random)
        limit = ALPHA / family
        power = rate_of(lambda d=design, s=size, a=limit: p_of(*d.draw([0.6, 0.6 + s], random)) < a, n)
        print(f"| {name} | {100 * size:.1f} | {power} |", flush=True)
    rate = rate_of(lambda: p_of(*Design(1000, 1).draw([0.5, 0.6], random)) < ALPHA / 120, n)
    print(f"| 1,000 questions, one of 120 comparisons | 10.0 | {rate} |")


if __name__ == "__main__":
    main()
