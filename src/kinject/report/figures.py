"""The figures of a report: accuracy, sweeps, learning against forgetting, and the curves of trainings.

Each returns None if there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinject.report.formatting import ROLES, View, arm_label, format_name, format_prompt
from kinject.report.style import (
    CHANCE,
    INK,
    LEARNING,
    LONGEST,
    MUTED,
    PAPER,
    RETENTION,
    RULE,
    TICKS,
    add_legend,
    line_mark,
    margin_text,
    panels,
    percent_axis,
    prepare_rows,
    series,
    style,
)
from kinject.results import ArmResult, PromptFormat, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 500  # of one curve: more cannot be seen
_COLUMNS = 3  # of panels
_MOST_EPOCHS = 24  # light lines in one panel

Log = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""A training's log: each logged number by its name, as (rising) steps and values, NaN where it is not finite."""

_ROLE_MARKS = {
    "learning": ("o", LEARNING), "retention": ("s", RETENTION), "unanswerable": ("^", series(3)[0]), "baseline": ("D", MUTED),
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


def accuracy(view: View) -> Figure | None:
    """Return accuracy with its interval and each seed's, one panel for each model and set, one row for each arm.

    An evaluation has a panel for each prompt format, a study for the headline alone. Learning is a blue
    circle, retention an orange square; a hollow mark has retrieved context.
    """
    groups = view.groups(1 if view.is_study else None)
    drawn = [_Panel(model, name, form, tuple(results)) for model, name, form, results in groups]
    if not drawn:
        return None

    with style():
        names = list(dict.fromkeys(arm_label(r) for r in sorted(
            (result for shown in drawn for result in shown.results), key=lambda result: result.k > 0)))  # fmt: skip
        figure, axes, n_columns = panels(len(drawn), _COLUMNS, 0.27 * len(names) + 0.75)
        rows = {name: row for row, name in enumerate(names)}
        for index, (panel, shown) in enumerate(zip(axes, drawn, strict=True)):
            prepare_rows(panel, names, labelled=index % n_columns == 0)
            _draw_panel(panel, shown, rows, view)
        roles = {shown.results[0].role for shown in drawn}
        marks = [line_mark(ROLES[role], marker=marker, color=colour, linestyle="none")
                 for role, (marker, colour) in _ROLE_MARKS.items() if role in roles]  # fmt: skip
        if any(result.k for shown in drawn for result in shown.results):
            marks.append(line_mark("hollow: with retrieved context", marker="o", color=INK, markerfacecolor=PAPER,
                                   linestyle="none"))  # fmt: skip
        if any(len(result.by_seed) > 1 for shown in drawn for result in shown.results):
            marks.append(line_mark("one seed", marker="|", color=MUTED, linestyle="none"))
        marks += [line_mark("guessing", **CHANCE), line_mark("base", color=MUTED, linewidth=0.8)]
        add_legend(figure, marks)
    return figure


def _draw_panel(panel: Axes, shown: _Panel, rows: Mapping[str, int], view: View) -> None:
    panel.set_xlim(0, 1)
    panel.set_xticks(*TICKS)
    panel.axvline(shown.results[0].chance, **CHANCE, label="chance")
    base = view.result(shown.model, view.base(shown.model), shown.question_set, 0, shown.format)
    if base is not None:
        panel.axvline(base.accuracy, color=MUTED, linewidth=0.8, label="base")
    for result in shown.results:
        _draw_accuracy(panel, rows[arm_label(result)], result)
    panel.set_title(shown.title(view), color=_ROLE_MARKS[shown.results[0].role][1], fontweight="bold")


def _draw_accuracy(panel: Axes, row: int, result: ArmResult) -> None:
    marker, colour = _ROLE_MARKS[result.role]
    if len(result.by_seed) > 1:
        panel.plot(result.by_seed, [row + 0.27] * len(result.by_seed), "|", color=MUTED, markersize=4, clip_on=False)
    whiskers = [[max(0.0, result.accuracy - result.low)], [max(0.0, result.high - result.accuracy)]]
    panel.errorbar(
        [result.accuracy], [row], xerr=whiskers, fmt=marker, color=colour, markersize=5, markeredgewidth=1.5,
        markerfacecolor=PAPER if result.k else colour, elinewidth=1.8, capsize=3, capthick=1.3, clip_on=False,
    )  # fmt: skip
    margin_text(panel, row, f"{100 * result.accuracy:.1f}")


def sweep(view: View, sweeps: Sequence[Sweep]) -> Figure | None:
    """Return accuracy along one sweep (one of each model): learning sets in one panel, retention sets in another."""
    drawn = [
        (sweep, role) for sweep in sweeps for role in ("learning", "retention")
        if any(_points(view, sweep, name) for name in view.sets(role, sweep.model))
    ]  # fmt: skip
    if not drawn:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, n_columns = panels(len(drawn), 2, 2.75)
        for index, (panel, (sweep, role)) in enumerate(zip(axes, drawn, strict=True)):
            percent_axis(panel, labelled=index % n_columns == 0)
            names = view.sets(role, sweep.model)
            for number, name in enumerate(names):
                # Learning begins with blue, retention with orange: the colours of their roles.
                marks |= _draw_curve(panel, view, sweep, name, series(2 * number + (role == "retention")))
            _draw_level(panel, view, sweep.model, names[0])
            panel.set_xticks(range(len(sweep.points)), [format_name(point.label, 14) for point in sweep.points])
            title = ROLES[role] + (f", {format_name(sweep.model, LONGEST)}" if view.several_models else "")
            panel.set_title(title, color=_ROLE_MARKS[role][1], fontweight="bold")
            panel.set_xlabel(format_name(f"{sweep.name} ({sweep.key})", 2 * LONGEST))
        marks["\0base"] = line_mark("base", color=MUTED, linewidth=0.9)
        marks["\0chance"] = line_mark("guessing", **CHANCE)
        add_legend(figure, list(marks.values()))
    return figure


def _points(view: View, sweep: Sweep, question_set: str) -> list[tuple[int, ArmResult, ArmResult | None]]:
    """Return (index, result, its control's result) of the points that have one."""
    drawn = []
    for x, point in enumerate(sweep.points):
        result = view.result(sweep.model, point.arm, question_set)
        control = view.result(sweep.model, point.control, question_set) if point.control else None
        if result is not None:
            drawn.append((x, result, control))
    return drawn


def _draw_curve(
    panel: Axes, view: View, sweep: Sweep, name: str, look: tuple[str, str, str]
) -> dict[str, Any]:  # fmt: skip
    """Draw one set along a sweep with intervals and controls; return its entries of the legend by name."""
    drawn, (colour, marker, line) = _points(view, sweep, name), look
    if not drawn:
        return {}
    xs, results = [x for x, _, _ in drawn], [result for _, result, _ in drawn]
    line = "none" if any(point.x is None for point in sweep.points) else line  # between categories there is nothing
    panel.vlines(xs, [r.low for r in results], [r.high for r in results], color=colour, linewidth=1.4, alpha=0.6)
    panel.plot(xs, [r.accuracy for r in results], color=colour, marker=marker, linestyle=line, markersize=5, label=name)
    marks = {name: line_mark(format_name(name, LONGEST), color=colour, marker=marker, linestyle=line, markersize=5)}
    controls = [(x, control.accuracy) for x, _, control in drawn if control is not None]
    if controls:
        panel.plot(*zip(*controls, strict=True), color=colour, marker=marker, markerfacecolor=PAPER, linestyle=":",
                   markersize=5, label="control")  # fmt: skip
        marks["\0control"] = line_mark("control", color=MUTED, marker="o", markerfacecolor=PAPER, linestyle=":")
    return marks


def _draw_level(panel: Axes, view: View, model: str, question_set: str) -> None:
    base = view.result(model, view.base(model), question_set)
    if base is not None:
        panel.axhline(base.accuracy, color=MUTED, linewidth=0.9, label="base")
        panel.axhline(base.chance, **CHANCE, label="chance")


def frontier(view: View) -> Figure | None:
    """Return learning against retention, one panel for each model and retention set: sweeps as lines, arms as marks."""
    drawn = []
    for model in view.report.models:
        learned = next((name for name in view.sets("learning", model) if "reverse" not in name.lower()), "")
        drawn += [(model, learned, kept) for kept in view.sets("retention", model) if learned]
    drawn = [(model, learned, kept) for model, learned, kept in drawn
             if sum(arm.trained for arm in view.arms.values() if arm.model == model) > 1]  # fmt: skip
    if not drawn:
        return None
    marks: dict[str, Any] = {}
    with style():
        figure, axes, _ = panels(len(drawn), _COLUMNS, 3.9 if len(drawn) > 1 else 4.45)
        for panel, (model, learned, kept) in zip(axes, drawn, strict=True):
            lines = [sweep for sweep in view.report.sweeps if sweep.model == model and sweep.frontier]
            groups = [(sweep.name, [point.arm for point in sweep.points]) for sweep in lines]
            groups += [(arm.name, [arm.name]) for arm in view.own_arms(model)]
            for index, (name, arms) in enumerate(groups):
                look = (INK, "*", "none") if name == view.base(model) else series(index)
                marks |= _draw_trade(panel, view, (model, learned, kept), name, arms, look)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
            panel.grid(color=RULE, linewidth=0.6)
            panel.set_axisbelow(True)
            panel.margins(0.1)
            panel.set_xlabel(f"{format_name(kept, LONGEST)}: kept")
            panel.set_ylabel(f"{format_name(learned, LONGEST)}: learned")
            if view.several_models:
                panel.set_title(format_name(model, LONGEST), fontweight="bold")
        n_rows = add_legend(figure, list(marks.values()))
        figure.set_figheight(figure.get_figheight() + 0.2 * max(0, n_rows - 2))
    return figure


def _draw_trade(
    panel: Axes, view: View, key: tuple[str, str, str], name: str, arms: Sequence[str], look: tuple[str, str, str]
) -> dict[str, Any]:
    """Draw what `arms` kept and learned, with both intervals; return the entry of the legend."""
    model, learned, kept = key
    pairs = [(arm, view.result(model, arm, kept), view.result(model, arm, learned)) for arm in arms]
    points = [(arm, x, y) for arm, x, y in pairs if x is not None and y is not None]
    if not points:
        return {}
    colour, marker, line = look
    size, line = (12 if marker == "*" else 6), (line if len(arms) > 1 else "none")
    panel.plot([x.accuracy for _, x, _ in points], [y.accuracy for _, _, y in points], color=colour, marker=marker,
               linestyle=line, markersize=size, linewidth=1.3, clip_on=False)  # fmt: skip
    for _, x, y in points:
        panel.hlines(y.accuracy, x.low, x.high, colors=colour, linewidth=0.8, alpha=0.4, zorder=1)
        panel.vlines(x.accuracy, y.low, y.high, colors=colour, linewidth=0.8, alpha=0.4, zorder=1)
    label = format_name(name, LONGEST)
    return {f"{name}\0{len(arms) > 1}": line_mark(label, color=colour, marker=marker, linestyle=line, markersize=6)}


def _thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return steps and values; if there are more than can be seen, means of equally many neighbours."""
    size = max(1, math.ceil(len(steps) / _MOST_POINTS))
    starts = range(0, len(steps), size)
    means = [[sum(of[i : i + size]) / len(of[i : i + size]) for i in starts] for of in (steps, values)]
    return means[0], means[1]


_PANELS = {"loss": "loss", "learning_rate": "learning rate", "grad_norm": "gradient norm"}
"""Name of a series in log.jsonl -> title of its panel."""


def training(log: Log, probes: Mapping[str, str]) -> Figure | None:
    """Return a panel each for loss (the held-out one dashed), learning rate, gradient norm and the probes' accuracies.

    `probes` maps the question sets to their roles. Light lines mark the ends of epochs.
    """
    drawn = {key: title for key, title in _PANELS.items() if key in log}
    if any(f"eval_{name}_accuracy" in log for name in probes):
        drawn["probes"] = "probe accuracy"
    if not drawn:
        return None
    last = max(steps[-1] for steps, _ in log.values())
    with style():
        figure, axes, _ = panels(len(drawn), 2, 2.4)
        for panel, (key, title) in zip(axes, drawn.items(), strict=True):
            for step in _epoch_ends(log):
                panel.axvline(step, color=RULE, linewidth=0.9, label="epoch")
            panel.grid(axis="y", color=RULE, linewidth=0.6)
            panel.set_xlabel("step")
            panel.set_xlim(0, last or 1.0)
            panel.set_title(title)
            if key == "probes":
                _draw_probes(panel, log, probes)
                continue
            panel.plot(*_thinned(*log[key]), color=LEARNING, linewidth=1.4, label="training text")
            if key == "loss" and "eval_loss" in log:
                panel.plot(*log["eval_loss"], color=MUTED, linestyle="--", marker=".", label="held-out text")
                panel.legend(handles=panel.lines[-2:], loc="upper right")
    return figure


def _epoch_ends(log: Log) -> Sequence[float]:
    """Return the (interpolated) steps at which one epoch ended and another began; only every few of many."""
    import numpy as np

    steps, epochs = log.get("epoch", ((), ()))
    if not epochs:
        return ()
    ends = np.interp(np.arange(math.floor(epochs[0]) + 1, math.ceil(epochs[-1])), epochs, steps).tolist()
    every = max(1, math.ceil(len(ends) / _MOST_EPOCHS))
    return list(ends[every - 1 :: every])


def _draw_probes(panel: Axes, log: Log, probes: Mapping[str, str]) -> None:
    marks = []
    for index, (name, role) in enumerate(probes.items()):
        colour, marker, line = series(index)
        label = f"{format_name(name, LONGEST)}: {ROLES[role]}"
        curve = log.get(f"eval_{name}_accuracy", ((), ()))
        marks += panel.plot(*curve, color=colour, marker=marker, markersize=3.5, linestyle=line, label=label)
    panel.set_ylim(0, 1.02)
    panel.set_yticks(*TICKS)
    panel.legend(handles=marks, loc="lower right")
