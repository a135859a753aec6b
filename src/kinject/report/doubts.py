"""What went wrong on the way to a report's numbers, and what its data cannot tell, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kinject.report.formatting import (
    View,
    arm_label,
    format_count,
    format_name,
    format_percent,
    join_words,
    quoted,
    unscored_text,
)
from kinject.report.page import Answer, Evidence
from kinject.results import MARGIN, ArmResult

_MOST_LISTED = 6  # names in one sentence
_GRAVE = 0.05  # the fraction of questions from which on a doubt is marked
_LOW_MASS = 0.5  # of the probability on the letters
_UNREAD = 0.99  # of the rows
_EVERYWHERE = "all question sets"


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


def _with_unlikely_letters(result: ArmResult) -> int:
    if result.mass is None or result.mass >= _LOW_MASS:
        return 0
    return result.n_scored


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
    (
        "letters hold under half of the probability",
        _with_unlikely_letters,
        "would go on with something else, so the format may have failed, not the knowledge. Try "
        "the format texts",
    ),
)
"""The doubt, on how many questions of a result it falls, and what that means."""


def doubts(view: View) -> Answer:
    """Return what went wrong: trainings cut short, prompts cut, no score, no letter, contexts that
    missed, failed arms."""
    lines = tuple(_doubts(view))
    arms: dict[str, dict[str, None]] = {}
    for item in lines:
        arms.setdefault(item.tag, {})[item.arm] = None
    lead = (
        f"Yes: {join_words([f'{tag} ({_listed(list(of_tag))})' for tag, of_tag in arms.items()])}."
    )
    if not arms:
        lead = (
            "No sign of it: every prompt fitted the model's window, and every question has a score."
        )
    return Answer("Did anything go wrong on the way?", lead, lines)


def _doubts(view: View) -> Iterator[Evidence]:
    """Yield each; of those that are counted, for each set the result that has most of it."""
    for (_, arm), training in view.trainings.items():
        if training.epochs is not None and training.epochs < _UNREAD:
            text = (
                f"training ended after {training.steps:,} steps with {format_percent(training.epochs)} of its rows read: raise "
                "trainer.max_steps or num_train_epochs."
            )
            yield Evidence(
                format_name(arm),
                _EVERYWHERE,
                "a training read a part of its rows only",
                "bad",
                text,
            )
        if not training.finished:
            text = "finish it, then evaluate again."
            yield Evidence(format_name(arm), _EVERYWHERE, "a training is not finished", "bad", text)
    for tag, count, text in _COUNTED:
        for name in view.sets():
            results = [r for r in view.set_results if r.question_set == name and count(r)]
            if results:
                most = max(results, key=count)
                arms = _listed(list(dict.fromkeys(map(arm_label, results))))
                tone = "bad" if count(most) >= _GRAVE * most.n else "flat"
                yield Evidence(
                    arms, quoted(name), tag, tone, f"up to {count(most):,} of {most.n:,} {text}."
                )
    yield from _given_away(view)
    for shortcuts in view.report.shortcuts:
        if warning := shortcuts.warning():
            name = quoted(shortcuts.question_set)
            yield Evidence(
                "the set",
                name,
                "choices can be picked without reading",
                "bad",
                format_name(warning),
            )
    for item in view.report.unscored:
        text = f"{unscored_text(item)}."
        yield Evidence(
            format_name(item.arm), quoted(item.question_set), "a model has no score", "bad", text
        )
    for recall in view.report.recalls:
        missed = recall.n - recall.n_found
        chosen = {
            r.k for r in view.set_results if r.question_set == recall.question_set and r.chosen_k
        }
        if missed and (recall.k in chosen or not chosen):
            empty = (
                f"; {format_count(recall.n_empty, 'question')} got none" if recall.n_empty else ""
            )
            text = (
                f"for {missed:,} of {recall.n:,} questions ({format_percent(missed / recall.n)}) the document is not among the "
                f"{format_count(recall.k, 'passage')} before it{empty}: a fault of the retriever, not of the models."
            )
            tone = "bad" if missed >= _GRAVE * recall.n else "flat"
            name = format_name(recall.retrieval) or "retrieval"
            yield Evidence(
                name, quoted(recall.question_set), "contexts missed their document", tone, text
            )
    for failure in view.report.failures[:_MOST_LISTED]:
        seed = "" if failure.seed is None else f" (seed {failure.seed})"
        run = f"{format_name(failure.arm)}{seed} at {format_name(failure.stage)}"
        text = f"{run} ended with: {format_name(failure.message, 200)} (log: {format_name(failure.log)})"
        yield Evidence(format_name(failure.arm), _EVERYWHERE, "arms failed", "bad", text)


def _given_away(view: View) -> Iterator[Evidence]:
    """Yield each set whose right choices are picked without the question more often than by
    guessing."""
    for name in view.sets():
        rates: dict[str, float] = {}
        chance = view.first(name).chance
        for result in view.set_results:
            control = result.control
            if (
                result.question_set == name
                and control is not None
                and control.low > chance + MARGIN
            ):
                rates[arm_label(result)] = control.accuracy
        if rates:
            text = (
                f"up to {format_percent(max(rates.values()))} of the right choices are picked without the "
                f"question, where guessing gives {format_percent(chance)}: give each question wrong choices "
                "that are right answers to others."
            )
            arms = _listed(list(rates))
            yield Evidence(arms, quoted(name), "choices give the answer away", "bad", text)


def limitations(view: View) -> Iterator[str]:
    """Yield one sentence for each limitation of the data, with what to do about it: seeds, choices."""
    n = len(view.report.seeds)
    if n == 2:
        yield (
            "Two seeds cannot show that one arm's trainings scatter more than the others': of such arms one in six was found to "
            "differ where nothing does (simulated). Three seeds bring it to one in twenty."
        )
    elif n > 2:
        yield f"{n} seeds: intervals and p hold the variance of documents and seeds, but {n} runs tell little of rare ones."
    for choice in view.report.choices:
        setting = f"{format_name(choice.key)} {format_name(str(choice.chosen))}"
        arm = format_name(choice.arm)
        if choice.at_edge:
            yield f"{setting} for {arm} was chosen at an end of its grid: a better value may lie beyond, so widen it."
        if choice.key != "k":
            yield f"{setting} was tuned for {arm}: where other arms take it over, a difference may be one of tuning."


def _listed(words: list[str]) -> str:
    more = [f"{len(words) - _MOST_LISTED} more"] if len(words) > _MOST_LISTED else []
    return join_words([*words[:_MOST_LISTED], *more])
