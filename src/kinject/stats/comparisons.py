"""Comparisons of arms, before and after the correction for their number; trends, who leads, and
what a comparison shows.

That is a tag with its numbers and its scope. The words are the report's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from kinject.results import ALPHA, MARGIN, ArmResult, Contrast, Scope, Test
from kinject.stats.intervals import (
    Estimate,
    bounded_accuracy,
    contrast_estimate,
    difference_estimate,
    holm,
)
from kinject.stats.matrix import CorrectnessMatrix, aligned


def make_contrast(
    matrix: CorrectnessMatrix, other: CorrectnessMatrix, name: str, scope: Scope = "these models"
) -> Contrast | None:
    """Return the difference of two arms on the questions of both, before any correction; None if
    they share none.

    `name` is the other's, `scope` the difference's (`kinject.results.Scope`).
    """
    matrix, other = aligned(matrix, other)
    if not matrix.question_ids:
        return None
    found, bounds = difference_estimate(matrix, other), bounded_accuracy(other)
    gained, lost = majority_changes(matrix, other)
    return Contrast(
        other=name,
        delta=found.value,
        low=found.low,
        high=found.high,
        p=found.p,
        p_holm=None,
        wrong_to_right=gained,
        right_to_wrong=lost,
        can_lose=bounds.low > other.chance,
        test=_test_name(matrix, other),
        scope=scope,
        n=len(matrix.question_ids),
        n_clusters=matrix.n_documents,
        n_effective=matrix.n_effective,
        accuracy=matrix.mean(),
    )


def _test_name(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> Test:
    if matrix.is_plain and other.is_plain:
        return "McNemar"
    if matrix.n_seeds == other.n_seeds == 1:
        return "sign flips"
    return "t over documents and seeds"


def net_contrast(
    contrast: Contrast, net: CorrectnessMatrix, base_net: CorrectnessMatrix
) -> Contrast:
    """Return `contrast`, of an arm and the base, with the difference beyond their controls
    (`kinject.stats.matrix.beyond`).

    Accuracies and changed answers stay those with the question.
    """
    net, base_net = aligned(net, base_net)
    found = difference_estimate(net, base_net)
    return replace(contrast, delta=found.value, low=found.low, high=found.high, p=found.p)


def majority_changes(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> tuple[int, int]:
    """Return how many questions most seeds of `other` had wrong and most of `matrix` correct, and
    the reverse.

    A question that half of the seeds answer is neither.
    """
    now, before = matrix.correct.mean(0), other.correct.mean(0)
    return int(((now > 0.5) & (before < 0.5)).sum()), int(((before > 0.5) & (now < 0.5)).sum())


def correct_contrasts(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return `contrasts` corrected as one family (Holm 1979); those without a p are none of it."""
    tested = [contrast.p for contrast in contrasts if contrast.p is not None]
    corrected = iter(holm(tested))
    family = max(1, len(tested))
    every = []
    for contrast in contrasts:
        p_holm = None
        if contrast.p is not None:
            p_holm = next(corrected)
        every.append(replace(contrast, p_holm=p_holm, family=family))
    return every


def lead(
    matrices: Sequence[CorrectnessMatrix],
    names: Sequence[str],
    scope: Scope,
    nets: Sequence[CorrectnessMatrix] = (),
) -> tuple[int, Contrast] | None:
    """Return which of several arms is best on the questions of all, and its comparison with the
    closest other.

    None where they share no question. With `nets`, what each has beyond its control, these are
    compared. The largest two-sided p of the best against the others holds its level although the
    data chose the best (Hung and Fithian, arXiv 1610.03944). Not significant: the arms are not told
    apart.
    """
    # Ranks by accuracies on different questions named the worse arm (docs/LOG.md).
    common = compared = aligned(*matrices)
    if nets:
        compared = aligned(*nets)
    if not common[0].question_ids or not compared[0].question_ids:
        return None
    means = [matrix.mean() for matrix in compared]
    first = means.index(max(means))
    closest: Contrast | None = None
    for i, other in enumerate(common):
        if i == first:
            continue
        contrast = make_contrast(common[first], other, names[i], scope)
        if contrast is None:
            continue
        if nets:
            contrast = net_contrast(contrast, compared[first], compared[i])
        if closest is None or _p_or_none_last(contrast) > _p_or_none_last(closest):
            closest = contrast
    if closest is None:
        return None
    return first, closest


def _p_or_none_last(contrast: Contrast) -> float:
    """Return p, or 2 where there is none, which says less than any."""
    if contrast.p is None:
        return 2.0
    return contrast.p


def trend(matrices: Sequence[CorrectnessMatrix]) -> tuple[Estimate, bool]:
    """Return the linear contrast of accuracies along `matrices` (the later over the earlier ones),
    on the same questions.

    And whether no step goes against its sign.
    """
    last = len(matrices) - 1
    estimate = contrast_estimate([(2 * i - last, matrix) for i, matrix in enumerate(matrices)])
    steps = [after.mean() - before.mean() for before, after in pairwise(matrices)]
    if estimate.value > 0:
        return estimate, min(steps) >= 0
    return estimate, max(steps) <= 0


class About(Enum):
    """The question that a finding answers: what a trained arm is compared with."""

    LEARNING = "learning"  # the base, on what it was to learn
    RETENTION = "retention"  # the base, on what it was not to forget
    DECLINING = "declining"  # the base, on questions without an answer
    INSTEAD = "instead of retrieval"  # the base with retrieval, itself without
    ADDED = "added to retrieval"  # the base with retrieval, itself with it


class Tag(Enum):
    """What a difference shows."""

    BETTER = "better"  # the corrected p is below 0.05
    WORSE = "worse"
    # Not shown, and the 95% interval excludes a difference of `MARGIN` or more, either way.
    ALIKE = "alike"
    ALONE = "alone"  # not shown, but p is below 0.05 before the correction for all comparisons
    # Not shown, and such differences remain possible: no evidence either way.
    UNDECIDED = "undecided"
    # Not shown, and the baseline is not above guessing, so that a loss could not show.
    NOTHING_TO_LOSE = "nothing to lose"
    TOO_FEW = "too few"  # effective documents
    # Better, and more than half of it without the question as well.
    WITHOUT_QUESTION = "without question"


@dataclass(frozen=True, slots=True)
class Finding:
    """What `contrast`, one of those of `result`, shows of what it is `about`."""

    about: About
    tag: Tag
    result: ArmResult
    contrast: Contrast

    @property
    def before(self) -> float:
        """The baseline's accuracy on the questions of both."""
        contrast = self.contrast
        if self.about is About.LEARNING and self.result.to_base is not None:
            contrast = self.result.to_base  # the net gain is no difference of two accuracies
        return contrast.accuracy - contrast.delta

    @property
    def possible(self) -> float:
        """The largest loss (of retention), or gain, that the interval leaves possible, 0 if none; 1
        without an interval."""
        low, high = self.contrast.low, self.contrast.high
        if low is None or high is None:
            return 1.0
        return max(0.0, -low if self.about is About.RETENTION else high)


_MOSTLY = 0.5
"""The part of a gain from which on it is not called learned, if the choices alone give it. A model
that only recognises strings of the documents gains as much without the question; an interval alone
would take one in forty for knowledge."""


def is_taste(delta: float, by_rule: float) -> bool:
    """Return whether less than half of a difference by a judge is there by kinject's rule too: a
    judge may accept more wrong answers of one style than of another."""
    return by_rule / delta < _MOSTLY


def find(about: About, result: ArmResult, contrast: Contrast) -> Finding:
    """Return what `contrast`, one of those of `result`, shows."""
    tag = _tag(contrast)
    raw = result.to_base
    gained = tag is Tag.BETTER or (raw is not None and raw.is_significant and raw.delta > 0)
    if about is About.LEARNING and gained and result.without_question > _MOSTLY:
        tag = Tag.WITHOUT_QUESTION
    if about is About.RETENTION and tag in (Tag.ALIKE, Tag.UNDECIDED) and not contrast.can_lose:
        tag = Tag.NOTHING_TO_LOSE
    return Finding(about, tag, result, contrast)


def _tag(contrast: Contrast) -> Tag:
    if contrast.too_few:
        return Tag.TOO_FEW
    if contrast.is_significant and contrast.delta > 0:
        return Tag.BETTER
    if contrast.is_significant:
        return Tag.WORSE
    within = False
    if contrast.low is not None and contrast.high is not None:
        within = max(-contrast.low, contrast.high) < MARGIN
    if not within and contrast.p is not None and contrast.p < ALPHA:
        return Tag.ALONE
    if within:
        return Tag.ALIKE
    return Tag.UNDECIDED
