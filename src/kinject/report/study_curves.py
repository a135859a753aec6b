"""A study's figures over a value: curves, K, exposures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinject.report.figures import FOURTH, INK, LEARNING, MUTED, OTHER, PAPER, RETENTION, RULE, panels, style
from kinject.report.formatting import ROLES, format_name
from kinject.report.study_figures import LONGEST, SERIES, TICKS, add_legend, line_mark
from kinject.report.study_view import View, exposures_label
from kinject.results import Curve, ExposureBin, Point, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROLE_SERIES = {
    "learning": ((LEARNING, "o", "-"), (FOURTH, "<", "--"), *SERIES[2:3]),
    "retention": ((RETENTION, "s", "-"), (SERIES[4][0], "v", "--"), *SERIES[2:3]),
}


@dataclass(frozen=True)
class _Drawn:
    """One position on a curve: where it stands, its score, and its control's."""

    x: float
    score: Score
    control: Score | None


def curve_figure(view: View, curves: Sequence[Curve], *, columns: int = 2) -> Figure | None:
    """Return accuracy along one curve (one of each model): learning sets in one panel, retention sets in another."""
    places = [
        (curve, role) for curve in curves for role in ("learning", "retention")
        if any(_drawn(view, curve, name) for name in view.sets(role, curve.model))
    ]  # fmt: skip
    if not places:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, n_columns = panels(len(places), min(columns, 2), 2.75)
        for index, (panel, (curve, role)) in enumerate(zip(axes, places, strict=True)):
            _prepare_percent(panel, labelled=index % n_columns == 0)
            names = view.sets(role, curve.model)
            for name, series in zip(names, _ROLE_SERIES[role] * len(names), strict=False):
                marks |= _draw_series(panel, view, (curve, name), series)
            marks |= _draw_control(panel, _drawn(view, curve, names[0]), _ROLE_SERIES[role][0])
            _draw_base(panel, view, curve.model, names[0])
            _ticks(panel, curve)
            title = ROLES[role] + (f", {format_name(curve.model, LONGEST)}" if view.several_models else "")
            panel.set_title(title, color=_ROLE_SERIES[role][0][0], fontweight="bold")
            panel.set_xlabel(format_name(f"{curve.name} ({curve.key})", 2 * LONGEST))
        marks["base"] = line_mark("base", color=MUTED, linewidth=0.9)
        marks["chance"] = line_mark("chance", color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        add_legend(figure, list(marks.values()), columns)
    return figure


def numbers_of(curve: Curve) -> list[float | None]:
    """Return the number that each value is. A mapping of one key to numbers counts, nothing in it as 0."""
    keys = {key for point in curve.points if isinstance(point.value, Mapping) for key in point.value}
    found: list[float | None] = []
    for point in curve.points:
        x = point.x
        if x is None and isinstance(point.value, Mapping) and len(keys) == 1:
            (held,) = point.value.values() or (0,)
            x = float(held) if isinstance(held, int | float) else None
        found.append(x)
    return found


def positions(curve: Curve) -> list[float]:
    """Return where each point stands: at its number, or evenly where values are not numbers (or not for a log axis)."""
    numbers = [x for x in numbers_of(curve) if x is not None and not (curve.log_x and x <= 0)]
    return numbers if len(numbers) == len(curve.points) else [float(at) for at in range(len(curve.points))]


def _is_even(curve: Curve) -> bool:
    return any(x is None or (curve.log_x and x <= 0) for x in numbers_of(curve))


def tick_label(point: Point, x: float | None) -> str:
    """Return a value as it stands on an axis: a number in few characters (``5e-4``), else the point's label."""
    if x is None:
        return format_name(point.label, 14)
    if x != 0 and not 0.01 <= abs(x) < 10_000:
        digits, power = f"{x:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{x:g}"


def _drawn(view: View, curve: Curve, question_set: str) -> list[_Drawn]:
    found = []
    for x, point in zip(positions(curve), curve.points, strict=True):
        score = view.point(curve, point, question_set)
        control = view.score(curve.model, point.control, question_set) if point.control else None
        if score is not None:
            found.append(_Drawn(x, score, control))
    return sorted(found, key=lambda drawn: drawn.x)


def _prepare_percent(panel: Axes, *, labelled: bool) -> None:
    panel.set_ylim(0, 1.02)
    panel.set_yticks(TICKS[0], TICKS[1] if labelled else [""] * len(TICKS[0]))
    panel.grid(axis="y", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)


def _draw_series(panel: Axes, view: View, place: tuple[Curve, str], series: tuple[str, str, str]) -> dict[str, Any]:
    """Draw one set along a curve with its band, seeds and control; return what the legend should say of it."""
    curve, name = place
    drawn, (colour, marker, line) = _drawn(view, curve, name), series
    if not drawn:
        return {}
    xs = [one.x for one in drawn]
    whole = None not in numbers_of(curve)  # between categories there is nothing
    if whole:
        panel.fill_between(
            xs, [d.score.low for d in drawn], [d.score.high for d in drawn], color=colour, alpha=0.16, lw=0
        )
    else:
        panel.vlines(xs, [d.score.low for d in drawn], [d.score.high for d in drawn], color=colour, linewidth=1.6)
    line = line if whole else "none"
    panel.plot(xs, [d.score.accuracy for d in drawn], color=colour, marker=marker, linestyle=line, markersize=5,
               linewidth=1.6, clip_on=False, label=name)  # fmt: skip
    for one in drawn:
        if len(one.score.by_seed) > 1:
            panel.plot([one.x] * len(one.score.by_seed), one.score.by_seed, "_", color=colour, markersize=5, alpha=0.8)
    return {name: line_mark(format_name(name, LONGEST), color=colour, marker=marker, linestyle=line, markersize=5)}


def _draw_control(panel: Axes, drawn: Sequence[_Drawn], series: tuple[str, str, str]) -> dict[str, Any]:
    colour, marker, _ = series
    held = [(one.x, one.control) for one in drawn if one.control is not None]
    if not held:
        return {}
    if len({control.arm for _, control in held}) == 1:  # one arm for the whole curve: a level, not a curve
        control = held[0][1]
        panel.axhspan(control.low, control.high, color=OTHER, alpha=0.3, linewidth=0)
        panel.axhline(control.accuracy, color=colour, linewidth=1.2, linestyle=(0, (1, 1.5)), label="control")
        name = format_name(control.arm, LONGEST)
        return {f"\0{control.arm}": line_mark(f"control: {name}", color=INK, linewidth=1.2, linestyle=(0, (1, 1.5)))}
    panel.plot([x for x, _ in held], [control.accuracy for _, control in held], color=MUTED, marker=marker,
               markerfacecolor=PAPER, linestyle=":", markersize=5, label="control")  # fmt: skip
    return {
        "\0control": line_mark("step-matched control", color=MUTED, marker="o", markerfacecolor=PAPER, linestyle=":")
    }


def _draw_base(panel: Axes, view: View, model: str, question_set: str) -> None:
    base = view.score(model, view.base(model), question_set)
    if base is not None:
        panel.axhline(base.accuracy, color=MUTED, linewidth=0.9, label="base")
        panel.axhline(base.chance, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="chance")


def _ticks(panel: Axes, curve: Curve) -> None:
    from matplotlib.ticker import NullLocator

    xs = positions(curve)
    labels = [tick_label(point, x) for point, x in zip(curve.points, numbers_of(curve), strict=True)]
    if curve.log_x and not _is_even(curve):
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
    turned = sum(map(len, labels)) > 40
    panel.set_xticks(xs, labels, rotation=30 if turned else 0, ha="right" if turned else "center")
    if _is_even(curve):
        panel.set_xlim(-0.5, len(xs) - 0.5)


def accuracy_by_k(view: View, *, columns: int = 3) -> Figure | None:
    """Return accuracy by number of retrieved passages, one panel for each model and set, one line for each arm."""
    places = [
        (model, name) for model in view.result.models for name in view.sets("", model)
        if any(len(view.by_k(model, arm.name, name)) > 2 for arm in view.own_arms(model))
    ]  # fmt: skip
    if not places:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, n_columns = panels(len(places), min(columns, len(places) + 1), 2.4)
        for index, (panel, (model, name)) in enumerate(zip(axes, places, strict=True)):
            _prepare_percent(panel, labelled=index % n_columns == 0)
            arms = [arm.name for arm in view.own_arms(model) if any(s.k for s in view.by_k(model, arm.name, name))]
            for arm, (colour, marker, line) in zip(arms, SERIES * (len(arms) // len(SERIES) + 1), strict=False):
                scores = view.by_k(model, arm, name)
                ks = [score.k for score in scores]
                panel.fill_between(
                    ks, [s.low for s in scores], [s.high for s in scores], color=colour, alpha=0.13, lw=0
                )
                panel.plot(
                    ks, [s.accuracy for s in scores], color=colour, marker=marker, linestyle=line, markersize=4.5
                )
                ringed = [s for s in scores if s.chosen_k]
                panel.plot([s.k for s in ringed], [s.accuracy for s in ringed], "o", color=INK, markersize=11,
                           markerfacecolor="none", markeredgewidth=1.1)  # fmt: skip
                marks[arm] = line_mark(
                    format_name(arm, LONGEST), color=colour, marker=marker, linestyle=line, markersize=4.5
                )
            _draw_base(panel, view, model, name)
            panel.set_xticks(sorted({s.k for arm in arms for s in view.by_k(model, arm, name)}))
            panel.set_xlabel("K, passages before the question")
            prefix = f"{format_name(model, LONGEST)}\n" if view.several_models else ""
            panel.set_title(prefix + format_name(name, LONGEST), fontweight="bold")
        marks["\0"] = line_mark(
            "chosen K", color=INK, marker="o", markerfacecolor="none", markersize=10, linestyle="none"
        )
        marks["\0c"] = line_mark("chance", color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        add_legend(figure, list(marks.values()), columns)
    return figure


def exposures(view: View, *, columns: int = 3) -> Figure | None:
    """Return accuracy by how often training read the document behind a question, one panel for each model and set."""
    bins = [bin for bin in view.result.exposures if not view.arms[bin.model, bin.arm].curve]
    places = list(dict.fromkeys((bin.model, bin.question_set) for bin in bins))
    if not places:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, n_columns = panels(len(places), columns if len(places) > 1 else 1, 2.6)
        if len(places) == 1 and columns > 1:
            figure.set_size_inches(10.0, 3.2)
        for index, (panel, place) in enumerate(zip(axes, places, strict=True)):
            own = [bin for bin in bins if (bin.model, bin.question_set) == place]
            _prepare_percent(panel, labelled=index % n_columns == 0)
            lows = sorted({(bin.low, bin.high) for bin in own})
            arms = list(dict.fromkeys(bin.arm for bin in own))
            for arm, (colour, marker, line) in zip(arms, SERIES * (len(arms) // len(SERIES) + 1), strict=False):
                held = sorted((bin for bin in own if bin.arm == arm), key=lambda bin: bin.low)
                panel.plot([lows.index((b.low, b.high)) for b in held], [b.accuracy for b in held], color=colour,
                           marker=marker, linestyle=line, markersize=5)  # fmt: skip
                marks[arm] = line_mark(format_name(arm, LONGEST), color=colour, marker=marker, linestyle=line)
            panel.set_xticks(range(len(lows)), [exposures_label(bin) for bin in _first_of(own, lows)])
            panel.set_xlim(-0.4, len(lows) - 0.6)
            _draw_base(panel, view, *place)
            panel.set_xlabel("times its document was read")
            prefix = f"{format_name(place[0], LONGEST)}\n" if view.several_models else ""
            panel.set_title(prefix + format_name(place[1], LONGEST), fontweight="bold")
        marks["\0base"] = line_mark("base", color=MUTED, linewidth=0.9)
        marks["\0chance"] = line_mark("chance", color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        add_legend(figure, list(marks.values()), columns)
    return figure


def _first_of(bins: Sequence[ExposureBin], bounds: Sequence[tuple[float, float]]) -> list[ExposureBin]:
    return [next(bin for bin in bins if (bin.low, bin.high) == bound) for bound in bounds]
