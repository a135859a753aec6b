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
_COUNTED: tuple[tuple[str, Callable[[ArmResult], float], str], ...] = (
    ("prompts were cut", lambda r: r.n_cut, "did not fit the model's window and lost examples, passages or their beginning"),
    ("questions have no score", lambda r: r.n_unscored, "have no score and are left out of every number"),
    ("answers name no letter", lambda r: round(r.written.unread * r.n) if r.written else 0,
     "name no letter that can be read and count as wrong: the format may have failed, not the knowledge"),
    ("thinking was cut", lambda r: round(r.written.thinking_cut * r.n) if r.written else 0,
     "never came, because the thinking filled eval.max_new_tokens; raise it"),
    ("letters hold under half of the probability", lambda r: r.n if r.mass is not None and r.mass < _LOW_MASS else 0,
     "would go on with something else, so the format may have failed, not the knowledge. Try the format texts"),
)  # fmt: skip


def doubts(view: View) -> Answer:
    """Return what went wrong: trainings cut short, prompts cut, no score, no letter, contexts that missed, failed arms."""
    lines = tuple(_doubts(view))
    arms: dict[str, dict[str, None]] = {}
    for item in lines:
        arms.setdefault(item.tag, {})[item.arm] = None
    lead = f"Yes: {join_words([f'{tag} ({_listed(list(of_tag))})' for tag, of_tag in arms.items()])}."
    if not arms:
        lead = "No sign of it: every prompt fitted the model's window, and every question has a score."
    return Answer("Did anything go wrong on the way?", lead, lines)


def _doubts(view: View) -> Iterator[Evidence]:
    """Yield each; of those that are counted, for each set the result that has most of it."""
    for (_, arm), training in view.trainings.items():
        if training.epochs is not None and training.epochs < _UNREAD:
            text = (
                f"training ended after {training.steps:,} steps with {format_percent(training.epochs)} of its rows read: raise "
                "trainer.max_steps or num_train_epochs."
            )
            yield Evidence(format_name(arm), _EVERYWHERE, "a training read a part of its rows only", "bad", text)
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
                yield Evidence(arms, quoted(name), tag, tone, f"up to {count(most):,} of {most.n:,} {text}.")
    for name in view.sets():
        results = [r for r in view.set_results if r.question_set == name and r.control is not None]
        given_away = [r for r in results if r.control is not None and r.control.low > r.chance + MARGIN]
        if given_away:
            most = max(given_away, key=lambda r: r.control.accuracy if r.control else 0.0)
            rate = most.control.accuracy if most.control else 0.0
            text = (
                f"up to {format_percent(rate)} of the right choices are picked without the question, where guessing gives "
                f"{format_percent(most.chance)}: give each question wrong choices that are right answers to others."
            )
            arms = _listed(list(dict.fromkeys(map(arm_label, given_away))))
            yield Evidence(arms, quoted(name), "choices give the answer away", "bad", text)
    for item in view.report.unscored:
        text = f"{unscored_text(item)}."
        yield Evidence(format_name(item.arm), quoted(item.question_set), "a model diverged", "bad", text)
    for recall in view.report.recalls:
        missed = recall.n - recall.n_found
        chosen = {r.k for r in view.set_results if r.question_set == recall.question_set and r.chosen_k}
        if missed and (recall.k in chosen or not chosen):
            empty = f"; {format_count(recall.n_empty, 'question')} got none" if recall.n_empty else ""
            text = (
                f"for {missed:,} of {recall.n:,} questions ({format_percent(missed / recall.n)}) the document is not among the "
                f"{format_count(recall.k, 'passage')} before it{empty}: a fault of the retriever, not of the models."
            )
            tone = "bad" if missed >= _GRAVE * recall.n else "flat"
            name = format_name(recall.retrieval) or "retrieval"
            yield Evidence(name, quoted(recall.question_set), "contexts missed their document", tone, text)
    for failure in view.report.failures[:_MOST_LISTED]:
        seed = "" if failure.seed is None else f" (seed {failure.seed})"
        run = f"{format_name(failure.arm)}{seed} at {format_name(failure.stage)}"
        text = f"{run} ended with: {format_name(failure.message, 200)} (log: {format_name(failure.log)})"
        yield Evidence(format_name(failure.arm), _EVERYWHERE, "arms failed", "bad", text)


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
