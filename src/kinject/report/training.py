"""Training logs as numbers, and the report of one training run: loss, learning rate, gradient norm, probe accuracies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kinject.disk import Row, check_output, read_jsonl, read_manifest, write_text
from kinject.errors import InputError
from kinject.report.formatting import format_name, format_percent
from kinject.report.page import TableBlock, as_markup, line, render_template
from kinject.report.plots.style import draw_figure
from kinject.report.plots.training import training_figure

_LARGEST = 1e9
_FIX = "Train again with --resume: the newest checkpoint holds the log."
_CAPTION = (
    "By step; a light line ends an epoch. A loss that steps down at those lines is memorisation: it falls because the same "
    "text comes again. Probe accuracies: solid blue what is to be learned, orange what is to be kept."
)


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """One run: one entry a logged step in each column, steps rising; `epochs` is empty where none were logged."""

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
        if row.get("loss") is None:
            continue
        where = f"{path}:{number}"
        step, loss = _number(row, "step", where), _number(row, "loss", where)
        if step is None or loss is None:
            raise InputError(f"{where}: has a loss but no step. Each row of a training log names its step.")
        rows[step] = (loss, _number(row, "epoch", where), _number(row, "learning_rate", where))
    steps = sorted(rows)
    epochs = [epoch for step in steps if (epoch := rows[step][1]) is not None]
    return TrainingLog(
        name=name,
        steps=tuple(steps),
        losses=tuple(rows[step][0] for step in steps),
        epochs=tuple(epochs) if len(epochs) == len(steps) else (),
        learning_rates=tuple(rate for step in steps if (rate := rows[step][2]) is not None),
    )


def _number(row: Row, key: str, where: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: {key}: found {value!r}, a number is needed.")
    # A loss that is not finite is a finding; a step that is not is damage.
    if key != "loss" and not 0 <= value < _LARGEST:
        raise InputError(f"{where}: {key}: found {value!r}, allowed is 0 to {_LARGEST:.0e}.")
    return float(value)


@dataclass(frozen=True, slots=True)
class Series:
    """One logged number over the run: `steps` rise, `values` stand beside them."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


def read_series(path: Path, keys: Sequence[str]) -> dict[str, Series]:
    """Return the series of each of `keys` that a training log holds; of rows with one step the last counts.

    Raises `DiskError` when the file cannot be read and `InputError` (file:line) when a value is not a number.
    """
    found: dict[str, dict[float, float]] = {key: {} for key in keys}
    check_output(path, _FIX)
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        step = _number(row, "step", where)
        for key in keys:
            value = _number(row, key, where)
            if step is not None and value is not None:
                found[key][step] = value
    return {
        key: Series(tuple(sorted(by_step)), tuple(by_step[step] for step in sorted(by_step)))
        for key, by_step in found.items()
        if by_step
    }


@dataclass(frozen=True)
class TrainingRun:
    """What a run logged: its losses with epochs, and every other series by the name it has in log.jsonl.

    `probes` are the question sets by name with their roles.
    """

    log: TrainingLog
    series: Mapping[str, Series]
    probes: Mapping[str, str]


def read_training_run(run_dir: Path) -> TrainingRun:
    """Return what a run of kinject train logged. Raises `InputError` or `DiskError` when it cannot be read."""
    recipe = (read_manifest(run_dir / "manifest.json") or {}).get("recipe") or {}
    section = recipe.get("probes") or {}
    sets = section.get("questions", {})
    roles = {
        name: item.get("role", "learning") if isinstance(item, dict) else "learning" for name, item in sets.items()
    }
    keys = ("learning_rate", "grad_norm", "eval_loss", *(f"eval_{name}_accuracy" for name in roles))
    path = run_dir / "log.jsonl"
    return TrainingRun(read_training_log(run_dir.name, path), read_series(path, keys), roles)


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
    columns = ("step", "epoch", *map(format_name, run.probes), "held-out loss")
    facts = tuple(line(*fact) for fact in _facts(manifest["counts"]))
    page = render_template(
        "training.html.j2", title=format_name(run_dir.name), facts=TableBlock("The run", "", ("", ""), facts, folded=True),
        evaluations=TableBlock("Evaluations", "", columns, tuple(line(*row) for row in _rows(run)), folded=True),
        notes=_notes(manifest["counts"]), figure=as_markup(plots).get("training"), caption=_CAPTION,
        command=format_name(" ".join(manifest.get("command", ()))),
    )  # fmt: skip
    path = run_dir / "report.html"
    write_text(path, page)
    return path


def _facts(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens = counts.get("tokens") or {}
    facts = [("steps", f"{counts.get('steps', 0):,}"), ("epochs", f"{counts.get('epochs') or 0:.2f}")]
    if isinstance(counts.get("loss"), float) and math.isfinite(counts["loss"]):
        facts.append(("mean loss", f"{counts['loss']:.3f}"))
    facts += [("seconds", f"{counts.get('seconds', 0):,.0f}")]
    facts += [(f"tokens {format_name(name)}", f"{n:,}") for name, n in tokens.items()]
    replay = counts.get("fractions", {}).get("replay")
    facts += [("replay", format_percent(replay))] if replay else []
    return [*facts, ("updates skipped", str(counts.get("skipped_updates", 0)))]


def _notes(counts: Mapping[str, Any]) -> list[str]:
    return [format_name(str(note)) for note in (*counts.get("notes", ()), *counts.get("warnings", ()))]


def _rows(run: TrainingRun) -> list[tuple[str, ...]]:
    """Return one line for each evaluation: step, epoch, accuracy of each probe, held-out loss."""
    keys = [*(f"eval_{name}_accuracy" for name in run.probes), "eval_loss"]
    by_key = {key: dict(zip(s.steps, s.values, strict=True)) for key, s in run.series.items()}
    steps = sorted({step for key in keys for step in by_key.get(key, ())})
    epochs = dict(zip(run.log.steps, run.log.epochs, strict=False))

    def shown(key: str, step: float) -> str:
        value = by_key.get(key, {}).get(step)
        return "" if value is None else f"{value:.3f}" if key == "eval_loss" else format_percent(value)

    return [
        (f"{step:,.0f}", f"{epochs[step]:.2f}" if step in epochs else "", *(shown(key, step) for key in keys))
        for step in steps
    ]
