"""What a report found, as values without words: findings, the leading arm, what is left open.

`kinject.stats.comparisons` has judged every number. `kinject.report.words` and
`kinject.report.doubts` write the sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kinject.report.formatting import View, arm_label
from kinject.results import MARGIN, ArmResult, Contrast, OutcomeResult, Recall, Scope, fewest_for
from kinject.stats.comparisons import About, Finding, Tag, find
from kinject.stats.power import detectable_by, documents_needed

# From five sentences on an opening was unreadable; the paper's shape gave 18.
MOST_SETS = 3
"""Question sets that get a sentence each in the opening."""
ROLES = {
    About.LEARNING: "learning",
    About.RETENTION: "retention",
    About.DECLINING: "unanswerable",
}
"""Comparison with the base -> the role of its question sets."""
BESIDE_RETRIEVAL = (About.INSTEAD, About.ADDED)
"""Comparisons with the base that has retrieved passages."""
SHOWN = (Tag.BETTER, Tag.WORSE)
"""What a finding shows if its test is significant."""


def find_all(view: View) -> tuple[Finding, ...]:
    """Return the findings on the trained arms by question set, each in the format that the recipe
    lists first."""
    found: list[Finding] = []
    for about, role in ROLES.items():
        for model in view.report.models:
            for name in view.sets(role, model):
                for result in view.shown(model, name):
                    if view.arms[model, result.arm].trained:
                        found += _findings_of(view, about, result)
    return tuple(found)


def _findings_of(view: View, about: About, result: ArmResult) -> Iterator[Finding]:
    """Yield what the result of a trained arm shows against the base, and against retrieval."""
    # Learned is what is gained beyond the choices alone (docs/scoring.md).
    contrast = result.gain if about is About.LEARNING else result.to_base
    if contrast is not None and not result.k:
        yield find(about, result, contrast)
    # Only questions to be learned ask which of the two to use: training, or retrieval.
    if about is not About.LEARNING or result.to_rag is None:
        return
    if not result.k:
        yield find(About.INSTEAD, result, result.to_rag)
    elif result.chosen_k or _has_k_of_base(view, result):
        yield find(About.ADDED, result, result.to_rag)


def _has_k_of_base(view: View, result: ArmResult) -> bool:
    """Return whether the base is compared with the same number of passages."""
    context = view.retrieval(result.model, result.question_set)
    return context is not None and result.k == context.k


def by_question_set(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Return question set -> its findings, in order."""
    sets: dict[str, list[Finding]] = {}
    for finding in findings:
        sets.setdefault(finding.result.question_set, []).append(finding)
    return sets


def by_model_and_set(findings: Sequence[Finding]) -> dict[tuple[str, str], list[Finding]]:
    """Return (base model, question set) -> its findings, in order."""
    sets: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        sets.setdefault((finding.result.model, finding.result.question_set), []).append(finding)
    return sets


def arms_of(findings: Sequence[Finding]) -> list[str]:
    """Return the names of the arms, each once, in order."""
    return list(dict.fromkeys(finding.result.arm for finding in findings))


@dataclass(frozen=True, slots=True)
class Leader:
    """The best of `n_arms` trained arms; `scope` is that of its lead, None for the only arm."""

    arm: str
    n_arms: int
    scope: Scope | None


def find_leader(view: View, learned: Sequence[Finding]) -> Leader | None:
    """Return the arm that is shown to be the best of those that learned, or the only one.

    None if no arm leads, or another one on each question set.
    """
    arms = arms_of(learned)
    if len(arms) == 1:
        return Leader(arms[0], 1, None)
    # Named only where the difference to the closest other arm is shown (docs/reports.md).
    leads = [
        (result.arm, result.to_closest.scope)
        for result in view.headline_results()
        if result.to_closest is not None and result.to_closest.is_significant
    ]
    if len({arm for arm, _ in leads}) != 1:
        return None
    arm, scope = leads[0]
    return Leader(arm, len(arms), scope)


def outcome_changes(
    view: View, outcome: str
) -> Iterator[tuple[ArmResult, OutcomeResult, Contrast]]:
    """Yield each headline result with `outcome` of its written answers, and the change from the
    base, where this is shown."""
    for result in view.headline_results():
        part = result.outcome(outcome)
        if part is not None and part.to_base is not None and part.to_base.is_significant:
            yield result, part, part.to_base


@dataclass(frozen=True, slots=True)
class TooFew:
    """A question set too small for its comparisons: it has `n` of `unit` (questions or documents).

    `needed` of them would allow a test, or where one is possible, tell a change of `MARGIN`.
    `tells` is the change that is shown in four of five such comparisons; None where no test is
    possible.
    """

    question_set: str
    unit: str
    n: int
    needed: int
    tells: float | None = None


def too_small_sets(compared: Sequence[Finding]) -> Iterator[TooFew]:
    """Yield the first question sets of findings against the base that are too small to judge."""
    for name in list(by_question_set(compared))[:MOST_SETS]:
        unsettled = [f for f in by_question_set(compared)[name] if _lacks_questions(f)]
        if not unsettled:
            continue
        # The largest family needs the most documents.
        largest = max((f.contrast for f in unsettled), key=_n_needed)
        untested = any(f.tag is Tag.TOO_FEW for f in unsettled)
        widest = max((f.contrast for f in unsettled), key=_width)
        if untested or widest.low is None or widest.high is None:
            yield TooFew(name, largest.unit, largest.n_clusters, _n_needed(largest))
            continue
        tells = detectable_by(*widest.bounds, widest.n_effective)
        needed = documents_needed(widest.bounds, widest.n_clusters, widest.n_effective, MARGIN)
        yield TooFew(name, widest.unit, widest.n_clusters, needed, tells)


def _n_needed(contrast: Contrast) -> int:
    return fewest_for(contrast.family)


def _width(contrast: Contrast) -> float:
    """Return the width of the interval, 2 without one."""
    low, high = contrast.bounds
    return high - low


def _lacks_questions(finding: Finding) -> bool:
    """Return whether more questions would settle what this finding leaves open."""
    if finding.tag is Tag.UNDECIDED:
        # So wide an interval lies inside the margin for no difference at all.
        return _width(finding.contrast) > 2 * MARGIN
    return finding.tag is Tag.TOO_FEW


def undone_by_holm(compared: Sequence[Finding]) -> list[str]:
    """Return the first question sets with a difference that only Holm's correction undoes."""
    return list(by_question_set([f for f in compared if f.tag is Tag.ALONE]))[:MOST_SETS]


def trained_once(compared: Sequence[Finding]) -> bool:
    """Return whether no trained arm has more than one seed; False without trained arms."""
    return bool(compared) and all(len(finding.result.by_seed) == 1 for finding in compared)


def missed_contexts(view: View) -> Iterator[Recall]:
    """Yield the retrievals that missed the document of some question, with the chosen K if any."""
    for recall in view.report.recalls:
        of_set = [r for r in view.set_results if r.question_set == recall.question_set]
        chosen = {result.k for result in of_set if result.chosen_k}
        # No verdict rests on passages of a K that was not chosen.
        if recall.n_found < recall.n and (recall.k in chosen or not chosen):
            yield recall


@dataclass(frozen=True, slots=True)
class GivenAway:
    """A question set whose correct choices are picked without the question: accuracy by arm."""

    question_set: str
    guessing: float
    accuracies: dict[str, float]


def given_away(view: View) -> Iterator[GivenAway]:
    """Yield the question sets on which an arm without the question is better than guessing."""
    for name in view.sets():
        guessing = view.first(name).chance
        accuracies = {
            arm_label(result): result.control.accuracy
            for result in view.set_results
            if result.question_set == name
            and result.control is not None
            and result.control.low > guessing + MARGIN
        }
        if accuracies:
            yield GivenAway(name, guessing, accuracies)
