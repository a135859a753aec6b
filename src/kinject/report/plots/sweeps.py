"""Figures over a value: sweeps, number of retrieved passages, exposures, learning against forgetting, scaling.

Each returns None if the report has nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinject.report.formatting import ROLES, format_name, format_percent
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
    Label,
    add_legend,
    add_tip,
    line_mark,
    panels,
    percent_axis,
    place_labels,
    style,
)
from kinject.report.view import View, exposures_label, is_reverse, result_text, scaling_label
from kinject.results import ArmResult, ExposureBin, Sweep, SweepPoint
from kinject.scaling import Scaling, ScalingFit, ScalingPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMES = 8
"""Arms that are named beside their points on the frontier; of more the legend has the names."""
_ROLE_SERIES = {
    "learning": ((LEARNING, "o", "-"), (FOURTH, "<", "--"), *SERIES[2:3]),
    "retention": ((RETENTION, "s", "-"), (SERIES[4][0], "v", "--"), *SERIES[2:3]),
}


@dataclass(frozen=True)
class _Drawn:
    """One point of a sweep: its position, its result, and its control's."""

    x: float
    result: ArmResult
    control: ArmResult | None


def sweep_figure(view: View, sweeps: Sequence[Sweep], *, columns: int = 2) -> Figure | None:
    """Return accuracy along one sweep (one of each model): learning sets in one panel, retention sets in another."""
    sweep_roles = [
        (sweep, role) for sweep in sweeps for role in ("learning", "retention")
        if any(_drawn(view, sweep, name) for name in view.sets(role, sweep.model))
    ]  # fmt: skip
    if not sweep_roles:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, n_columns = panels(len(sweep_roles), min(columns, 2), 2.75)
        for index, (panel, (sweep, role)) in enumerate(zip(axes, sweep_roles, strict=True)):
            percent_axis(panel, labelled=index % n_columns == 0)
            names = view.sets(role, sweep.model)
            for name, series in zip(names, _ROLE_SERIES[role] * len(names), strict=False):
                marks |= _draw_series(panel, view, sweep, name, series)
            marks |= _draw_control(panel, _drawn(view, sweep, names[0]), _ROLE_SERIES[role][0])
            _draw_base(panel, view, sweep.model, names[0])
            _ticks(panel, sweep)
            title = ROLES[role] + (f", {format_name(sweep.model, LONGEST)}" if view.several_models else "")
            panel.set_title(title, color=_ROLE_SERIES[role][0][0], fontweight="bold")
            panel.set_xlabel(format_name(f"{sweep.name} ({sweep.key})", 2 * LONGEST))
        marks["base"] = line_mark("base", color=MUTED, linewidth=0.9)
        marks["chance"] = line_mark("chance", **CHANCE)
        add_legend(figure, list(marks.values()), columns)
    return figure


def numbers_of(sweep: Sweep) -> list[float | None]:
    """Return each value as a number, None if it is none. A mapping of one key counts by its number; an empty one is 0."""
    keys = {key for point in sweep.points if isinstance(point.value, Mapping) for key in point.value}
    numbers: list[float | None] = []
    for point in sweep.points:
        x = point.x
        if x is None and isinstance(point.value, Mapping) and len(keys) == 1:
            (value,) = point.value.values() or (0,)
            x = float(value) if isinstance(value, int | float) else None
        numbers.append(x)
    return numbers


def positions(sweep: Sweep) -> list[float]:
    """Return the position of each point: its number, or its index if values are not numbers (or not for a log axis)."""
    numbers = [x for x in numbers_of(sweep) if x is not None and not (sweep.log_x and x <= 0)]
    return numbers if len(numbers) == len(sweep.points) else [float(i) for i in range(len(sweep.points))]


def _is_even(sweep: Sweep) -> bool:
    return any(x is None or (sweep.log_x and x <= 0) for x in numbers_of(sweep))


def tick_label(point: SweepPoint, x: float | None) -> str:
    """Return a value as the axis shows it: a number in few characters (``5e-4``), else the point's label."""
    if x is None:
        return format_name(point.label, 14)
    if x != 0 and not 0.01 <= abs(x) < 10_000:
        digits, power = f"{x:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{x:g}"


def _drawn(view: View, sweep: Sweep, question_set: str) -> list[_Drawn]:
    drawn = []
    for x, point in zip(positions(sweep), sweep.points, strict=True):
        result = view.point(sweep, point, question_set)
        control = view.result(sweep.model, point.control, question_set) if point.control else None
        if result is not None:
            drawn.append(_Drawn(x, result, control))
    return sorted(drawn, key=lambda point: point.x)


def _draw_series(panel: Axes, view: View, sweep: Sweep, name: str, series: tuple[str, str, str]) -> dict[str, Any]:
    """Draw one set along a sweep with its band and seeds; return its entry of the legend by name."""
    drawn, (colour, marker, line) = _drawn(view, sweep, name), series
    if not drawn:
        return {}
    xs = [point.x for point in drawn]
    is_continuous = None not in numbers_of(sweep)  # between categories there is nothing
    if is_continuous:
        panel.fill_between(
            xs, [d.result.low for d in drawn], [d.result.high for d in drawn], color=colour, alpha=0.16, lw=0
        )
    else:
        panel.vlines(xs, [d.result.low for d in drawn], [d.result.high for d in drawn], color=colour, linewidth=1.6)
    line = line if is_continuous else "none"
    panel.plot(xs, [d.result.accuracy for d in drawn], color=colour, marker=marker, linestyle=line, markersize=5,
               linewidth=1.6, clip_on=False, label=name)  # fmt: skip
    for point in drawn:
        add_tip(panel, point.x, point.result.accuracy, result_text(point.result))
        if len(point.result.by_seed) > 1:
            panel.plot(
                [point.x] * len(point.result.by_seed), point.result.by_seed, "_", color=colour, markersize=5, alpha=0.8
            )
    return {name: line_mark(format_name(name, LONGEST), color=colour, marker=marker, linestyle=line, markersize=5)}


def _draw_control(panel: Axes, drawn: Sequence[_Drawn], series: tuple[str, str, str]) -> dict[str, Any]:
    colour, marker, _ = series
    controls = [(point.x, point.control) for point in drawn if point.control is not None]
    if not controls:
        return {}
    if len({control.arm for _, control in controls}) == 1:  # one arm for the whole sweep: a level, not a sweep
        control = controls[0][1]
        panel.axhspan(control.low, control.high, color=OTHER, alpha=0.3, linewidth=0)
        panel.axhline(control.accuracy, color=colour, linewidth=1.2, linestyle=(0, (1, 1.5)), label="control")
        name = format_name(control.arm, LONGEST)
        return {f"\0{control.arm}": line_mark(f"control: {name}", color=INK, linewidth=1.2, linestyle=(0, (1, 1.5)))}
    panel.plot([x for x, _ in controls], [control.accuracy for _, control in controls], color=MUTED, marker=marker,
               markerfacecolor=PAPER, linestyle=":", markersize=5, label="control")  # fmt: skip
    return {
        "\0control": line_mark("step-matched control", color=MUTED, marker="o", markerfacecolor=PAPER, linestyle=":")
    }


def _draw_base(panel: Axes, view: View, model: str, question_set: str) -> None:
    base = view.result(model, view.base(model), question_set)
    if base is not None:
        panel.axhline(base.accuracy, color=MUTED, linewidth=0.9, label="base")
        panel.axhline(base.chance, **CHANCE, label="chance")


def _ticks(panel: Axes, sweep: Sweep) -> None:
    from matplotlib.ticker import NullLocator

    xs = positions(sweep)
    labels = [tick_label(point, x) for point, x in zip(sweep.points, numbers_of(sweep), strict=True)]
    if sweep.log_x and not _is_even(sweep):
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
    turned = sum(map(len, labels)) > 40
    panel.set_xticks(xs, labels, rotation=30 if turned else 0, ha="right" if turned else "center")
    if _is_even(sweep):
        panel.set_xlim(-0.5, len(xs) - 0.5)


def accuracy_by_k(view: View, *, columns: int = 3) -> Figure | None:
    """Return accuracy by number of retrieved passages, one panel for each model and set, one line for each arm."""
    model_sets = [
        (model, name) for model in view.report.models for name in view.sets("", model)
        if any(len(view.every_k(model, arm.name, name)) > 2 for arm in view.own_arms(model))
    ]  # fmt: skip
    if not model_sets:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, n_columns = panels(len(model_sets), min(columns, len(model_sets) + 1), 2.4)
        for index, (panel, (model, name)) in enumerate(zip(axes, model_sets, strict=True)):
            percent_axis(panel, labelled=index % n_columns == 0)
            arms = [arm.name for arm in view.own_arms(model) if any(s.k for s in view.every_k(model, arm.name, name))]
            for arm, (colour, marker, line) in zip(arms, SERIES * (len(arms) // len(SERIES) + 1), strict=False):
                results = view.every_k(model, arm, name)
                ks = [result.k for result in results]
                panel.fill_between(
                    ks, [s.low for s in results], [s.high for s in results], color=colour, alpha=0.13, lw=0
                )
                panel.plot(
                    ks, [s.accuracy for s in results], color=colour, marker=marker, linestyle=line, markersize=4.5
                )
                for result in results:
                    add_tip(panel, result.k, result.accuracy, f"{result_text(result)}; K = {result.k}")
                ringed = [s for s in results if s.chosen_k]
                panel.plot([s.k for s in ringed], [s.accuracy for s in ringed], "o", color=INK, markersize=11,
                           markerfacecolor="none", markeredgewidth=1.1)  # fmt: skip
                marks[arm] = line_mark(
                    format_name(arm, LONGEST), color=colour, marker=marker, linestyle=line, markersize=4.5
                )
            _draw_base(panel, view, model, name)
            panel.set_xticks(sorted({s.k for arm in arms for s in view.every_k(model, arm, name)}))
            panel.set_xlabel("K, passages before the question")
            prefix = f"{format_name(model, LONGEST)}\n" if view.several_models else ""
            panel.set_title(prefix + format_name(name, LONGEST), fontweight="bold")
        marks["\0"] = line_mark(
            "chosen K", color=INK, marker="o", markerfacecolor="none", markersize=10, linestyle="none"
        )
        marks["\0c"] = line_mark("chance", **CHANCE)
        add_legend(figure, list(marks.values()), columns)
    return figure


def exposures(view: View, *, columns: int = 3) -> Figure | None:
    """Return accuracy by how often training read the document behind a question, one panel for each model and set."""
    bins = [bin for bin in view.report.exposures if not view.arms[bin.model, bin.arm].sweep]
    model_sets = list(dict.fromkeys((bin.model, bin.question_set) for bin in bins))
    if not model_sets:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, n_columns = panels(len(model_sets), columns if len(model_sets) > 1 else 1, 2.6)
        if len(model_sets) == 1 and columns > 1:
            figure.set_size_inches(10.0, 3.2)
        for index, (panel, model_set) in enumerate(zip(axes, model_sets, strict=True)):
            of_panel = [bin for bin in bins if (bin.model, bin.question_set) == model_set]
            percent_axis(panel, labelled=index % n_columns == 0)
            lows = sorted({(bin.low, bin.high) for bin in of_panel})
            arms = list(dict.fromkeys(bin.arm for bin in of_panel))
            for arm, (colour, marker, line) in zip(arms, SERIES * (len(arms) // len(SERIES) + 1), strict=False):
                of_arm = sorted((bin for bin in of_panel if bin.arm == arm), key=lambda bin: bin.low)
                panel.plot([lows.index((b.low, b.high)) for b in of_arm], [b.accuracy for b in of_arm], color=colour,
                           marker=marker, linestyle=line, markersize=5)  # fmt: skip
                for b in of_arm:
                    text = f"{arm}: {format_percent(b.accuracy)} of {b.n:,} answers, read {exposures_label(b)} times"
                    add_tip(panel, lows.index((b.low, b.high)), b.accuracy, text)
                marks[arm] = line_mark(format_name(arm, LONGEST), color=colour, marker=marker, linestyle=line)
            panel.set_xticks(range(len(lows)), [exposures_label(bin) for bin in _first_of(of_panel, lows)])
            panel.set_xlim(-0.4, len(lows) - 0.6)
            _draw_base(panel, view, *model_set)
            panel.set_xlabel("times its document was read")
            prefix = f"{format_name(model_set[0], LONGEST)}\n" if view.several_models else ""
            panel.set_title(prefix + format_name(model_set[1], LONGEST), fontweight="bold")
        marks["\0base"] = line_mark("base", color=MUTED, linewidth=0.9)
        marks["\0chance"] = line_mark("chance", **CHANCE)
        add_legend(figure, list(marks.values()), columns)
    return figure


def _first_of(bins: Sequence[ExposureBin], bounds: Sequence[tuple[float, float]]) -> list[ExposureBin]:
    return [next(bin for bin in bins if (bin.low, bin.high) == bound) for bound in bounds]


def frontier(view: View, *, columns: int = 2) -> Figure | None:
    """Return learning against retention, one panel for each model and retention set, one line for each sweep."""
    panel_keys = []
    for model in view.report.models:
        forward = [name for name in view.sets("learning", model) if not is_reverse(name)]
        sweeps = [sweep for sweep in view.report.sweeps if sweep.model == model and sweep.frontier]
        panel_keys += [
            (model, sweeps, forward[0], kept) for kept in view.sets("retention", model)
            if forward and any(_both(view, sweep, forward[0], kept) for sweep in sweeps)
        ]  # fmt: skip
    if not panel_keys:
        return None
    marks: dict[str, Any] = {}
    labels: list[list[Label]] = []
    with style():
        figure, axes, _ = panels(len(panel_keys), columns if len(panel_keys) > 1 else 1, 3.9)
        if len(panel_keys) == 1 and columns > 1:
            figure.set_size_inches(10.0, 5.0)
        for panel, (model, sweeps, learned, kept) in zip(axes, panel_keys, strict=True):
            texts, of_panel = _arm_labels(view), list[Label]()
            for sweep, (colour, marker, line) in zip(sweeps, SERIES * len(sweeps), strict=False):
                points = _both(view, sweep, learned, kept)
                panel.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, marker=marker,
                           linestyle=line, markersize=6, linewidth=1.4, alpha=0.95)  # fmt: skip
                for point in sweep.points:
                    _draw_intervals(panel, [view.point(sweep, point, name) for name in (kept, learned)], colour)
                for x, y, label in points:
                    text = f"{sweep.name} {label}: {format_percent(y)} learned, {format_percent(x)} kept"
                    add_tip(panel, x, y, text)
                    of_panel.append(Label(x, y, label, colour))
                name = format_name(sweep.name, LONGEST)
                marks[sweep.name] = line_mark(name, color=colour, marker=marker, linestyle=line, markersize=6)
            arm_marks, arms = _draw_arms(panel, view, (model, learned, kept), texts)
            marks |= arm_marks
            labelled = {(label.x, label.y) for label in arms}
            labels.append([*arms, *(label for label in of_panel if (label.x, label.y) not in labelled)])
            _prepare_frontier(panel, view, (model, learned, kept))
        n_rows = add_legend(figure, list(marks.values()), columns)
        figure.set_figheight(figure.get_figheight() + 0.2 * max(0, n_rows - 2))
        engine = figure.get_layout_engine()
        if engine is not None:
            engine.execute(figure)  # labels are placed on the page
        for panel, of_panel in zip(axes, labels, strict=True):
            place_labels(panel, of_panel)
    return figure


def _arm_labels(view: View) -> dict[str, str]:
    """Return the text beside each trained arm: its name, or its number in the legend where names would cover each other."""
    names = list(dict.fromkeys(arm.name for model in view.report.models for arm in view.own_arms(model) if arm.trained))
    numbered = len(names) > _MOST_NAMES
    return {name: f"{number}" if numbered else format_name(name, LONGEST) for number, name in enumerate(names, 1)}


def _both(view: View, sweep: Sweep, learned: str, kept: str) -> list[tuple[float, float, str]]:
    """Return (kept, learned, label) of each point of a sweep that has both."""
    points = []
    for point, x in zip(sweep.points, numbers_of(sweep), strict=True):
        retention, learning = view.point(sweep, point, kept), view.point(sweep, point, learned)
        if retention is not None and learning is not None:
            points.append((retention.accuracy, learning.accuracy, tick_label(point, x)))
    return points


def _draw_intervals(panel: Axes, results: Sequence[ArmResult | None], colour: str) -> None:
    """Draw the 95% intervals of retention and of learning (the two `results`) as a thin cross."""
    retention, learning = results
    if retention is not None and learning is not None:
        panel.hlines(
            learning.accuracy, retention.low, retention.high, colors=colour, linewidth=0.8, alpha=0.4, zorder=1
        )
        panel.vlines(retention.accuracy, learning.low, learning.high, colors=colour, linewidth=0.8, alpha=0.4, zorder=1)


def _draw_arms(
    panel: Axes, view: View, panel_key: tuple[str, str, str], texts: Mapping[str, str]
) -> tuple[dict[str, Any], list[Label]]:
    """Draw the study's own arms, the base as a star; return the entries of the legend, and the labels of `texts`."""
    model, learned, kept = panel_key
    marks = {"\0base": line_mark("base", color=INK, marker="*", markersize=11, linestyle="none")}
    labels = []
    for arm in view.own_arms(model):
        retention, learning = view.result(model, arm.name, kept), view.result(model, arm.name, learned)
        if retention is None or learning is None:
            continue
        marker, size = ("x", 6) if arm.trained else ("*", 13)
        panel.plot(
            [retention.accuracy], [learning.accuracy], marker, color=INK, markersize=size, clip_on=False, zorder=4
        )
        if not any(point.arm == arm.name for sweep in view.report.sweeps if sweep.frontier for point in sweep.points):
            _draw_intervals(panel, (retention, learning), INK)
        text = f"{arm.name}: {format_percent(learning.accuracy)} learned, {format_percent(retention.accuracy)} kept"
        add_tip(panel, retention.accuracy, learning.accuracy, text)
        label = texts.get(arm.name, "")
        labels.append(Label(retention.accuracy, learning.accuracy, label))
        if label:
            name = format_name(arm.name, LONGEST)
            words = "an arm of its own" if label == name else f"{label}  {name}"
            marks[f"\0{words}"] = line_mark(words, color=INK, marker="x" if label == name else "", linestyle="none")
    return marks, labels


def _prepare_frontier(panel: Axes, view: View, panel_key: tuple[str, str, str]) -> None:
    model, learned, kept = panel_key
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    panel.grid(color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(0.1)
    panel.set_xlabel(f"{format_name(kept, LONGEST)}: kept")
    panel.set_ylabel(f"{format_name(learned, LONGEST)}: learned")
    if view.several_models:
        panel.set_title(format_name(model, LONGEST), fontweight="bold")


def scaling_figure(view: View, *, columns: int = 3) -> Figure | None:
    """Return three kinds of panels: accuracy by parameters, accuracy by exposures, bits per parameter by parameters."""
    scaling = view.report.scaling
    if scaling is None or not scaling.points:
        return None
    sets = list(dict.fromkeys(point.question_set for point in scaling.points))
    kinds: list[tuple[str, str]] = [("parameters", name) for name in sets]
    kinds += [("exposures", name) for name in sets if any(p.exposures for p in _of(scaling, name))]
    kinds += [("bits", name) for name in sets]
    with style():
        figure, axes, _ = panels(len(kinds), columns, 2.75)
        for panel, (kind, name) in zip(axes, kinds, strict=True):
            points = _of(scaling, name)
            marks: list[Any] = []
            key = "model" if kind == "exposures" else "label"
            for index, group in enumerate(dict.fromkeys(getattr(point, key) for point in points)):
                colour, marker, _line = SERIES[index % len(SERIES)]
                of_group = [point for point in points if getattr(point, key) == group]
                if kind == "bits":
                    _draw_bits(panel, of_group, colour, marker)
                else:
                    fit = _fit_of(scaling, (name, kind, group))
                    _draw_accuracies(panel, of_group, kind, fit, (colour, marker))
                label = group if kind == "exposures" else scaling_label(scaling, group)
                marks.append(line_mark(format_name(label, LONGEST), color=colour, marker=marker, markersize=5))
            _finish(panel, kind, name, points)
            panel.legend(handles=marks, fontsize=7.5, handlelength=1.5)
    return figure


def _of(scaling: Scaling, question_set: str) -> list[ScalingPoint]:
    return [point for point in scaling.points if point.question_set == question_set]


def _fit_of(scaling: Scaling, fit_key: tuple[str, str, str]) -> ScalingFit | None:
    return next((fit for fit in scaling.fits if (fit.question_set, fit.along, fit.fixed) == fit_key), None)


def _draw_accuracies(
    panel: Axes, points: Sequence[ScalingPoint], kind: str, fit: ScalingFit | None, series: tuple[str, str]
) -> None:
    colour, marker = series
    with_x = [(x, point) for point in points if (x := getattr(point, kind))]
    for x, point in with_x:
        panel.plot([x] * len(point.by_seed), point.by_seed, marker, color=colour, markersize=3.5, alpha=0.7)
        add_tip(
            panel, x, point.accuracy, f"{point.model} {point.label}: {format_percent(point.accuracy)}, {kind} {x:,.4g}"
        )
    if fit is not None:
        ends = [min(x for x, _ in with_x), max(x for x, _ in with_x)]
        panel.plot(ends, [fit.intercept + fit.slope * math.log2(x) for x in ends], color=colour, linewidth=1.4)


def _draw_bits(panel: Axes, points: Sequence[ScalingPoint], colour: str, marker: str) -> None:
    points = sorted(points, key=lambda point: point.parameters)
    values = [point.per_parameter for point in points]
    below = [max(0.0, (point.bits - point.low) / point.parameters) for point in points]
    above = [max(0.0, (point.high - point.bits) / point.parameters) for point in points]
    panel.errorbar([point.parameters for point in points], values, yerr=[below, above], color=colour, marker=marker,
                   markersize=4.5, linewidth=1.2, capsize=2)  # fmt: skip
    for point, value in zip(points, values, strict=True):
        add_tip(
            panel,
            point.parameters,
            value,
            f"{point.model}: {value:.3g} bits per parameter, {format_percent(point.accuracy)}",
        )


def _finish(panel: Axes, kind: str, name: str, points: Sequence[ScalingPoint]) -> None:
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(axis="y", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    xs = sorted({x for point in points if (x := getattr(point, "exposures" if kind == "exposures" else "parameters"))})
    if kind == "exposures":  # widths read the same number of texts, to a fraction
        xs = sorted({round(x) for x in xs})
    panel.set_xticks(xs, [f"{x / 1e6:.2g}M" if x >= 1e6 else f"{x / 1e3:.3g}k" if x >= 1e3 else f"{x:g}" for x in xs])
    panel.set_xlabel("times each document was read" if kind == "exposures" else "parameters")
    quantity = "bits per parameter" if kind == "bits" else "accuracy"
    panel.set_title(f"{format_name(name, LONGEST)}: {quantity}", fontweight="bold")
    if kind != "bits":
        panel.set_ylim(0, 1.02)
        panel.set_yticks(*TICKS)
        panel.axhline(points[0].chance, **CHANCE)
