"""The report of one training run: loss, learning rate, gradient norm and probe accuracies over its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import read_manifest, write_text
from kinject.disk.atomic import atomic_file
from kinject.errors import InputError
from kinject.report.figures import (
    LEARNING,
    MUTED,
    RETENTION,
    RULE,
    draw_epochs,
    inline_svg,
    panels,
    render_png,
    render_svg,
    style,
)
from kinject.report.formatting import ROLES, format_name, format_percent
from kinject.report.html import render_template
from kinject.report.training_log import Series, TrainingLog, read_series, read_training_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("-", "--", ":", "-.")
_CAPTION = (
    "By step; a light line ends an epoch. A loss that steps down at those lines is memorisation: it falls because the same "
    "text comes again. Probe accuracies: solid blue what is to be learned, orange what is to be kept."
)


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
        label = f"{format_name(name, 22)}: {ROLES[role]}"
        panel.plot(held.steps, held.values, color=colour, marker=marker, markersize=3.5, linestyle=line, label=label)
    panel.set_ylim(0, 1.02)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
    panel.legend(handles=[line for line in panel.lines if line.get_label() != "epoch"], loc="lower right")
    panel.set_title("probe accuracy")


def write_training_report(run_dir: Path) -> Path:
    """Write report.html and figures/training (PNG, SVG) of a finished training run; return the page's path.

    Raises `InputError` when `run_dir` holds no training run, or its log is damaged.
    """
    manifest = read_manifest(run_dir / "manifest.json")
    if manifest is None or manifest.get("stage") != "train":
        raise InputError(f"{run_dir}: holds no training run. Give the run_dir of kinject train.")
    run = read_training_run(run_dir)
    wide = narrow = ""
    if run.log.steps or run.series:
        figure = training_figure(run)
        wide, narrow = render_svg(figure), render_svg(training_figure(run, columns=1))
        write_text(run_dir / "figures" / "training.svg", wide)
        with atomic_file(run_dir / "figures" / "training.png", "wb") as file:
            file.write(render_png(figure))
        label = "Loss, learning rate, gradient norm and probe accuracies by step"
        wide = inline_svg(wide, prefix="wide", label=label)
        narrow = inline_svg(narrow, prefix="narrow", label=label)
    from markupsafe import Markup

    page = render_template(
        "training.html.j2", title=format_name(run_dir.name), facts=_facts(manifest["counts"]), notes=_notes(manifest["counts"]),
        columns=("step", "epoch", *map(format_name, run.probes), "held-out loss"), rows=_rows(run), caption=_CAPTION,
        wide=Markup(wide), narrow=Markup(narrow), command=format_name(" ".join(manifest.get("command", ()))),  # noqa: S704 - our own
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
