"""A study's figures of its arms: accuracy, relative gain, flips, and forward against reverse questions.

Each returns None where the result has nothing to draw. Colours and style are the report's (figures.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinject.report.figures import FIFTH, FOURTH, INK, LEARNING, MUTED, PAPER, RETENTION, RULE, THIRD, panels, style
from kinject.report.formatting import ROLES, format_name, format_points, format_relative
from kinject.report.study_view import View, arm_label, is_reverse
from kinject.results import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = (
    (LEARNING, "o", "-"), (RETENTION, "s", "--"), (THIRD, "^", "-."), (FOURTH, "D", ":"), (FIFTH, "v", "-"),
    (MUTED, "P", "--"),
)  # fmt: skip
"""Colour, mark and line of each series: no meaning hangs on colour alone."""

LONGEST = 22  # characters of a name in a figure
TICKS = ([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
_ROLE_MARKS = {"learning": ("o", LEARNING), "retention": ("s", RETENTION), "baseline": ("D", MUTED)}


@dataclass(frozen=True)
class _Panel:
    """One model on one question set."""

    model: str
    question_set: str
    scores: tuple[Score, ...]

    def title(self, view: View) -> str:
        name = format_name(self.question_set, LONGEST)
        first = f"{name}: {ROLES[self.scores[0].role]}"
        return f"{format_name(self.model, LONGEST)}\n{first}" if view.several_models else first


def model_panels(view: View, role: str = "") -> list[_Panel]:
    """Return one panel for each model and question set (of `role`) with the study's own arms on it."""
    found = [
        _Panel(model, name, tuple(view.shown(model, name)))
        for model in view.result.models for name in view.sets(role, model)
    ]  # fmt: skip
    return [panel for panel in found if panel.scores]


def _row_names(drawn: Sequence[_Panel], *, base: bool) -> list[str]:
    """Return the labels of all rows: arms without context first, then with."""
    scores = [score for panel in drawn for score in panel.scores if base or score.to_base is not None]
    return list(dict.fromkeys(arm_label(s) for s in sorted(scores, key=lambda score: score.k > 0)))


def prepare_rows(panel: Axes, names: Sequence[str], *, labelled: bool) -> None:
    """Set `panel` up for one row a name, the first on top; `labelled` writes the names."""
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_yticks(range(len(names)), [format_name(n, LONGEST) for n in names] if labelled else [""] * len(names))
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)


def _margin(panel: Axes, row: int, text: str) -> None:
    panel.annotate(
        text, (1, row), xycoords=panel.get_yaxis_transform(), xytext=(10, 0), textcoords="offset points",
        va="center_baseline", fontsize=9, annotation_clip=False,
    )  # fmt: skip


def line_mark(label: str, **style_of: Any) -> Any:
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style_of)


def add_legend(figure: Figure, marks: Sequence[Any], columns: int) -> None:
    """Set a legend under the panels, in as many columns as the page's width holds."""
    widths = [len(mark.get_label()) + 7 for mark in marks]  # in characters
    room = 125 if columns > 1 else 52
    n = next((n for n in range(len(marks), 1, -1) if sum(max(widths[i::n]) for i in range(n)) <= room), 1)
    figure.legend(handles=list(marks), loc="outside lower left", ncols=n, columnspacing=1.4, handletextpad=0.6)


def accuracy_by_arm(view: View, *, columns: int = 3) -> Figure | None:
    """Return accuracy with its interval and each seed's, one panel for each model and set, one row for each arm."""
    drawn = model_panels(view)
    if not drawn:
        return None
    names = _row_names(drawn, base=True)
    with style():
        figure, axes, n_columns = panels(len(drawn), columns, 0.27 * len(names) + 0.75)
        for index, (panel, shown) in enumerate(zip(axes, drawn, strict=True)):
            prepare_rows(panel, names, labelled=index % n_columns == 0)
            panel.set_xlim(0, 1)
            panel.set_xticks(*TICKS)
            panel.axvline(shown.scores[0].chance, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="chance")
            base = next((score for score in shown.scores if score.to_base is None), None)
            if base is not None:
                panel.axvline(base.accuracy, color=MUTED, linewidth=0.8, label="base")
            for score in shown.scores:
                _draw_score(panel, names.index(arm_label(score)), score)
            panel.set_title(shown.title(view), color=_ROLE_MARKS[shown.scores[0].role][1], fontweight="bold")
        roles = {shown.scores[0].role for shown in drawn}
        marks = [line_mark(ROLES[role], marker=marker, color=colour, linestyle="none")
                 for role, (marker, colour) in _ROLE_MARKS.items() if role in roles]  # fmt: skip
        marks += [
            line_mark("with retrieved context", marker="o", color=INK, markerfacecolor=PAPER, linestyle="none"),
            line_mark("one seed", marker="|", color=MUTED, linestyle="none"),
            line_mark("chance", color=MUTED, linewidth=1.2, linestyle=(0, (4, 3))),
            line_mark("base", color=MUTED, linewidth=0.8),
        ]
        add_legend(figure, marks, columns)
    return figure


def _draw_score(panel: Axes, row: int, score: Score) -> None:
    marker, colour = _ROLE_MARKS[score.role]
    if len(score.by_seed) > 1:
        panel.plot(score.by_seed, [row + 0.27] * len(score.by_seed), "|", color=MUTED, markersize=4, clip_on=False)
    whiskers = [[max(0.0, score.accuracy - score.low)], [max(0.0, score.high - score.accuracy)]]
    panel.errorbar(
        [score.accuracy], [row], xerr=whiskers, fmt=marker, color=colour, markersize=5, markeredgewidth=1.5,
        markerfacecolor=PAPER if score.k else colour, elinewidth=1.8, capsize=3, capthick=1.3, clip_on=False,
    )  # fmt: skip
    _margin(panel, row, f"{100 * score.accuracy:.1f}")


def relative_gains(view: View, *, columns: int = 3) -> Figure | None:
    """Return the gain over base as a share of base's accuracy, with the interval of the difference over it."""
    drawn = [
        panel for panel in model_panels(view, "learning")
        if any(s.to_base is not None and s.to_base.relative is not None for s in panel.scores)
    ]  # fmt: skip
    if not drawn:
        return None
    names = _row_names(drawn, base=False)
    with style():
        figure, axes, n_columns = panels(len(drawn), columns, 0.27 * len(names) + 0.75)
        for index, (panel, shown) in enumerate(zip(axes, drawn, strict=True)):
            prepare_rows(panel, names, labelled=index % n_columns == 0)
            panel.axvline(0, color=INK, linewidth=0.9)
            for score in shown.scores:
                _draw_gain(panel, names.index(arm_label(score)) if score.to_base else 0, score)
            panel.xaxis.set_major_formatter(lambda value, _: format_relative(value))
            panel.locator_params(axis="x", nbins=4)
            panel.margins(x=0.08)
            panel.set_title(shown.title(view), fontweight="bold")
    return figure


def _draw_gain(panel: Axes, row: int, score: Score) -> None:
    contrast = score.to_base
    if contrast is None or contrast.relative is None:
        return
    base = score.accuracy - contrast.delta
    low, high = contrast.low / base, contrast.high / base
    colour = LEARNING if contrast.delta >= 0 else RETENTION
    panel.barh([row], [contrast.relative], height=0.55, color=colour, alpha=0.3 if score.k else 0.75, linewidth=0)
    panel.plot([low, high], [row, row], color=INK, linewidth=1.2)
    _margin(panel, row, format_relative(contrast.relative))


def flips(view: View, *, columns: int = 3) -> Figure | None:
    """Return, for each arm, how many questions became right (to the right) and wrong (to the left) against base."""
    drawn = [panel for panel in model_panels(view) if any(score.to_base is not None for score in panel.scores)]
    if not drawn:
        return None
    names = _row_names(drawn, base=False)
    with style():
        figure, axes, n_columns = panels(len(drawn), columns, 0.27 * len(names) + 0.75)
        for index, (panel, shown) in enumerate(zip(axes, drawn, strict=True)):
            prepare_rows(panel, names, labelled=index % n_columns == 0)
            contrasts = [(names.index(arm_label(s)), s.to_base) for s in shown.scores if s.to_base is not None]
            for row, contrast in contrasts:
                _draw_flips(panel, row, contrast.wrong_to_right, contrast.right_to_wrong)
            most = max(1, *(max(c.wrong_to_right, c.right_to_wrong) for _, c in contrasts))
            left = max(1, *(c.right_to_wrong for _, c in contrasts))
            panel.set_xlim(
                -max(left, 0.3 * most) * 1.3, max(0.3 * most, *(c.wrong_to_right for _, c in contrasts)) * 1.3
            )
            panel.axvline(0, color=INK, linewidth=0.9)
            panel.xaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
            panel.locator_params(axis="x", nbins=5, integer=True)
            of = f"{format_name(shown.model, LONGEST)}\n" if view.several_models else ""
            name = format_name(shown.question_set, LONGEST)
            panel.set_title(f"{of}{name}, {shown.scores[0].n:,} questions", fontweight="bold")
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
    pairs = [(model, forward[0], other) for model in view.result.models for other in reverse]
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
            for label, one, other in rows[pair]:
                row = labels.index(label)
                panel.plot([one.accuracy, other.accuracy], [row, row], color=RULE, linewidth=3, solid_capstyle="round")
                for score, marker, colour in ((one, "o", LEARNING), (other, "<", FOURTH)):
                    panel.plot([score.low, score.high], [row, row], color=colour, linewidth=1.2)
                    panel.plot([score.accuracy], [row], marker, color=colour, markersize=6.5, clip_on=False)
                _margin(panel, row, format_points(other.accuracy - one.accuracy))
            panel.axvline(rows[pair][0][2].chance, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
            panel.set_title(view.set_label(pair[2], view.headline(pair[2]), pair[0]), fontweight="bold")
        add_legend(figure, [
            line_mark(format_name(forward[0], LONGEST), marker="o", color=LEARNING, linestyle="none"),
            line_mark("reverse", marker="<", color=FOURTH, linestyle="none"),
            line_mark("chance", color=MUTED, linewidth=1.2, linestyle=(0, (4, 3))),
        ], columns)  # fmt: skip
    return figure


def _direction_rows(view: View, model: str, forward: str, reverse: str) -> list[tuple[str, Score, Score]]:
    others = {arm_label(score): score for score in view.shown(model, reverse)}
    return [(arm_label(s), s, others[arm_label(s)]) for s in view.shown(model, forward) if arm_label(s) in others]
