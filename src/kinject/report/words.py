"""Findings in words, for page, terminal, Markdown and model card: effect first, then what it allows
to say, then what is open.

At the end what went wrong on the way, and what the data cannot tell. Every number comes from the
report; `kinject.report.facts` selects it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kinject.report.doubts import doubts
from kinject.report.effect import advice_sentence, first_sentences
from kinject.report.facts import (
    BESIDE_RETRIEVAL,
    ROLES,
    SHOWN,
    TooFew,
    by_model_and_set,
    find_all,
    outcome_changes,
    too_small_sets,
    trained_once,
    undone_by_holm,
)
from kinject.report.formatting import (
    View,
    arm_label,
    format_finite,
    format_name,
    format_percent,
    format_points,
    join_words,
    perplexity_change,
    quoted,
)
from kinject.report.page import Answer, Evidence, Opening
from kinject.report.phrases import points_span, sentence, size_that_is
from kinject.results import (
    MARGIN,
    ArmResult,
    Contrast,
    OutcomeResult,
    Perplexity,
)
from kinject.stats.comparisons import About, Finding, Tag
from kinject.terminal import format_count

_MOST_ARMS = 4  # in one sentence; more are counted


class Wording(NamedTuple):
    """The tag of a finding on the page, and its clause: `{arms}` are those of which it is true."""

    tag: str
    clause: str


_WORDS: dict[About, dict[Tag, Wording]] = {
    About.LEARNING: {
        Tag.BETTER: Wording("learned", "{arms} learned"),
        Tag.WORSE: Wording("got worse", "{arms} got worse"),
        Tag.ALIKE: Wording("no learning shown", "no learning is shown for {arms}"),
        Tag.UNDECIDED: Wording(
            "no learning shown",
            "no learning is shown for {arms}, and gains of up to {most} points remain possible",
        ),
        Tag.WITHOUT_QUESTION: Wording(
            "mostly without the question",
            "{arms} gained, but most of it without the question as well: no learning is shown",
        ),
    },
    About.RETENTION: {
        Tag.BETTER: Wording("gained", "{arms} gained"),
        Tag.WORSE: Wording("forgot", "{arms} forgot"),
        Tag.ALIKE: Wording(
            "no large loss",
            "{arms} lost little, if anything: losses of up to {most} points remain possible",
        ),
        Tag.UNDECIDED: Wording(
            "loss undecided",
            "too few questions to see a loss below {most} points in {arms}",
        ),
        Tag.NOTHING_TO_LOSE: Wording(
            "nothing to lose",
            "a loss cannot show for {arms}: the base is not above guessing",
        ),
    },
    About.DECLINING: {
        Tag.BETTER: Wording("declines more", "{arms} declined more often"),
        Tag.WORSE: Wording(
            "declines less",
            "{arms} declined less often, and answered questions that no document answers",
        ),
        Tag.ALIKE: Wording("no change shown", "no change is shown for {arms}"),
        Tag.UNDECIDED: Wording(
            "no change shown",
            "no change is shown for {arms}, and gains of up to {most} points remain possible",
        ),
    },
    About.INSTEAD: {
        Tag.BETTER: Wording("better than retrieval", "{arms} did better than retrieval alone"),
        Tag.WORSE: Wording("retrieval better", "retrieval alone did better than {arms}"),
        Tag.ALIKE: Wording(
            "as good as retrieval",
            "{arms} did about as well as retrieval alone: no difference is shown",
        ),
        Tag.UNDECIDED: Wording(
            "no difference shown",
            "no difference from retrieval alone is shown for {arms}",
        ),
    },
    About.ADDED: {
        Tag.BETTER: Wording("adds to retrieval", "{arms} did better than retrieval alone"),
        Tag.WORSE: Wording("hurts retrieval", "training made retrieval worse in {arms}"),
        Tag.ALIKE: Wording(
            "adds nothing", "that training adds to retrieval is not shown for {arms}"
        ),
        Tag.UNDECIDED: Wording(
            "no addition shown",
            "that training adds to retrieval is not shown for {arms}",
        ),
    },
}
"""What was compared -> what it shows -> the tag on the page, and its words; behind each arm stands
its change in points."""
_TOO_FEW = Wording("too few to tell", "{size} too few for any test of {arms}")
_ALONE_TO_BASE = (
    "{arms} differed from the base in a test by itself (p < 0.05), but not after Holm's correction "
    "for {family} comparisons"
)
_ALONE_TO_RETRIEVAL = (
    "{arms} differed from retrieval alone in a test by itself (p < 0.05), but not after Holm's "
    "correction for {family} comparisons"
)
_ALONE = {
    About.LEARNING: Wording("not after Holm", _ALONE_TO_BASE),
    About.RETENTION: Wording(
        "not after Holm",
        f"{_ALONE_TO_BASE}, and losses of up to {{most}} points remain possible",
    ),
    About.DECLINING: Wording("not after Holm", _ALONE_TO_BASE),
    About.INSTEAD: Wording("not after Holm", _ALONE_TO_RETRIEVAL),
    About.ADDED: Wording("not after Holm", _ALONE_TO_RETRIEVAL),
}
_AT_CHANCE = Wording(
    "gained, not above guessing", "{arms} gained, but cannot be told from guessing"
)
_BOTH = Wording("both help", "both help: {arms} did better than either alone")
_TONES = {
    "learned": "good",
    "gained": "good",
    "declines more": "good",
    "better than retrieval": "good",
    "adds to retrieval": "good",
    "both help": "good",
    "got worse": "bad",
    "forgot": "bad",
    "declines less": "bad",
    "retrieval better": "bad",
    "hurts retrieval": "bad",
}


class _Question(NamedTuple):
    """A practitioner's question, the comparisons that answer it, and the answer without any ("":
    left out)."""

    text: str
    abouts: tuple[About, ...]
    without: str


_QUESTIONS = (
    _Question(
        "Did it learn?",
        (About.LEARNING,),
        "This {kind} cannot say: it has no trained arm with a question set of the role “learning”.",
    ),
    _Question(
        "What did it forget?",
        (About.RETENTION,),
        "Forgetting was not measured: no trained arm has a question set of the role “retention”.",
    ),
    _Question(
        "Would retrieval have done better, or do both help?",
        (About.INSTEAD, About.ADDED),
        "Retrieval was not tried: no trained arm is tested against the base with retrieved context "
        "(and a chosen K).",
    ),
    _Question("Does it answer what no document says?", (About.DECLINING,), ""),
)
_OUTCOMES = {
    "answered": (
        "more answers to questions that no document answers",
        "fewer answers to questions that no document answers",
    ),
    "wrong": ("more wrong answers", "fewer wrong answers"),
}
"""Outcome of written answers -> the tag of a rise, and of a fall."""


def write_opening(view: View) -> Opening:
    """Return the first sentences of the report."""
    findings = find_all(view)
    answers = [_answer(view, question, findings) for question in _QUESTIONS]
    return Opening(
        first_sentences(view, findings),
        (*(answer for answer in answers if answer.lead), *_outcomes(view), doubts(view)),
        tuple(_open(findings)),
        advice_sentence(view),
    )


def _answer(view: View, question: _Question, findings: Sequence[Finding]) -> Answer:
    """Return the answer to `question`; its lead is "" if the question is left out of the report."""
    group = [finding for finding in findings if finding.about in question.abouts]
    # That training adds nothing to retrieval is the rule; only the evidence lists it.
    leading = [f for f in group if f.about is not About.ADDED or f.tag in SHOWN]
    sentences = [_leads(view, leading)]
    if About.RETENTION in question.abouts:
        sentences += [_perplexities(view), _not_measured(view, group)]
    lead = " ".join(filter(None, sentences)) or question.without.format(kind=view.report.kind)
    lines = [_line(view, finding) for finding in group]
    # What shows something comes first, else in the order of the recipe.
    lines.sort(key=_is_flat)
    return Answer(question.text, lead, tuple(lines))


def _not_measured(view: View, kept: Sequence[Finding]) -> str:
    """Return which of knowledge, prose and chat no number shows, of a report that shows one of
    them; a loss in one says nothing of the others (docs/chat.md)."""
    missing = []
    if not kept:
        # There is such a set, and the base alone was asked: `_Question.without` has this.
        if any(result.role == "retention" for result in view.report.results):
            return ""
        missing.append("knowledge (no set of the role retention)")
    if not any(finding.result.written for finding in kept):
        missing.append("chat (no such set whose answers are written)")
    if not view.report.perplexities:
        missing.append("prose (no eval.perplexity_corpus)")
    if not missing or len(missing) == 3:
        return ""
    return f"Not measured: {join_words(missing)}."


def _is_flat(line: Evidence) -> bool:
    return line.tone == "flat"


def _wording(finding: Finding) -> Wording:
    """Return the words for what a finding shows."""
    about, tag, result = finding.about, finding.tag, finding.result
    if tag is Tag.TOO_FEW:
        return _TOO_FEW
    if tag is Tag.ALONE:
        return _ALONE[about]
    # "Learned" means above guessing as well: a base may lie below it (docs/reports.md).
    at_chance = result.too_few or result.low <= result.chance
    if tag is Tag.BETTER and about is About.LEARNING and at_chance:
        return _AT_CHANCE
    # Both help only where together they beat either alone (docs/reports.md).
    if tag is Tag.BETTER and about is About.ADDED and _adds_to_training(result):
        return _BOTH
    return _WORDS[about][tag]


def _adds_to_training(result: ArmResult) -> bool:
    """Return whether an arm is shown to be better with passages than without."""
    plain = result.to_plain
    return plain is not None and plain.is_significant and plain.delta > 0


def _leads(view: View, findings: Sequence[Finding]) -> str:
    """Return a sentence for each question set: its arms by tag, each with its change."""
    sets = by_model_and_set(findings)
    if len(sets) > _MOST_ARMS:
        return _tag_counts(findings)
    clauses = [
        f"{_where(view, model, of_set)}, {_clauses(of_set)}." for (model, _), of_set in sets.items()
    ]
    # Where documents are too few nothing is claimed, so no scope is needed.
    judged = {f.contrast.scope for f in findings if f.tag is not Tag.TOO_FEW}
    if judged == {"these models"}:
        return f"In these models: on {' On '.join(clauses)}"
    return " ".join(f"On {clause}" for clause in clauses)


def _tag_counts(findings: Sequence[Finding]) -> str:
    """Return how often each tag was found, where there are too many sets for a sentence each."""
    counts = Counter(_wording(finding).tag for finding in findings)
    tags = ", ".join(f"{tag} {count}" for tag, count in counts.items())
    return (
        f"In {format_count(len(findings), 'comparison')}: {tags} ({points_span(findings)} points)."
    )


def _where(view: View, model: str, of_set: Sequence[Finding]) -> str:
    """Return the question set, with its base model and K where there are several."""
    name = of_set[0].result.question_set
    words = quoted(name)
    if view.several_models:
        words += f" ({format_name(model)})"
    if of_set[0].about in BESIDE_RETRIEVAL:
        retrieval = view.retrieval(model, name)
        # In an evaluation no K is chosen, so it is named.
        if retrieval is not None and not retrieval.chosen_k:
            words += f" with K = {retrieval.k}"
    return words


def _clauses(of_set: Sequence[Finding]) -> str:
    """Return a clause for each wording, with all arms of which it is true; what is shown comes
    first."""
    shown_first = sorted(of_set, key=lambda finding: finding.tag not in SHOWN)
    same: dict[str, list[Finding]] = {}
    for finding in shown_first:
        same.setdefault(_wording(finding).clause, []).append(finding)
    return "; ".join(_clause(clause, findings) for clause, findings in same.items())


def _clause(clause: str, same: Sequence[Finding]) -> str:
    arms = f"{len(same)} arms ({points_span(same)} points)"
    if len(same) <= _MOST_ARMS:
        names = [f"{arm_label(f.result)} ({format_points(f.contrast.delta)} points)" for f in same]
        arms = join_words(names)
    contrast = same[0].contrast
    return clause.format(
        arms=arms,
        # Of several arms the largest, which holds for each of them.
        most=f"{100 * max(finding.possible for finding in same):.1f}",
        size=size_that_is(contrast),
        family=f"{contrast.family:,}",
    )


def _line(view: View, finding: Finding) -> Evidence:
    result, tag = finding.result, _wording(finding).tag
    name = quoted(result.question_set)
    if view.several_models:
        name += f" ({format_name(result.model)})"
    return Evidence(arm_label(result), name, tag, _TONES.get(tag, "flat"), f"{sentence(finding)}.")


def _perplexities(view: View) -> str:
    """Return the perplexities of held-out texts of all arms, by base model and file."""
    sentences = []
    for label, items in view.perplexities():
        if not view.has_base(items):
            continue
        base, *others = items
        # Perplexities of other tokens cannot be compared.
        same = [o for o in others if o.per_token is not None and o.n_tokens == base.n_tokens]
        changes = [f"{_perplexity(item)} ({perplexity_change(item, base)})" for item in same]
        if changes:
            sentences.append(
                f"Perplexity of {label} (change from the base, 95% interval): {_perplexity(base)}, "
                f"{join_words(changes)}."
            )
    return " ".join(sentences)


def _perplexity(item: Perplexity) -> str:
    return f"{format_finite(item.per_token, 1)} for {format_name(item.arm)}"


def _outcomes(view: View) -> Iterator[Answer]:
    """Yield the changes of wrong answers, and of answers that no document holds; nothing where
    models wrote none."""
    if not any(result.outcomes for result in view.headline_results()):
        return
    lines = [
        _outcome_line(result, part, change)
        for outcome in _OUTCOMES
        for result, part, change in outcome_changes(view, outcome)
    ]
    named = [f"{line.tag} from {line.arm} on {line.question_set}" for line in lines[:_MOST_ARMS]]
    if len(lines) > _MOST_ARMS:
        named.append(format_count(len(lines) - _MOST_ARMS, "more change"))
    lead = f"Shown: {join_words(named)}."
    if not named:
        lead = (
            "No change in wrong answers, or in answers to questions that no document answers, is "
            "shown."
        )
    yield Answer("Does it know what it does not know?", lead, tuple(lines))


def _outcome_line(result: ArmResult, part: OutcomeResult, change: Contrast) -> Evidence:
    more, fewer = _OUTCOMES[part.outcome]
    tag, tone = fewer, "good"
    if change.delta > 0:
        tag, tone = more, "bad"
    text = (
        f"{format_percent(part.rate)} of {part.n:,} questions, {format_points(change.delta)} "
        "points to base."
    )
    return Evidence(arm_label(result), quoted(result.question_set), tag, tone, text)


def _open(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what would settle the open questions: documents, seeds, question sets, retrieval."""
    compared = [finding for finding in findings if finding.about in ROLES]
    undone = undone_by_holm(compared)
    if undone:
        yield (
            f"On {join_words([quoted(name) for name in undone])}, Holm's correction decides: ask "
            "about more documents, train more seeds or compare fewer arms."
        )
    sizes: dict[str, dict[str, str]] = {}  # sentence -> set -> its size
    for few in too_small_sets(compared):
        # Sets that need the same share a sentence.
        sizes.setdefault(_what_is_needed(few), {})[quoted(few.question_set)] = f"{few.n:,}"
    for needed, by_set in sizes.items():
        # Sets of one size name it once.
        has = join_words(list(dict.fromkeys(by_set.values())))
        yield f"On {join_words(list(by_set))}, {needed} (now {has})."
    if trained_once(compared):
        yield (
            "Each arm was trained once, so intervals and p are about these models: another "
            "training would move the numbers too. A study with 3 seeds or more tells the method "
            "from one lucky training."
        )


def _what_is_needed(few: TooFew) -> str:
    if few.tells is None:
        return f"a test needs questions on at least {few.needed} {few.unit}"
    enough = f"about {format_count(few.needed, 'question')}"
    if few.unit != "questions":
        enough = f"questions on about {few.needed:,} {few.unit}"
    return (
        f"a change of {100 * few.tells:.0f} points would be shown four times in five; one of "
        f"{100 * MARGIN:g} points needs {enough}"
    )
