"""A study's figures of single questions, of grids and of costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kinject.report.figures import INK, LEARNING, MUTED, PAPER, RULE, panels, style
from kinject.report.formatting import format_name
from kinject.report.study_details import STAGES
from kinject.report.study_figures import LONGEST, SERIES, add_legend, line_mark, prepare_rows
from kinject.report.study_view import View
from kinject.results import Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = ((1.0, 1.0), (0.5, 0.55), (0.0, 0.25))  # (share of seeds above this, opacity)


def question_strip(view: View, *, columns: int = 1) -> Figure | None:
    """Return one strip for each question set: a column for each question, a row for each arm, dark where it is right.

    Questions are sorted by what base and then the arms in order have right, so that gains and losses stand together.
    """
    model = view.result.models[0] if view.result.models else ""
    own = [arm.name for arm in view.own_arms(model)]
    sets = list(dict.fromkeys(item.question_set for item in view.result.questions))
    items = {name: [item for item in view.result.questions if item.question_set == name] for name in sets}
    labels = {
        name: [label for label in (*own, *(f"{arm}+rag" for arm in own)) if all(label in i.right for i in items[name])]
        for name in sets
    }
    sets = [name for name in sets if labels[name]]
    if not sets:
        return None
    with style():
        rows = max(len(labels[name]) for name in sets)
        figure, axes, _ = panels(len(sets), 1, 0.24 * rows + 0.6)
        figure.set_size_inches(10.0 if columns > 1 else 4.4, len(sets) * (0.24 * rows + 0.6) + 0.4)
        for panel, name in zip(axes, sets, strict=True):
            ordered = sorted(items[name], key=lambda item: [-item.right[label] for label in labels[name]])
            prepare_rows(panel, labels[name], labelled=True)
            panel.grid(visible=False)
            for row, label in enumerate(labels[name]):
                _draw_strip(panel, row, [item.right[label] for item in ordered])
            panel.set_xlim(0, len(ordered))
            panel.set_xticks([])
            panel.set_title(f"{format_name(name, LONGEST)}: {len(ordered):,} questions", fontweight="bold")
    return figure


def _draw_strip(panel: Axes, row: int, shares: Sequence[float]) -> None:
    """Draw neighbours of one shade as one rectangle, and all rectangles of a shade as one path."""
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    panel.add_patch(Rectangle((0, row - 0.42), len(shares), 0.84, facecolor=RULE, linewidth=0))
    boxes: dict[float, list[Path]] = {}
    at = 0
    for shade, run in groupby(shares, key=_shade):
        n = len(list(run))
        if shade:
            corners = [(at, row - 0.42), (at + n, row - 0.42), (at + n, row + 0.42), (at, row + 0.42), (at, row - 0.42)]
            boxes.setdefault(shade, []).append(Path(corners, closed=True))
        at += n
    for shade, paths in boxes.items():
        panel.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=LEARNING, alpha=shade, linewidth=0))


def _shade(share: float) -> float:
    if share >= 1:
        return 1.0
    return next((opacity for above, opacity in _SHADES[1:] if share > above), 0.0)


def grids(view: View, *, columns: int = 3) -> Figure | None:
    """Return the validation accuracy of each value tried, the chosen one filled; one panel for each choice."""
    choices = [choice for choice in view.result.choices if len(choice.candidates) > 1]
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
                    at = values.index(value)
                    face = colour if marker == "o" else "none"
                    panel.plot([at], [accuracies[at]], marker, color=colour, markersize=size, markerfacecolor=face)
            labels = [f"{v:g}" if isinstance(v, float) else format_name(str(v), 10) for v in values]
            panel.set_xticks(range(len(values)), labels)
            panel.set_xlim(-0.4, len(values) - 0.6)
            panel.margins(y=0.2)
            panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
            panel.locator_params(axis="y", nbins=5)
            panel.grid(axis="y", color=RULE, linewidth=0.6)
            panel.set_xlabel(format_name(choice.what, 2 * LONGEST))
            of = f"{format_name(choice.model, LONGEST)}, " if view.several_models else ""
            panel.set_title(f"{of}{format_name(choice.arm, LONGEST)} on {format_name(choice.question_set, LONGEST)}",
                            fontweight="bold")  # fmt: skip
        marks = [line_mark("chosen on validation questions", marker="o", color=LEARNING, linestyle="none")]
        if any(choice.best_on_test is not None for choice in choices):
            marks.append(line_mark("best on test questions (not used)", marker="D", color=INK, markerfacecolor="none",
                                   linestyle="none"))  # fmt: skip
        add_legend(figure, marks, columns)
    return figure


def time_by_arm(view: View, *, columns: int = 3) -> Figure | None:
    """Return what each arm's stages took, all seeds together, stacked; a curve's own arms stand as one row."""
    rows: dict[str, list[Cost]] = {}
    for cost in view.result.costs:
        arm = view.arms.get((cost.model, cost.arm))
        name = f"curve: {format_name(arm.curve)}" if arm is not None and arm.curve else format_name(cost.arm)
        rows.setdefault(f"{format_name(cost.model)}, {name}" if view.several_models else name, []).append(cost)
    if not rows:
        return None
    from matplotlib.ticker import MultipleLocator

    names = sorted(rows, key=lambda name: "curve: " in name)
    with style():
        figure, (panel,), _ = panels(1, 1, 0.27 * len(names) + 0.6)
        figure.set_size_inches(10.0 if columns > 1 else 4.4, 0.27 * len(names) + 1.2)
        prepare_rows(panel, names, labelled=True)
        left = [0.0] * len(names)
        used = [stage for stage in STAGES if any(cost.stage == stage for cost in view.result.costs)]
        for stage, (colour, _, _) in zip(STAGES, SERIES, strict=True):
            seconds = [sum(c.seconds / c.shared_by for c in rows[name] if c.stage == stage) for name in names]
            if stage in used:
                panel.barh(
                    range(len(names)), seconds, left=left, height=0.62, color=colour, edgecolor=PAPER, linewidth=0.8
                )
            left = [a + b for a, b in zip(left, seconds, strict=True)]
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
    """Return a step of 1, 2 or 5 times a power of ten that parts `most` in at most 8."""
    power = 10.0 ** math.floor(math.log10(max(most, 1e-9) / 8))
    return next(step * power for step in (1, 2, 5, 10) if most / (step * power) <= 8)
