"""Training: logs as numbers, their figures, and the page of one run (loss, learning rate, gradient norm, probes)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import Row, check_output, read_jsonl, read_manifest, write_text
from kinject.errors import InputError
from kinject.report.formatting import ROLES, format_date, format_name, format_percent
from kinject.report.page import Bullets, Code, FigureBlock, Page, Section, TableBlock, line, render_html
from kinject.report.plots.style import (
    LEARNING,
    LONGEST,
    MUTED,
    OTHER,
    RETENTION,
    RULE,
    TICKS,
    add_tip,
    draw_figure,
    panels,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("-", "--", ":", "-.")
_MOST_POINTS = 500  # of one loss curve: more cannot be seen
_MOST_EPOCHS = 24  # light lines in one panel
_MOST_BEHIND = 20  # other losses in one panel
_MOST_GAPS = 8  # steps without a loss that are named
_LARGEST = 1e9
_FIX = "Train again with --resume: the newest checkpoint holds the log."
_CAPTION = (
    "By step; a light line ends an epoch. A loss that steps down at those lines is memorisation: it falls because the same "
    "text comes again. Probe accuracies: solid blue for learning, orange for retention."
)


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """One run: one entry a logged step in each column, steps rising; `epochs` is empty if none were logged.

    A loss that is not finite (null in log.jsonl) is NaN.
    """

    name: str
    steps: tuple[float, ...]
    losses: tuple[float, ...]
    epochs: tuple[float, ...]
    learning_rates: tuple[float, ...]

    def epoch_ends(self) -> tuple[float, ...]:
        """Return the (interpolated) steps at which one epoch ended and another began."""
        if not self.epochs:
            return ()
        import numpy as np

        between = np.arange(math.floor(self.epochs[0]) + 1, math.ceil(self.epochs[-1]))
        return tuple(float(step) for step in np.interp(between, self.epochs, self.steps))


def read_training_log(name: str, path: Path) -> TrainingLog:
    """Return the rows of `path` that hold a training loss; of rows with one step the last counts, as after a resume.

    Raises `DiskError` when the file cannot be read and `InputError` (file:line) when a value is not a number.
    """
    rows: dict[float, tuple[float, float | None, float | None]] = {}
    check_output(path, _FIX)
    for number, row in read_jsonl(path):
        if "loss" not in row:
            continue
        location = f"{path}:{number}"
        step, loss = _number(row, "step", location), _number(row, "loss", location)
        if step is None:
            raise InputError(f"{location}: has a loss but no step. Each row of a training log names its step.")
        rows[step] = (
            math.nan if loss is None else loss,
            _number(row, "epoch", location),
            _number(row, "learning_rate", location),
        )
    steps = sorted(rows)
    epochs = [epoch for step in steps if (epoch := rows[step][1]) is not None]
    return TrainingLog(
        name=name,
        steps=tuple(steps),
        losses=tuple(rows[step][0] for step in steps),
        epochs=tuple(epochs) if len(epochs) == len(steps) else (),
        learning_rates=tuple(rate for step in steps if (rate := rows[step][2]) is not None),
    )


def _number(row: Row, key: str, location: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{location}: {key}: found {value!r}, a number is needed.")
    # A loss that is not finite is a finding; a step that is not is damage.
    if key != "loss" and not 0 <= value < _LARGEST:
        raise InputError(f"{location}: {key}: found {value!r}, allowed is 0 to {_LARGEST:.0e}.")
    return float(value)


@dataclass(frozen=True, slots=True)
class Series:
    """One logged number over the run: the (rising) `steps` and the value at each, NaN where it is not finite."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


def read_series(path: Path, keys: Sequence[str]) -> dict[str, Series]:
    """Return the series of each of `keys` that a training log holds; of rows with one step the last counts.

    Raises `DiskError` when the file cannot be read and `InputError` (file:line) when a value is not a number.
    """
    values: dict[str, dict[float, float]] = {key: {} for key in keys}
    check_output(path, _FIX)
    for number, row in read_jsonl(path):
        location = f"{path}:{number}"
        step = _number(row, "step", location)
        for key in keys:
            value = _number(row, key, location)
            if step is not None and key in row:
                values[key][step] = math.nan if value is None else value
    return {
        key: Series(tuple(sorted(by_step)), tuple(by_step[step] for step in sorted(by_step)))
        for key, by_step in values.items() if by_step
    }  # fmt: skip


@dataclass(frozen=True)
class TrainingRun:
    """The log of a run: its losses with epochs, and every other series by its name in log.jsonl.

    `probes` are the question sets by name with their roles.
    """

    log: TrainingLog
    series: Mapping[str, Series]
    probes: Mapping[str, str]


def read_training_run(run_dir: Path) -> TrainingRun:
    """Return the log of a run of kinject train. Raises `InputError` or `DiskError` when it cannot be read."""
    recipe = (read_manifest(run_dir / "manifest.json") or {}).get("recipe") or {}
    section = recipe.get("probes") or {}
    sets = section.get("questions", {})
    roles = {
        name: item.get("role", "learning") if isinstance(item, dict) else "learning" for name, item in sets.items()
    }
    keys = ("learning_rate", "grad_norm", "eval_loss", *(f"eval_{name}_accuracy" for name in roles))
    path = run_dir / "log.jsonl"
    return TrainingRun(read_training_log(run_dir.name, path), read_series(path, keys), roles)


def loss_figure(logs: Sequence[TrainingLog], *, columns: int = 3) -> Figure:
    """Return the training loss, one panel for each run, the others in grey behind it, up to its last step.

    At most about twenty others are drawn, evenly chosen. Light lines mark the ends of epochs. All panels share one scale of
    loss, logarithmic if the losses span more than a factor of five.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    finite = [loss for log in logs for loss in log.losses if math.isfinite(loss)]
    logarithmic = bool(finite) and min(finite) > 0 and max(finite) > 5 * min(finite)
    others = [(other, _thinned(other)) for other in logs[:: math.ceil(len(logs) / _MOST_BEHIND)]]
    with style():
        figure, axes, n_columns = panels(len(logs), columns, 2.5)
        for index, (panel, log) in enumerate(zip(axes, logs, strict=True)):
            for other, (steps, losses) in others:
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
    """Mark the ends of epochs with light lines; only every few of many."""
    ends = log.epoch_ends()
    every = max(1, math.ceil(len(ends) / _MOST_EPOCHS))
    for step in ends[every - 1 :: every]:
        panel.axvline(step, color=RULE, linewidth=0.9, label="epoch")
    if ends:
        text = "light lines: epochs" if every == 1 else f"light lines: every {every} epochs"
        panel.text(1, 1.02, text, transform=panel.transAxes, ha="right", va="bottom", color=MUTED, fontsize=8.5)


def _thinned(log: TrainingLog) -> tuple[list[float], list[float]]:
    """Return steps and losses; if there are more than can be seen, means of equally many neighbours."""
    size = math.ceil(len(log.steps) / _MOST_POINTS)
    starts = range(0, len(log.steps), max(1, size))
    means = [
        [sum(column[i : i + size]) / len(column[i : i + size]) for i in starts] for column in (log.steps, log.losses)
    ]
    return means[0], means[1]


def training_figure(run: TrainingRun, *, columns: int = 2) -> Figure:
    """Return one panel each for loss (the held-out one dashed), learning rate, gradient norm and probe accuracies."""
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
                series = run.series[kind]
                panel.plot(series.steps, series.values, color=LEARNING, linewidth=1.4)
                panel.set_title({"learning_rate": "learning rate", "grad_norm": "gradient norm"}[kind])
                finite = [value for value in series.values if math.isfinite(value)]
                if kind == "grad_norm" and finite and min(finite) > 0 and max(finite) > 10 * min(finite):
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
        panel.legend(
            handles=[line for line in panel.lines if line.get_label() not in ("epoch", "_tip")], loc="upper right"
        )
    panel.set_title("loss")


def _draw_probes(panel: Axes, run: TrainingRun) -> None:
    counts = Counter[str]()
    for name, role in run.probes.items():
        series = run.series.get(f"eval_{name}_accuracy")
        if series is None:
            continue
        colour, marker = (LEARNING, "o") if role == "learning" else (RETENTION, "s")
        line = _LINES[counts[role] % len(_LINES)]
        counts[role] += 1
        label = f"{format_name(name, LONGEST)}: {ROLES[role]}"
        panel.plot(
            series.steps, series.values, color=colour, marker=marker, markersize=3.5, linestyle=line, label=label
        )
        for step, value in zip(series.steps, series.values, strict=True):
            if math.isfinite(value):
                add_tip(panel, step, value, f"{name}, step {step:,.0f}: {format_percent(value)}")
    panel.set_ylim(0, 1.02)
    panel.set_yticks(*TICKS)
    panel.legend(handles=[line for line in panel.lines if line.get_label() not in ("epoch", "_tip")], loc="lower right")
    panel.set_title("probe accuracy")


def write_training_report(run_dir: Path) -> Path:
    """Write report.html and figures/training (PNG, SVG) of a finished training run; return the page's path.

    Raises `InputError` when `run_dir` holds no training run, or its log is damaged.
    """
    manifest = read_manifest(run_dir / "manifest.json")
    if manifest is None or manifest.get("stage") != "train":
        raise InputError(f"{run_dir}: holds no training run. Give the run_dir of kinject train.")
    run = read_training_run(run_dir)
    label = "Loss, learning rate, gradient norm and probe accuracies by step"
    plots = {}
    if run.log.steps or run.series:
        plot = draw_figure(run_dir / "figures" / "training", partial(training_figure, run), label, 2)
        plots = {"training": plot} if plot is not None else {}
    path = run_dir / "report.html"
    write_text(path, render_html(_make_page(run_dir, run, manifest, label if plots else ""), plots))
    return path


def _make_page(run_dir: Path, run: TrainingRun, manifest: Mapping[str, Any], label: str) -> Page:
    counts, recipe = manifest["counts"], manifest.get("recipe") or {}
    model, corpus = (str((recipe.get(name) or {}).get("path") or "") for name in ("model", "corpus"))
    facts = (("date", format_date(str(manifest.get("written", "")))), ("base model", format_name(model)),
             ("corpus", format_name(corpus)), ("method", format_name(str(recipe.get("method", "")))))  # fmt: skip
    columns = ("step", "epoch", *map(format_name, run.probes), "held-out loss")
    table = TableBlock("The run", "", ("", ""), tuple(line(*fact) for fact in _facts(counts)))
    evaluations = TableBlock("Evaluations", "", columns, tuple(line(*row) for row in _rows(run)))
    notes, command = _notes(run, counts), format_name(" ".join(manifest.get("command", ())))
    sections = (
        Section("The course of the run", (FigureBlock("training", label, _CAPTION),) if label else ()),
        Section("Evaluations", (evaluations,) if evaluations.lines else ()),
        Section("The run in numbers", (table,)),
        Section("Notes and warnings", (Bullets(tuple(notes)),) if notes else ()),
        Section("Run it again", (Code((command,)),) if command else ()),
    )
    return Page(
        title=format_name(run_dir.name), subtitle="kinject train", description="",
        facts=tuple(fact for fact in facts if fact[1]), headline=_headline(run, counts), verdict=(),
        sections=tuple(section for section in sections if section.blocks), footer="",
    )  # fmt: skip


def _headline(run: TrainingRun, counts: Mapping[str, Any]) -> str:
    """Return steps, loss and the accuracies of the probes, from the first to the last, in a sentence."""
    text = f"{counts.get('steps', 0):,} steps in {counts.get('seconds', 0):,.0f} seconds"
    losses = [loss for loss in run.log.losses if math.isfinite(loss)]
    text += f"; the training loss went from {losses[0]:.2f} to {losses[-1]:.2f}" if losses else ""
    for name, role in run.probes.items():
        values = run.series[f"eval_{name}_accuracy"].values if f"eval_{name}_accuracy" in run.series else ()
        if values:
            text += f"; {format_name(name)} ({ROLES[role]}) from {format_percent(values[0])} to {format_percent(values[-1])}"
    return text + ("." if counts.get("finished") else ". This run is not finished.")


def _facts(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens = counts.get("tokens") or {}
    facts = [("steps", f"{counts.get('steps', 0):,}"), ("epochs", f"{counts.get('epochs') or 0:.2f}")]
    if isinstance(counts.get("loss"), float) and math.isfinite(counts["loss"]):
        facts.append(("mean loss", f"{counts['loss']:.3f}"))
    facts += [("seconds", f"{counts.get('seconds', 0):,.0f}")]
    learned = counts.get("learned_tokens")
    facts += [] if learned is None else [("tokens learned, over all steps", f"{learned:,}")]
    facts += [(f"tokens in an epoch: {format_name(name)}", f"{n:,}") for name, n in tokens.items()]
    replay = counts.get("fractions", {}).get("replay")
    facts += [("replay", format_percent(replay))] if replay else []
    return [*facts, ("updates skipped", str(counts.get("skipped_updates", 0)))]


def _notes(run: TrainingRun, counts: Mapping[str, Any]) -> list[str]:
    notes = [] if counts.get("finished") else ["This run is not finished."]
    lost = [step for step, loss in zip(run.log.steps, run.log.losses, strict=True) if not math.isfinite(loss)]
    if lost:
        steps = ", ".join(f"{step:,.0f}" for step in lost[:_MOST_GAPS]) + (", ..." if len(lost) > _MOST_GAPS else "")
        notes.append(
            f"The loss is not finite at {len(lost):,} of {len(run.log.steps):,} logged steps ({steps}): gaps in the curve."
        )
    return [format_name(str(note)) for note in (*notes, *counts.get("notes", ()), *counts.get("warnings", ()))]


def _rows(run: TrainingRun) -> list[tuple[str, ...]]:
    """Return one line for each evaluation: step, epoch, accuracy of each probe, held-out loss."""
    keys = [*(f"eval_{name}_accuracy" for name in run.probes), "eval_loss"]
    by_key = {key: dict(zip(s.steps, s.values, strict=True)) for key, s in run.series.items()}
    steps = sorted({step for key in keys for step in by_key.get(key, ())})
    epochs = dict(zip(run.log.steps, run.log.epochs, strict=False))

    def shown(key: str, step: float) -> str:
        value = by_key.get(key, {}).get(step)
        if value is None or not math.isfinite(value):
            return "" if value is None else "not finite"
        return f"{value:.3f}" if key == "eval_loss" else format_percent(value)

    return [
        (f"{step:,.0f}", f"{epochs[step]:.2f}" if step in epochs else "", *(shown(key, step) for key in keys))
        for step in steps
    ]
