"""Differences, spans and sizes as phrases, and the numbers of a finding as a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from kinject.report.facts import (
    BESIDE_RETRIEVAL,
    SHOWN,
)
from kinject.report.formatting import (
    format_p,
    format_percent,
    format_points,
    with_details,
)
from kinject.results import (
    Contrast,
    fewest_for,
    in_these_models,
)
from kinject.stats.comparisons import About, Finding, Tag
from kinject.terminal import format_count


def format_size(contrast: Contrast) -> str:
    """Return ``600 questions on 120 documents``."""
    questions = format_count(contrast.n, "question")
    if contrast.unit == "questions":
        return questions
    return f"{questions} on {format_count(contrast.n_clusters, 'document')}"


def percent_span(fractions: Sequence[float]) -> str:
    """Return ``61.0% to 87.1%``, or ``61.0%`` if both ends read the same."""
    ends = (format_percent(min(fractions)), format_percent(max(fractions)))
    return " to ".join(dict.fromkeys(ends))


def points_span(findings: Sequence[Finding]) -> str:
    changes = [finding.contrast.delta for finding in findings]
    # Once where both ends read the same.
    return " to ".join(dict.fromkeys(map(format_points, (min(changes), max(changes)))))


def without_question(finding: Finding) -> str:
    """Return ``without the question 24.0% → 25.1%``, "" where there is no such control."""
    control = finding.result.control
    if finding.about is not About.LEARNING or control is None or control.to_base is None:
        return ""
    before = control.accuracy - control.to_base.delta
    return f"without the question {format_percent(before)} → {format_percent(control.accuracy)}"


def sentence(finding: Finding) -> str:
    """Return the numbers of a finding: both accuracies, the difference with its interval and p, and
    what remains possible."""
    contrast = finding.contrast
    before, after = format_percent(finding.before), format_percent(contrast.accuracy)
    if finding.about in BESIDE_RETRIEVAL:
        before += " with retrieval alone"
    size = format_size(contrast) + _seeds(finding.result.by_seed)
    change = _tested_change(finding)
    if control := without_question(finding):
        change += f" beyond the choices alone ({control})"
    return f"{before} → {after}, {size}: {change}{_remains_open(finding)}"


def _seeds(by_seed: Sequence[float]) -> str:
    """Return ``, 3 seeds (30.0% to 55.0%)``, "" for one."""
    if len(by_seed) == 1:
        return ""
    span = f"{format_percent(min(by_seed))} to {format_percent(max(by_seed))}"
    return f", {len(by_seed)} seeds ({span})"


def _remains_open(finding: Finding) -> str:
    """Return ``; ...`` with the reason why a finding shows nothing, "" if it shows a difference."""
    contrast = finding.contrast
    if finding.tag is Tag.TOO_FEW:
        needed = fewest_for(contrast.family)
        counted = ""
        # A few large documents count as few (docs/studies.md).
        if contrast.n_effective < contrast.n_clusters:
            counted = f" (they count as {contrast.n_effective:.0f})"
        size = size_that_is(contrast, counted)
        return f"; {size} too few for a test: {needed} are needed"
    if finding.tag is Tag.ALONE and contrast.p is not None:
        return (
            f"; {format_p(contrast.p)} in a test by itself, and {contrast.family:,} comparisons "
            "were made"
        )
    interval = format_interval(contrast)
    if finding.tag in SHOWN or not interval:
        return ""
    return f"; changes of {interval} points remain possible"


def size_that_is(contrast: Contrast, details: str = "") -> str:
    """Return ``8 documents are`` or ``1 document is``, with `details` behind the noun."""
    n = contrast.n_clusters
    verb = "is" if n == 1 else "are"
    return f"{format_count(n, contrast.unit.removesuffix('s'))}{details} {verb}"


def format_interval(contrast: Contrast) -> str:
    """Return ``+57.0 to +66.1``, "" without an interval."""
    if contrast.low is None or contrast.high is None:
        return ""
    return f"{format_points(contrast.low)} to {format_points(contrast.high)}"


def format_change(contrast: Contrast) -> str:
    """Return ``+61.8 points, 95% interval +57.0 to +66.1``."""
    points, interval = f"{format_points(contrast.delta)} points", format_interval(contrast)
    if not interval:
        return points
    return f"{points}, 95% interval {interval}"


def format_change_briefly(contrast: Contrast) -> str:
    """Return ``+61.8, +57.0 to +66.1``."""
    return ", ".join(filter(None, (format_points(contrast.delta), format_interval(contrast))))


def _tested_change(finding: Finding) -> str:
    """Return ``+61.8 points in these models (95% interval +57.0 to +66.1; p < 0.001)``."""
    contrast = finding.contrast
    points = f"{format_points(contrast.delta)} points"
    # What is not shown claims nothing that had to be limited to these models.
    if finding.tag in SHOWN:
        points += in_these_models(contrast.scope)
    details = []
    if interval := format_interval(contrast):
        details.append(f"95% interval {interval}")
    if contrast.deciding_p is not None:
        details.append(format_p(contrast.deciding_p))
        if contrast.family > 1:
            details[-1] += " after Holm"
    return with_details(points, "; ".join(details))
