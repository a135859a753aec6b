"""A study's plot of what was learned against what was kept, along the curves that are marked for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kinject.report.figures import INK, PAPER, RULE, panels, style
from kinject.report.formatting import format_name
from kinject.report.study_curves import numbers_of, tick_label
from kinject.report.study_figures import LONGEST, SERIES, add_legend, line_mark
from kinject.report.study_view import View, is_reverse
from kinject.results import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NEAR = 0.045  # in accuracy: labels nearer than this would overlap


def frontier(view: View, *, columns: int = 2) -> Figure | None:
    """Return what was learned against what was kept, one panel for each model and retention set, one line for each curve."""
    places = []
    for model in view.result.models:
        forward = [name for name in view.sets("learning", model) if not is_reverse(name)]
        curves = [curve for curve in view.result.curves if curve.model == model and curve.frontier]
        places += [
            (model, curves, forward[0], kept) for kept in view.sets("retention", model)
            if forward and any(_both(view, curve, forward[0], kept) for curve in curves)
        ]  # fmt: skip
    if not places:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, _ = panels(len(places), columns if len(places) > 1 else 1, 3.9)
        if len(places) == 1 and columns > 1:
            figure.set_size_inches(10.0, 5.0)
        for panel, (model, curves, learned, kept) in zip(axes, places, strict=True):
            labelled: list[tuple[float, float]] = []
            for curve, (colour, marker, line) in zip(curves, SERIES * len(curves), strict=False):
                points = _both(view, curve, learned, kept)
                panel.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, marker=marker,
                           linestyle=line, markersize=6, linewidth=1.4, alpha=0.95)  # fmt: skip
                name = format_name(curve.name, LONGEST)
                marks[curve.name] = line_mark(name, color=colour, marker=marker, linestyle=line, markersize=6)
                _label(panel, points, colour, labelled)
            marks |= _draw_arms(panel, view, (model, learned, kept), labelled)
            _prepare_frontier(panel, view, (model, learned, kept))
        add_legend(figure, list(marks.values()), columns)
    return figure


def _both(view: View, curve: Curve, learned: str, kept: str) -> list[tuple[float, float, str]]:
    """Return (kept, learned, label) of each point of a curve that has both."""
    found = []
    for point, x in zip(curve.points, numbers_of(curve), strict=True):
        one, other = view.point(curve, point, kept), view.point(curve, point, learned)
        if one is not None and other is not None:
            found.append((one.accuracy, other.accuracy, tick_label(point, x)))
    return found


def _label(
    panel: Axes, points: Sequence[tuple[float, float, str]], colour: str, taken: list[tuple[float, float]]
) -> None:
    """Write the value at each point, but not where another label stands."""
    for x, y, text in points:
        if all(math.hypot(x - a, y - b) > _NEAR for a, b in taken):
            panel.annotate(
                text,
                (x, y),
                xytext=(6, 4),
                textcoords="offset points",
                fontsize=8.5,
                color=colour,
                bbox={"facecolor": PAPER, "alpha": 0.75, "linewidth": 0, "pad": 0.6},
            )
            taken.append((x, y))


def _draw_arms(
    panel: Axes, view: View, place: tuple[str, str, str], taken: list[tuple[float, float]]
) -> dict[str, Any]:
    """Draw the study's own arms where they stand, the base as a star."""
    model, learned, kept = place
    for arm in view.own_arms(model):
        one, other = view.score(model, arm.name, kept), view.score(model, arm.name, learned)
        if one is None or other is None:
            continue
        marker, size = ("x", 6) if arm.trained else ("*", 13)
        panel.plot([one.accuracy], [other.accuracy], marker, color=INK, markersize=size, clip_on=False, zorder=4)
        on_curve = any(point.arm == arm.name for curve in view.result.curves for point in curve.points)
        panel.annotate(format_name(arm.name, LONGEST), (one.accuracy, other.accuracy), fontsize=8.5, color=INK, ha="right",
                       xytext=(-7, -12 if on_curve else -3), textcoords="offset points")  # fmt: skip
        taken.append((one.accuracy, other.accuracy))
    return {
        "\0base": line_mark("base", color=INK, marker="*", markersize=11, linestyle="none"),
        "\0arm": line_mark("an arm of its own", color=INK, marker="x", linestyle="none"),
    }


def _prepare_frontier(panel: Axes, view: View, place: tuple[str, str, str]) -> None:
    model, learned, kept = place
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    panel.grid(color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(0.1)
    panel.set_xlabel(f"{format_name(kept, LONGEST)}: kept")
    panel.set_ylabel(f"{format_name(learned, LONGEST)}: learned")
    if view.several_models:
        panel.set_title(format_name(model, LONGEST), fontweight="bold")
