"""What a study's data cannot tell: seeds, the smallest difference they would show, what is missing, edges of grids."""

from __future__ import annotations

from collections.abc import Iterator

from kinject.report.formatting import format_asked, format_name, format_percent, is_significant, join_words
from kinject.report.study_view import View, arm_label
from kinject.results import Failure, Score

_MOST_NAMED = 6


def render_limits(view: View) -> tuple[str, ...]:
    """Return one sentence for each thing that the study leaves open, every number of it from the result."""
    return (
        *_seeds(view), *_smallest(view), *_no_room(view), *_coverage(view), *_missing(view), *_edges(view),
        *_context(view), *_other_ways(view),
    )  # fmt: skip


def _seeds(view: View) -> Iterator[str]:
    n = len(view.result.seeds)
    if n < 2:
        yield (
            "One seed: each arm was trained once. The intervals speak of other questions, not of another training run, which "
            "would move the numbers too."
        )
    else:
        yield (
            f"{n} seeds: the intervals cover other documents and other seeds, but {n} runs say little of rare ones. p speaks "
            "of the models that were trained here."
        )
    short = {
        arm_label(s): len(s.by_seed) for s in view.whole if view.arms[s.model, s.arm].trained and len(s.by_seed) < n
    }
    if short:
        named = [f"{format_name(arm)} ({count})" for arm, count in short.items()]
        yield f"Fewer seeds than the study's {n}: {_some(named)}."


def _smallest(view: View) -> Iterator[str]:
    parts = []
    for name in view.sets():
        shown = [score for model in view.result.models for score in view.shown(model, name)]
        found = [s.to_base.smallest for s in shown if s.to_base is not None and s.to_base.smallest is not None]
        if found:
            ends = dict.fromkeys(f"{100 * value:.1f}" for value in (min(found), max(found)))
            parts.append(f"{format_name(name)} {' to '.join(ends)} ({max(score.n for score in shown):,} questions)")
    if parts:
        yield (
            "Smallest difference from base, in points, that the questions show with 80% power (by arm; smaller ones are "
            f"likely missed): {join_words(parts)}."
        )


def _no_room(view: View) -> Iterator[str]:
    for model in view.result.models:
        for name in view.sets("retention", model):
            base = view.score(model, view.base(model), name)
            if base is not None and base.low <= base.chance:
                yield (
                    f"{view.set_label(name, view.headline(name), model)}: the base is not above chance "
                    f"({format_percent(base.accuracy)}), so forgetting could not show."
                )


def _coverage(view: View) -> Iterator[str]:
    unread: dict[tuple[int, int, str], list[str]] = {}
    for bin in view.result.exposures:
        if bin.high <= 1 and not view.arms[bin.model, bin.arm].curve:
            total = sum(
                own.n for own in view.result.exposures
                if (own.model, own.arm, own.question_set) == (bin.model, bin.arm, bin.question_set)
            )  # fmt: skip
            arm = f"{format_name(bin.arm)} ({format_name(bin.model)})" if view.several_models else format_name(bin.arm)
            unread.setdefault((bin.n, total, bin.question_set), []).append(arm)
    for (n, total, name), arms in unread.items():
        yield (
            f"Coverage: {_some(arms)} never read a whole text of the documents behind {n:,} of {total:,} answers on "
            f"{format_name(name)}."
        )
    planned, found = 0, 0
    for info in view.result.arms:
        sets = view.sets("", info.model)
        planned += len(sets)
        found += sum(view.score(info.model, info.name, name) is not None for name in sets)
    if found < planned:
        yield f"Coverage: {planned - found:,} of {planned:,} results (arm by question set) are missing."


def _missing(view: View) -> Iterator[str]:
    if view.result.failures:
        yield f"Failed: {_some([failed_run(view, failure) for failure in view.result.failures])}."


def failed_run(view: View, failure: Failure) -> str:
    """Return ``ft-syn (seed 2) at train``."""
    of = f"{format_name(failure.model)}, " if view.several_models else ""
    seed = "" if failure.seed is None else f" (seed {failure.seed})"
    return f"{of}{format_name(failure.arm)}{seed} at {format_name(failure.stage)}"


def _edges(view: View) -> Iterator[str]:
    edges = [f"{format_name(c.what)} {format_name(str(c.chosen))} for {format_name(c.arm)}"
             for c in view.result.choices if c.at_edge]  # fmt: skip
    if edges:
        yield f"Chosen at an end of its grid, so a better value may lie beyond: {_some(edges)}."


def _context(view: View) -> Iterator[str]:
    asked = {(s.model, s.question_set) for s in view.whole if s.k}
    chosen = {(s.model, s.question_set) for s in view.whole if s.chosen_k}
    without = sorted({name for _, name in asked - chosen})
    if without:
        yield (
            f"No K was chosen for {_some(list(map(format_name, without)))}: no validation questions. The table by K holds all."
        )
    untested = [s for s in view.whole if _is_beside(view, s) and s.to_rag is None]
    if untested and any(s.k for s in view.whole):
        names = _some(list(dict.fromkeys(map(arm_label, untested))))
        yield f"Arms that stand beside retrieval without a paired test: {names}."


def _is_beside(view: View, score: Score) -> bool:
    own = view.arms[score.model, score.arm]
    beside = view.chosen(score.model, view.base(score.model), score.question_set) is not None
    return own.trained and not own.curve and beside and score.role == "learning" and (not score.k or score.chosen_k)


def _other_ways(view: View) -> Iterator[str]:
    """Yield where another way of asking says the opposite, significantly."""
    for name in view.sets():
        head = view.headline(name)
        for score in view.whole:
            way = (score.format, score.shots)
            if score.question_set != name or way == head or score.to_base is None or score.k:
                continue
            first = view.score(score.model, score.arm, name)
            if first is None or first.to_base is None or view.arms[score.model, score.arm].curve:
                continue
            both = is_significant(score.to_base.p_holm) and is_significant(first.to_base.p_holm)
            if both and score.to_base.delta * first.to_base.delta < 0:
                yield (
                    f"{arm_label(score)} on {view.set_label(name, way, score.model)} moved the other way than with "
                    f"{format_asked(*head)}: the finding hangs on the way of asking."
                )


def _some(words: list[str]) -> str:
    if len(words) <= _MOST_NAMED:
        return join_words(words)
    return join_words([*words[:_MOST_NAMED], f"{len(words) - _MOST_NAMED} more"])
