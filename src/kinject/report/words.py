"""Findings in words, for page, terminal, Markdown and model card: effect first, then what it allows
to say, then what is open.

At the end what went wrong on the way, and what the data cannot tell. Every number comes from the
report; `kinject.stats.findings` has judged it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kinject.report.doubts import doubts
from kinject.report.formatting import (
    View,
    arm_label,
    arm_name,
    format_count,
    format_finite,
    format_name,
    format_p,
    format_percent,
    format_points,
    join_words,
    more_unscored,
    perplexity_change,
    quoted,
)
from kinject.report.page import Answer, Evidence, Opening
from kinject.results import MARGIN, ArmResult, Contrast, fewest_for, in_these_models
from kinject.stats.comparisons import About, Finding, Tag, find

_MOST_ARMS = 4  # in one sentence; more are counted
_MOST_SETS = 3  # with a sentence each in the opening
_WORDS: dict[About, dict[Tag, tuple[str, str]]] = {
    About.LEARNING: {
        Tag.BETTER: ("learned", "{arms} learned"),
        Tag.WORSE: ("got worse", "{arms} got worse"),
        Tag.ALIKE: ("no learning shown", "no learning is shown for {arms}"),
        Tag.UNDECIDED: (
            "no learning shown",
            "no learning is shown for {arms}, and {possible} remain possible",
        ),
        Tag.WITHOUT_QUESTION: (
            "mostly without the question",
            "{arms} gained, but most of it without the question as well: no learning is shown",
        ),
    },
    About.RETENTION: {
        Tag.BETTER: ("gained", "{arms} gained"),
        Tag.WORSE: ("forgot", "{arms} forgot"),
        Tag.ALIKE: ("no large loss", "{arms} lost little, if anything: {possible} remain possible"),
        Tag.UNDECIDED: (
            "loss undecided",
            "too few questions to see a loss below {most} points in {arms}",
        ),
        Tag.NOTHING_TO_LOSE: (
            "nothing to lose",
            "a loss cannot show for {arms}: the base is not above guessing",
        ),
    },
    About.DECLINING: {
        Tag.BETTER: ("declines more", "{arms} declined more often"),
        Tag.WORSE: (
            "declines less",
            "{arms} declined less often, and answered questions that no document answers",
        ),
        Tag.ALIKE: ("no change shown", "no change is shown for {arms}"),
        Tag.UNDECIDED: (
            "no change shown",
            "no change is shown for {arms}, and {possible} remain possible",
        ),
    },
    About.INSTEAD: {
        Tag.BETTER: ("better than retrieval", "{arms} did better than retrieval alone"),
        Tag.WORSE: ("retrieval better", "retrieval alone did better than {arms}"),
        Tag.ALIKE: (
            "as good as retrieval",
            "{arms} did about as well as retrieval alone: no difference is shown",
        ),
        Tag.UNDECIDED: (
            "no difference shown",
            "no difference from retrieval alone is shown for {arms}",
        ),
    },
    About.ADDED: {
        Tag.BETTER: ("adds to retrieval", "{arms} did better than retrieval alone"),
        Tag.WORSE: ("hurts retrieval", "training made retrieval worse in {arms}"),
        Tag.ALIKE: ("adds nothing", "that training adds to retrieval is not shown for {arms}"),
        Tag.UNDECIDED: (
            "no addition shown",
            "that training adds to retrieval is not shown for {arms}",
        ),
    },
}
"""What was compared -> what it shows -> the tag on the page, and its words; behind each arm stands
its change in points."""
_TOO_FEW = ("too few to tell", "{n} {unit} are too few for any test of {arms}")
_ALONE = (
    "not after Holm",
    "{arms} differed from {other} in a test by itself (p < 0.05), but not after Holm's correction for {family} comparisons",
)
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
"""The practitioner's questions, the comparisons that answer them, and the answer without any ("":
left out)."""
_OUTCOMES = {"answered": "answers to questions that no document answers", "wrong": "wrong answers"}
_BESIDE = (About.INSTEAD, About.ADDED)
_ROLES = {About.LEARNING: "learning", About.RETENTION: "retention", About.DECLINING: "unanswerable"}


def find_all(view: View) -> tuple[Finding, ...]:
    """Return the findings on the trained arms by question set, each in the format that the recipe
    lists first."""
    found = []
    for about, role in _ROLES.items():
        for model in view.report.models:
            for name in view.sets(role, model):
                context = view.retrieval(model, name)
                for result in view.shown(model, name):
                    if not view.arms[model, result.arm].trained:
                        continue
                    contrast = result.gain if about is About.LEARNING else result.to_base
                    if contrast is not None and not result.k:
                        found.append(find(about, result, contrast))
                    beside = (
                        not result.k
                        or result.chosen_k
                        or (context is not None and result.k == context.k)
                    )
                    if role == "learning" and result.to_rag is not None and beside:
                        found.append(
                            find(About.ADDED if result.k else About.INSTEAD, result, result.to_rag)
                        )
    return tuple(found)


def write_opening(view: View) -> Opening:
    """Return the first sentences of the report."""
    findings = find_all(view)
    answers = []
    for question, abouts, otherwise in _QUESTIONS:
        group = [finding for finding in findings if finding.about in abouts]
        lead = _leads(
            view,
            [f for f in group if f.about is not About.ADDED or f.tag in (Tag.BETTER, Tag.WORSE)],
        )
        if About.RETENTION in abouts:
            lead = " ".join(filter(None, (lead, _perplexities(view))))
        lead = lead or otherwise.format(kind=view.report.kind)
        if lead:
            lines = [_line(view, finding) for finding in group]
            shown = [line for line in lines if line.tone != "flat"]
            others = [line for line in lines if line.tone == "flat"]
            answers.append(Answer(question, lead, (*shown, *others)))
    return Opening(
        _effect(view, findings),
        (*answers, *_outcomes(view), doubts(view)),
        tuple(_open(view, findings)),
    )


def _words(view: View, finding: Finding) -> tuple[str, str]:
    """Return the tag of a finding and its phrase."""
    result = finding.result
    if finding.tag is Tag.TOO_FEW:
        return _TOO_FEW
    if finding.tag is Tag.ALONE:
        tag, phrase = _ALONE
        return tag, phrase + ", and {possible} remain possible" * (finding.about is About.RETENTION)
    if (
        finding.about is About.LEARNING
        and finding.tag is Tag.BETTER
        and (result.too_few or result.low <= result.chance)
    ):
        return _AT_CHANCE
    plain = result.to_plain
    if (
        finding.about is About.ADDED
        and finding.tag is Tag.BETTER
        and plain
        and plain.is_significant
        and plain.delta > 0
    ):
        return _BOTH
    return _WORDS[finding.about][finding.tag]


def _effect(view: View, findings: Sequence[Finding]) -> str:
    """Return the measured accuracies: before and after training, of one arm, or of all as a span."""
    learned = [finding for finding in findings if finding.about is About.LEARNING]
    if not learned:
        return _untrained(view)
    arms = list(dict.fromkeys(finding.result.arm for finding in learned))
    sets = list(dict.fromkeys(finding.result.question_set for finding in learned))
    if view.several_models or len(sets) > _MOST_SETS:
        n_arms = format_count(
            len({(f.result.model, f.result.arm) for f in findings}), "trained arm"
        )
        models = format_count(len(view.report.models), "base model")
        return (
            f"{n_arms} of {models} on {format_count(len(sets), 'question set')} to be learned: the change from training is "
            f"{_points_span(learned)} points."
        )
    shown = [
        r
        for r in view.headline_results()
        if r.to_closest is not None and r.to_closest.is_significant
    ]
    leaders = list({result.arm for result in shown}) if len(arms) > 1 else arms
    if len(leaders) != 1:  # none is the best on a learning set, or another on each
        return _between(learned)
    best = leaders[0]
    of_best = [finding for finding in learned if finding.result.arm == best]
    parts = [f"{'; '.join(_before_and_after(finding, of_best[0]) for finding in of_best)}."]
    if len(arms) > 1:
        scope = next(r.to_closest.scope for r in shown if r.to_closest is not None)
        these = "these " if in_these_models(scope) else ""
        parts.append(f"{arm_name(best)} did best of {these}{len(arms)} trained models.")
    reading = view.reading(view.report.models[0], best)
    return " ".join([*parts, *([f"It read {reading}."] if reading else [])])


def _before_and_after(finding: Finding, first: Finding) -> str:
    """Return ``cpt answers 134 of 600 questions “new” before and 590 after training (22.3% → 98.3%,
    ...): +76.0 points ...``.

    Only the `first` names the arm.
    """
    n, before, after = finding.contrast.n, finding.before, finding.contrast.accuracy
    percents = f"{format_percent(before)} → {format_percent(after)}"
    documents = _size(finding.contrast).partition(" on ")[2]
    seeds = len(finding.result.by_seed)
    trainings = f"mean of {seeds} trainings" if seeds > 1 else ""
    details = ", ".join(filter(None, (percents, _without_question(finding), documents, trainings)))
    details += more_unscored(finding.result.n - n)
    who, what = (
        f"{arm_name(finding.result.arm)} answers",
        f"of {n:,} questions {quoted(finding.result.question_set)}",
    )
    start = f"{who} {before * n:,.0f} {what}" if finding is first else f"{what} {before * n:,.0f}"
    end = f"{after * n:,.0f} after{' training' if finding is first else ''} ({details})"
    beyond = " beyond the choices alone" if _without_question(finding) else ""
    return f"{start} before and {end}: {_difference(finding, test=False)}{beyond}{_part_without_question(finding.result)}"


def _without_question(finding: Finding) -> str:
    """Return ``without the question 24.0% → 25.1%``, "" where there is no such control."""
    control = finding.result.control
    if finding.about is not About.LEARNING or control is None or control.to_base is None:
        return ""
    before = control.accuracy - control.to_base.delta
    return f"without the question {format_percent(before)} → {format_percent(control.accuracy)}"


_LEAST_PART = 0.1  # of a gain; below it, the part that needs no question is not worth a clause


def _part_without_question(result: ArmResult) -> str:
    """Return ``; 48% of this gain needs no question`` where the control rises by as much as
    matters."""
    rise = None if result.control is None else result.control.to_base
    if (
        rise is None
        or result.without_question < _LEAST_PART
        or (rise.delta < MARGIN and not rise.is_significant)
    ):
        return ""
    return f"; {100 * result.without_question:.0f}% of the gain needs no question"


def _size(contrast: Contrast) -> str:
    """Return ``600 questions on 120 documents``."""
    documents = (
        ""
        if contrast.unit == "questions"
        else f" on {format_count(contrast.n_clusters, 'document')}"
    )
    return format_count(contrast.n, "question") + documents


def _between(learned: Sequence[Finding]) -> str:
    """Return the span of several arms on each set, which is highest there, and that none is the
    best."""
    sets: dict[str, list[Finding]] = {}
    for finding in learned:
        sets.setdefault(finding.result.question_set, []).append(finding)
    n_arms, sizes = (
        len({f.result.arm for f in learned}),
        {_size(of_set[0].contrast) for of_set in sets.values()},
    )
    each = f", each {sizes.pop()}" if len(sets) > 1 and len(sizes) == 1 else ""
    spans, highest, unsure = list[str](), list[str](), dict[str, list[str]]()
    for name, of_set in sets.items():
        best, low = (choose(of_set, key=lambda f: f.contrast.accuracy) for choose in (max, min))
        span = " to ".join(dict.fromkeys(format_percent(f.contrast.accuracy) for f in (low, best)))
        details = [f"{'' if spans else 'before training '}{format_percent(best.before)}"]
        details += _span_without_question(of_set)
        details += [] if each else [_size(best.contrast)]
        details += [f"{len(of_set)} of them"] if len(of_set) < n_arms else []
        if unscored := more_unscored(best.result.n - best.contrast.n):
            details.append(unscored.removeprefix("; "))
        spans.append(
            f"{span} of {'' if spans else 'the questions '}{quoted(name)} ({', '.join(details)})"
        )
        on = f" on {quoted(name)}" if len(sets) > 1 else ""
        highest.append(
            f"{arm_name(best.result.arm)}{on} ({_difference(best, test=False, short=bool(highest))})"
        )
        why = f"too few {best.contrast.unit} ({best.contrast.n_clusters}) for any test, so they are not ranked"
        unsure.setdefault(
            why if best.tag is Tag.TOO_FEW else "none is shown to be the best", []
        ).append(quoted(name))
    ends = [
        f"{text} on {join_words(names)}" if len(unsure) > 1 else text
        for text, names in unsure.items()
    ]
    return f"{n_arms} trained models answer {join_words(spans)}{each}. Highest: {'; '.join([join_words(highest), *ends])}."


def _span_without_question(findings: Sequence[Finding]) -> list[str]:
    """Return [``without the question 24.0% to 26.0%``], the accuracies of several arms; [] where
    they have no control."""
    accuracies = [f.result.control.accuracy for f in findings if f.result.control is not None]
    if not accuracies:
        return []
    ends = dict.fromkeys(map(format_percent, (min(accuracies), max(accuracies))))
    return [f"without the question {' to '.join(ends)}"]


def _untrained(view: View) -> str:
    """Return the accuracies of the base, where no trained arm can be compared."""
    parts, model = [], view.report.models[0]
    for name in view.sets("", model)[:_MOST_SETS]:
        base, rag = view.result(model, view.base(model), name), view.retrieval(model, name)
        if base is not None:
            beside = (
                ""
                if rag is None
                else f", {format_percent(rag.accuracy)} with passages before the question"
            )
            guess = f" (guessing gives {format_percent(base.chance)})" if base.chance else ""
            parts.append(
                f"{format_percent(base.accuracy)} of {base.n_scored:,} questions {quoted(name)}{beside}{guess}"
                f"{more_unscored(base.n_unscored)}"
            )
    if not parts:
        return "No arm has a score, so there is no result."
    return f"No trained model can be compared on questions to be learned; the base answers {'; '.join(parts)}."


def _leads(view: View, findings: Sequence[Finding]) -> str:
    """Return a sentence for each question set: its arms by tag, each with its change."""
    sets: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        sets.setdefault((finding.result.model, finding.result.question_set), []).append(finding)
    if len(sets) > _MOST_ARMS:
        labels = [_words(view, finding)[0] for finding in findings]
        tags = [f"{label} {labels.count(label)}" for label in dict.fromkeys(labels)]
        return (
            f"In {len(findings)} comparisons: {', '.join(tags)} ({_points_span(findings)} points)."
        )
    sentences = list[str]()
    judged = {f.contrast.scope for f in findings if f.tag is not Tag.TOO_FEW}
    scope = "In these models: " if judged == {"these models"} else ""
    for (model, name), of_set in sets.items():
        of = f" ({format_name(model)})" if view.several_models else ""
        rag = view.retrieval(model, name) if of_set[0].about in _BESIDE else None
        of += f" with K = {rag.k}" if rag is not None and not rag.chosen_k else ""
        phrases: dict[str, list[Finding]] = {}
        for finding in sorted(
            of_set, key=lambda f: f.tag not in (Tag.BETTER, Tag.WORSE)
        ):  # what is shown comes first
            phrases.setdefault(_words(view, finding)[1], []).append(finding)
        clauses = [_clause(phrase, same) for phrase, same in phrases.items()]
        sentences.append(
            f"{'on' if scope and not sentences else 'On'} {quoted(name)}{of}, {'; '.join(clauses)}."
        )
    return scope + " ".join(sentences)


def _clause(phrase: str, same: Sequence[Finding]) -> str:
    arms = f"{len(same)} arms ({_points_span(same)} points)"
    if len(same) <= _MOST_ARMS:
        names = [f"{arm_label(f.result)} ({format_points(f.contrast.delta)} points)" for f in same]
        arms = join_words(names)
    most, contrast = f"{100 * max(f.possible for f in same):.1f}", same[0].contrast
    possible = f"{'losses' if same[0].about is About.RETENTION else 'gains'} of up to {most} points"
    return phrase.format(
        arms=arms, possible=possible, most=most, unit=contrast.unit, n=f"{contrast.n_clusters:,}",
        other="retrieval alone" if same[0].about in _BESIDE else "the base", family=f"{contrast.family:,}",
    )  # fmt: skip


def _points_span(findings: Sequence[Finding]) -> str:
    changes = [finding.contrast.delta for finding in findings]
    return " to ".join(dict.fromkeys(map(format_points, (min(changes), max(changes)))))


def _line(view: View, finding: Finding) -> Evidence:
    result, tag = finding.result, _words(view, finding)[0]
    label = quoted(result.question_set) + (
        f" ({format_name(result.model)})" if view.several_models else ""
    )
    return Evidence(arm_label(result), label, tag, _TONES.get(tag, "flat"), f"{sentence(finding)}.")


def sentence(finding: Finding) -> str:
    """Return the numbers of a finding: both accuracies, the difference with its interval and p, and
    what remains possible."""
    contrast, by_seed = finding.contrast, finding.result.by_seed
    span = f"{format_percent(min(by_seed))} to {format_percent(max(by_seed))}"
    seeds = f", {len(by_seed)} seeds ({span})" if len(by_seed) > 1 else ""
    of = " with retrieval alone" if finding.about in _BESIDE else ""
    text = f"{format_percent(finding.before)}{of} → {format_percent(contrast.accuracy)}, {_size(contrast)}{seeds}: "
    text += _difference(finding)
    if control := _without_question(finding):
        text += f" beyond the choices alone ({control})"
    if finding.tag is Tag.TOO_FEW:
        n, effective = contrast.n_clusters, contrast.n_effective
        as_few = "" if effective >= n else f" (they count as {effective:.0f})"
        return f"{text}; {n} {contrast.unit}{as_few} are too few for a test: {fewest_for(contrast.family)} are needed"
    if finding.tag is Tag.ALONE and contrast.p is not None:
        text += f"; {format_p(contrast.p)} in a test by itself, and {contrast.family:,} comparisons were made"
    elif (
        finding.tag not in (Tag.BETTER, Tag.WORSE)
        and contrast.low is not None
        and contrast.high is not None
    ):
        text += f"; changes of {format_points(contrast.low)} to {format_points(contrast.high)} points remain possible"
    return text


def _difference(finding: Finding, *, test: bool = True, short: bool = False) -> str:
    """Return ``+61.8 points (95% interval +57.0 to +66.1; p < 0.001 after Holm)``; `short` has the
    numbers only."""
    contrast, parts = finding.contrast, []
    if contrast.low is not None and contrast.high is not None:
        interval = f"{format_points(contrast.low)} to {format_points(contrast.high)}"
        parts.append(interval if short else f"95% interval {interval}")
    if test and contrast.deciding_p is not None:
        parts.append(format_p(contrast.deciding_p) + (" after Holm" if contrast.family > 1 else ""))
    scope = (
        in_these_models(contrast.scope) if test and finding.tag in (Tag.BETTER, Tag.WORSE) else ""
    )
    inside = f" ({'; '.join(parts)})" if test and parts else f", {parts[0]}" if parts else ""
    return f"{format_points(contrast.delta)}{'' if short else ' points'}{scope}{inside}"


def _perplexities(view: View) -> str:
    """Return the perplexities of held-out texts of all arms, by base model and file."""
    sentences = []
    for label, (base, *others) in view.perplexities():
        changes = [f"{format_finite(item.per_token, 1)} for {format_name(item.arm)} ({perplexity_change(item, base)})"
                   for item in others if item.per_token is not None and item.n_tokens == base.n_tokens]  # fmt: skip
        if changes:
            before = f"{format_finite(base.per_token, 1)} for {format_name(base.arm)}"
            sentences.append(
                f"Perplexity of {label}, without a test: {before}, {join_words(changes)}."
            )
    return " ".join(sentences)


def _outcomes(view: View) -> Iterator[Answer]:
    """Yield the changes of wrong answers, and of answers that no document holds; nothing where
    models wrote none."""
    shown, lines = [r for r in view.headline_results() if r.outcomes], []
    for outcome, words in _OUTCOMES.items():
        for result in shown:
            part = result.outcome(outcome)
            if part is not None and part.to_base is not None and part.to_base.is_significant:
                amount, tone = ("more", "bad") if part.to_base.delta > 0 else ("fewer", "good")
                text = f"{format_percent(part.rate)} of {part.n:,} questions, {format_points(part.to_base.delta)} points to base."
                name = quoted(result.question_set)
                lines.append(Evidence(arm_label(result), name, f"{amount} {words}", tone, text))
    if shown:
        named = [
            f"{line.tag} from {line.arm} on {line.question_set}" for line in lines[:_MOST_ARMS]
        ]
        named += [f"{len(lines) - _MOST_ARMS} more changes"] if len(lines) > _MOST_ARMS else []
        lead = f"Shown: {join_words(named)}."
        if not named:
            lead = "No change in wrong answers, or in answers to questions that no document answers, is shown."
        yield Answer("Does it know what it does not know?", lead, tuple(lines))


def _open(view: View, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what would settle the open questions: documents, seeds, question sets, retrieval."""
    trained = [finding for finding in findings if finding.about in _ROLES]
    same: dict[
        str, dict[str, str]
    ] = {}  # sentence -> the sets of which it is true, with their numbers
    for name in list(dict.fromkeys(finding.result.question_set for finding in trained))[
        :_MOST_SETS
    ]:
        of_set = [
            f for f in trained if f.result.question_set == name and (f.tag is Tag.TOO_FEW or (f.tag is Tag.UNDECIDED
            and (f.contrast.high or 1.0) - (f.contrast.low or -1.0) > 2 * MARGIN))
        ]  # fmt: skip
        if not of_set:
            continue
        most = max(
            (finding.contrast for finding in of_set),
            key=lambda contrast: fewest_for(contrast.family),
        )
        unit, has = most.unit, f"{most.n_clusters:,}"
        if any(finding.tag is Tag.TOO_FEW for finding in of_set):
            text = f"a test needs questions on at least {fewest_for(most.family)} {unit}"
        else:
            text = f"there are too few {unit} to tell a change of {100 * MARGIN:g} points from none"
        same.setdefault(text, {})[quoted(name)] = has
    alone = [finding for finding in trained if finding.tag is Tag.ALONE]
    if alone:
        names = join_words(
            list(dict.fromkeys(quoted(finding.result.question_set) for finding in alone))[
                :_MOST_SETS
            ]
        )
        yield f"On {names}, Holm's correction decides: ask about more documents, train more seeds or compare fewer arms."
    for text, sets in same.items():
        yield f"On {join_words(list(sets))}, {text} (now {join_words(list(dict.fromkeys(sets.values())))})."
    if trained and max(len(finding.result.by_seed) for finding in trained) == 1:
        yield (
            "Each arm was trained once, so intervals and p are about these models: another training would move the numbers too. "
            "A study with 3 seeds or more tells the method from one lucky training."
        )
