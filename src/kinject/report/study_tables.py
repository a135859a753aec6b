"""A study's tables: the paper's Tables 1 to 3 in shape, and every number behind the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kinject.report.formatting import (
    ROLES,
    format_asked,
    format_name,
    format_p,
    format_percent,
    format_points,
    format_relative,
)
from kinject.report.study_blocks import Cell, Line, TableBlock, line, with_common_heads, without_empty_columns
from kinject.report.study_published import load_published, published_by_k, published_column, published_scores
from kinject.report.study_view import View, Way, arm_label, exposures_label, tone_of
from kinject.results import Curve, Score

_RAG = "+rag"
_MARKS = {"good": " ▲", "bad": " ▼", "": ""}
_NUMBERS = ("arm", "accuracy", "by seed", "n", "to base, points", "Holm p", "of base", "became right / wrong",
            "smallest seen")  # fmt: skip


def score_cell(score: Score | None) -> Cell:
    """Return accuracy with its interval below, marked where it differs from base after Holm's correction."""
    if score is None:
        return Cell("")
    tone = tone_of(score)
    below = f"{100 * score.low:.1f} – {100 * score.high:.1f}"
    return Cell(f"{100 * score.accuracy:.1f}{_MARKS[tone]}", tone, below)


def paper_tables(view: View) -> list[TableBlock]:
    """Return Tables 1 and 2 in shape: a row for each task, shots and model, a column for each way of injecting.

    Where the study has arms named as the paper's, those stand in the first table and the other arms in a second.
    """
    names = list(dict.fromkeys(arm.name for model in view.result.models for arm in view.own_arms(model)))
    base = [name for name in names if any(view.base(model) == name for model in view.result.models)]
    paper = [name for name in names if published_column(name) and name not in base]
    others = [name for name in names if name not in paper and name not in base]
    if not paper:
        paper, others = others, []
    title = "Accuracy by way of injecting knowledge, in %"
    tables = [_methods_table(view, title, [*base, *paper], published=True)]
    if others:
        tables.append(_methods_table(view, "The controls and other arms, in %", [*base, *others], published=False))
    return [table for table in tables if len(table.columns) > 1]


def _methods_table(view: View, title: str, arms: Sequence[str], *, published: bool) -> TableBlock:
    base, others = arms[:1], arms[1:]
    columns = [*base, *(f"{name}{_RAG}" for name in base), *others, *(f"{name}{_RAG}" for name in others)]
    lines: list[Line] = []
    for task, way, subject in _tasks(view):
        for model in view.result.models:
            cells = [_method_score(view, model, column, (task, way, subject)) for column in columns]
            if any(cells):
                head = (_task_name(task, subject), format_asked(*way), format_name(model))
                lines.append(line(*head, *map(score_cell, cells)))
                if published and (printed := _printed_line(view, model, (subject or task, way), columns)):
                    lines.append(printed)
    table = TableBlock(title, "", ("task", "asked", "model", *map(format_name, columns)), tuple(lines), heads=3)
    return with_common_heads(without_empty_columns(table))


def _tasks(view: View) -> list[tuple[str, Way, str]]:
    """Return (question set, way, subject) of each row; a set scored by subject has one row for all, then a row for each."""
    keys = dict.fromkeys(
        (score.question_set, (score.format, score.shots), score.subject)
        for score in sorted(view.result.scores, key=lambda score: bool(score.subject))
        if score.role != "baseline"
    )
    order = list(dict.fromkeys(score.question_set for score in view.result.scores))
    return sorted(keys, key=lambda key: order.index(key[0]))


def _task_name(task: str, subject: str) -> str:
    return format_name(f"{task}: {subject}" if subject else task)


def _method_score(view: View, model: str, column: str, place: tuple[str, Way, str]) -> Score | None:
    question_set, way, subject = place
    arm = column.removesuffix(_RAG)
    own = view.every_k(model, arm, question_set, way, subject)
    return next((score for score in own if (score.chosen_k if column != arm else score.k == 0)), None)


def _printed_line(view: View, model: str, place: tuple[str, Way], columns: Sequence[str]) -> Line | None:
    task, way = place
    printed = published_scores(view.source(model), task, way[1])
    if not printed:
        return None
    # The paper's Table 1 has one fine-tuned column, on the texts as they are: what Table 2 calls regular.
    printed |= {f"ft-reg{end}": printed[f"ft{end}"] for end in ("", _RAG) if f"ft{end}" in printed}
    cells = []
    for column in columns:
        arm = column.removesuffix(_RAG)
        key = published_column(arm) + (_RAG if column != arm else "")
        cells.append(f"{100 * printed[key]:.1f}" if key in printed else "")
    return line("published", f"{way[1]} shots", format_name(model), *cells, kind="published") if any(cells) else None


def k_tables(view: View) -> list[TableBlock]:
    """Return Table 3 in shape: accuracy by the number of retrieved passages, for each arm asked with several."""
    lines: list[Line] = []
    ks = sorted({score.k for score in view.whole if score.k})
    for name in view.sets():
        for way in view.ways(name):
            for model in view.result.models:
                lines += _k_lines(view, model, (name, way), ks)
    if len(ks) < 2 or not lines:
        return []
    columns = ("task", "asked", "model", "arm", "K = 0", *(f"K = {k}" for k in ks))
    title, subtitle = "Accuracy by number of retrieved passages, in %", "● the K chosen on validation questions"
    return [with_common_heads(TableBlock(title, subtitle, columns, tuple(lines), heads=4))]


def _k_lines(view: View, model: str, place: tuple[str, Way], ks: Sequence[int]) -> list[Line]:
    name, way = place
    lines = []
    for arm in view.own_arms(model):
        found = {k: view.score(model, arm.name, name, k, way) for k in (0, *ks)}
        if not any(found[k] for k in ks):
            continue
        head = (format_name(name), format_asked(*way), format_name(model), format_name(arm.name))
        lines.append(line(*head, *(_k_cell(found[k]) for k in (0, *ks))))
        printed = published_by_k(view.source(model), name, way[1]) if not arm.trained else {}
        if printed:
            cells = (f"{100 * printed[k]:.1f}" if k in printed else "" for k in ks)
            lines.append(line("published", f"{way[1]} shots", format_name(model), "base", "", *cells, kind="published"))
    return lines


def _k_cell(score: Score | None) -> Cell:
    cell = score_cell(score)
    return Cell(f"● {cell.text}", cell.tone, cell.below) if score is not None and score.chosen_k else cell


def numbers_tables(view: View) -> list[TableBlock]:
    """Return every number of the study's own arms: one table for each model, question set and way of asking."""
    tables = []
    for model in view.result.models:
        for name in view.sets("", model):
            for way in view.ways(name):
                scores = view.shown(model, name, way)
                if scores:
                    role, chance = scores[0].role, format_percent(scores[0].chance)
                    title = f"{view.set_label(name, way, model)}: {ROLES[role]}"
                    lines = tuple(_numbers_line(score) for score in scores)
                    subtitle = f"{format_asked(*way)}; chance {chance}"
                    tables.append(TableBlock(title, subtitle, _NUMBERS, lines, role=role))
    return tables


def _numbers_line(score: Score) -> Line:
    seeds = ", ".join(f"{100 * value:.1f}" for value in score.by_seed) if len(score.by_seed) > 1 else ""
    accuracy = Cell(format_percent(score.accuracy), "", f"{100 * score.low:.1f} – {100 * score.high:.1f}")
    start = (Cell(arm_label(score)), accuracy, Cell(seeds), Cell(f"{score.n:,}"))
    contrast = score.to_base
    if contrast is None:
        return Line((*start, *(Cell("") for _ in _NUMBERS[len(start) :])))
    tone = tone_of(score)
    bounds = f"{format_points(contrast.low)} to {format_points(contrast.high)}"
    delta = Cell(format_points(contrast.delta) + _MARKS[tone], tone, bounds)
    p = format_p(contrast.p_holm).removeprefix("p ").removeprefix("= ")
    relative = "" if contrast.relative is None else format_relative(contrast.relative)
    smallest = "" if contrast.smallest is None else f"{100 * contrast.smallest:.1f}"
    flips = f"{contrast.wrong_to_right:,} / {contrast.right_to_wrong:,}"
    return Line((*start, delta, *map(Cell, (p, relative, flips, smallest))))


def curve_table(view: View, curve: Curve) -> TableBlock:
    """Return the accuracies along a curve, a column for each question set; values whose arm is missing are named."""
    sets = view.sets("", curve.model)
    lines = []
    for point in curve.points:
        cells = [score_cell(view.point(curve, point, name)) for name in sets]
        missing = "" if any(cell.text for cell in cells) else "no result"
        lines.append(line(Cell(format_name(point.label), "", missing), format_name(point.arm), *cells))
    title = format_name(curve.name) + (f", {format_name(curve.model)}" if view.several_models else "")
    columns = ("value", "arm", *map(format_name, sets))
    return TableBlock(f"{title}: accuracy in %", format_name(curve.key), columns, tuple(lines), folded=True, heads=2)


def subjects_tables(view: View) -> list[TableBlock]:
    """Return accuracy by subject for the study's own arms, where a set has several and no rows of their own."""
    tables = []
    scored = {(score.model, score.question_set) for score in view.result.scores if score.subject}
    for model in view.result.models:
        for name in view.sets("", model):
            scores = [score for score in view.shown(model, name) if score.by_subject]
            if not scores or (model, name) in scored:
                continue
            subjects = list(dict.fromkeys((one, n) for score in scores for one, n, _ in score.by_subject))
            by_arm: list[Mapping[str, float]] = [{one: value for one, _, value in s.by_subject} for s in scores]
            lines = tuple(
                line(format_name(one), f"{n:,}", *(f"{100 * own[one]:.1f}" if one in own else "" for own in by_arm))
                for one, n in subjects
            )
            columns = ("subject", "n", *(arm_label(score) for score in scores))
            title = f"{view.set_label(name, view.headline(name), model)} by subject, in %"
            tables.append(TableBlock(title, "without intervals: few questions each", columns, lines, folded=True))
    return tables


def published_notes(tables: Sequence[TableBlock]) -> tuple[str, ...]:
    """Return where published rows come from, () where no table holds one."""
    if not any(own.kind == "published" for table in tables for own in table.lines):
        return ()
    found = load_published()
    matched = "Models are matched by where they come from, tasks and arms by name."
    return (f"Published: {found['source']}. {found['about']} {matched}",)


def exposures_table(view: View) -> TableBlock:
    """Return the bins of exposures: how many answers (seeds together) and what share of them was right."""
    lines = tuple(
        line(format_name(bin.question_set), format_name(bin.model), format_name(bin.arm), exposures_label(bin),
             f"{bin.n:,}", format_percent(bin.accuracy))
        for bin in view.result.exposures if not view.arms[bin.model, bin.arm].curve
    )  # fmt: skip
    columns = ("set", "model", "arm", "times read", "answers", "right")
    return with_common_heads(TableBlock("Exposures", "", columns, lines, folded=True, heads=4))
