"""Tables of results: the paper's Tables 1 to 3 in shape with its printed numbers, and every number behind the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from kinject.report.formatting import (
    ROLES,
    bare_p,
    format_count,
    format_finite,
    format_name,
    format_percent,
    format_points,
    format_prompt,
    format_relative,
    perplexity_change,
)
from kinject.report.page import Cell, Line, TableBlock, line, with_common_heads, without_empty_columns
from kinject.report.view import View, arm_label, exposures_label, tone_of
from kinject.results import ArmResult, OutcomeResult, PromptFormat, Subject, Sweep
from kinject.types import Written

_RAG = "+rag"
_MARKS = {"good": " ▲", "bad": " ▼", "": ""}
_NUMBERS = (
    "arm", "accuracy", "by seed", "n", "to base, points", "gain", "became right", "became wrong", "p", "p, Holm",
)  # fmt: skip


def accuracy_cell(result: ArmResult | None) -> Cell:
    """Return accuracy with its interval below, marked where it differs from base after Holm's correction."""
    if result is None:
        return Cell("")
    tone = tone_of(result)
    unscored = f"; {result.n_unscored:,} unscored" if result.n_unscored else ""
    return Cell(f"{100 * result.accuracy:.1f}{_MARKS[tone]}", tone, f"{_bounds(result)}{unscored}")


def paper_tables(view: View) -> list[TableBlock]:
    """Return Tables 1 and 2 in shape: a row for each task, shots and model, a column for each way of injecting.

    Arms that are named as the paper's are in the first table, the other arms in a second.
    """
    names = list(dict.fromkeys(arm.name for model in view.report.models for arm in view.own_arms(model)))
    base = [name for name in names if any(view.base(model) == name for model in view.report.models)]
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
    for task, form, subject in _tasks(view):
        for model in view.report.models:
            cells = [_method_result(view, model, column, (task, form, subject)) for column in columns]
            if any(cells):
                head = (_task_name(task, subject), format_prompt(form), format_name(model))
                lines.append(line(*head, *map(accuracy_cell, cells)))
                if published and (printed := _printed_line(view, model, subject or task, form, columns)):
                    lines.append(printed)
    table = TableBlock(title, "", ("task", "asked", "model", *map(format_name, columns)), tuple(lines), heads=3)
    return with_common_heads(without_empty_columns(table))


def _tasks(view: View) -> list[tuple[str, PromptFormat, str]]:
    """Return (question set, prompt format, subject) of each row; a set scored by subject has a row for each after its own."""
    keys = dict.fromkeys(
        (result.question_set, result.prompt_format, result.subject)
        for result in sorted(view.report.results, key=lambda result: bool(result.subject))
        if result.role != "baseline"
    )
    order = list(dict.fromkeys(result.question_set for result in view.report.results))
    return sorted(keys, key=lambda key: order.index(key[0]))


def _task_name(task: str, subject: str) -> str:
    return format_name(f"{task}: {subject}" if subject else task)


def _method_result(view: View, model: str, column: str, task: tuple[str, PromptFormat, str]) -> ArmResult | None:
    question_set, form, subject = task
    arm = column.removesuffix(_RAG)
    results = view.every_k(model, arm, question_set, form, subject)
    return next((result for result in results if (result.chosen_k if column != arm else result.k == 0)), None)


def _printed_line(view: View, model: str, task: str, form: PromptFormat, columns: Sequence[str]) -> Line | None:
    printed = published_scores(view.source(model), task, form.shots)
    if not printed:
        return None
    # The paper's Table 1 has one fine-tuned column, on the unchanged texts, which Table 2 calls regular.
    printed |= {f"ft-reg{end}": printed[f"ft{end}"] for end in ("", _RAG) if f"ft{end}" in printed}
    cells = []
    for column in columns:
        arm = column.removesuffix(_RAG)
        key = published_column(arm) + (_RAG if column != arm else "")
        cells.append(f"{100 * printed[key]:.1f}" if key in printed else "")
    return (
        line("published", f"{form.shots} shots", format_name(model), *cells, kind="published") if any(cells) else None
    )


def k_tables(view: View) -> list[TableBlock]:
    """Return Table 3 in shape: accuracy by the number of retrieved passages, for each arm asked with several numbers."""
    lines: list[Line] = []
    ks = sorted({result.k for result in view.set_results if result.k})
    for name in view.sets():
        for form in view.formats(name):
            for model in view.report.models:
                lines += _k_lines(view, model, name, form, ks)
    if len(ks) < 2 or not lines:
        return []
    columns = ("task", "asked", "model", "arm", "K = 0", *(f"K = {k}" for k in ks))
    title, subtitle = "Accuracy by number of retrieved passages, in %", "● the K chosen on validation questions"
    return [with_common_heads(TableBlock(title, subtitle, columns, tuple(lines), heads=4))]


def _k_lines(view: View, model: str, name: str, form: PromptFormat, ks: Sequence[int]) -> list[Line]:
    lines = []
    for arm in view.own_arms(model):
        by_k = {k: view.result(model, arm.name, name, k, form) for k in (0, *ks)}
        if not any(by_k[k] for k in ks):
            continue
        head = (format_name(name), format_prompt(form), format_name(model), format_name(arm.name))
        lines.append(line(*head, *(_k_cell(by_k[k]) for k in (0, *ks))))
        printed = published_by_k(view.source(model), name, form.shots) if not arm.trained else {}
        if printed:
            cells = (f"{100 * printed[k]:.1f}" if k in printed else "" for k in ks)
            lines.append(
                line("published", f"{form.shots} shots", format_name(model), "base", "", *cells, kind="published")
            )
    return lines


def _k_cell(result: ArmResult | None) -> Cell:
    cell = accuracy_cell(result)
    return Cell(f"● {cell.text}", cell.tone, cell.below) if result is not None and result.chosen_k else cell


def numbers_tables(view: View) -> list[TableBlock]:
    """Return every number of the report's own arms: one table for each model, question set and prompt format."""
    tables = []
    for model, name, form, results in view.groups():
        role, chance = results[0].role, format_percent(results[0].chance)
        title = f"{view.set_label(name, form, model)}: {ROLES[role]}"
        lines = tuple(_numbers_line(result, view.base(model)) for result in results)
        questions = format_count(max(r.n for r in results), "question")
        scopes = {c.scope for r in results for c in (r.to_base, r.to_rag, r.to_plain) if c is not None}
        models = " · arms with one seed: in these models" if "these models" in scopes else ""
        guessing = f", chance {chance}" if results[0].chance else ""
        subtitle = f"{format_prompt(form)} · {questions}{guessing}{models}"
        tables.append(without_empty_columns(TableBlock(title, subtitle, _NUMBERS, lines, role=role)))
    return tables


_OUTCOMES = {
    "wrong": ("wrong answers", "bad"), "abstained": ("no answer, though there is one", ""),
    "answered": ("answered, though no document says", "bad"),
}  # fmt: skip
"""Outcome of a written answer -> its words, and the tone of more of it."""


def outcome_tables(view: View) -> list[TableBlock]:
    """Return every number of the outcomes of written answers beside right, as `numbers_tables` has those of right."""
    tables = []
    for model, name, form, shown in view.groups():
        for outcome, (words, more) in _OUTCOMES.items():
            parts = [(result, part) for result in shown if (part := result.outcome(outcome)) is not None]
            if parts:
                title = f"{view.set_label(name, form, model)}: {words}"
                lines = tuple(_outcome_line(result, part, view.base(model), more) for result, part in parts)
                columns = ("arm", "share", *_NUMBERS[2:6], "came", "went", *_NUMBERS[8:])
                about = f"{format_prompt(form)} · {format_count(max(part.n for _, part in parts), 'question')}"
                tables.append(without_empty_columns(TableBlock(title, about, columns, lines, folded=True)))
    return tables


def _outcome_line(result: ArmResult, part: OutcomeResult, base: str, more: str) -> Line:
    as_right = replace(
        result, by_seed=part.by_seed, accuracy=part.rate, low=part.low, high=part.high, n=part.n, n_unscored=0,
        to_base=part.to_base,
    )  # fmt: skip
    tones = {"": "", "good": more, "bad": "good" if more else ""}
    return _numbers_line(as_right, base, tones[tone_of(as_right)])


def written_tables(view: View) -> tuple[TableBlock, ...]:
    """Return a table of the answers that models wrote: right, wrong and abstained apart; () if none did."""
    written = [result for result in view.report.results if result.written is not None and not result.subject]
    lines = [_written_line(result, result.written) for result in written if result.written is not None]
    columns = (
        "set", "model", "arm", "asked", "right", "wrong", "abstained", "answered without an answer", "unread", "exact match",
        "F1", "contains", "tokens", "thinking", "thinking cut",
    )  # fmt: skip
    about = (
        "below each share its 95% interval; ▲ more and ▼ less than base (corrected p below 0.05); wrong: neither right nor "
        "abstained; abstained: declines, though there is an answer; F1: mean of SQuAD's; tokens: mean length"
    )
    if any(result.outcome("answered") for result in written):
        about += "; answered without an answer: of the questions that no document answers, where to abstain is right"
    if any(result.written.unread for result in written if result.written):
        about += "; unread: wrong, as no letter can be read"
    if any(result.written.n_thinking for result in written if result.written):
        about += "; thinking: mean length before the answer; thinking cut: it did not end by itself"
    table = TableBlock("Answers that the models wrote", about, columns, tuple(lines), heads=4)
    return (with_common_heads(without_empty_columns(table)),) if lines else ()


def judge_tables(view: View) -> tuple[TableBlock, ...]:
    """Return the accuracy of the judge of written answers: by grade, and by kind of planted answer; () without a judge."""
    judge = view.report.judge
    if judge is None:
        return ()
    about = (
        "measured before it graded others, on answers made from the questions; precision: how many of its grades are right, as "
        "if every grade were as frequent"
    )
    grades = tuple(
        line(grade, f"{judge.planted(grade):,}", *(_rate(of[grade]) for of in (judge.precision, judge.recall)))
        for grade in judge.recall
    )
    kinds = tuple(line(kind.kind, kind.grade, f"{kind.planted:,}", f"{kind.right:,}") for kind in judge.kinds)
    title = f"The judge, {format_name(judge.model)}"
    return (
        TableBlock(title, about, ("grade", "planted answers", "precision", "recall"), grades),
        TableBlock(
            "The judge by kind of answer", "", ("kind", "grade", "planted", "graded right"), kinds, heads=2, folded=True
        ),
    )


def _rate(value: float | None) -> str:
    return "" if value is None else format_percent(value)


def _written_line(result: ArmResult, written: Written) -> Line:
    w, lettered = written, result.format == "letters-written"
    texts = ("", "", "") if lettered else map(format_percent, (w.exact, w.f1, w.contains))
    thinking = (f"{w.n_thinking:.1f}", format_percent(w.thinking_cut)) if w.n_thinking else ("", "")
    return line(
        format_name(result.question_set), format_name(result.model), arm_label(result), format_prompt(result.prompt_format),
        accuracy_cell(result), *(_rate_cell(result.outcome(name), more) for name, (_, more) in _OUTCOMES.items()),
        format_percent(w.unread) if lettered else "", *texts, f"{w.n_tokens:.1f}", *thinking,
    )  # fmt: skip


def _rate_cell(part: OutcomeResult | None, more: str) -> Cell:
    if part is None:
        return Cell("")
    mark, tone = "", ""
    if part.to_base is not None and part.to_base.is_significant:
        grew = part.to_base.delta > 0
        mark, tone = (" ▲", more) if grew else (" ▼", "good" if more else "")
    return Cell(f"{100 * part.rate:.1f}{mark}", tone, f"{100 * part.low:.1f} – {100 * part.high:.1f}")


def _numbers_line(result: ArmResult, base: str, tone: str | None = None) -> Line:
    seeds = ", ".join(f"{100 * value:.1f}" for value in result.by_seed) if len(result.by_seed) > 1 else ""
    accuracy = format_percent(result.accuracy) + (f" ({result.n_unscored:,} unscored)" if result.n_unscored else "")
    start = (Cell(arm_label(result)), Cell(accuracy, "", _bounds(result)), Cell(seeds), Cell(f"{result.n:,}"))
    contrast = result.to_base
    if contrast is None:
        name = "base" if result.arm == base and not result.k else "base has no score"
        return Line((*start, Cell(name), *(Cell("") for _ in _NUMBERS[len(start) + 1 :])))
    bounds = ""
    mark = {-1: _MARKS["bad"], 1: _MARKS["good"]}[1 if contrast.delta > 0 else -1] if tone_of(result) else ""
    tone = tone_of(result) if tone is None else tone
    if contrast.low is not None and contrast.high is not None:
        bounds = f"{format_points(contrast.low)} to {format_points(contrast.high)}"
    delta = Cell(format_points(contrast.delta) + mark, tone, bounds)
    relative = Cell("")
    if contrast.relative is not None:
        ends = (contrast.relative_low, contrast.relative_high)
        below = "" if None in ends else " to ".join(format_relative(end) for end in ends if end is not None)
        relative = Cell(f"{100 * contrast.relative:+.1f}%".replace("-", "−"), "", below)
    flips = (f"{contrast.wrong_to_right:,}", f"{contrast.right_to_wrong:,}")
    p = ("" if value is None else bare_p(value) for value in (contrast.p, contrast.p_holm))
    return Line((*start, delta, relative, *map(Cell, (*flips, *p))))


def _bounds(result: ArmResult) -> str:
    return f"{100 * result.low:.1f} – {100 * result.high:.1f}"


def sweep_table(view: View, sweep: Sweep) -> TableBlock:
    """Return the accuracies along a sweep, a column for each question set; a value without a result is marked."""
    sets = view.sets("", sweep.model)
    lines = []
    for point in sweep.points:
        results = [view.point(sweep, point, name) for name in sets]
        cells = [accuracy_cell(result) for result in results]
        cells += [
            _rate_cell(None if result is None else result.outcome(name), more)
            for result in results for name, (_, more) in _OUTCOMES.items()
        ]  # fmt: skip
        missing = "" if any(cell.text for cell in cells) else "no result"
        lines.append(line(Cell(format_name(point.label), "", missing), format_name(point.arm), *cells))
    title = format_name(sweep.name) + (f", {format_name(sweep.model)}" if view.several_models else "")
    outcome_columns = (f"{format_name(name)}, {outcome}" for name in sets for outcome in _OUTCOMES)
    columns = ("value", "arm", *map(format_name, sets), *outcome_columns)
    table = TableBlock(f"{title}: accuracy in %", format_name(sweep.key), columns, tuple(lines), folded=True, heads=2)
    return without_empty_columns(table)


def subjects_tables(view: View) -> list[TableBlock]:
    """Return accuracy by subject for the report's own arms, where a set has several and no rows of their own."""
    tables = []
    by_subject = {(result.model, result.question_set) for result in view.report.results if result.subject}
    for model, name, form, shown in view.groups(n_formats=1 if view.is_study else None):
        results = [result for result in shown if result.subjects]
        if results and (model, name) not in by_subject:
            title = f"{view.set_label(name, form, model)} by subject, in %"
            tables.append(_subjects_table(title, results))
    return tables


def _subjects_table(title: str, results: Sequence[ArmResult]) -> TableBlock:
    subjects = {subject.name: subject.n for result in reversed(results) for subject in result.subjects}
    by_arm = [{subject.name: _subject_cell(subject) for subject in result.subjects} for result in results]
    lines = [
        line(format_name(name) or "(none)", f"{n:,}", *(cells.get(name, "") for cells in by_arm))
        for name, n in subjects.items()
    ]
    if any(result.macro for result in results):
        means = (Cell("") if r.macro is None else _bounded(*r.macro) for r in results)
        lines.append(line("mean of subjects", f"{results[0].n:,}", *means))
    columns = ("subject", "n", *map(arm_label, results))
    subtitle = "" if any(result.macro for result in results) else "without intervals: few questions each"
    return TableBlock(title, subtitle, columns, tuple(lines), folded=True)


def _subject_cell(subject: Subject) -> Cell:
    if subject.low is None or subject.high is None:
        return Cell(f"{100 * subject.accuracy:.1f}")
    return _bounded(subject.accuracy, subject.low, subject.high)


def _bounded(value: float, low: float, high: float) -> Cell:
    return Cell(f"{100 * value:.1f}", "", f"{100 * low:.0f} – {100 * high:.0f}")


def recall_tables(view: View) -> list[TableBlock]:
    """Return a table of the fraction of questions whose source document was retrieved, [] without retrieval."""
    recalls = view.report.recalls
    ks = list(dict.fromkeys(recall.k for recall in recalls))
    lines = []
    for name, n in {recall.question_set: recall.n for recall in recalls}.items():
        by_k = {recall.k: recall.n_found / recall.n for recall in recalls if recall.question_set == name}
        lines.append(line(format_name(name), f"{n:,}", *(format_percent(by_k[k]) if k in by_k else "" for k in ks)))
    about = "questions whose document is among the K passages, of those that name one"
    columns = ("questions", "n", *(f"K = {k}" for k in ks))
    return [TableBlock("Recall of retrieval", about, columns, tuple(lines))] if lines else []


def perplexity_tables(view: View) -> list[TableBlock]:
    """Return a table for each base model and file of held-out texts: a row an arm, the change to the first of them."""
    tables = []
    for label, items in view.perplexities():
        has_seeds = any(len(item.by_seed) > 1 for item in items)
        lines = []
        for item in items:
            counts = (f"{item.n_texts:,}", f"{item.n_tokens:,}", format_finite(item.per_token, 3))
            spread = (f"{min(item.by_seed):.3f} to {max(item.by_seed):.3f}",) if len(item.by_seed) > 1 else ("",)
            change = "base" if item is items[0] else perplexity_change(item, items[0]).replace("-", "−")
            cells = (*counts, *spread[: int(has_seeds)], change, format_finite(item.bits_per_byte, 4))
            lines.append(line(format_name(item.arm), *cells))
        seeds = ("over seeds",) if has_seeds else ()
        columns = ("model", "texts", "tokens", "perplexity", *seeds, "to base", "bits per byte")
        tables.append(TableBlock("Perplexity of held-out texts", label, columns, tuple(lines)))
    return tables


def published_notes(view: View, tables: Sequence[TableBlock]) -> tuple[str, ...]:
    """Return the source of the published rows, and whether the bases' accuracies agree with them; () if there are none."""
    if not any(row.kind == "published" for table in tables for row in table.lines):
        return ()
    published = load_published()
    matched = "Models are matched by where they come from, tasks and arms by name."
    return (f"Published: {published['source']}. {published['about']} {matched}", *_base_agreement(view))


def _base_agreement(view: View) -> tuple[str, ...]:
    """Return the number of published accuracies of base models within the intervals of these, and the others."""
    n, misses = 0, []
    for task, form, subject in _tasks(view):
        for model in view.report.models:
            result = _method_result(view, model, view.base(model), (task, form, subject))
            printed = published_scores(view.source(model), subject or task, form.shots).get("base")
            if result is None or printed is None:
                continue
            n += 1
            if not result.low <= printed <= result.high:
                label = f"{_task_name(task, subject)}, {format_prompt(form)}, {format_name(model)}"
                misses.append(f"{label} ({_bounds(result)}, published {100 * printed:.1f})")
    if not n:
        return ()
    text = f"Base models: {n - len(misses)} of {n} published accuracies lie within the 95% intervals of this study"
    return (f"{text}; not {'; '.join(misses)}." if misses else f"{text}.",)


def exposures_table(view: View) -> TableBlock:
    """Return the bins of exposures: the number of answers (seeds together) and the fraction of them that was correct."""
    lines = tuple(
        line(format_name(bin.question_set), format_name(bin.model), format_name(bin.arm), exposures_label(bin),
             f"{bin.n:,}", format_percent(bin.accuracy))
        for bin in view.report.exposures if not view.arms[bin.model, bin.arm].sweep
    )  # fmt: skip
    columns = ("set", "model", "arm", "times read", "answers", "right")
    return with_common_heads(TableBlock("Exposures", "", columns, lines, folded=True, heads=4))


@cache
def load_published() -> Mapping[str, Any]:
    """Return published.json: `source`, `about`, `columns` and rows of the three tables, other names of the models."""
    text = resources.files("kinject.report").joinpath("published.json").read_text("utf-8")
    return dict(json.loads(text))


def published_scores(model: str, task: str, shots: int) -> dict[str, float]:
    """Return column (``base``, ``ft-par+rag``, ...) -> accuracy as printed in Tables 1 and 2; {} if there is none."""
    results: dict[str, float] = {}
    for table in ("table1", "table2"):
        for name, of_shots, of_model, *values in load_published()[table]:
            if _is_task(name, task) and of_shots in (None, shots) and _is_model(of_model, model):
                results |= dict(zip(load_published()["columns"][table], values, strict=True))
    return results


def published_by_k(model: str, task: str, shots: int) -> dict[int, float]:
    """Return K -> accuracy of the base with K passages as printed in Table 3; {} if there is none."""
    for name, of_shots, of_model, *values in load_published()["table3"]:
        if _is_task(name, task) and of_shots == shots and _is_model(of_model, model):
            return dict(zip(load_published()["columns"]["table3"], values, strict=True))
    return {}


def published_column(arm: str) -> str:
    """Return the column of the paper with an arm's name: ``ft-par`` for ``FT_par``; "" if there is none."""
    flat = re.sub(r"[^a-z0-9]+", "-", arm.lower()).strip("-")
    return flat if flat in ("base", "ft", "ft-reg", "ft-par") else ""


def _flat(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])


def _is_task(published: str, task: str) -> bool:
    flat = _flat(task).removeprefix("mmlu")
    return flat in (_flat(published), *load_published()["tasks"].get(published, ()))


def _is_model(published: str, model: str) -> bool:
    return _flat(model) in (_flat(published), *load_published()["models"][published])
