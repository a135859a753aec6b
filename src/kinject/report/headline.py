"""The report in one sentence, and the doubts about its numbers. Both repeat the verdict's findings and judge nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from kinject.report.formatting import (
    format_count,
    format_finite,
    format_name,
    format_percent,
    format_points,
    join_words,
)
from kinject.report.verdict import AnsweredQuestion, Finding
from kinject.report.view import View, arm_label
from kinject.results import ArmResult

_MOST_SETS = 3  # question sets in the sentence; more are counted
_MOST_ARMS = 4  # arms in a doubt; more are counted
_GRAVE = 0.05  # the fraction of questions from which on a doubt is marked
_CHANGE = "{set} ({before} → {after} correct)"
_LEARNED = {
    "learned": ("learned {}", _CHANGE),
    "not above chance": ("gained on {}, but is not shown to be above guessing", _CHANGE),
    "no learning shown": ("is not shown to have learned {}", _CHANGE),
    "got worse": ("got worse on {}", _CHANGE),
}
_KEPT = {
    "forgot": ("it lost {}", "{points} points on {set}"),
    "no loss shown": ("no loss is shown on {}", "{set}"),
    "gained": ("it gained {}", "{points} points on {set}"),
}
_BESIDE = {
    "retrieval better": ("retrieval alone does better on {}", "{set} ({rag})"),
    "better than retrieval": ("it does better than retrieval alone on {}", "{set} ({rag})"),
    "no difference shown": ("no difference from retrieval alone is shown on {}", "{set} ({rag})"),
    "not tested": ("it was not tested against retrieval alone on {}", "{set} ({rag})"),
}
"""Tag of a finding -> words for the question sets that have it, and for each set. A set with too few documents has its own."""
_DECLINES = "{set} ({before} → {after})"
_DECLINED = {
    "declines more": ("it declines more questions that no document answers, of {}", _DECLINES),
    "declines less": ("it declines fewer questions that no document answers, of {}", _DECLINES),
    "no change in declining shown": ("no change in declining what no document answers is shown on {}", _DECLINES),
}
_TOO_FEW = ("there are too few documents to tell on {}", "{set}")
_COUNTED = (
    (tuple(_LEARNED), {"learned": "learned", "got worse": "got worse"}),
    (tuple(_KEPT), {"forgot": "forgot", "gained": "gained"}),
    (("retrieval better", "better than retrieval", "no difference shown"),
     {"retrieval better": "did worse than retrieval alone", "better than retrieval": "did better than it"}),
)  # fmt: skip
"""Tags of one question's findings, and the words for those that show something."""


def render_headline(view: View, verdict: Sequence[AnsweredQuestion]) -> tuple[str, str]:
    """Return a sentence on learning, forgetting and retrieval, and one on their certainty.

    It is about one arm: the only trained one, or the one that is shown to be the best. Without one, with several base models
    or many question sets, it counts the findings.
    """
    trained = {format_name(arm.name) for model in view.report.models for arm in view.own_arms(model) if arm.trained}
    learned = [finding for finding in verdict[0].findings if finding.arm in trained]
    if not learned:
        return _untrained(view), _sureness(view)
    arms = list(dict.fromkeys(finding.arm for finding in learned))
    if len(view.report.models) > 1 or len({finding.question_set for finding in learned}) > _MOST_SETS:
        return f"The trained arms {_counts(verdict)}.", _sureness(view)
    best, sets = (arms[0], []) if len(arms) == 1 else _best(view)
    if not best:
        return f"None of {len(arms)} trained arms is shown to be the best: they {_counts(verdict)}.", _sureness(view)
    before = f"{best} is the best of {len(arms)} trained arms on {join_words(sets)}: it " if sets else f"{best} "
    return f"{before}{_about(best, view, verdict, learned)}.", _sureness(view)


def _best(view: View) -> tuple[str, list[str]]:
    """Return the trained arm that is shown to be better than all others, and on which learning sets; "" if there is none.

    No other may be shown to be better than it on another set.
    """
    shown = [r for r in _headline_results(view) if r.to_closest is not None and r.to_closest.is_significant]
    arms = {arm_label(result) for result in shown}
    return (arms.pop(), [format_name(result.question_set) for result in shown]) if len(arms) == 1 else ("", [])


def _about(arm: str, view: View, verdict: Sequence[AnsweredQuestion], learned: Sequence[Finding]) -> str:
    """Return the clauses on an arm's learning, forgetting and retrieval."""
    results = {(arm_label(result), format_name(result.question_set)): result for result in _headline_results(view)}
    parts = [_phrases(arm, learned, _LEARNED, view, results)]
    parts += [_phrases(arm, verdict[1].findings, _KEPT, view, results) or _perplexity(view, arm)]
    parts += [_phrases(arm, verdict[2].findings, _BESIDE, view, results) or "retrieval was not tried"]
    parts += [_phrases(arm, of.findings, _DECLINED, view, results) for of in verdict[3:]]
    both = [f for f in verdict[2].findings if f.tag == "both help" and f.arm.split("+rag")[0] == arm]
    parts += [
        f"both together do better than either ({_percent(results.get((f.arm, f.question_set)))})" for f in both[:1]
    ]
    return "; ".join(filter(None, parts))


def _perplexity(view: View, arm: str) -> str:
    """Return the clause on an arm's forgetting without a question set for it: its perplexity of held-out texts."""
    for base, item in ((items[0], item) for _, items in view.perplexities() for item in items):
        if format_name(item.arm) != arm:
            continue
        if item.per_token is not None and base.per_token is not None and item.n_tokens == base.n_tokens:
            before, after = (format_finite(of.per_token, 1) for of in (base, item))
            return f"its perplexity of {format_name(item.name)} went from {before} to {after}"
    return "its forgetting was not measured"


def _headline_results(view: View) -> Iterator[ArmResult]:
    """Yield the results that the verdict judges: each set's first prompt format."""
    return (result for result in view.set_results if result.prompt_format == view.headline(result.question_set))


def _phrases(
    arm: str, findings: Iterable[Finding], words: Mapping[str, tuple[str, str]], view: View,
    results: Mapping[tuple[str, str], ArmResult],
) -> str:  # fmt: skip
    """Return one clause for each tag of the findings on `arm`, with its question sets; "" without findings."""
    sets: dict[tuple[str, str], list[str]] = {}
    for finding in (finding for finding in findings if finding.arm == arm):
        clause = _TOO_FEW if finding.tag.startswith("too few") else words.get(finding.tag)
        result = results.get((arm, finding.question_set))
        if clause is not None and result is not None:
            base = view.result(result.model, view.base(result.model), result.question_set)
            text = clause[1].format(
                set=finding.question_set, before=_percent(base), after=_percent(result),
                rag=_percent(view.retrieval(result.model, result.question_set)),
                points=format_points(abs(finding.change)).lstrip("+"),
            )  # fmt: skip
            sets.setdefault(clause, []).append(text)
    return join_words([clause.format(join_words(texts)) for (clause, _), texts in sets.items()])


def _percent(result: ArmResult | None) -> str:
    return "no score" if result is None else format_percent(result.accuracy)


def _counts(verdict: Sequence[AnsweredQuestion]) -> str:
    """Return how often the trained arms learned, forgot, and did better or worse than retrieval."""
    parts = []
    for (tags, words), answered in zip(_COUNTED, verdict, strict=False):
        counts = Counter(finding.tag for finding in answered.findings if finding.tag in tags)
        if counts:
            changes = join_words([f"{text} in {counts[tag]}" for tag, text in words.items()])
            parts.append(f"{changes} of {counts.total()} comparisons")
    return "; ".join(parts) or "have too few questions or documents to tell"


def _untrained(view: View) -> str:
    """Return the sentence on a report without a trained arm that has a score: the base alone."""
    model = next(iter(view.report.models), "")
    parts = []
    for name in view.sets("", model)[:_MOST_SETS]:
        base, rag = view.result(model, view.base(model), name), view.retrieval(model, name)
        if base is not None:
            beside = "" if rag is None else f", {_percent(rag)} with passages before the question"
            parts.append(
                f"{_percent(base)} of {format_name(name)}{beside} (guessing gives {format_percent(base.chance)})"
            )
    if not parts:
        return "No arm has a score, so there is no result."
    is_trained = any(view.arms[result.model, result.arm].trained for result in view.set_results)
    why = (
        "No question set has the role learning"
        if is_trained and not view.sets("learning")
        else "No trained arm has a score here"
    )
    return f"{why}; the base answers {'; '.join(parts)}."


def _sureness(view: View) -> str:
    """Return the scope of the differences: other trainings, or these models only; "" without a trained arm."""
    trained = [result for result in _headline_results(view) if view.arms[result.model, result.arm].trained]
    if not trained:
        return ""
    most, fewest = (of((len(result.by_seed) for result in trained), default=1) for of in (max, min))
    if most == 1:
        text = "This is about these models: each arm was trained once, and another training may differ"
    else:
        text = f"Each arm was trained {f'{fewest} to {most}' if fewest < most else most} times, with different seeds"
    contrasts = [result.to_base for result in trained if result.to_base is not None]
    corrected = " after correction for all comparisons" if any(c.p_holm is not None for c in contrasts) else ""
    return f"{text}; a difference is named only if p < 0.05{corrected}."


def render_doubts(view: View) -> AnsweredQuestion:
    """Return the doubts: cut prompts or thinking, no score, no letter, contexts that missed, failed arms."""
    findings = [*_cut(view), *_unscored(view), *_unread(view), *_missed(view), *_failed(view)]
    parts = {
        "cut": "prompts were cut",
        "thinking cut": "thinking was cut",
        "no score": "questions have no score",
        "unread": "answers name no letter",
        "missed": "contexts missed their document",
        "failed": "arms failed",
    }
    doubts = [text for tag, text in parts.items() if any(finding.tag == tag for finding in findings)]
    lead = (
        f"Yes: {join_words(doubts)}."
        if doubts
        else "No: every prompt fitted the model's window, and every question has a score."
    )
    return AnsweredQuestion("Did anything go wrong on the way?", lead, tuple(findings))


_OUTCOMES = {
    "answered": (
        "more answers to questions that no document answers",
        "fewer answers to questions that no document answers",
    ),
    "wrong": ("more wrong answers", "fewer wrong answers"),
}


def render_outcomes(view: View) -> tuple[AnsweredQuestion, ...]:
    """Return the changes of wrong answers, and of answers that no document holds; () where models wrote none."""
    headline = [r for r in view.set_results if r.outcomes and r.prompt_format == view.headline(r.question_set)]
    headline = [
        r for r in headline if not view.arms[r.model, r.arm].sweep and (not r.k or r.chosen_k or not view.is_study)
    ]
    if not headline:
        return ()
    findings, leads = [], []
    for outcome, words in _OUTCOMES.items():
        for rises, text in zip((True, False), words, strict=True):
            named = []
            for result in headline:
                part = result.outcome(outcome)
                contrast = None if part is None else part.to_base
                if part is None or contrast is None or not contrast.is_significant or (contrast.delta > 0) != rises:
                    continue
                points, arm, name = format_points(contrast.delta), arm_label(result), format_name(result.question_set)
                named.append(f"{arm} on {name} ({points} points)")
                about = f"{outcome} {format_percent(part.rate)} of {part.n:,} questions, {points} points to base"
                findings.append(
                    Finding(arm, name, text, "bad" if rises else "good", contrast.delta, about, contrast.scope)
                )
            more = f" and {len(named) - _MOST_ARMS} more" if len(named) > _MOST_ARMS else ""
            leads += [f"{text[:1].upper()}{text[1:]}: {', '.join(named[:_MOST_ARMS])}{more}."] if named else []
    lead = (
        " ".join(leads) or "No change in wrong answers, or in answers to questions that no document answers, is shown."
    )
    return (AnsweredQuestion("Does it know what it does not know?", lead, tuple(findings)),)


def _failed(view: View) -> Iterator[Finding]:
    for failure in view.report.failures[:_MOST_ARMS]:
        seed = "" if failure.seed is None else f", seed {failure.seed},"
        text = f"the stage {format_name(failure.stage)}{seed} ended with: {format_name(failure.message, 200)}"
        yield Finding(format_name(failure.arm), "all question sets", "failed", "bad", 0.0, text)


def _tone(fraction: float) -> str:
    return "bad" if fraction >= _GRAVE else "flat"


def _doubted(view: View, tag: str, count: Callable[[ArmResult], int], text: str) -> Iterator[Finding]:
    """Yield one finding on the results of which `count` is not 0: the most of each question set."""
    results = [result for result in view.set_results if count(result)]
    if results:
        most = {name: max((r for r in results if r.question_set == name), key=count) for name in view.sets()
                if any(r.question_set == name for r in results)}  # fmt: skip
        numbers = join_words([f"{count(result):,} of {result.n:,}" for result in most.values()])
        arms = list(dict.fromkeys(map(arm_label, results)))
        arms = arms if len(arms) <= _MOST_ARMS else [*arms[:_MOST_ARMS], f"{len(arms) - _MOST_ARMS} more"]
        sets = join_words([format_name(name) for name in most])
        tone = _tone(max(count(result) / result.n for result in most.values()))
        yield Finding(join_words(arms), sets, tag, tone, 0.0, f"up to {numbers} {text}")


def _cut(view: View) -> Iterator[Finding]:
    yield from _doubted(
        view, "cut", lambda result: result.n_cut,
        "prompts did not fit the model's window: they lost examples, then passages, then their beginning. Uncut, the model "
        "might answer more of them.",
    )  # fmt: skip


def _unscored(view: View) -> Iterator[Finding]:
    yield from _doubted(
        view, "no score", lambda result: result.n_unscored, "questions have no score and are left out of every number."
    )
    for item in view.report.unscored:
        arm = format_name(item.arm) + (f"+rag, K = {item.k}" if item.k else "")
        seed = "" if item.seed is None else f" (seed {item.seed})"
        text = f"none of {item.n:,} questions has a score{seed}: the model diverged."
        yield Finding(arm, format_name(item.question_set), "no score", "bad", 0.0, text)


def _unread(view: View) -> Iterator[Finding]:
    yield from _doubted(
        view, "unread", lambda result: _n_written(result, "unread"),
        "written answers name no letter of an option that can be read, and count as wrong: the format may have failed, not the "
        "knowledge.",
    )  # fmt: skip
    yield from _doubted(
        view, "thinking cut", lambda result: _n_written(result, "thinking_cut"),
        "answers were begun by cutting the model's thinking at its limit. With a higher limit it might answer more of them.",
    )  # fmt: skip


def _n_written(result: ArmResult, part: Literal["unread", "thinking_cut"]) -> int:
    """Return the number of written answers of a kind (the mean over seeds, at least 1 if there are any)."""
    fraction = getattr(result.written, part, 0.0)
    return max(1, round(fraction * (result.n - result.n_unscored))) if fraction else 0


def _missed(view: View) -> Iterator[Finding]:
    for recall in view.report.recalls:
        missed = recall.n - recall.n_found
        shown = {
            result.k for result in view.set_results if result.question_set == recall.question_set and result.chosen_k
        }
        if missed and (recall.k in shown or not shown):
            text = (
                f"for {missed:,} of {recall.n:,} questions ({format_percent(missed / recall.n)}) the document is not among the "
                f"{format_count(recall.k, 'passage')} before it: a fault of the retriever, not of the models."
            )
            yield Finding("retrieval", format_name(recall.question_set), "missed", _tone(missed / recall.n), 0.0, text)
