"""Findings in words, for page, terminal, Markdown and model card: effect first, then what it allows to say, then what is open.

Every number comes from the report; `kinject.stats.findings` has judged it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kinject.report.formatting import (
    format_count,
    format_finite,
    format_name,
    format_p,
    format_percent,
    format_points,
    join_words,
    perplexity_change,
    quoted,
)
from kinject.report.limits import doubts
from kinject.report.page import SETTLE, Answer, Evidence
from kinject.report.view import View, arm_name
from kinject.results import MARGIN, in_these_models
from kinject.stats.findings import About, Finding, Tag, find

_MOST_ARMS = 4  # in one sentence; more are counted
_MOST_SETS = 3  # with a sentence each in the opening
_WORDS: dict[About, dict[Tag, tuple[str, str]]] = {
    About.LEARNING: {
        Tag.BETTER: ("learned", "{arms} learned"),
        Tag.WORSE: ("got worse", "{arms} got worse"),
        Tag.ALIKE: ("no learning shown", "no learning is shown for {arms}"),
        Tag.UNDECIDED: ("no learning shown", "no learning is shown for {arms}, and {possible} remain possible"),
    },
    About.RETENTION: {
        Tag.BETTER: ("gained", "{arms} gained"),
        Tag.WORSE: ("forgot", "{arms} forgot"),
        Tag.ALIKE: ("no large loss", "{arms} lost little, if anything: {possible} remain possible"),
        Tag.UNDECIDED: ("loss undecided", "too few questions to see a loss below {most} points in {arms}"),
        Tag.NOTHING_TO_LOSE: ("nothing to lose", "a loss cannot show for {arms}: the base is not above guessing"),
    },
    About.DECLINING: {
        Tag.BETTER: ("declines more", "{arms} declined more often"),
        Tag.WORSE: ("declines less", "{arms} declined less often, and answered questions that no document answers"),
        Tag.ALIKE: ("no change shown", "no change is shown for {arms}"),
        Tag.UNDECIDED: ("no change shown", "no change is shown for {arms}, and {possible} remain possible"),
    },
    About.INSTEAD: {
        Tag.BETTER: ("better than retrieval", "{arms} did better than retrieval alone"),
        Tag.WORSE: ("retrieval better", "retrieval alone did better than {arms}"),
        Tag.ALIKE: ("as good as retrieval", "{arms} did about as well as retrieval alone: no difference is shown"),
        Tag.UNDECIDED: ("no difference shown", "no difference from retrieval alone is shown for {arms}"),
    },
    About.ADDED: {
        Tag.BETTER: ("adds to retrieval", "{arms} did better than retrieval alone"),
        Tag.WORSE: ("hurts retrieval", "training made retrieval worse in {arms}"),
        Tag.ALIKE: ("adds nothing", "that training adds to retrieval is not shown for {arms}"),
        Tag.UNDECIDED: ("no addition shown", "that training adds to retrieval is not shown for {arms}"),
    },
}
"""What was compared -> what it shows -> the tag on the page, and its words; behind each arm stands its change in points."""
_TOO_FEW = ("too few to tell", "{n} {unit} are too few for any test of {arms}")
_AT_CHANCE = ("gained, not above guessing", "{arms} gained, but cannot be told from guessing")
_BOTH = ("both help", "both help: {arms} did better than either alone")
_TONES = {"learned": "good", "gained": "good", "declines more": "good", "better than retrieval": "good",
          "adds to retrieval": "good", "both help": "good", "got worse": "bad", "forgot": "bad", "declines less": "bad",
          "retrieval better": "bad", "hurts retrieval": "bad"}  # fmt: skip
_QUESTIONS: tuple[tuple[str, tuple[About, ...], str], ...] = (
    ("Did it learn?", (About.LEARNING,),
     "This {kind} cannot say: it has no trained arm with a question set of the role “learning”."),
    ("What did it forget?", (About.RETENTION,),
     "Forgetting was not measured: no trained arm has a question set of the role “retention”."),
    ("Would retrieval have done better, or do both help?", (About.INSTEAD, About.ADDED),
     "Retrieval was not tried: no trained arm is tested against the base with retrieved context (and a chosen K)."),
    ("Does it answer what no document says?", (About.DECLINING,), ""),
)  # fmt: skip
"""The practitioner's questions, the comparisons that answer them, and the answer without any ("": left out)."""
_ROLES = {About.LEARNING: "learning", About.RETENTION: "retention", About.DECLINING: "unanswerable"}


@dataclass(frozen=True, slots=True)
class Opening:
    """The first sentences of a report: what was measured, what it allows to say, and what would settle the rest."""

    effect: str
    answers: tuple[Answer, ...]
    open: tuple[str, ...]

    def paragraphs(self) -> list[str]:
        """Return the opening as plain paragraphs."""
        leads = [f"{answer.question} {answer.lead}" for answer in self.answers]
        return [self.effect, *leads, *([f"{SETTLE}: {' '.join(self.open)}"] if self.open else [])]


def find_all(view: View) -> tuple[Finding, ...]:
    """Return the findings on the trained arms by question set, each in the format that the recipe lists first."""
    found = []
    for about, role in _ROLES.items():
        for model in view.report.models:
            for name in view.sets(role, model):
                context = view.retrieval(model, name)
                for result in view.shown(model, name):
                    if not view.arms[model, result.arm].trained:
                        continue
                    if result.to_base is not None and not result.k:
                        found.append(find(about, result, result.to_base))
                    beside = not result.k or result.chosen_k or (context is not None and result.k == context.k)
                    if role == "learning" and result.to_rag is not None and beside:
                        found.append(find(About.ADDED if result.k else About.INSTEAD, result, result.to_rag))
    return tuple(found)


def write_opening(view: View) -> Opening:
    """Return the first sentences of the report."""
    findings = find_all(view)
    answers = []
    for question, abouts, otherwise in _QUESTIONS:
        group = [finding for finding in findings if finding.about in abouts]
        told = [f for f in group if f.about is not About.ADDED or f.tag in (Tag.BETTER, Tag.WORSE)]
        parts = [_leads(view, told), *(_diverged(view, about) for about in abouts)]
        parts += [_perplexities(view)] if About.RETENTION in abouts else []
        lead = " ".join(filter(None, parts)) or otherwise.format(kind=view.report.kind)
        if lead:
            lines = sorted((_line(view, finding) for finding in group), key=lambda line: line.tone == "flat")
            answers.append(Answer(question, lead, tuple(lines)))
    return Opening(_effect(view, findings), (*answers, *_outcomes(view), doubts(view)), tuple(_open(view, findings)))


def _words(view: View, finding: Finding) -> tuple[str, str]:
    """Return the tag of a finding and its phrase."""
    if finding.tag is Tag.TOO_FEW:
        return _TOO_FEW
    if finding.about is About.LEARNING and finding.tag is Tag.BETTER and not finding.above_chance:
        return _AT_CHANCE
    if finding.about is About.ADDED and finding.tag is Tag.BETTER:
        result = view.result(finding.model, finding.arm, finding.question_set, finding.k)
        plain = None if result is None else result.to_plain
        if plain is not None and plain.is_significant and plain.delta > 0:
            return _BOTH
    return _WORDS[finding.about][finding.tag]


def _diverged(view: View, about: About) -> str:
    """Return the sentence on arms of which no question of a set has a score."""
    items = [item for item in view.report.unscored if item.role == _ROLES.get(about) and not item.k]
    names = {
        name: [i for i in items if i.question_set == name] for name in dict.fromkeys(i.question_set for i in items)
    }
    return " ".join(
        f"On {quoted(name)}, {join_words([arm_name(i.arm) + ('' if i.seed is None else f' (seed {i.seed})') for i in of_set])} "
        "diverged: no question has a score."
        for name, of_set in names.items()
    )  # fmt: skip


def _effect(view: View, findings: Sequence[Finding]) -> str:
    """Return the measured accuracies: before and after training, of one arm, or of all as a span."""
    learned = [finding for finding in findings if finding.about is About.LEARNING]
    if not learned:
        return _untrained(view)
    arms = list(dict.fromkeys(finding.arm for finding in learned))
    sets = list(dict.fromkeys(finding.question_set for finding in learned))
    if view.several_models or len(sets) > _MOST_SETS:
        n_arms = format_count(len({(f.model, f.arm) for f in findings}), "trained arm")
        models = format_count(len(view.report.models), "base model")
        low, high = min(learned, key=lambda f: f.change), max(learned, key=lambda f: f.change)
        return (
            f"{n_arms} of {models} on {format_count(len(sets), 'question set')} to be learned: the change from training lies "
            f"between {format_points(low.change)} ({arm_name(low.arm)} on {quoted(low.question_set)}) and "
            f"{format_points(high.change)} points ({arm_name(high.arm)} on {quoted(high.question_set)})."
        )
    best = _best_arm(view) if len(arms) > 1 else arms[0]
    if not best:
        return " ".join(_between([f for f in learned if f.question_set == name]) for name in sets)
    parts = [_before_and_after(finding) for finding in learned if finding.arm == best]
    if len(arms) > 1:
        scope = next(r.to_closest.scope for r in view.headline_results() if r.arm == best and r.to_closest is not None)
        parts.append(f"{arm_name(best)} did best of {len(arms)} trained models{in_these_models(scope)}.")
    reading = view.reading(view.report.models[0], best)
    return " ".join([*parts, *([f"It read {reading}."] if reading else [])])


def _best_arm(view: View) -> str:
    """Return the trained arm that is shown to be better than all others on a learning set, and worse on none; else ""."""
    shown = [r for r in view.headline_results() if r.to_closest is not None and r.to_closest.is_significant]
    arms = {result.arm for result in shown}
    return arms.pop() if len(arms) == 1 else ""


def _before_and_after(finding: Finding) -> str:
    """Return ``cpt answers 134 of 600 questions “new” before and 590 after training (22.3% → 98.3%, ...): +76.0 points ...``."""
    n, before, after = finding.n_questions, finding.before, finding.after
    percents = f"{format_percent(before)} → {format_percent(after)}"
    documents = "" if _unit(finding) == "questions" else f", {format_count(finding.n_documents, 'document')}"
    trainings = f", mean of {finding.n_seeds} trainings" if finding.n_seeds > 1 else ""
    return (
        f"{arm_name(finding.arm)} answers {before * n:,.0f} of {n:,} questions {quoted(finding.question_set)} before and "
        f"{after * n:,.0f} after training ({percents}{documents}{trainings}): {_difference(finding, test=False)}."
    )


def _unit(finding: Finding) -> str:
    return "questions" if finding.n_documents == finding.n_questions else "documents"


def _size(finding: Finding) -> str:
    """Return ``600 questions on 120 documents``."""
    questions = format_count(finding.n_questions, "question")
    if finding.n_documents == finding.n_questions:
        return questions
    return f"{questions} on {format_count(finding.n_documents, 'document')}"


def _between(of_set: Sequence[Finding]) -> str:
    """Return the span of several arms on one set, and which is highest."""
    best, low = max(of_set, key=lambda f: f.after), min(of_set, key=lambda f: f.after)
    span = " to ".join(dict.fromkeys((format_percent(low.after), format_percent(best.after))))
    unsure = "none is shown to be the best"
    if best.tag is Tag.TOO_FEW:
        unsure = f"too few {_unit(best)} ({best.n_documents}) for any test, so they are not ranked"
    return (
        f"{len(of_set)} trained models answer {span} of the questions {quoted(best.question_set)}, before training "
        f"{format_percent(best.before)} ({_size(best)}); highest {arm_name(best.arm)}, "
        f"{_difference(best, test=False)}; {unsure}."
    )


def _untrained(view: View) -> str:
    """Return the accuracies of the base, where no trained arm can be compared."""
    parts = []
    for model in view.report.models[:1]:
        for name in view.sets("", model)[:_MOST_SETS]:
            base, rag = view.result(model, view.base(model), name), view.retrieval(model, name)
            if base is not None:
                beside = "" if rag is None else f", {format_percent(rag.accuracy)} with passages before the question"
                guess = f" (guessing gives {format_percent(base.chance)})" if base.chance else ""
                parts.append(f"{format_percent(base.accuracy)} of {base.n:,} questions {quoted(name)}{beside}{guess}")
    if not parts:
        return "No arm has a score, so there is no result."
    trained = any(arm.trained for arm in view.report.arms)
    why = "No trained model can be compared on questions to be learned" if trained else "No trained model was asked"
    return f"{why}; the base answers {'; '.join(parts)}."


def _leads(view: View, findings: Sequence[Finding]) -> str:
    """Return a sentence for each question set: its arms by tag, each with its change."""
    sets = list(dict.fromkeys((f.model, f.question_set) for f in findings))
    if len(sets) > _MOST_ARMS:
        labels = [_words(view, finding)[0] for finding in findings]
        tags = [f"{label} {labels.count(label)}" for label in dict.fromkeys(labels)]
        return f"In {len(findings)} comparisons: {', '.join(tags)} ({_points_span(findings)} points)."
    sentences = []
    for model, name in sets:
        of_set = [f for f in findings if (f.model, f.question_set) == (model, name)]
        judged = {f.scope for f in of_set if f.tag is not Tag.TOO_FEW}
        scope = f"{in_these_models('these models')}," if judged == {"these models"} else ""
        of = f" ({format_name(model)})" if view.several_models else ""
        phrases: dict[str, list[Finding]] = {}
        for finding in sorted(of_set, key=lambda f: f.tag not in (Tag.BETTER, Tag.WORSE)):  # what is shown comes first
            phrases.setdefault(_words(view, finding)[1], []).append(finding)
        clauses = [_clause(phrase, same) for phrase, same in phrases.items()]
        sentences.append(f"On {quoted(name)}{of},{scope} {'; '.join(clauses)}.")
    return " ".join(sentences)


def _clause(phrase: str, same: Sequence[Finding]) -> str:
    arms = join_words([f"{arm_name(f.arm, f.k)} ({format_points(f.change)} points)" for f in same])
    if len(same) > _MOST_ARMS:
        arms = f"{len(same)} arms ({_points_span(same)} points)"
    losses = same[0].about is About.RETENTION
    most = max(f.possible_loss if losses else f.possible_gain for f in same)
    possible = f"{'losses' if losses else 'gains'} of up to {100 * most:.1f} points"
    n, unit = f"{same[0].n_documents:,}", _unit(same[0])
    return phrase.format(arms=arms, possible=possible, most=f"{100 * most:.1f}", unit=unit, n=n)


def _points_span(findings: Sequence[Finding]) -> str:
    changes = [finding.change for finding in findings]
    return " to ".join(dict.fromkeys(map(format_points, (min(changes), max(changes)))))


def _line(view: View, finding: Finding) -> Evidence:
    label = quoted(finding.question_set) + (f" ({format_name(finding.model)})" if view.several_models else "")
    tag = _words(view, finding)[0]
    return Evidence(arm_name(finding.arm, finding.k), label, tag, _TONES.get(tag, "flat"), f"{sentence(finding)}.")


def sentence(finding: Finding) -> str:
    """Return the numbers of a finding: both accuracies, the difference with its interval and p, and what remains possible."""
    seeds = f", {finding.n_seeds} seeds" if finding.n_seeds > 1 else ""
    of = " with retrieval alone" if finding.about in (About.INSTEAD, About.ADDED) else ""
    text = f"{format_percent(finding.before)}{of} → {format_percent(finding.after)}, {_size(finding)}{seeds}: "
    text += _difference(finding)
    if finding.tag is Tag.TOO_FEW:
        effective = "" if finding.n_effective >= finding.n_documents else f" (they count as {finding.n_effective:.0f})"
        return f"{text}; {finding.n_documents} {_unit(finding)}{effective} are too few for a test: {finding.needed} are needed"
    if (
        finding.tag in (Tag.ALIKE, Tag.UNDECIDED, Tag.NOTHING_TO_LOSE)
        and finding.low is not None
        and finding.high is not None
    ):
        text += f"; changes of {format_points(finding.low)} to {format_points(finding.high)} points remain possible"
    return text


def _difference(finding: Finding, *, test: bool = True) -> str:
    """Return ``+61.8 points (95% interval +57.0 to +66.1; p < 0.001 after Holm)``."""
    parts = []
    if finding.low is not None and finding.high is not None:
        parts.append(f"95% interval {format_points(finding.low)} to {format_points(finding.high)}")
    if test and finding.p is not None:
        parts.append(format_p(finding.p) + (" after Holm" if finding.family > 1 else ""))
    scope = in_these_models(finding.scope) if test and finding.tag in (Tag.BETTER, Tag.WORSE) else ""
    inside = f" ({'; '.join(parts)})" if test and parts else f", {parts[0]}" if parts else ""
    return f"{format_points(finding.change)} points{scope}{inside}"


def _perplexities(view: View) -> str:
    """Return the perplexities of held-out texts of all arms, by base model and file."""
    sentences = []
    for label, (base, *others) in view.perplexities():
        changes = [f"{format_finite(item.per_token, 1)} for {format_name(item.arm)} ({perplexity_change(item, base)})"
                   for item in others if item.per_token is not None and item.n_tokens == base.n_tokens]  # fmt: skip
        if changes:
            before = f"{format_finite(base.per_token, 1)} for {format_name(base.arm)}"
            sentences.append(f"Perplexity of {label}, without a test: {before}, {join_words(changes)}.")
    return " ".join(sentences)


_OUTCOMES: tuple[tuple[Literal["answered", "wrong"], str], ...] = (
    ("answered", "answers to questions that no document answers"),
    ("wrong", "wrong answers"),
)


def _outcomes(view: View) -> Iterator[Answer]:
    """Yield the changes of wrong answers, and of answers that no document holds; nothing where models wrote none."""
    shown = [r for r in view.headline_results() if r.outcomes]
    lines = []
    for outcome, words in _OUTCOMES:
        for result in shown:
            part = result.outcome(outcome)
            if part is not None and part.to_base is not None and part.to_base.is_significant:
                more = part.to_base.delta > 0
                points = format_points(part.to_base.delta)
                text = f"{format_percent(part.rate)} of {part.n:,} questions, {points} points to base."
                lines.append(Evidence(arm_name(result.arm, result.k), quoted(result.question_set),
                                  f"{'more' if more else 'fewer'} {words}", "bad" if more else "good", text))  # fmt: skip
    if shown:
        named = [f"{line.tag} from {line.arm} on {line.question_set}" for line in lines[:_MOST_ARMS]]
        named += [f"{len(lines) - _MOST_ARMS} more changes"] if len(lines) > _MOST_ARMS else []
        lead = f"Shown: {join_words(named)}." if named else (
            "No change in wrong answers, or in answers to questions that no document answers, is shown.")  # fmt: skip
        yield Answer("Does it know what it does not know?", lead, tuple(lines))


def _open(view: View, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what would settle the open questions: documents, seeds, question sets, retrieval."""
    trained = [finding for finding in findings if finding.about in _ROLES]
    for name in list(dict.fromkeys(finding.question_set for finding in trained))[:_MOST_SETS]:
        unsettled = [f for f in trained if f.question_set == name and (f.needed or 0) > f.n_effective]
        if not unsettled:
            continue
        most = max(unsettled, key=lambda finding: finding.needed or 0)
        unit, has = _unit(most), f"it has {most.n_documents:,}"
        if most.tag is Tag.TOO_FEW:
            yield f"{quoted(name)} needs questions on at least {most.needed:,} {unit} for a test ({has})."
        else:
            points = f"{100 * MARGIN:g} points"
            yield f"To tell a change of {points} from none, {quoted(name)} needs about {most.needed:,} {unit} ({has})."
    if trained and max(finding.n_seeds for finding in trained) == 1:
        yield "Each arm was trained once; a study with 3 seeds or more tells the method from one lucky training."
    abouts = {finding.about for finding in findings}
    if trained and About.RETENTION not in abouts and not view.report.perplexities:
        yield "Questions with role: retention would measure what training lost."
    if trained and not abouts & {About.INSTEAD, About.ADDED}:
        yield "eval.retrieval would show whether passages before the question do as well."
