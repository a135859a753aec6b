"""What a comparison shows, as a tag with its numbers and its scope. The words are the report's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kinject.results import MARGIN, ArmResult, Contrast


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
    ALIKE = "alike"  # not shown, and the 95% interval excludes a difference of `MARGIN` or more, either way
    UNDECIDED = "undecided"  # not shown, and such differences remain possible: no evidence either way
    NOTHING_TO_LOSE = (
        "nothing to lose"  # not shown, and the baseline is not above guessing, so that a loss could not show
    )
    TOO_FEW = "too few"  # effective documents


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
