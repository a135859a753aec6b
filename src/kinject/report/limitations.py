"""The limitations of the data in sentences: seeds, documents, comparisons, choices, results that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kinject.report.formatting import format_count, format_name, format_percent, format_prompt, join_words
from kinject.report.view import View, arm_label, unscored_text
from kinject.results import FEWEST, ArmResult, Choice, Failure, fewest_for

_MOST_LISTED = 6  # names in one sentence


def render_limitations(view: View) -> tuple[str, ...]:
    """Return one sentence for each limitation of the data."""
    return (
        *_seeds(view), *_clusters(view), *_families(view), *_no_room(view), *_coverage(view),
        *_missing(view), *_edges(view), *_tuned(view), *_context(view), *_other_format_disagrees(view),
    )  # fmt: skip


def _seeds(view: View) -> Iterator[str]:
    n = len(view.report.seeds)
    if n < 2:
        yield (
            "One seed: each arm was trained once. Intervals and p speak of these models on other questions, not of another "
            "training run, which would move the numbers too."
        )
    else:
        yield (
            f"{n} seeds: intervals and p hold the variance of documents and of seeds, but {n} runs say little of rare ones."
        )
    short = {
        arm_label(s): len(s.by_seed)
        for s in view.set_results
        if view.arms[s.model, s.arm].trained and len(s.by_seed) < n
    }
    if short:
        named = [f"{format_name(arm)} ({count})" for arm, count in short.items()]
        yield f"Fewer seeds than the study's {n}: {_listed(named)}."


def range_text(values: Sequence[float], render: Callable[[float], str]) -> str:
    """Return ``1.0 to 2.5``, the least and the largest value, or one text if both look alike."""
    return " to ".join(dict.fromkeys(map(render, (min(values), max(values)))))


def _clusters(view: View) -> Iterator[str]:
    """Yield the effective documents of the question sets of which some have most of the questions."""
    parts = []
    for name in view.sets():
        result = view.first(name)
        if result.n_documents and result.n_effective and result.n_effective < 0.8 * result.n_documents:
            parts.append(f"{format_name(name)} {result.n_documents:,}, which count as {result.n_effective:.0f}")
    if parts:
        yield f"Some documents have most of the questions, so that the documents count as fewer: {join_words(parts)}."


def _families(view: View) -> Iterator[str]:
    """Yield the question sets whose documents are too few for the number of comparisons: no p could become small enough."""
    for name in view.sets():
        contrasts = [r.to_base for r in view.set_results if r.question_set == name and r.to_base is not None]
        few = [c for c in contrasts if FEWEST <= c.n_effective < fewest_for(c.family)]
        if few:
            most = max(few, key=lambda contrast: contrast.family)
            yield (
                f"Too many comparisons for so few {most.unit}: {format_name(name)} has {most.n_effective:.0f}, and "
                f"{fewest_for(most.family)} are needed before a p corrected for {most.family:,} can fall below 0.05."
            )


def _tuned(view: View) -> Iterator[str]:
    """Yield the effects of the chosen values on comparisons: models that made the choice, arms that took the value over."""
    for choice in view.report.choices:
        setting = f"{format_name(choice.key)} {format_name(str(choice.chosen))}"
        arm = f"{format_name(choice.arm)}{f' ({format_name(choice.model)})' if view.several_models else ''}"
        if choice.reported_seeds:
            seeds = join_words([str(seed) for seed in choice.reported_seeds])
            yield (
                f"Optimism: {setting} was chosen because seed {seeds} of {arm} did best with it on validation questions, and "
                f"that very training is reported too; expect a little less of other seeds.{_by_seed(view, choice)}"
            )
        if choice.inherited_by:
            heirs = [name for name in choice.inherited_by if not view.arms[choice.model, name].sweep]
            swept = len(choice.inherited_by) - len(heirs)
            points = [format_count(swept, "point") + " of sweeps"] if swept else []
            yield (
                f"{setting} was tuned for {arm} only and taken over by {_listed([*map(format_name, heirs), *points])}: a "
                f"difference to {format_name(choice.arm)} may be one of tuning."
            )


def _by_seed(view: View, choice: Choice) -> str:
    """Return the accuracy of the seeds that made the choice and of the others, "" where they cannot be told apart."""
    first = choice.question_set.split(", ")[0]
    result = view.result(choice.model, choice.arm, first) if first in view.sets() else None
    seeds = view.report.seeds
    if result is None or len(result.by_seed) != len(seeds) or set(choice.reported_seeds) >= set(seeds):
        return ""
    pairs = list(zip(seeds, result.by_seed, strict=True))
    made = [value for seed, value in pairs if seed in choice.reported_seeds]
    others = [value for seed, value in pairs if seed not in choice.reported_seeds]
    accuracies = (format_percent(sum(values) / len(values)) for values in (made, others))
    return " On {}: {}, the other seeds {}.".format(format_name(first), *accuracies)


def _no_room(view: View) -> Iterator[str]:
    for model in view.report.models:
        for name in view.sets("retention", model):
            base = view.result(model, view.base(model), name)
            if base is not None and base.low <= base.chance:
                yield (
                    f"{view.set_label(name, view.headline(name), model)}: the base is not above chance "
                    f"({format_percent(base.accuracy)}), so forgetting could not show."
                )


def _coverage(view: View) -> Iterator[str]:
    unread: dict[tuple[int, int, str], list[str]] = {}
    for bin in view.report.exposures:
        if bin.high <= 1 and not view.arms[bin.model, bin.arm].sweep:
            total = sum(
                other.n for other in view.report.exposures
                if (other.model, other.arm, other.question_set) == (bin.model, bin.arm, bin.question_set)
            )  # fmt: skip
            arm = f"{format_name(bin.arm)} ({format_name(bin.model)})" if view.several_models else format_name(bin.arm)
            unread.setdefault((bin.n, total, bin.question_set), []).append(arm)
    for (n, total, name), arms in unread.items():
        yield (
            f"Coverage: {_listed(arms)} never read a whole text of the documents behind {n:,} of {total:,} answers on "
            f"{format_name(name)}."
        )
    results = [view.result(arm.model, arm.name, name) for arm in view.report.arms for name in view.sets("", arm.model)]
    if None in results:
        yield f"Coverage: {results.count(None):,} of {len(results):,} results (arm by question set) are missing."


def _missing(view: View) -> Iterator[str]:
    if view.report.failures:
        yield f"Failed: {_listed([failed_run(view, failure) for failure in view.report.failures])}."
    yield from (f"{unscored_text(item)}." for item in view.report.unscored[:_MOST_LISTED])


def failed_run(view: View, failure: Failure) -> str:
    """Return ``ft-syn (seed 2) at train``."""
    of = f"{format_name(failure.model)}, " if view.several_models else ""
    seed = "" if failure.seed is None else f" (seed {failure.seed})"
    return f"{of}{format_name(failure.arm)}{seed} at {format_name(failure.stage)}"


def _edges(view: View) -> Iterator[str]:
    edges = [f"{format_name(c.key)} {format_name(str(c.chosen))} for {format_name(c.arm)}"
             for c in view.report.choices if c.at_edge]  # fmt: skip
    if edges:
        yield f"Chosen at an end of its grid, so a better value may lie beyond: {_listed(edges)}."


def _context(view: View) -> Iterator[str]:
    with_context = {(s.model, s.question_set) for s in view.set_results if s.k}
    chosen = {(s.model, s.question_set) for s in view.set_results if s.chosen_k}
    without = sorted({name for _, name in with_context - chosen})
    if without:
        yield (
            f"No K was chosen for {_listed(list(map(format_name, without)))}: no validation questions. The table by K shows all."
        )
    untested = [s for s in view.set_results if _is_beside(view, s) and s.to_rag is None]
    if untested and any(s.k for s in view.set_results):
        names = _listed(list(dict.fromkeys(map(arm_label, untested))))
        yield f"Arms that are compared with retrieval without a paired test: {names}."


def _is_beside(view: View, result: ArmResult) -> bool:
    arm = view.arms[result.model, result.arm]
    beside = view.chosen(result.model, view.base(result.model), result.question_set) is not None
    return arm.trained and not arm.sweep and beside and result.role == "learning" and (not result.k or result.chosen_k)


def _other_format_disagrees(view: View) -> Iterator[str]:
    """Yield a sentence for each result whose change is significantly the opposite in another prompt format."""
    for result in view.set_results:
        head = view.headline(result.question_set)
        if result.prompt_format == head or result.to_base is None or result.k:
            continue
        first = view.result(result.model, result.arm, result.question_set)
        if first is None or first.to_base is None or view.arms[result.model, result.arm].sweep:
            continue
        both = result.to_base.is_significant and first.to_base.is_significant
        if both and result.to_base.delta * first.to_base.delta < 0:
            label = view.set_label(result.question_set, result.prompt_format, result.model)
            yield (
                f"{arm_label(result)} on {label} moved the other way than with {format_prompt(head)}: the finding depends "
                "on the prompt format."
            )


def _listed(words: list[str]) -> str:
    if len(words) <= _MOST_LISTED:
        return join_words(words)
    return join_words([*words[:_MOST_LISTED], f"{len(words) - _MOST_LISTED} more"])
