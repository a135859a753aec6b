"""What a comparison shows, as a tag with its numbers and its scope. The words are the report's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kinject.results import MARGIN, ArmResult, Contrast, Scope, fewest_for


class About(Enum):
    """The question that a finding answers."""

    LEARNING = "learning"
    """A trained arm against the base, on what it was to learn."""
    RETENTION = "retention"
    """A trained arm against the base, on what it was not to forget."""
    DECLINING = "declining"
    """A trained arm against the base, on questions without an answer."""
    INSTEAD = "instead of retrieval"
    """A trained arm without context against the base with retrieval."""
    ADDED = "added to retrieval"
    """A trained arm with retrieval against the base with retrieval."""


class Tag(Enum):
    """What a difference shows."""

    BETTER = "better"
    """The corrected p is below 0.05, and the difference above 0."""
    WORSE = "worse"
    ALIKE = "alike"
    """Neither; and the 95% interval excludes a difference of `MARGIN` or more, either way."""
    UNDECIDED = "undecided"
    """Neither; differences of `MARGIN` or more remain possible: no evidence either way."""
    NOTHING_TO_LOSE = "nothing to lose"
    """Of retention: neither, and the baseline is not above guessing, so that a loss could not show."""
    TOO_FEW = "too few"
    """Too few effective documents to judge anything."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison: accuracies `before` (the baseline) and `after` (the arm) on the same questions, and what it shows.

    `low` and `high` bound `change` at 95%, None with one document. `p` is the deciding one (Holm's where there is one).
    `n_effective` are documents as far as they count (Kish): fewer than `n_documents` where some have most questions.
    `needed`: the effective documents with which TOO_FEW or UNDECIDED would be settled, None for the other tags.
    `above_chance` is None where the documents are too few to tell.
    """

    about: About
    tag: Tag
    model: str
    arm: str
    baseline: str
    question_set: str
    k: int
    before: float
    after: float
    change: float
    low: float | None
    high: float | None
    p: float | None
    n_questions: int
    n_documents: int
    n_effective: float
    n_seeds: int
    scope: Scope
    family: int
    needed: int | None
    above_chance: bool | None

    @property
    def possible_loss(self) -> float:
        """The largest loss that the interval leaves possible, 0 if none; 1 without an interval."""
        return 1.0 if self.low is None else max(0.0, -self.low)

    @property
    def possible_gain(self) -> float:
        """The largest gain that the interval leaves possible, 0 if none; 1 without an interval."""
        return 1.0 if self.high is None else max(0.0, self.high)


def find(about: About, result: ArmResult, contrast: Contrast) -> Finding:
    """Return what `contrast`, one of those of `result`, shows."""
    tag = _tag(contrast)
    if about is About.RETENTION and tag in (Tag.ALIKE, Tag.UNDECIDED) and not contrast.can_lose:
        tag = Tag.NOTHING_TO_LOSE
    return Finding(
        about=about, tag=tag, model=result.model, arm=result.arm, baseline=contrast.other,
        question_set=result.question_set, k=result.k, before=contrast.accuracy - contrast.delta, after=contrast.accuracy,
        change=contrast.delta, low=contrast.low, high=contrast.high, p=contrast.deciding_p, n_questions=contrast.n,
        n_documents=contrast.n_clusters, n_effective=contrast.n_effective, n_seeds=len(result.by_seed),
        scope=contrast.scope, family=contrast.family, needed=_needed(tag, contrast), above_chance=above_chance(result),
    )  # fmt: skip


def above_chance(result: ArmResult) -> bool | None:
    """Return whether an accuracy's interval lies above guessing; None with too few effective documents to tell."""
    return None if result.too_few else result.low > result.chance


def _tag(contrast: Contrast) -> Tag:
    if contrast.too_few:
        return Tag.TOO_FEW
    if contrast.is_significant:
        return Tag.BETTER if contrast.delta > 0 else Tag.WORSE
    within = contrast.low is not None and contrast.high is not None and max(-contrast.low, contrast.high) < MARGIN
    return Tag.ALIKE if within else Tag.UNDECIDED


def _needed(tag: Tag, contrast: Contrast) -> int | None:
    if tag is Tag.TOO_FEW:
        return fewest_for(contrast.family)
    if tag is not Tag.UNDECIDED or contrast.low is None or contrast.high is None:
        return None
    return math.ceil(contrast.n_effective * ((contrast.high - contrast.low) / 2 / MARGIN) ** 2)
