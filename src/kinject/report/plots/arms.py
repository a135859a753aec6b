"""Figures of a report's arms: accuracy, gain, flips, forward against reverse; single questions, choices and costs.

Each returns None if the report has nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kinject.report.details import STAGES
from kinject.report.formatting import ROLES, format_name, format_percent, format_points, format_prompt, format_relative
from kinject.report.plots.style import (
    CHANCE,
    FOURTH,
    INK,
    LEARNING,
    LONGEST,
    MUTED,
    OTHER,
    PAPER,
    RETENTION,
    RULE,
    SERIES,
    TICKS,
    add_legend,
    add_tip,
    line_mark,
    margin_text,
    panels,
    prepare_rows,
    style,
)
from kinject.report.view import View, arm_label, is_reverse, result_text
from kinject.results import ArmResult, Cost, PromptFormat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = ((1.0, 1.0), (0.5, 0.55), (0.0, 0.25))  # (fraction of seeds above this, opacity)
_ROLE_MARKS = {
    "learning": ("o", LEARNING), "retention": ("s", RETENTION), "unanswerable": ("^", SERIES[3][0]), "baseline": ("D", MUTED),
}  # fmt: skip


@dataclass(frozen=True)
class _Panel:
    """One model on one question set, asked in one prompt format."""

    model: str
    question_set: str
    format: PromptFormat
    results: tuple[ArmResult, ...]

    def title(self, view: View) -> str:
        name = format_name(self.question_set, LONGEST)
        first = f"{name}: {ROLES[self.results[0].role]}"
        if not view.is_study and len(view.formats(self.question_set)) > 1:
            first += f"\n{format_prompt(self.format)}"
        return f"{format_name(self.model, LONGEST)}\n{first}" if view.several_models else first


def model_panels(view: View, role: str = "") -> list[_Panel]:
    """Return one panel for each model and question set (of `role`) with the report's own arms, in the headline format."""
    return _panels(view, role, 1)


def _panels(view: View, role: str, n_formats: int | None) -> list[_Panel]:
    return [_Panel(model, name, form, tuple(results)) for model, name, form, results in view.groups(role, n_formats)]


def _row_names(drawn: Sequence[_Panel], *, base: bool) -> list[str]:
    """Return the labels of all rows: arms without context first, then with."""
    results = [result for panel in drawn for result in panel.results if base or result.to_base is not None]
    return list(dict.fromkeys(arm_label(s) for s in sorted(results, key=lambda result: result.k > 0)))


def _prepared(drawn: Sequence[_Panel], names: Sequence[str], columns: int) -> tuple[Figure, list[tuple[Axes, _Panel]]]:
    """Return a figure with axes for each of `drawn`, a row for each of `names`; the first of a line is labelled."""
    figure, axes, n_columns = panels(len(drawn), columns, 0.27 * len(names) + 0.75)
    for index, panel in enumerate(axes):
        prepare_rows(panel, names, labelled=index % n_columns == 0)
    return figure, list(zip(axes, drawn, strict=True))


def accuracy_by_arm(view: View, *, columns: int = 3) -> Figure | None:
    """Return accuracy with its interval and each seed's, one panel for each model and set, one row for each arm.

    An evaluation has a panel for each prompt format, a study for the headline alone. Learning is a blue
    circle, retention an orange square; a hollow mark has retrieved context.
    """
    drawn = _panels(view, "", 1 if view.is_study else None)
    if not drawn:
        return None
    names = _row_names(drawn, base=True)
    with style():
        figure, prepared = _prepared(drawn, names, columns)
        for panel, shown in prepared:
            panel.set_xlim(0, 1)
            panel.set_xticks(*TICKS)
            panel.axvline(shown.results[0].chance, **CHANCE, label="chance")
            base = view.result(shown.model, view.base(shown.model), shown.question_set, 0, shown.format)
            if base is not None:
                panel.axvline(base.accuracy, color=MUTED, linewidth=0.8, label="base")
            for result in shown.results:
                _draw_result(panel, names.index(arm_label(result)), result)
            panel.set_title(shown.title(view), color=_ROLE_MARKS[shown.results[0].role][1], fontweight="bold")
        roles = {shown.results[0].role for shown in drawn}
        marks = [line_mark(ROLES[role], marker=marker, color=colour, linestyle="none")
                 for role, (marker, colour) in _ROLE_MARKS.items() if role in roles]  # fmt: skip
        if any(result.k for shown in drawn for result in shown.results):
            marks.append(line_mark("hollow: with retrieved context", marker="o", color=INK, markerfacecolor=PAPER,
                                   linestyle="none"))  # fmt: skip
        if any(len(result.by_seed) > 1 for shown in drawn for result in shown.results):
            marks.append(line_mark("one seed", marker="|", color=MUTED, linestyle="none"))
        marks += [line_mark("chance", **CHANCE), line_mark("base", color=MUTED, linewidth=0.8)]
        add_legend(figure, marks, columns)
    return figure


def _draw_result(panel: Axes, row: int, result: ArmResult) -> None:
    marker, colour = _ROLE_MARKS[result.role]
    if len(result.by_seed) > 1:
        panel.plot(result.by_seed, [row + 0.27] * len(result.by_seed), "|", color=MUTED, markersize=4, clip_on=False)
    whiskers = [[max(0.0, result.accuracy - result.low)], [max(0.0, result.high - result.accuracy)]]
    panel.errorbar(
        [result.accuracy], [row], xerr=whiskers, fmt=marker, color=colour, markersize=5, markeredgewidth=1.5,
        markerfacecolor=PAPER if result.k else colour, elinewidth=1.8, capsize=3, capthick=1.3, clip_on=False,
    )  # fmt: skip
    margin_text(panel, row, f"{100 * result.accuracy:.1f}")
    add_tip(panel, result.accuracy, row, result_text(result))


def outcomes_by_arm(view: View, *, columns: int = 3) -> Figure | None:
    """Return the fractions of written answers that are right, abstained and wrong: a panel for each set, a bar for each arm."""
    drawn = [panel for panel in model_panels(view) if any(result.outcomes for result in panel.results)]
    if not drawn:
        return None
    names = _row_names(drawn, base=True)
    with style():
        figure, prepared = _prepared(drawn, names, columns)
        for panel, shown in prepared:
            panel.set_xlim(0, 1)
            panel.set_xticks(*TICKS)
            panel.grid(visible=False)
            for result in shown.results:
                _draw_outcomes(panel, names.index(arm_label(result)), result)
            panel.set_title(shown.title(view), fontweight="bold")
        marks = {"right": LEARNING, "abstained": OTHER, "wrong": RETENTION}
        add_legend(figure, [line_mark(name, marker="s", color=colour, linestyle="none") for name, colour in marks.items()],
                   columns)  # fmt: skip
    return figure


def _draw_outcomes(panel: Axes, row: int, result: ArmResult) -> None:
    abstained = result.abstained.rate if result.abstained is not None else 0.0
    parts = (result.accuracy, abstained, max(0.0, 1 - result.accuracy - abstained))
    starts = (0.0, parts[0], parts[0] + parts[1])
    panel.barh([row] * 3, parts, left=starts, height=0.66, color=[LEARNING, OTHER, RETENTION], linewidth=0)
    text = f"{arm_label(result)} on {format_name(result.question_set)}: right {format_percent(parts[0])}, "
    add_tip(panel, 0.5, row, f"{text}abstained {format_percent(parts[1])}, wrong {format_percent(parts[2])}")
    margin_text(panel, row, f"{100 * parts[0]:.0f} | {100 * parts[2]:.0f}")


def relative_gains(view: View, *, columns: int = 3) -> Figure | None:
    """Return the gain over base as a fraction of base's accuracy above chance, with its interval."""
    drawn = [
        panel for panel in model_panels(view, "learning")
        if any(s.to_base is not None and s.to_base.relative is not None for s in panel.results)
    ]  # fmt: skip
    if not drawn:
        return None
    names = _row_names(drawn, base=False)
    with style():
        figure, prepared = _prepared(drawn, names, columns)
        for panel, shown in prepared:
            panel.axvline(0, color=INK, linewidth=0.9)
            for result in shown.results:
                _draw_gain(panel, names.index(arm_label(result)) if result.to_base else 0, result)
            panel.xaxis.set_major_formatter(lambda value, _: format_relative(value))
            panel.locator_params(axis="x", nbins=4)
            panel.margins(x=0.08)
            panel.set_title(shown.title(view), fontweight="bold")
    return figure


def _draw_gain(panel: Axes, row: int, result: ArmResult) -> None:
    contrast = result.to_base
    if contrast is None or contrast.relative is None:
        return
    colour = LEARNING if contrast.delta >= 0 else RETENTION
    panel.barh([row], [contrast.relative], height=0.55, color=colour, alpha=0.3 if result.k else 0.75, linewidth=0)
    if contrast.relative_low is not None and contrast.relative_high is not None:
        panel.plot([contrast.relative_low, contrast.relative_high], [row, row], color=INK, linewidth=1.2)
    margin_text(panel, row, format_relative(contrast.relative))
    add_tip(panel, contrast.relative, row, f"{format_relative(contrast.relative)}; {result_text(result)}")


def flips(view: View, *, columns: int = 3) -> Figure | None:
    """Return, for each arm, how many questions became right (to the right) and wrong (to the left) against base."""
    drawn = [panel for panel in model_panels(view) if any(result.to_base is not None for result in panel.results)]
    if not drawn:
        return None
    names = _row_names(drawn, base=False)
    with style():
        figure, prepared = _prepared(drawn, names, columns)
        for panel, shown in prepared:
            contrasts = [(names.index(arm_label(s)), s.to_base) for s in shown.results if s.to_base is not None]
            for row, contrast in contrasts:
                _draw_flips(panel, row, contrast.wrong_to_right, contrast.right_to_wrong)
                for n, words in ((contrast.wrong_to_right, "right"), (-contrast.right_to_wrong, "wrong")):
                    add_tip(panel, n / 2, row, f"{names[row]}: {abs(n):,} of {contrast.n:,} questions became {words}")
            most = max(1, *(max(c.wrong_to_right, c.right_to_wrong) for _, c in contrasts))
            most_lost = max(1, *(c.right_to_wrong for _, c in contrasts))
            panel.set_xlim(
                -max(most_lost, 0.3 * most) * 1.3, max(0.3 * most, *(c.wrong_to_right for _, c in contrasts)) * 1.3
            )
            panel.axvline(0, color=INK, linewidth=0.9)
            panel.xaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
            panel.locator_params(axis="x", nbins=5, integer=True)
            of = f"{format_name(shown.model, LONGEST)}\n" if view.several_models else ""
            name = format_name(shown.question_set, LONGEST)
            panel.set_title(f"{of}{name}, {shown.results[0].n:,} questions", fontweight="bold")
        add_legend(figure, [
            line_mark("became wrong (left)", marker="s", color=RETENTION, linestyle="none", markersize=7),
            line_mark("became right (right)", marker="s", color=LEARNING, linestyle="none", markersize=7),
        ], columns)  # fmt: skip
    return figure


def _draw_flips(panel: Axes, row: int, gained: int, lost: int) -> None:
    panel.barh([row, row], [gained, -lost], height=0.6, color=[LEARNING, RETENTION], linewidth=0)
    for value, side in ((gained, 1), (-lost, -1)):
        panel.annotate(
            f"{abs(value):,}", (value, row), xytext=(3 * side, 0), textcoords="offset points", fontsize=8.5, color=INK,
            ha="left" if side > 0 else "right", va="center_baseline",
        )  # fmt: skip


def directions(view: View, *, columns: int = 3) -> Figure | None:
    """Return each arm's accuracy on forward and on reverse questions, a line between; one panel for each model."""
    names = view.sets("learning")
    forward, reverse = [n for n in names if not is_reverse(n)], [n for n in names if is_reverse(n)]
    if not forward or not reverse:
        return None
    pairs = [(model, forward[0], other) for model in view.report.models for other in reverse]
    rows = {pair: _direction_rows(view, *pair) for pair in pairs}
    pairs = [pair for pair in pairs if rows[pair]]
    labels = list(dict.fromkeys(label for pair in pairs for label, _, _ in rows[pair]))
    if not pairs:
        return None
    with style():
        figure, axes, n_columns = panels(len(pairs), min(columns, 2), 0.29 * len(labels) + 0.75)
        for index, (panel, pair) in enumerate(zip(axes, pairs, strict=True)):
            prepare_rows(panel, labels, labelled=index % n_columns == 0)
            panel.set_xlim(0, 1)
            panel.set_xticks(*TICKS)
            for label, forward_result, reverse_result in rows[pair]:
                row = labels.index(label)
                panel.plot(
                    [forward_result.accuracy, reverse_result.accuracy],
                    [row, row],
                    color=RULE,
                    linewidth=3,
                    solid_capstyle="round",
                )
                for result, marker, colour in ((forward_result, "o", LEARNING), (reverse_result, "<", FOURTH)):
                    panel.plot([result.low, result.high], [row, row], color=colour, linewidth=1.2)
                    panel.plot([result.accuracy], [row], marker, color=colour, markersize=6.5, clip_on=False)
                    add_tip(panel, result.accuracy, row, result_text(result))
                margin_text(panel, row, format_points(reverse_result.accuracy - forward_result.accuracy))
            panel.axvline(rows[pair][0][2].chance, **CHANCE)
            panel.set_title(view.set_label(pair[2], view.headline(pair[2]), pair[0]), fontweight="bold")
        add_legend(figure, [
            line_mark(format_name(forward[0], LONGEST), marker="o", color=LEARNING, linestyle="none"),
            line_mark("reverse", marker="<", color=FOURTH, linestyle="none"),
            line_mark("chance", **CHANCE),
        ], columns)  # fmt: skip
    return figure


def _direction_rows(view: View, model: str, forward: str, reverse: str) -> list[tuple[str, ArmResult, ArmResult]]:
    others = {arm_label(result): result for result in view.shown(model, reverse)}
    return [(arm_label(s), s, others[arm_label(s)]) for s in view.shown(model, forward) if arm_label(s) in others]


def question_strip(view: View, *, columns: int = 1) -> Figure | None:
    """Return one strip for each question set: a column for each question, a row for each arm, dark if its answer is correct.

    Questions are sorted by the answers of base, then of the arms in order, so that gains are together and losses too.
    """
    model = view.report.models[0] if view.report.models else ""
    arms = [arm.name for arm in view.own_arms(model)]
    every = (*arms, *(f"{arm}+rag" for arm in arms))
    sets = list(dict.fromkeys(item.question_set for item in view.report.questions))
    items = {name: [item for item in view.report.questions if item.question_set == name] for name in sets}
    labels = {
        name: [label for label in every if all(label in item.fraction_correct for item in items[name])] for name in sets
    }
    sets = [name for name in sets if labels[name]]
    if not sets:
        return None
    with style():
        rows = max(len(labels[name]) for name in sets)
        figure, axes, _ = panels(len(sets), 1, 0.24 * rows + 0.6)
        figure.set_size_inches(10.0 if columns > 1 else 4.4, len(sets) * (0.24 * rows + 0.6) + 0.4)
        for panel, name in zip(axes, sets, strict=True):
            ordered = sorted(items[name], key=lambda item: [-item.fraction_correct[label] for label in labels[name]])
            prepare_rows(panel, labels[name], labelled=True)
            panel.grid(visible=False)
            for row, label in enumerate(labels[name]):
                _draw_strip(panel, row, [item.fraction_correct[label] for item in ordered])
            panel.set_xlim(0, len(ordered))
            panel.set_xticks([])
            panel.set_title(f"{format_name(name, LONGEST)}: {len(ordered):,} questions", fontweight="bold")
    return figure


def _draw_strip(panel: Axes, row: int, fractions: Sequence[float]) -> None:
    """Draw neighbours of one shade as one rectangle, and all rectangles of a shade as one path."""
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    panel.add_patch(Rectangle((0, row - 0.42), len(fractions), 0.84, facecolor=RULE, linewidth=0))
    boxes: dict[float, list[Path]] = {}
    start = 0
    for shade, run in groupby(fractions, key=_shade):
        end = start + len(list(run))
        if shade:
            low, high = row - 0.42, row + 0.42
            corners = [(start, low), (end, low), (end, high), (start, high), (start, low)]
            boxes.setdefault(shade, []).append(Path(corners, closed=True))
        start = end
    for shade, paths in boxes.items():
        panel.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=LEARNING, alpha=shade, linewidth=0))


def _shade(fraction: float) -> float:
    if fraction >= 1:
        return 1.0
    return next((opacity for above, opacity in _SHADES[1:] if fraction > above), 0.0)


def grids(view: View, *, columns: int = 3) -> Figure | None:
    """Return the validation accuracy of each value tried, the chosen one filled; one panel for each choice."""
    choices = [choice for choice in view.report.choices if len(choice.candidates) > 1]
    if not choices:
        return None
    with style():
        figure, axes, _ = panels(len(choices), columns if len(choices) > 1 else 2, 2.2)
        for panel, choice in zip(axes, choices, strict=True):
            values = [value for value, _, _ in choice.candidates]
            accuracies = [accuracy for _, accuracy, _ in choice.candidates]
            panel.plot(range(len(values)), accuracies, "o-", color=MUTED, markerfacecolor=PAPER, linewidth=1.2)
            for value, marker, size, colour in ((choice.chosen, "o", 7, LEARNING), (choice.best_on_test, "D", 11, INK)):
                if value in values:
                    index = values.index(value)
                    face = colour if marker == "o" else "none"
                    panel.plot(
                        [index], [accuracies[index]], marker, color=colour, markersize=size, markerfacecolor=face
                    )
            outcome, by = ("", "") if choice.outcome == "right" else (f"{choice.outcome} ", f", {choice.outcome}")
            for index, (value, accuracy, n) in enumerate(choice.candidates):
                add_tip(
                    panel,
                    index,
                    accuracy,
                    f"{choice.key} {value}: {outcome}{format_percent(accuracy)} of {n:,} validation questions",
                )
            labels = [f"{v:g}" if isinstance(v, float) else format_name(str(v), 10) for v in values]
            panel.set_xticks(range(len(values)), labels)
            panel.set_xlim(-0.4, len(values) - 0.6)
            panel.margins(y=0.2)
            panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
            panel.locator_params(axis="y", nbins=5)
            panel.grid(axis="y", color=RULE, linewidth=0.6)
            panel.set_xlabel(format_name(choice.key, 2 * LONGEST))
            of = f"{format_name(choice.model, LONGEST)}, " if view.several_models else ""
            panel.set_title(f"{of}{format_name(choice.arm, LONGEST)} on {format_name(choice.question_set, LONGEST)}{by}",
                            fontweight="bold")  # fmt: skip
        marks = [line_mark("chosen on validation questions", marker="o", color=LEARNING, linestyle="none")]
        if any(choice.best_on_test is not None for choice in choices):
            marks.append(line_mark("best on test questions (not used)", marker="D", color=INK, markerfacecolor="none",
                                   linestyle="none"))  # fmt: skip
        add_legend(figure, marks, columns)
    return figure


def time_by_arm(view: View, *, columns: int = 3) -> Figure | None:
    """Return the seconds of each arm's stages, all seeds together, stacked; the arms of one sweep are one row."""
    rows: dict[str, list[Cost]] = {}
    for cost in view.report.costs:
        arm = view.arms.get((cost.model, cost.arm))
        name = f"sweep: {format_name(arm.sweep)}" if arm is not None and arm.sweep else format_name(cost.arm)
        rows.setdefault(f"{format_name(cost.model)}, {name}" if view.several_models else name, []).append(cost)
    if not rows:
        return None
    from matplotlib.ticker import MultipleLocator

    names = sorted(rows, key=lambda name: "sweep: " in name)
    with style():
        figure, (panel,), _ = panels(1, 1, 0.27 * len(names) + 0.6)
        figure.set_size_inches(10.0 if columns > 1 else 4.4, 0.27 * len(names) + 1.2)
        prepare_rows(panel, names, labelled=True)
        starts = [0.0] * len(names)
        used = [stage for stage in STAGES if any(cost.stage == stage for cost in view.report.costs)]
        for stage, (colour, _, _) in zip(STAGES, SERIES, strict=True):
            seconds = [sum(c.seconds / c.shared_by for c in rows[name] if c.stage == stage) for name in names]
            if stage in used:
                panel.barh(
                    range(len(names)), seconds, left=starts, height=0.62, color=colour, edgecolor=PAPER, linewidth=0.8
                )
                for row, (start, wide) in enumerate(zip(starts, seconds, strict=True)):
                    if wide:
                        add_tip(panel, start + wide / 2, row, f"{names[row]}, {stage}: {wide:,.0f} seconds")
            starts = [a + b for a, b in zip(starts, seconds, strict=True)]
        most = max(panel.get_xlim())
        unit, size = ("seconds", 1) if most < 120 else ("minutes", 60) if most < 7200 else ("hours", 3600)
        panel.xaxis.set_major_locator(MultipleLocator(size * _tick_step(most / size)))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
        panel.set_xlabel(unit)
        marks = [line_mark(stage, marker="s", color=colour, linestyle="none", markersize=7)
                 for stage, (colour, _, _) in zip(STAGES, SERIES, strict=True) if stage in used]  # fmt: skip
        add_legend(figure, marks, columns)
    return figure


def _tick_step(most: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that divides `most` into at most 8 parts."""
    power = 10.0 ** math.floor(math.log10(max(most, 1e-9) / 8))
    return next(step * power for step in (1, 2, 5, 10) if most / (step * power) <= 8)
