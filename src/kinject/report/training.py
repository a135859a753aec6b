"""The report of one training run: loss, learning rate, gradient norm and probe accuracies over its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kinject.disk import read_manifest, write_text
from kinject.errors import InputError
from kinject.report.files import draw_figure
from kinject.report.formatting import format_name, format_percent
from kinject.report.page import TableBlock, as_markup, line, render_template
from kinject.report.plots.training import training_figure
from kinject.report.training_log import TrainingRun, read_training_run

_CAPTION = (
    "By step; a light line ends an epoch. A loss that steps down at those lines is memorisation: it falls because the same "
    "text comes again. Probe accuracies: solid blue what is to be learned, orange what is to be kept."
)


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
