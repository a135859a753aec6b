"""Reads report.json and writes report.md, report.html and the figures.

The report and the training logs that it names decide every byte.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kinject.disk import check_version, read_json, read_manifest, write_text
from kinject.errors import InputError
from kinject.report.augment import write_augment_report
from kinject.report.documents import write_documents_report
from kinject.report.flips import read_flips
from kinject.report.formatting import ROLES, format_count, format_date, format_name, join_words
from kinject.report.headline import render_doubts, render_headline, render_outcomes
from kinject.report.page import Page, render_html, render_markdown
from kinject.report.plots import arms, sweeps
from kinject.report.plots.style import Plot, draw_figure
from kinject.report.sections import Beside, figure_label, make_sections
from kinject.report.training import TrainingLog, loss_figure, read_training_log, write_training_report
from kinject.report.verdict import render_verdict
from kinject.report.view import View, slug
from kinject.results import Report

_FIGURES: dict[str, Callable[..., Any]] = {
    "accuracy": arms.accuracy_by_arm, "outcomes": arms.outcomes_by_arm, "gains": arms.relative_gains, "k": sweeps.accuracy_by_k,
    "scaling": sweeps.scaling_figure, "frontier": sweeps.frontier, "flips": arms.flips, "questions": arms.question_strip,
    "directions": arms.directions, "exposures": sweeps.exposures, "choices": arms.grids, "costs": arms.time_by_arm,
}  # fmt: skip
"""Stem of a figure's files -> the function that draws it from a view with so many columns (None: nothing to draw)."""

_WIDE = 3  # columns of panels
_MOST_NAMED = 4  # arms in the title, question sets in the head
_FOOTER_VERSIONS = ("kinject", "torch", "transformers", "trl", "python")
_FIX = "Run kinject eval or kinject study again."
_TOLERANCE = 1e-6


def read_report(path: Path) -> Report:
    """Return the report at `path` (a report.json).

    Raises `DiskError` when it cannot be read, and `InputError` naming the field when it is damaged, inconsistent, or of a
    newer format. Unknown keys are ignored.
    """
    value = read_json(path, _FIX)
    check_version(value.get("format_version", 1), f"{path}: format_version")
    try:
        return _from_json(value, str(path))
    except InputError as error:
        raise InputError(f"{error} {_FIX}") from None


def _from_json(value: Mapping[str, Any], source: str) -> Report:
    """Return the report that `value` (JSON values) describes. Unknown keys are ignored.

    Raises `InputError` naming `source` and the first field that is wrong.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        report = TypeAdapter(Report).validate_json(json.dumps(value), strict=True)
        _check_results(report)
    except ValidationError as error:
        first_error = error.errors()[0]
        raise InputError(
            f"{source}: damaged report: {_path(first_error['loc'])}: {_problem(dict(first_error))}."
        ) from None
    except _ResultError as error:
        raise InputError(f"{source}: damaged report: {error}.") from None
    return report


class _ResultError(Exception):
    """Numbers of a report that contradict each other."""


def _check_results(report: Report) -> None:
    """Raise `_ResultError` where the numbers of a result contradict each other, or an arm is there twice."""
    seen: set[tuple[object, ...]] = set()
    for index, result in enumerate(report.results):
        entry = f"results[{index}]"
        n_correct, n_seeds = result.n_correct, len(result.by_seed)
        if result.n < 1 or not n_seeds:
            raise _ResultError(f"{entry}.n: found {result.n} questions, {n_seeds} seeds; at least 1 of each is needed")
        if n_correct is not None and n_correct + result.n_unscored > result.n:
            raise _ResultError(f"{entry}.n: found {result.n} with {n_correct} correct and {result.n_unscored} unscored")
        n_scored = result.n - result.n_unscored
        if n_scored < 1:
            raise _ResultError(f"{entry}.n_unscored: found {result.n_unscored} of {result.n}: nothing has a score")
        if n_correct is not None and abs(result.accuracy - n_correct / n_scored) > _TOLERANCE:
            raise _ResultError(
                f"{entry}.accuracy: found {result.accuracy}, which disagrees with n_correct / scored questions"
            )
        bounded = result.low - _TOLERANCE <= result.accuracy <= result.high + _TOLERANCE
        if result.interval == "Wilson" and not bounded:
            raise _ResultError(f"{entry}.accuracy: found {result.accuracy}, outside {result.low} to {result.high}")
        key = (result.model, result.arm, result.question_set, *result.prompt_format, result.k, result.subject)
        if key in seen:
            raise _ResultError(f"{entry}: the arm {result.arm!r:.60} on {result.question_set!r:.60} is there twice")
        seen.add(key)
    for index, recall in enumerate(report.recalls):
        if not 0 < recall.n >= recall.n_found:
            raise _ResultError(f"recalls[{index}].n_found: found {recall.n_found} of {recall.n}")


_NEEDED = {
    "string_type": "a string", "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "finite_number": "a finite number",
}  # fmt: skip
_CONTAINERS = {"tuple_type": "a list", "dict_type": "an object", "dataclass_type": "an object"}


def _path(parts: tuple[int | str, ...]) -> str:
    """Return ``results[0].to_base.low``; "report" for the whole."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part:.60}" for part in parts)
    return text.removeprefix(".") or "report"


def _problem(error: dict[str, Any]) -> str:
    kind, value = error["type"], error.get("input")
    if kind == "missing":
        return "missing"
    if kind in _CONTAINERS:
        return f"found {type(value).__name__}, {_CONTAINERS[kind]} is needed"
    if kind in _NEEDED:
        return f"found {value!r:.60}, {_NEEDED[kind]} is needed"
    if kind == "literal_error":
        return f"found {value!r:.60}, allowed are {error['ctx']['expected']}"
    if kind == "value_error":
        return f"found {value!r:.60}, {error['ctx']['error']}"
    return f"found {value!r:.60}: {error['msg']}"


def write_report(run_dir: Path, report: Report) -> Path:
    """Write report.md, report.html and figures/ (PNG and SVG) into `run_dir`; return report.html's path.

    An evaluation's commands and versions come from the manifests in `run_dir` and beside its training logs, its changed
    answers from flips.jsonl. Figures of an earlier report that this one does not have are removed. Raises `InputError`
    when an evaluation has no results, or a log or flips.jsonl is damaged; `DiskError` on I/O.
    """
    if report.kind == "evaluation" and not report.results and not report.unscored:
        raise InputError(f"{run_dir}: the report has no results. Evaluate at least one model on one question set.")
    manifest = read_manifest(run_dir / "manifest.json") if report.kind == "evaluation" else None
    report = _with_manifests(run_dir, report, manifest)
    view = View(report)
    logs, missing = _read_logs(run_dir, view)
    stems = _sweep_stems(report)
    plots = _draw_figures(run_dir, view, logs, stems)
    changed = read_flips(run_dir / "flips.jsonl", view)
    beside = Beside({name: stems.get(name, "") for name in plots}, tuple(logs.values()), missing, changed)
    page = _make_page(view, beside)
    write_text(run_dir / "report.md", render_markdown(page))
    path = run_dir / "report.html"
    write_text(path, render_html(page, plots))
    return path


def redraw_report(run_dir: Path) -> Path:
    """Write the page and figures of a finished run again, whichever verb made it; return the HTML's path.

    Raises `DiskError` when there is none, `InputError` when one of its files is damaged.
    """
    stage = (read_manifest(run_dir / "manifest.json") or {}).get("stage")
    if stage == "train":
        return write_training_report(run_dir)
    if stage == "augment":
        return write_augment_report(run_dir)
    if stage == "documents":
        return write_documents_report(run_dir)
    return write_report(run_dir, read_report(run_dir / "report.json"))


def _with_manifests(run_dir: Path, report: Report, manifest: Mapping[str, Any] | None) -> Report:
    """Return an evaluation's `report` with the date, commands and versions of its manifests; a study's holds its own."""
    if report.kind == "study":
        return report
    paths = [run_dir / log for *_, log in report.logs]
    manifests = [*(read_manifest(path.parent / "manifest.json") for path in paths), manifest]
    commands = [item["command"] for item in manifests if item and isinstance(item.get("command"), list)]
    lines = tuple(dict.fromkeys(shlex.join(map(str, command)) for command in commands))
    versions = manifest.get("versions") if manifest else None
    date = str(manifest.get("written", "")) if manifest else ""
    return replace(report, written=date, commands=lines, versions=dict(versions) if isinstance(versions, dict) else {})


def _make_page(view: View, beside: Beside) -> Page:
    report, sets = view.report, view.sets()
    counts = ((len(report.models), "base model"), (len(report.arms), "arm"), (len(sets), "question set"))
    parts = [format_count(n, noun) for n, noun in counts]
    seeds = format_count(len(report.seeds), "seed")
    most = max((result.n for result in report.results), default=0)
    versions = ", ".join(f"{name} {report.versions[name]}" for name in _FOOTER_VERSIONS if name in report.versions)
    written = f"Evaluated {report.written}" if report.written else "Written by kinject"
    verdict = render_verdict(view)
    headline, sureness = render_headline(view, verdict)
    return Page(
        title=_title(view),
        subtitle=f"kinject {report.kind}: {', '.join(parts)} of up to {most:,} questions, {seeds}",
        description=format_name(report.description),
        facts=tuple((label, text) for label, text in _facts(view) if text),
        headline=headline,
        sureness=sureness,
        verdict=(*verdict, *render_outcomes(view), render_doubts(view)),
        sections=make_sections(view, beside),
        footer=format_name(written + (f" with {versions}." if versions else ".")),
    )


def _title(view: View) -> str:
    """Return a study's title, or an evaluation's with the arms that it compares."""
    title = format_name(view.report.title) or view.report.kind.capitalize()
    if view.is_study:
        return title
    trained = [format_name(arm.name) for arm in view.report.arms if arm.trained]
    names = join_words(trained) if len(trained) <= _MOST_NAMED else f"{len(trained)} models"
    base = format_name(view.base(view.report.models[0]))
    return f"{title}: {names} against {base}" if trained else f"{title}: {base}"


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the page's head: when, which models, which questions, how often it was trained."""
    report = view.report
    yield "date", format_date(report.written)
    sources = [(format_name(name), format_name(report.model_sources.get(name, ""))) for name in report.models]
    yield "base model", join_words([f"{name} ({source})" if source else name for name, source in sources])
    sets = [view.first(name) for name in view.sets()]
    named = [f"{format_name(r.question_set)}, {r.n:,} questions {ROLES.get(r.role, '')}" for r in sets[:_MOST_NAMED]]
    yield (
        "questions",
        "; ".join([*named, *([f"{len(sets) - _MOST_NAMED} more sets"] if len(sets) > _MOST_NAMED else [])]),
    )
    n = len(report.seeds)
    yield "trainings", f"{n} of each arm, with different seeds" if n > 1 else "one of each arm"


def _sweep_stems(report: Report) -> dict[str, str]:
    """Return stem of the figure's files -> name of each sweep."""
    stems: dict[str, str] = {}
    for name in dict.fromkeys(sweep.name for sweep in report.sweeps):
        stems[slug(f"sweep {name}", stems)] = name
    return stems


def _draw_figures(
    run_dir: Path, view: View, logs: Mapping[tuple[str, str, int], TrainingLog], stems: Mapping[str, str]
) -> dict[str, Plot]:
    """Write the files of each figure that has something to draw, remove older ones, and return the figures by stem."""
    drawers = {name: partial(draw, view) for name, draw in _FIGURES.items()}
    first_seeds = _first_seeds(logs)
    if first_seeds:
        drawers["loss"] = partial(loss_figure, first_seeds)
    for stem, name in stems.items():
        drawers[stem] = partial(
            sweeps.sweep_figure, view, [sweep for sweep in view.report.sweeps if sweep.name == name]
        )
    plots = {}
    for name, draw in drawers.items():
        plot = draw_figure(run_dir / "figures" / name, draw, figure_label(name), _WIDE)
        if plot is not None:
            plots[name] = plot
    old = {*_FIGURES, "loss", *(path.stem for path in (run_dir / "figures").glob("sweep-*"))}
    for name in old - plots.keys():  # files of an earlier report
        for suffix in (".png", ".svg"):
            (run_dir / "figures" / f"{name}{suffix}").unlink(missing_ok=True)
    return plots


def _read_logs(run_dir: Path, view: View) -> tuple[dict[tuple[str, str, int], TrainingLog], tuple[str, ...]]:
    """Return (model, arm, seed) -> log of the report's own arms, and the names of those that are missing.

    Relative paths are `run_dir`'s.
    """
    logs, missing = {}, []
    several = len(view.report.seeds) > 1
    for model, arm, seed, path in view.report.logs:
        info = view.arms.get((model, arm))
        if info is None or info.sweep:
            continue
        name = f"{format_name(model)}, {format_name(arm)}" if view.several_models else format_name(arm)
        name = f"{name}, seed {seed}" if several else name
        if (run_dir / path).is_file():
            logs[model, arm, seed] = read_training_log(name, run_dir / path)
        else:
            missing.append(name)
    return logs, tuple(missing)


def _first_seeds(logs: Mapping[tuple[str, str, int], TrainingLog]) -> list[TrainingLog]:
    """Return the first log with a loss of each arm."""
    first: dict[tuple[str, str], TrainingLog] = {}
    for (model, arm, _), log in logs.items():
        if log.steps:
            first.setdefault((model, arm), log)
    return list(first.values())
