"""Figures of training: the losses of several runs, and what one run logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinject.report.formatting import ROLES, format_name
from kinject.report.plots.style import LEARNING, LONGEST, MUTED, OTHER, RETENTION, RULE, TICKS, panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kinject.report.training import TrainingLog, TrainingRun

_LINES = ("-", "--", ":", "-.")
_MOST_POINTS = 500  # of one loss curve: more cannot be seen
_MOST_EPOCHS = 24  # light lines in one panel
_MOST_BEHIND = 20  # other losses in one panel


def loss_figure(logs: Sequence[TrainingLog], *, columns: int = 3) -> Figure:
    """Return the training loss, one panel for each run, the others in grey behind it as far as this one goes.

    Behind stand some twenty at most, evenly chosen: a panel shows no more, and all behind all would be their square.

    Light lines mark the ends of epochs. All share one scale of loss, logarithmic where the losses span more than a
    factor of five.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    finite = [loss for log in logs for loss in log.losses if math.isfinite(loss)]
    logarithmic = bool(finite) and min(finite) > 0 and max(finite) > 5 * min(finite)
    behind = [(other, _thinned(other)) for other in logs[:: math.ceil(len(logs) / _MOST_BEHIND)]]
    with style():
        figure, axes, n_columns = panels(len(logs), columns, 2.5)
        for index, (panel, log) in enumerate(zip(axes, logs, strict=True)):
            for other, (steps, losses) in behind:
                if other is not log:
                    panel.plot(steps, losses, color=OTHER, linewidth=0.9)
            draw_epochs(panel, log)
            panel.plot(*_thinned(log), color=LEARNING, linewidth=1.5, label="loss")
            panel.set_title(format_name(log.name, 30), fontweight="bold")
            if logarithmic:
                panel.set_yscale("log")
                panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                panel.yaxis.set_minor_locator(NullLocator())
                panel.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
            panel.grid(axis="y", color=RULE, linewidth=0.6)
            if index % n_columns == 0:
                panel.set_ylabel("training loss" + (" (log scale)" if logarithmic else ""))
            if index >= len(logs) - n_columns:
                panel.set_xlabel("step")
            panel.set_xlim(0, log.steps[-1] or 1)
        for panel in axes[1:]:
            panel.sharey(axes[0])
        axes[0].autoscale(axis="y")
    return figure


def draw_epochs(panel: Axes, log: TrainingLog) -> None:
    """Mark where epochs end with light lines, every few of them where there are many."""
    ends = log.epoch_ends()
    every = max(1, math.ceil(len(ends) / _MOST_EPOCHS))
    for step in ends[every - 1 :: every]:
        panel.axvline(step, color=RULE, linewidth=0.9, label="epoch")
    if ends:
        text = "light lines: epochs" if every == 1 else f"light lines: every {every} epochs"
        panel.text(1, 1.02, text, transform=panel.transAxes, ha="right", va="bottom", color=MUTED, fontsize=8.5)


def _thinned(log: TrainingLog) -> tuple[list[float], list[float]]:
    """Return steps and losses; where there are more than can be seen, means of equally many neighbours."""
    size = math.ceil(len(log.steps) / _MOST_POINTS)
    starts = range(0, len(log.steps), max(1, size))
    means = [
        [sum(column[i : i + size]) / len(column[i : i + size]) for i in starts] for column in (log.steps, log.losses)
    ]
    return means[0], means[1]


def training_figure(run: TrainingRun, *, columns: int = 2) -> Figure:
    """Return one panel each for loss (the held-out one dashed), learning rate, gradient norm, and probe accuracies."""
    drawn = [kind for kind in ("loss", "learning_rate", "grad_norm", "probes") if _has(run, kind)]
    with style():
        figure, axes, _ = panels(len(drawn), columns, 2.4)
        for panel, kind in zip(axes, drawn, strict=True):
            draw_epochs(panel, run.log)
            panel.grid(axis="y", color=RULE, linewidth=0.6)
            panel.set_xlabel("step")
            panel.set_xlim(0, max((run.log.steps or (1.0,))[-1], *(s.steps[-1] for s in run.series.values()), 1.0))
            if kind == "loss":
                _draw_loss(panel, run)
            elif kind == "probes":
                _draw_probes(panel, run)
            else:
                held = run.series[kind]
                panel.plot(held.steps, held.values, color=LEARNING, linewidth=1.4)
                panel.set_title({"learning_rate": "learning rate", "grad_norm": "gradient norm"}[kind])
                if kind == "grad_norm" and min(held.values) > 0 and max(held.values) > 10 * min(held.values):
                    panel.set_yscale("log")
    return figure


def _has(run: TrainingRun, kind: str) -> bool:
    if kind == "loss":
        return bool(run.log.steps)
    return any(f"eval_{n}_accuracy" in run.series for n in run.probes) if kind == "probes" else kind in run.series


def _draw_loss(panel: Axes, run: TrainingRun) -> None:
    panel.plot(run.log.steps, run.log.losses, color=LEARNING, linewidth=1.5, label="training text")
    if "eval_loss" in run.series:
        held_out = run.series["eval_loss"]
        panel.plot(held_out.steps, held_out.values, color=MUTED, linestyle="--", marker=".", label="held-out text")
        panel.legend(handles=[line for line in panel.lines if line.get_label() != "epoch"], loc="upper right")
    panel.set_title("loss")


def _draw_probes(panel: Axes, run: TrainingRun) -> None:
    counts = {"learning": 0, "retention": 0}
    for name, role in run.probes.items():
        held = run.series.get(f"eval_{name}_accuracy")
        if held is None:
            continue
        colour, marker = (LEARNING, "o") if role == "learning" else (RETENTION, "s")
        line = _LINES[counts[role] % len(_LINES)]
        counts[role] += 1
        label = f"{format_name(name, LONGEST)}: {ROLES[role]}"
        panel.plot(held.steps, held.values, color=colour, marker=marker, markersize=3.5, linestyle=line, label=label)
    panel.set_ylim(0, 1.02)
    panel.set_yticks(*TICKS)
    panel.legend(handles=[line for line in panel.lines if line.get_label() != "epoch"], loc="lower right")
    panel.set_title("probe accuracy")
