"""What went wrong on the way, and what the data cannot tell: prompts, scores, trainings, retrieval, seeds, choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kinject.report.formatting import format_count, format_name, format_percent, join_words, quoted
from kinject.report.page import Answer, Evidence
from kinject.report.view import View, arm_label, unscored_text
from kinject.results import ArmResult, Failure

_MOST_LISTED = 6  # names in one sentence
_GRAVE = 0.05  # the fraction of questions from which on a doubt is marked
_LOW_MASS = 0.5  # of the probability on the letters
_UNREAD = 0.99  # of the rows


def doubts(view: View) -> Answer:
    """Return what went wrong: trainings cut short, prompts cut, no score, no letter, contexts that missed, failed arms."""
    lines = [*_short_trainings(view), *_counted(view), *_off_format(view), *_missed(view), *_failed(view)]
    arms: dict[str, dict[str, None]] = {}
    for item in lines:
        arms.setdefault(item.tag, {})[item.arm] = None
    lead = f"Yes: {join_words([f'{tag} ({_listed(list(of_tag))})' for tag, of_tag in arms.items()])}."
    if not arms:
        lead = "No sign of it: every prompt fitted the model's window, and every question has a score."
    return Answer("Did anything go wrong on the way?", lead, tuple(lines))


def _short_trainings(view: View) -> Iterator[Evidence]:
    for (_, arm), training in view.trainings.items():
        if training.epochs is not None and training.epochs < _UNREAD:
            text = (
                f"training ended after {training.steps:,} steps with {format_percent(training.epochs)} of its rows read: raise "
                "trainer.max_steps or num_train_epochs."
            )
            yield Evidence(
                format_name(arm), "all question sets", "a training read a part of its rows only", "bad", text
            )
        if not training.finished:
            text = "finish it, then evaluate again."
            yield Evidence(format_name(arm), "all question sets", "a training is not finished", "bad", text)


_COUNTED: tuple[tuple[str, Callable[[ArmResult], float], str], ...] = (
    ("prompts were cut", lambda r: r.n_cut, "did not fit the model's window and lost examples, passages or their beginning"),
    ("questions have no score", lambda r: r.n_unscored, "have no score and are left out of every number"),
    ("answers name no letter", lambda r: _written(r, r.written.unread if r.written else 0.0),
     "name no letter that can be read and count as wrong: the format may have failed, not the knowledge"),
    ("thinking was cut", lambda r: _written(r, r.written.thinking_cut if r.written else 0.0),
     "were begun by cutting the model's thinking at its limit; raise it"),
)  # fmt: skip


def _written(result: ArmResult, fraction: float) -> int:
    return max(1, round(fraction * (result.n - result.n_unscored))) if fraction else 0


def _counted(view: View) -> Iterator[Evidence]:
    """Yield, for each doubt and set, the result that has most of it."""
    for tag, count, text in _COUNTED:
        for name in view.sets():
            results = [r for r in view.set_results if r.question_set == name and count(r)]
            if results:
                most = max(results, key=count)
                arms = list(dict.fromkeys(map(arm_label, results)))
                tone = "bad" if count(most) >= _GRAVE * most.n else "flat"
                yield Evidence(_listed(arms), quoted(name), tag, tone, f"up to {count(most):,} of {most.n:,} {text}.")
    for item in view.report.unscored:
        yield Evidence(
            format_name(item.arm), quoted(item.question_set), "a model diverged", "bad", f"{unscored_text(item)}."
        )


def _off_format(view: View) -> Iterator[Evidence]:
    for name in view.sets():
        low = [r for r in view.set_results if r.question_set == name and r.mass is not None and r.mass < _LOW_MASS]
        if low:
            least = min(low, key=lambda result: result.mass or 0.0)
            text = (
                f"the letters hold only {format_percent(least.mass or 0.0)} of the probability: the model would go on with "
                "something else, so the format may have failed, not the knowledge. Try the format texts."
            )
            arms = _listed(list(dict.fromkeys(map(arm_label, low))))
            yield Evidence(arms, quoted(name), "letters hold under half of the probability", "bad", text)


def _missed(view: View) -> Iterator[Evidence]:
    for recall in view.report.recalls:
        missed = recall.n - recall.n_found
        chosen = {r.k for r in view.set_results if r.question_set == recall.question_set and r.chosen_k}
        if missed and (recall.k in chosen or not chosen):
            text = (
                f"for {missed:,} of {recall.n:,} questions ({format_percent(missed / recall.n)}) the document is not among the "
                f"{format_count(recall.k, 'passage')} before it: a fault of the retriever, not of the models."
            )
            tone = "bad" if missed >= _GRAVE * recall.n else "flat"
            yield Evidence("retrieval", quoted(recall.question_set), "contexts missed their document", tone, text)


def _failed(view: View) -> Iterator[Evidence]:
    for failure in view.report.failures[:_MOST_LISTED]:
        text = f"{failed_run(view, failure)} ended with: {format_name(failure.message, 200)}"
        yield Evidence(format_name(failure.arm), "all question sets", "arms failed", "bad", text)


def failed_run(view: View, failure: Failure) -> str:
    """Return ``ft-syn (seed 2) at train``."""
    of = f"{format_name(failure.model)}, " if view.several_models else ""
    seed = "" if failure.seed is None else f" (seed {failure.seed})"
    return f"{of}{format_name(failure.arm)}{seed} at {format_name(failure.stage)}"


def limitations(view: View) -> tuple[str, ...]:
    """Return one sentence for each limitation of the data, with what to do about it."""
    return (*_seeds(view), *_clusters(view), *_no_room(view), *_choices(view))


def _seeds(view: View) -> Iterator[str]:
    n = len(view.report.seeds)
    if n < 2:
        yield (
            "One training of each arm: intervals and p are about these models on other questions, not about another training, "
            "which would move the numbers too. A study trains several seeds."
        )
    elif n == 2:
        yield (
            "Two seeds cannot show that one arm's trainings scatter more than the others': of such arms one in six was found to "
            "differ where nothing does (simulated). Three seeds bring it to one in twenty."
        )
    else:
        yield f"{n} seeds: intervals and p hold the variance of documents and seeds, but {n} runs tell little of rare ones."
    short = {arm_label(r): len(r.by_seed) for r in view.set_results
             if view.arms[r.model, r.arm].trained and len(r.by_seed) < n}  # fmt: skip
    if short:
        yield f"Fewer seeds than {n}: {_listed([f'{arm} ({count})' for arm, count in short.items()])}."


def _clusters(view: View) -> Iterator[str]:
    """Yield the question sets of which some documents have most of the questions, so that documents count as fewer."""
    parts = []
    for name in view.sets():
        first = view.first(name)
        if first.n_documents and first.n_effective and first.n_effective < 0.8 * first.n_documents:
            parts.append(f"{quoted(name)} {first.n_documents:,}, which count as {first.n_effective:.0f}")
    if parts:
        yield (
            f"Some documents have most of the questions, so that the documents count as fewer: {join_words(parts)}. Ask as many "
            "questions of each document."
        )


def _no_room(view: View) -> Iterator[str]:
    for model in view.report.models:
        for name in view.sets("retention", model):
            base = view.result(model, view.base(model), name)
            if base is not None and base.low <= base.chance:
                yield (
                    f"{quoted(name)}: the base is not above guessing ({format_percent(base.accuracy)}), so forgetting could not "
                    "show. Choose questions that it can answer."
                )


def _choices(view: View) -> Iterator[str]:
    """Yield choices at an end of their grid, and taken over by other arms."""
    for choice in view.report.choices:
        setting = f"{format_name(choice.key)} {format_name(str(choice.chosen))}"
        arm = format_name(choice.arm)
        if choice.at_edge:
            yield f"{setting} for {arm} was chosen at an end of its grid: a better value may lie beyond, so widen it."
        if choice.inherited_by:
            heirs = [format_name(name) for name in choice.inherited_by]
            yield f"{setting} was tuned for {arm} and taken over by {_listed(heirs)}: a difference may be one of tuning."


def _listed(words: list[str]) -> str:
    more = [f"{len(words) - _MOST_LISTED} more"] if len(words) > _MOST_LISTED else []
    return join_words([*words[:_MOST_LISTED], *more])
