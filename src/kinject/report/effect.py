"""The first sentences of a report: accuracy before and after training, and what that advises."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kinject.report.facts import (
    MOST_SETS,
    Leader,
    arms_of,
    by_question_set,
    find_leader,
)
from kinject.report.formatting import (
    View,
    arm_name,
    format_name,
    format_percent,
    join_words,
    more_unscored,
    quoted,
)
from kinject.report.phrases import (
    format_change,
    format_change_briefly,
    format_size,
    percent_span,
    points_span,
    without_question,
)
from kinject.results import (
    MARGIN,
    ArmResult,
)
from kinject.stats.comparisons import About, Finding, Tag
from kinject.terminal import format_count
from kinject.types import Advice

_ADVICE = {
    ("both", "better"): "take both: {arm} with passages does better than retrieval alone",
    ("training", "better"): "training comes first: {arm} does better than retrieval",
    ("retrieval", "better"): "retrieval is the better first choice",
    ("retrieval", "alike"): (
        "retrieval is at least as good a first choice: the two differ by less than "
        f"{100 * MARGIN:g} points"
    ),
    ("retrieval", "not shown"): "retrieval is at least as good a first choice",
    ("", "not shown"): ("neither comes first: that {arm} does better than retrieval is not shown"),
    ("", "too few"): "nothing can be decided: the documents are too few",
    ("training", "not compared"): (
        "training works; whether retrieval would do better was not measured"
    ),
    ("", "not learned"): "training cannot be advised: that {arm} learned is not shown",
}
"""(First choice, reason) of an advice -> its words, behind "On this evidence"."""
# With so few more there is a test, and it may decide nothing.
_ENDS = {"too few": " would allow a test"}
_LONGEST_ABOUT = 300  # characters
_COUNTED = {
    "both": "both",
    "training": "training",
    "retrieval": "retrieval",
    "": "open",
}


def first_sentences(view: View, findings: Sequence[Finding]) -> str:
    """Return the accuracies before and after training, of one arm, or of all as a span; behind them
    what kind of questions they are, as their file says."""
    about = view.report.about_sets
    described = [name for name in view.sets() if name in about]
    sentences = [
        f"Questions {quoted(name)}: {format_name(about[name], _LONGEST_ABOUT).rstrip('.')}."
        for name in described[:MOST_SETS]
    ]
    return " ".join([_accuracies(view, findings), *sentences])


def advice_sentence(view: View) -> str:
    """Return the sentence for someone who decides, "" where no arm was trained."""
    advice = view.report.advice
    if not advice:
        return ""
    if len(advice) > MOST_SETS:
        counts = Counter(_COUNTED[item.first] for item in advice)
        parts = [f"{name} {count}" for name, count in counts.items()]
        return f"On this evidence, the first choice on {len(advice)} sets: {', '.join(parts)}."
    if len(advice) == 1:
        return f"On this evidence {_advised(advice[0])}."
    sets: dict[str, list[str]] = {}
    for item in advice:
        where = quoted(item.question_set)
        if view.several_models:
            where += f" ({format_name(item.model)})"
        # Sets with the same advice share a sentence.
        sets.setdefault(_advised(item), []).append(where)
    clauses = [f"{join_words(names)}, {text}." for text, names in sets.items()]
    return f"On this evidence: on {' On '.join(clauses)}"


def _advised(item: Advice) -> str:
    """Return ``retrieval is at least as good a first choice; 40 more questions on 20 more
    documents would decide``."""
    text = _ADVICE[item.first, item.reason].format(arm=arm_name(item.arm))
    # What was forgotten matters to whoever would take the trained model.
    if item.forgotten and item.first != "retrieval":
        sets = join_words([quoted(name) for name in item.forgotten])
        text += f", and {arm_name(item.arm)} forgot on {sets}"
    if item.n_more:
        text += f"; {format_count(item.n_more, 'more question')}"
        if item.n_more_documents != item.n_more:
            text += f" on {format_count(item.n_more_documents, 'more document')}"
        text += _ENDS.get(item.reason, " would decide")
    return text


def _accuracies(view: View, findings: Sequence[Finding]) -> str:
    """Return the accuracies before and after training, of one arm, or of all as a span."""
    learned = [finding for finding in findings if finding.about is About.LEARNING]
    if not learned:
        return _untrained(view)
    if view.several_models or len(by_question_set(learned)) > MOST_SETS:
        return _overview(view, findings, learned)
    leader = find_leader(view, learned)
    # Where none is shown to be the best, no arm is named first (docs/reports.md).
    if leader is None:
        return _between(learned)
    return _effect_of(view, leader, [f for f in learned if f.result.arm == leader.arm])


def _overview(view: View, findings: Sequence[Finding], learned: Sequence[Finding]) -> str:
    """Return the changes of all arms as one span, where there are too many sets for a sentence
    each."""
    n_arms = len({(finding.result.model, finding.result.arm) for finding in findings})
    arms = format_count(n_arms, "trained arm")
    models = format_count(len(view.report.models), "base model")
    sets = format_count(len(by_question_set(learned)), "question set")
    return (
        f"{arms} of {models} on {sets} to be learned: the change from training is "
        f"{points_span(learned)} points."
    )


def _effect_of(view: View, leader: Leader, learned: Sequence[Finding]) -> str:
    """Return what the leading (or only) arm learned, that it leads, and what it read."""
    first, *others = learned
    clauses = [_before_and_after(first), *map(_before_and_after_again, others)]
    sentences = [f"{'; '.join(clauses)}."]
    arm = arm_name(leader.arm)
    # With one seed an arm the lead is about these models (docs/studies.md).
    if leader.scope == "these models":
        sentences.append(f"{arm} did best of these {leader.n_arms} trained models.")
    elif leader.scope is not None:
        sentences.append(f"{arm} did best of {leader.n_arms} trained models.")
    reading = view.reading(view.report.models[0], leader.arm)
    if reading:
        sentences.append(f"It read {reading}.")
    return " ".join(sentences)


def _before_and_after(finding: Finding) -> str:
    """Return ``cpt answers 134 of 600 questions “new” before and 590 after training (22.3% → 98.3%,
    ...): +76.0 points ...``."""
    arm, before, after = arm_name(finding.result.arm), *_n_correct(finding)
    return (
        f"{arm} answers {before} of {_questions(finding)} before and {after} after training "
        f"({_before_and_after_details(finding)}): {_gain(finding)}"
    )


def _before_and_after_again(finding: Finding) -> str:
    """Return ``of 600 questions “new” 134 before and 590 after (...): +76.0 points ...``, of an arm
    that an earlier clause has named."""
    before, after = _n_correct(finding)
    return (
        f"of {_questions(finding)} {before} before and {after} after "
        f"({_before_and_after_details(finding)}): {_gain(finding)}"
    )


def _n_correct(finding: Finding) -> tuple[str, str]:
    """Return the number of correct answers before and after training."""
    n = finding.contrast.n
    return f"{finding.before * n:,.0f}", f"{finding.contrast.accuracy * n:,.0f}"


def _questions(finding: Finding) -> str:
    return f"{format_count(finding.contrast.n, 'question')} {quoted(finding.result.question_set)}"


def _before_and_after_details(finding: Finding) -> str:
    """Return ``22.3% → 98.3%, without the question 24.0% → 25.1%, 120 documents, mean of 3
    trainings``, as far as there is each."""
    contrast, n_seeds = finding.contrast, len(finding.result.by_seed)
    details = [f"{format_percent(finding.before)} → {format_percent(contrast.accuracy)}"]
    if control := without_question(finding):
        details.append(control)
    if contrast.unit == "documents":
        details.append(format_count(contrast.n_clusters, "document"))
    if n_seeds > 1:
        details.append(f"mean of {n_seeds} trainings")
    # Percentages are of the scored questions alone, so the others are named beside them.
    return ", ".join(details) + more_unscored(finding.result.n - contrast.n)


def _gain(finding: Finding) -> str:
    """Return ``+76.0 points, 95% interval ...``, and how much of it needs no question."""
    gain = format_change(finding.contrast)
    if without_question(finding):
        gain += " beyond the choices alone"
    return gain + _part_without_question(finding.result)


_LEAST_PART = 0.1  # of a gain; below it, the part that needs no question is not worth a clause


def _part_without_question(result: ArmResult) -> str:
    """Return ``; 48% of this gain needs no question`` where the control rises by as much as
    matters."""
    if result.control is None or result.control.to_base is None:
        return ""
    rise = result.control.to_base
    if result.without_question < _LEAST_PART or (rise.delta < MARGIN and not rise.is_significant):
        return ""
    return f"; {100 * result.without_question:.0f}% of the gain needs no question"


def _between(learned: Sequence[Finding]) -> str:
    """Return the span of several arms on each set, which is highest there, and that none is the
    best."""
    sets = by_question_set(learned)
    n_arms = len(arms_of(learned))
    sizes = {format_size(of_set[0].contrast) for of_set in sets.values()}
    # One size of all sets is named once, behind them.
    same_size = len(sets) > 1 and len(sizes) == 1
    first, *others = sets.values()
    spans = [_span_of_first(first, n_arms, same_size)]
    spans += [_span(of_set, n_arms, same_size) for of_set in others]
    each = f", each {sizes.pop()}" if same_size else ""
    ends = [join_words(list(_highest(sets))), *_no_ranking(sets)]
    return f"{n_arms} trained models answer {join_words(spans)}{each}. Highest: {'; '.join(ends)}."


def _highest_of(findings: Sequence[Finding]) -> Finding:
    return max(findings, key=_accuracy)


_MOST_ALIKE = 3
"""Equally high arms that are named."""


def _all_highest_of(findings: Sequence[Finding]) -> list[Finding]:
    most = _accuracy(_highest_of(findings))
    # Means of seeds may differ in the last digit.
    return [finding for finding in findings if math.isclose(_accuracy(finding), most)]


def _accuracy(finding: Finding) -> float:
    return finding.contrast.accuracy


def _span_of_first(of_set: Sequence[Finding], n_arms: int, same_size: bool) -> str:
    """Return ``61.0% to 87.1% of the questions “new” (before training 26.0%, 300 questions)``."""
    name = quoted(of_set[0].result.question_set)
    details = _span_details(of_set, n_arms, same_size)
    return f"{_accuracy_span(of_set)} of the questions {name} (before training {details})"


def _span(of_set: Sequence[Finding], n_arms: int, same_size: bool) -> str:
    """Return ``61.0% to 87.1% of “new” (26.0%, 300 questions)``, behind another set's."""
    name = quoted(of_set[0].result.question_set)
    return f"{_accuracy_span(of_set)} of {name} ({_span_details(of_set, n_arms, same_size)})"


def _accuracy_span(of_set: Sequence[Finding]) -> str:
    return percent_span([finding.contrast.accuracy for finding in of_set])


def _span_details(of_set: Sequence[Finding], n_arms: int, same_size: bool) -> str:
    """Return the accuracy before training, and further details of several arms on a set."""
    best = _highest_of(of_set)
    details = [format_percent(best.before)]
    controls = [f.result.control.accuracy for f in of_set if f.result.control is not None]
    if controls:
        details.append(f"without the question {percent_span(controls)}")
    if not same_size:
        details.append(format_size(best.contrast))
    if len(of_set) < n_arms:
        # Some arms may have no score on this set.
        details.append(f"{len(of_set)} of them")
    n_unscored = best.result.n - best.contrast.n
    if n_unscored:
        details.append(more_unscored(n_unscored).removeprefix("; "))
    return ", ".join(details)


def _highest(sets: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    """Yield the highest arm of each set with its change, or all that are equally high; only the
    first has the units."""
    for index, (name, of_set) in enumerate(sets.items()):
        on = f" on {quoted(name)}" if len(sets) > 1 else ""
        highest = _all_highest_of(of_set)
        if len(highest) > _MOST_ALIKE:
            yield f"{len(highest)} of them alike{on}"
            continue
        for number, best in enumerate(highest):
            change = format_change(best.contrast)
            if index or number:
                change = format_change_briefly(best.contrast)
            yield f"{arm_name(best.result.arm)}{on} ({change})"


def _no_ranking(sets: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    """Yield why the highest arm is not called the best, with its sets if they differ in it."""
    reasons: dict[str, list[str]] = {}
    for name, of_set in sets.items():
        best = _highest_of(of_set)
        reason = "none is shown to be the best"
        if best.tag is Tag.TOO_FEW:
            reason = (
                f"too few {best.contrast.unit} ({best.contrast.n_clusters}) for any test, so they "
                "are not ranked"
            )
        reasons.setdefault(reason, []).append(quoted(name))
    for reason, names in reasons.items():
        if len(reasons) > 1:
            reason += f" on {join_words(names)}"
        yield reason


def _untrained(view: View) -> str:
    """Return the accuracies of the base, where no trained arm can be compared."""
    model = view.report.models[0]
    clauses = []
    for name in view.sets("", model)[:MOST_SETS]:
        base = view.result(model, view.base(model), name)
        if base is not None:
            clauses.append(_base_clause(base, view.retrieval(model, name)))
    if not clauses:
        return "No arm has a score, so there is no result."
    return (
        "No trained model can be compared on questions to be learned; the base answers "
        f"{'; '.join(clauses)}."
    )


def _base_clause(base: ArmResult, retrieval: ArmResult | None) -> str:
    """Return ``25.0% of 200 questions “new”, 90.0% with passages before the question (guessing
    gives 25.0%)``."""
    clause = (
        f"{format_percent(base.accuracy)} of {format_count(base.n_scored, 'question')} "
        f"{quoted(base.question_set)}"
    )
    if retrieval is not None:
        clause += f", {format_percent(retrieval.accuracy)} with passages before the question"
    # Written answers have no accuracy of guessing.
    if base.chance:
        clause += f" (guessing gives {format_percent(base.chance)})"
    return clause + more_unscored(base.n_unscored)
