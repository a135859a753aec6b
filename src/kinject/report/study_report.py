"""A study's result in, report.json, report.md, report.html and figures out.

Everything but report.json is derived from the result and the training logs that it names, so the same input gives the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kinject.disk import atomic_file, write_text
from kinject.report.figures import inline_svg, loss_figure, render_png, render_svg
from kinject.report.formatting import format_name
from kinject.report.pages import Plot
from kinject.report.study_curves import accuracy_by_k, curve_figure, exposures
from kinject.report.study_figures import accuracy_by_arm, directions, flips, relative_gains
from kinject.report.study_file import read_study, save_study
from kinject.report.study_frontier import frontier
from kinject.report.study_pages import make_study_page, render_study_html, render_study_markdown
from kinject.report.study_scaling import scaling_figure
from kinject.report.study_sections import Logs, figure_label
from kinject.report.study_strips import grids, question_strip, time_by_arm
from kinject.report.study_view import View, slug
from kinject.report.training_log import TrainingLog, read_training_log
from kinject.results import StudyResult

__all__ = ["read_study", "redraw_study", "write_study_report"]

_FIGURES: dict[str, Callable[..., Any]] = {
    "accuracy": accuracy_by_arm,
    "gains": relative_gains,
    "k": accuracy_by_k,
    "scaling": scaling_figure,
    "frontier": frontier,
    "flips": flips,
    "questions": question_strip,
    "directions": directions,
    "exposures": exposures,
    "choices": grids,
    "costs": time_by_arm,
}
"""Stem of a figure's files -> what draws it from a view with so many columns (None where there is nothing to draw)."""

_WIDE = 3  # columns of panels


def write_study_report(run_dir: Path, result: StudyResult) -> Path:
    """Write report.json, report.md, report.html and figures/ (PNG and SVG) into `run_dir`; return report.html's path.

    Raises `InputError` when a training log is damaged, `DiskError` on I/O. Figures of an earlier report that this result
    has nothing for are removed.
    """
    save_study(run_dir / "report.json", result)
    return _write_pages(run_dir, result)


def redraw_study(run_dir: Path) -> Path:
    """Write the pages and figures of a finished study anew from its report.json; return report.html's path.

    Raises `DiskError` when there is none, `InputError` when it or a training log is damaged.
    """
    return _write_pages(run_dir, read_study(run_dir / "report.json"))


def _write_pages(run_dir: Path, result: StudyResult) -> Path:
    view = View(result)
    logs, gone = _read_logs(run_dir, view)
    shown = _first_seeds(logs)
    curves = _curve_stems(result)
    plots: dict[str, Plot] = {}
    for name, draw in _FIGURES.items():
        _draw(run_dir, plots, name, lambda columns, draw=draw: draw(view, columns=columns))  # type: ignore[misc]
    if shown:
        _draw(run_dir, plots, "loss", lambda columns: loss_figure(shown, columns=columns))
    for stem, name in curves.items():
        own = [curve for curve in result.curves if curve.name == name]
        _draw(run_dir, plots, stem, lambda columns, own=own: curve_figure(view, own, columns=columns))  # type: ignore[misc]
    _remove_old_figures(run_dir / "figures", plots)
    page = make_study_page(view, {name: curves.get(name, "") for name in plots}, Logs(tuple(logs.values()), gone))
    write_text(run_dir / "report.md", render_study_markdown(page))
    path = run_dir / "report.html"
    write_text(path, render_study_html(page, plots))
    return path


def _curve_stems(result: StudyResult) -> dict[str, str]:
    """Return stem of the figure's files -> name of each curve."""
    stems: dict[str, str] = {}
    for name in dict.fromkeys(curve.name for curve in result.curves):
        stems[slug(f"curve {name}", stems)] = name
    return stems


def _draw(run_dir: Path, plots: dict[str, Plot], name: str, draw: Callable[[int], Any]) -> None:
    """Write the figure's files and add it to `plots`, where there is something to draw."""
    wide, narrow = draw(_WIDE), draw(1)
    if wide is None:
        return
    svg = render_svg(wide)
    write_text(run_dir / "figures" / f"{name}.svg", svg)
    with atomic_file(run_dir / "figures" / f"{name}.png", "wb") as file:
        file.write(render_png(wide))
    label = figure_label(name)
    plots[name] = Plot(
        wide=inline_svg(svg, prefix=name, label=label),
        narrow=inline_svg(render_svg(narrow), prefix=f"{name}-narrow", label=label),
    )


def _remove_old_figures(folder: Path, plots: dict[str, Plot]) -> None:
    """Remove what an earlier report drew and this one does not: it would be taken for this one's."""
    names = {*_FIGURES, "loss", *(path.stem for path in folder.glob("curve-*"))}
    for name in names - plots.keys():
        for suffix in (".png", ".svg"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)


def _read_logs(run_dir: Path, view: View) -> tuple[dict[tuple[str, str, int], TrainingLog], tuple[str, ...]]:
    """Return (model, arm, seed) -> log of the study's own arms, and the names of those that are not there any more.

    Relative paths are `run_dir`'s.
    """
    found, gone = {}, []
    several = len(view.result.seeds) > 1
    for model, arm, seed, path in view.result.logs:
        own = view.arms.get((model, arm))
        if own is None or own.curve:
            continue
        name = f"{format_name(model)}, {format_name(arm)}" if view.several_models else format_name(arm)
        name = f"{name}, seed {seed}" if several else name
        if (run_dir / path).is_file():
            found[model, arm, seed] = read_training_log(name, run_dir / path)
        else:
            gone.append(name)
    return found, tuple(gone)


def _first_seeds(logs: Mapping[tuple[str, str, int], TrainingLog]) -> list[TrainingLog]:
    """Return the first log with a loss of each arm."""
    found: dict[tuple[str, str], TrainingLog] = {}
    for (model, arm, _), log in logs.items():
        if log.steps:
            found.setdefault((model, arm), log)
    return list(found.values())
