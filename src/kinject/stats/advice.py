"""What the results of a question set advise: to train, to retrieve, both, or what would decide.

Rules on the tests and the 95% intervals of a report, for someone who decides (docs/reports.md has
them in words). Of several trained arms the most accurate one counts: where not even that one is
above retrieval, none is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kinject.results import MARGIN, ArmInfo, ArmResult, Contrast, PromptFormat, fewest_for
from kinject.stats.comparisons import About, Finding, Tag, find
from kinject.stats.power import documents_needed
from kinject.types import Advice, Reason


def advise(results: Sequence[ArmResult], arms: Sequence[ArmInfo]) -> tuple[Advice, ...]:
    """Return the advice of each base model and question set to be learned, in their order."""
    trained = {(arm.model, arm.name) for arm in arms if arm.trained and not arm.sweep}
    headline = [result for result in _headline(results) if (result.model, result.arm) in trained]
    sets: dict[tuple[str, str], list[ArmResult]] = {}
    for result in headline:
        if result.role == "learning":
            sets.setdefault((result.model, result.question_set), []).append(result)
    found = []
    for of_set in sets.values():
        plain = [result for result in of_set if not result.k and result.to_base is not None]
        if plain:
            best = max(plain, key=_accuracy)
            found.append(_advice(best, of_set, tuple(_forgotten(best, headline))))
    return tuple(found)


def _headline(results: Sequence[ArmResult]) -> Iterator[ArmResult]:
    """Yield the results on whole sets in each set's first format."""
    formats: dict[str, PromptFormat] = {}
    for result in results:
        if result.role == "baseline" or result.subject:
            continue
        if formats.setdefault(result.question_set, result.prompt_format) == result.prompt_format:
            yield result


def _accuracy(result: ArmResult) -> float:
    return result.accuracy


def _forgotten(best: ArmResult, headline: Sequence[ArmResult]) -> Iterator[str]:
    """Yield the sets to be kept on which the arm of `best` is shown to have lost."""
    for result in headline:
        is_same = (result.model, result.arm) == (best.model, best.arm)
        if not is_same or result.role != "retention" or result.k or result.to_base is None:
            continue
        if find(About.RETENTION, result, result.to_base).tag is Tag.WORSE:
            yield result.question_set


def _advice(best: ArmResult, of_set: Sequence[ArmResult], forgotten: tuple[str, ...]) -> Advice:
    """Return the advice of one question set, on its most accurate arm without passages."""
    assert best.to_base is not None  # only such results are asked about
    learned = find(About.LEARNING, best, best.gain or best.to_base)
    # "Learned" means above guessing as well, as the report's word does.
    has_learned = learned.tag is Tag.BETTER and best.low > best.chance and not best.too_few
    about = (best.model, best.question_set, best.arm)
    if best.to_rag is None:
        points = best.to_base.delta
        if has_learned:
            return Advice(*about, "training", "not compared", points, forgotten=forgotten)
        reason: Reason = "not learned"
        if learned.tag is Tag.TOO_FEW:
            reason = "too few"
        return Advice(*about, "", reason, points, *_more(learned), forgotten)
    finding, points = find(About.INSTEAD, best, best.to_rag), best.to_rag.delta
    if any(_adds(result, finding) for result in of_set):
        return Advice(*about, "both", "better", points, forgotten=forgotten)
    if finding.tag is Tag.WORSE:
        return Advice(*about, "retrieval", "better", points, forgotten=forgotten)
    if finding.tag is Tag.BETTER and has_learned:
        return Advice(*about, "training", "better", points, forgotten=forgotten)
    if finding.tag is Tag.BETTER:
        # It beats retrieval by what its choices give away without the question.
        return Advice(*about, "", "not learned", points, forgotten=forgotten)
    if finding.tag is Tag.ALIKE:
        return Advice(*about, "retrieval", "alike", points, forgotten=forgotten)
    if finding.tag is Tag.TOO_FEW:
        return Advice(*about, "", "too few", points, *_more(finding), forgotten)
    # Of two that are not told apart the one comes first that leaves the model as it is, unless the
    # number itself speaks for the other.
    if points <= 0:
        return Advice(*about, "retrieval", "not shown", points, *_more(finding), forgotten)
    return Advice(*about, "", "not shown", points, *_more(finding), forgotten)


def _adds(result: ArmResult, instead: Finding) -> bool:
    """Return whether a trained arm with passages is shown to be better than retrieval alone, and
    than training alone."""
    if not result.k or result.to_rag is None:
        return False
    if find(About.ADDED, result, result.to_rag).tag is not Tag.BETTER:
        return False
    if result.to_plain is not None:
        return result.to_plain.is_significant and result.to_plain.delta > 0
    # An evaluation has no such test. What is better than retrieval is better than what retrieval is
    # better than.
    return instead.tag is Tag.WORSE


def _more(finding: Finding) -> tuple[int, int]:
    """Return how many more questions would decide a finding, and on how many more documents;
    (0, 0) where it is decided."""
    contrast = finding.contrast
    needed = _needed(contrast, finding.tag)
    if needed is None:
        return 0, 0
    # Sign flips and intervals differ a little, so a number that suffices may be reached already.
    n_documents = max(1, needed - contrast.n_clusters)
    n_more = math.ceil(n_documents * contrast.n / contrast.n_clusters)
    if contrast.unit == "questions":
        return n_more, n_more
    return n_more, n_documents


def _needed(contrast: Contrast, tag: Tag) -> int | None:
    """Return how many documents would decide a comparison; None where it is decided."""
    if tag is Tag.TOO_FEW or contrast.low is None or contrast.high is None:
        # In terms of those that are there: some large ones count as few.
        worth = contrast.n_clusters / contrast.n_effective
        return math.ceil(fewest_for(contrast.family) * worth)
    if tag not in (Tag.UNDECIDED, Tag.ALONE):
        return None
    # Below MARGIN a difference does not matter, whichever way it goes.
    distance = max(abs(contrast.delta), MARGIN)
    return documents_needed(
        contrast.bounds, contrast.n_clusters, contrast.n_effective, distance, contrast.family
    )
