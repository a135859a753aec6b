"""What a comparison shows, as a tag with its numbers and its scope. The words are the report's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kinject.results import MARGIN, ArmResult, Contrast, fewest_for


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
    """What `contrast`, one of those of `result`, shows of what it is `about`."""

    about: About
    tag: Tag
    result: ArmResult
    contrast: Contrast

    @property
    def before(self) -> float:
        """The baseline's accuracy on the questions of both."""
        return self.contrast.accuracy - self.contrast.delta

    @property
    def possible(self) -> float:
        """The largest loss (of retention), or gain, that the interval leaves possible, 0 if none; 1 without an interval."""
        low, high = self.contrast.low, self.contrast.high
        if low is None or high is None:
            return 1.0
        return max(0.0, -low if self.about is About.RETENTION else high)

    @property
    def needed(self) -> int | None:
        """The effective documents that would settle what is too few or undecided; None for the other tags."""
        of = self.contrast
        if self.tag is Tag.TOO_FEW:
            return fewest_for(of.family)
        if self.tag is not Tag.UNDECIDED or of.low is None or of.high is None:
            return None
        return math.ceil(of.n_effective * ((of.high - of.low) / 2 / MARGIN) ** 2)


def find(about: About, result: ArmResult, contrast: Contrast) -> Finding:
    """Return what `contrast`, one of those of `result`, shows."""
    tag = _tag(contrast)
    if about is About.RETENTION and tag in (Tag.ALIKE, Tag.UNDECIDED) and not contrast.can_lose:
        tag = Tag.NOTHING_TO_LOSE
    return Finding(about, tag, result, contrast)


def _tag(contrast: Contrast) -> Tag:
    if contrast.too_few:
        return Tag.TOO_FEW
    if contrast.is_significant:
        return Tag.BETTER if contrast.delta > 0 else Tag.WORSE
    within = contrast.low is not None and contrast.high is not None and max(-contrast.low, contrast.high) < MARGIN
    return Tag.ALIKE if within else Tag.UNDECIDED
