"""What went wrong on the way to a report's numbers, and what its data cannot tell, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kinject.report.facts import GivenAway, given_away, missed_contexts
from kinject.report.formatting import (
    View,
    arm_label,
    format_name,
    format_percent,
    format_points,
    join_words,
    quoted,
    unscored_text,
)
from kinject.report.page import Answer, Evidence
from kinject.results import ArmResult, Failure, PromptFormat, Recall
from kinject.stats.comparisons import is_taste
from kinject.terminal import format_count

_MOST_LISTED = 6  # names in one sentence
_LONGEST_WARNING = 400  # characters
_GRAVE = 0.05  # the fraction of questions from which on a doubt is marked
_LOW_MASS = 0.5  # of the probability on the letters
_UNREAD = 0.99  # of the rows
_EVERYWHERE = "all question sets"
_EVERY_ARM = "every arm"


def _cut(result: ArmResult) -> int:
    return result.n_cut


def _unscored(result: ArmResult) -> int:
    return result.n_unscored


def _without_letter(result: ArmResult) -> int:
    if result.written is None:
        return 0
    return round(result.written.unread * result.n_scored)


def _cut_thinking(result: ArmResult) -> int:
    if result.written is None:
        return 0
    return round(result.written.thinking_cut * result.n_scored)


_COUNTED: tuple[tuple[str, Callable[[ArmResult], int], str], ...] = (
    (
        "prompts were cut",
        _cut,
        "did not fit the model's window and lost examples, passages or their beginning",
    ),
    (
        "questions have no score",
        _unscored,
        "have no score and are left out of every number",
    ),
    (
        "answers name no letter",
        _without_letter,
        "name no letter that can be read and count as wrong: the format may have failed, not the "
        "knowledge",
    ),
    (
        "thinking was cut",
        _cut_thinking,
        "never came, because the thinking filled eval.max_new_tokens; raise it",
    ),
)
"""The doubt, on how many questions of a result it falls, and what that means."""


def doubts(view: View) -> Answer:
    """Return what went wrong: trainings cut short, prompts cut, no score, no letter, contexts that
    missed, failed arms. The lead names the arms of each, or the sets where it is every arm's."""
    lines = tuple(_doubts(view))
    arms: dict[str, dict[str, None]] = {}
    for item in lines:
        about = item.arm
        if about == _EVERY_ARM:
            about = item.question_set
        # A dict in place of a set, which would not keep the order.
        arms.setdefault(item.tag, {})[about] = None
    lead = "No sign of it: every prompt fitted the model's window, and every question has a score."
    if arms:
        tags = [f"{tag} ({_listed(list(of_tag))})" for tag, of_tag in arms.items()]
        lead = f"Yes: {join_words(tags)}."
    return Answer("Did anything go wrong on the way?", lead, lines)


def _doubts(view: View) -> Iterator[Evidence]:
    yield from _unfinished_trainings(view)
    yield from _counted(view)
    yield from _unlikely_letters(view)
    yield from map(_given_away_line, given_away(view))
    yield from _guessable(view)
    yield from _tastes(view)
    for item in view.report.unscored:
        arm, name = format_name(item.arm), quoted(item.question_set)
        yield Evidence(arm, name, "a model has no score", "bad", f"{unscored_text(item)}.")
    yield from map(_missed_line, missed_contexts(view))
    yield from map(_failure_line, view.report.failures[:_MOST_LISTED])


def _unfinished_trainings(view: View) -> Iterator[Evidence]:
    """Yield the trainings that read a part of their rows only, were evaluated too early, or
    warned."""
    for (_, arm), training in view.trainings.items():
        name = format_name(arm)
        if training.epochs is not None and training.epochs < _UNREAD:
            text = (
                f"training ended after {format_count(training.steps, 'step')} with "
                f"{format_percent(training.epochs)} of its rows read: raise trainer.max_steps or "
                "num_train_epochs."
            )
            tag = "a training read a part of its rows only"
            yield Evidence(name, _EVERYWHERE, tag, "bad", text)
        if not training.finished:
            text = "finish it, then evaluate again."
            yield Evidence(name, _EVERYWHERE, "a training is not finished", "bad", text)
        for warning in training.warnings[:_MOST_LISTED]:
            text = f"{format_name(warning, _LONGEST_WARNING).removesuffix('.')}."
            yield Evidence(name, _EVERYWHERE, "a training warned", "flat", text)


def _counted(view: View) -> Iterator[Evidence]:
    """Yield each doubt that is counted, for each set with the result that has most of it."""
    for tag, count, text in _COUNTED:
        for name in view.sets():
            results = [r for r in view.set_results if r.question_set == name and count(r)]
            if not results:
                continue
            most = max(results, key=count)
            arms = _listed(list(dict.fromkeys(map(arm_label, results))))
            tone = _tone(count(most), most.n)
            text_of_set = f"up to {count(most):,} of {most.n:,} {text}."
            yield Evidence(arms, quoted(name), tag, tone, text_of_set)


def _unlikely_letters(view: View) -> Iterator[Evidence]:
    """Yield the sets on which an arm gives the letters under half of the probability: a mean, which
    tells of no single question."""
    unlikely = [r for r in view.set_results if r.mass is not None and r.mass < _LOW_MASS]
    for name in view.sets():
        results = [result for result in unlikely if result.question_set == name]
        if not results:
            continue
        least = min(result.mass or 0.0 for result in results)
        arms = _listed(list(dict.fromkeys(map(arm_label, results))))
        text = (
            f"the letters have {format_percent(least)} on average, other texts the rest, so the "
            "format may have failed, not the knowledge. Try the format texts."
        )
        tag = "letters hold under half of the probability"
        yield Evidence(arms, quoted(name), tag, "bad", text)


def _tone(n: int, n_questions: int) -> str:
    return "bad" if n >= _GRAVE * n_questions else "flat"


def _given_away_line(item: GivenAway) -> Evidence:
    text = (
        f"up to {format_percent(max(item.accuracies.values()))} of the right choices are picked "
        f"without the question, where guessing gives {format_percent(item.guessing)}: give each "
        "question wrong choices that are right answers to others."
    )
    arms = _listed(list(item.accuracies))
    return Evidence(arms, quoted(item.question_set), "choices give the answer away", "bad", text)


def _guessable(view: View) -> Iterator[Evidence]:
    """Yield the sets on which a strategy that reads no question beats guessing."""
    for shortcuts in view.report.shortcuts:
        warning = shortcuts.warning().removeprefix(f"{shortcuts.question_set}: ")
        if warning:
            name, tag = quoted(shortcuts.question_set), "choices can be picked without reading"
            yield Evidence(_EVERY_ARM, name, tag, "bad", format_name(warning))


def _tastes(view: View) -> Iterator[Evidence]:
    """Yield the differences to the base that a judge sees and kinject's rule does not."""
    by_arm = {_asked(result, result.arm, result.k): result for result in view.set_results}
    for result in view.set_results:
        contrast = result.to_base
        if contrast is None or not contrast.is_significant:
            continue
        base = by_arm.get(_asked(result, contrast.other, 0))
        if base is None or result.written is None or base.written is None:
            continue
        now, before = result.written.by_rule, base.written.by_rule
        if now is None or before is None or not is_taste(contrast.delta, now - before):
            continue
        # Of two equal arms a judge that accepts 15% of one's wrong answers calls 80% different.
        text = (
            f"{format_points(contrast.delta)} by the judge, {format_points(now - before)} by "
            "kinject's rule: a judge may prefer one arm's style. Read answers of both."
        )
        name = quoted(result.question_set)
        yield Evidence(arm_label(result), name, "only the judge sees the difference", "bad", text)


def _asked(result: ArmResult, arm: str, k: int) -> tuple[str, str, str, PromptFormat, int]:
    """Return the key by which results of two arms in one setting find each other."""
    return result.model, arm, result.question_set, result.prompt_format, k


def _missed_line(recall: Recall) -> Evidence:
    missed = recall.n - recall.n_found
    empty = ""
    if recall.n_empty:
        empty = f"; {format_count(recall.n_empty, 'question')} got none"
    text = (
        f"for {missed:,} of {format_count(recall.n, 'question')} "
        f"({format_percent(missed / recall.n)}) the "
        f"document is not among the {format_count(recall.k, 'passage')} before it{empty}: a fault "
        "of the retriever, not of the models."
    )
    name = format_name(recall.retrieval) or "retrieval"
    tag, tone = "contexts missed their document", _tone(missed, recall.n)
    return Evidence(name, quoted(recall.question_set), tag, tone, text)


def _failure_line(failure: Failure) -> Evidence:
    arm, stage = format_name(failure.arm), format_name(failure.stage)
    seed = "" if failure.seed is None else f" (seed {failure.seed})"
    message, log = format_name(failure.message, 200), format_name(failure.log)
    text = f"{arm}{seed} at {stage} ended with: {message} (log: {log})"
    return Evidence(arm, _EVERYWHERE, "arms failed", "bad", text)


def limitations(view: View) -> Iterator[str]:
    """Yield a sentence for each limitation of the data (seeds, choices), with what to do."""
    n = len(view.report.seeds)
    # One unstable arm among 30: 14.8% false with two seeds, 6.0% with three (docs/figures.md).
    if n == 2:
        yield (
            "Two seeds cannot show that one arm's trainings scatter more than the others': of such "
            "arms one in seven was found to differ where nothing does (simulated). Three seeds "
            "bring it to one in seventeen."
        )
    elif n > 2:
        yield (
            f"{n} seeds: intervals and p hold the variance of documents and seeds, but {n} runs "
            "tell little of rare ones."
        )
    for choice in view.report.choices:
        setting = f"{format_name(choice.key)} {format_name(str(choice.chosen))}"
        arm = format_name(choice.arm)
        if choice.at_edge:
            yield (
                f"{setting} for {arm} was chosen at an end of its grid: a better value may lie "
                "beyond, so widen it."
            )
        # K is a number of passages, no setting of a training.
        if choice.key != "k":
            yield (
                f"{setting} was tuned for {arm}: where other arms take it over, a difference may "
                "be one of tuning."
            )


def _listed(words: list[str]) -> str:
    """Return the first of `words`, and how many more there are."""
    if len(words) <= _MOST_LISTED:
        return join_words(words)
    return join_words([*words[:_MOST_LISTED], f"{len(words) - _MOST_LISTED} more"])
