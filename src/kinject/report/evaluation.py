"""report.json in, report.md, report.html and figures out.

The eval stage writes report.json; everything here is derived from it and from the training logs, so the same input
gives the same bytes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinject.disk import atomic_file, check_version, read_checked_json, read_manifest, write_text
from kinject.errors import InputError
from kinject.report import figures
from kinject.report.flips import read_flips
from kinject.report.formatting import ROLES
from kinject.report.pages import Plot, make_page, render_html, render_markdown
from kinject.report.training_log import TrainingLog, read_training_log, training_logs
from kinject.types import Cell, Difference, Perplexity, Recall, Report, Subject

_FOOTER_VERSIONS = ("kinject", "torch", "transformers", "trl", "python")


def write_report(run_dir: Path, report: Report, training: Mapping[str, Path]) -> Path:
    """Write report.md, report.html and figures/ (accuracy, loss; PNG and SVG) into `run_dir`; return the HTML's path.

    `training` names the log.jsonl of each training run to show. Commands to run it again are taken from the manifests
    beside them. Raises `InputError` when the report is empty or a log is damaged, `DiskError` on I/O.
    """
    if not report.cells:
        raise InputError(f"{run_dir}: the report has no results. Evaluate at least one model on one question set.")
    logs = [read_training_log(name, path) for name, path in training.items()]
    manifests = [read_manifest(path.parent / "manifest.json") for path in training.values()]
    manifest = read_manifest(run_dir / "manifest.json")
    drawn = [log for log in logs if log.steps]
    accuracy = _draw_accuracy(run_dir, report)
    loss = _draw_loss(run_dir, drawn)
    commands = [command for found in (*manifests, manifest) if found and (command := _command(found))]
    flips = read_flips(run_dir / "flips.jsonl", report.cells)
    page = make_page(report, logs, list(dict.fromkeys(commands)), _footer(manifest), flips)
    write_text(run_dir / "report.md", render_markdown(page, has_loss=loss is not None))
    html_path = run_dir / "report.html"
    write_text(html_path, render_html(page, accuracy, loss))
    return html_path


def redraw_report(run_dir: Path) -> Path:
    """Write the pages and figures of a finished evaluation anew; return the HTML's path.

    The results come from report.json in `run_dir`, the training logs from beside the models that its manifest names.
    Raises `DiskError` when there is no report, `InputError` when it or a log is damaged.
    """
    report = read_report(run_dir / "report.json")
    recipe = (read_manifest(run_dir / "manifest.json") or {}).get("recipe")
    section = recipe.get("eval") if isinstance(recipe, dict) else None
    models = section.get("models") if isinstance(section, dict) else None
    named = {str(name): str(folder) for name, folder in models.items()} if isinstance(models, dict) else {}
    return write_report(run_dir, report, training_logs(named))


def _draw_accuracy(run_dir: Path, report: Report) -> Plot:
    wide = _write_figure(run_dir / "figures" / "accuracy", figures.accuracy_figure(report.cells))
    narrow = figures.render_svg(figures.accuracy_figure(report.cells, columns=1))
    label = "Accuracy by arm; the numbers stand in the tables below"
    return Plot(
        wide=figures.inline_svg(wide, prefix="accuracy", label=label),
        narrow=figures.inline_svg(narrow, prefix="accuracy-narrow", label=label),
    )


def _draw_loss(run_dir: Path, logs: Sequence[TrainingLog]) -> Plot | None:
    stem = run_dir / "figures" / "loss"
    if not logs:
        for suffix in (".png", ".svg"):  # of an earlier report, which would now be taken for this one's
            stem.with_suffix(suffix).unlink(missing_ok=True)
        return None
    wide = _write_figure(stem, figures.loss_figure(logs))
    narrow = figures.render_svg(figures.loss_figure(logs, columns=1))
    label = "Training loss by step; first and last values stand in the table below"
    return Plot(
        wide=figures.inline_svg(wide, prefix="loss", label=label),
        narrow=figures.inline_svg(narrow, prefix="loss-narrow", label=label),
    )


def _write_figure(stem: Path, figure: Any) -> str:
    svg = figures.render_svg(figure)
    write_text(stem.with_suffix(".svg"), svg)
    with atomic_file(stem.with_suffix(".png"), "wb") as file:
        file.write(figures.render_png(figure))
    return svg


def _command(manifest: Mapping[str, Any]) -> str:
    command = manifest.get("command")
    return shlex.join(str(word) for word in command) if isinstance(command, list) else ""


def _footer(manifest: Mapping[str, Any] | None) -> str:
    if manifest is None:
        return "Written by kinject."
    versions = manifest.get("versions")
    known = versions if isinstance(versions, dict) else {}
    made_with = ", ".join(f"{name} {known[name]}" for name in _FOOTER_VERSIONS if name in known)
    return f"Evaluated {manifest.get('written', 'at an unknown time')}" + (f" with {made_with}." if made_with else ".")


def read_report(path: Path) -> Report:
    """Return the report at `path` (a report.json).

    Raises `DiskError` when it cannot be read, and `InputError` naming the place when it is damaged, inconsistent, or
    of a newer format. Keys that this version does not know are left out.
    """
    value = read_checked_json(path, "Run kinject eval again.")
    source = _Source(path, value, "report")
    check_version(source.value.get("format_version", 1), f"{path}: format_version")
    cells = tuple(_read_cell(_Source(path, cell, f"cells[{i}]")) for i, cell in enumerate(source.items("cells")))
    seen: set[tuple[object, ...]] = set()
    for i, cell in enumerate(cells):
        key = (cell.question_set, cell.arm, cell.format, cell.shots, cell.k, cell.score)
        if key in seen:
            raise source.fault(f"cells[{i}]", f"the arm {cell.arm!r} on {cell.question_set!r} stands there twice")
        seen.add(key)
    notes = source.items("notes") if "notes" in source.value else []
    if not all(isinstance(note, str) for note in notes):
        raise source.fault("notes", "each must be a string")
    beside = source.items("perplexities") if "perplexities" in source.value else []
    perplexities = (_read_perplexity(_Source(path, item, f"perplexities[{i}]")) for i, item in enumerate(beside))
    found = source.items("recalls") if "recalls" in source.value else []
    recalls = (_read_recall(_Source(path, item, f"recalls[{i}]")) for i, item in enumerate(found))
    return Report(source.text("title"), cells, tuple(notes), tuple(perplexities), tuple(recalls))


class _Source:
    """A JSON object of the report with its place, so that each fault names both."""

    def __init__(self, path: Path, value: object, place: str) -> None:
        self.path, self.place = path, place
        if not isinstance(value, dict):
            raise self.fault("", f"found {type(value).__name__}, an object is needed")
        self.value: dict[str, Any] = value

    def fault(self, key: str, what: str) -> InputError:
        place = ".".join(part for part in (self.place, key) if part)
        return InputError(f"{self.path}: damaged report: {place}: {what}. Run kinject eval again.")

    def _get(self, key: str, kind: type | tuple[type, ...], needed: str) -> Any:
        if key not in self.value:
            raise self.fault(key, "missing")
        found = self.value[key]
        if not isinstance(found, kind) or isinstance(found, bool):
            raise self.fault(key, f"found {found!r:.60}, {needed} is needed")
        return found

    def inner(self, key: str) -> _Source:
        return _Source(self.path, self.value[key], f"{self.place}.{key}")

    def text(self, key: str) -> str:
        return str(self._get(key, str, "a string"))

    def items(self, key: str) -> list[Any]:
        return list(self._get(key, list, "a list"))

    def count(self, key: str) -> int:
        found = int(self._get(key, int, "a whole number"))
        if not 0 <= found < 2**53:
            raise self.fault(key, f"found {found!r:.60}, allowed is 0 or more, up to what is exact as a float")
        return found

    def number(self, key: str) -> float:
        found = self._get(key, (int, float), "a number")
        if not _is_finite(found):
            raise self.fault(key, f"found {found!r:.60}, a finite number is needed")
        return float(found)

    def maybe(self, key: str) -> float | None:
        return None if self.value.get(key) is None else self.number(key)

    def share(self, key: str, least: float = 0.0) -> float:
        found = self._get(key, (int, float), "a number")
        if not least <= found <= 1:
            raise self.fault(key, f"found {found}, allowed is {least:g} to 1")
        return float(found)


def _read_cell(source: _Source) -> Cell:
    paired = source.value.get("difference")
    cell = Cell(
        question_set=source.text("question_set"),
        role=source.text("role"),
        arm=source.text("arm"),
        model=source.text("model"),
        format=source.text("format"),
        shots=source.count("shots"),
        k=source.count("k"),
        n=source.count("n"),
        n_unscored=source.count("n_unscored"),
        n_correct=source.count("n_correct"),
        accuracy=source.share("accuracy"),
        low=source.share("low"),
        high=source.share("high"),
        chance=source.share("chance"),
        difference=None if paired is None else _read_difference(source.inner("difference")),
        score=source.text("score") if "score" in source.value else "sum",
        mass=source.maybe("mass"),
        subjects=_read_subjects(source),
        macro=_read_macro(source),
    )
    if cell.role not in ROLES:
        raise source.fault("role", f"found {cell.role!r}, allowed are {' and '.join(ROLES)}")
    if cell.n < 1 or cell.n_correct + cell.n_unscored > cell.n:
        raise source.fault("n", f"found {cell.n} with {cell.n_correct} right and {cell.n_unscored} unscored")
    if abs(cell.accuracy - cell.n_correct / cell.n) > 1e-6 or not cell.low - 1e-6 <= cell.accuracy <= cell.high + 1e-6:
        raise source.fault("accuracy", f"found {cell.accuracy}, which disagrees with n_correct / n, low or high")
    return cell


def _read_difference(source: _Source) -> Difference:
    return Difference(
        base_arm=source.text("base_arm"),
        delta=source.share("delta", least=-1.0),
        wrong_to_right=source.count("wrong_to_right"),
        right_to_wrong=source.count("right_to_wrong"),
        p=source.share("p"),
        low=source.maybe("low"),
        high=source.maybe("high"),
        relative=source.maybe("relative"),
        p_holm=source.maybe("p_holm"),
        smallest=source.maybe("smallest"),
    )


def _read_subjects(source: _Source) -> tuple[Subject, ...]:
    if "subjects" not in source.value:
        return ()
    items = (_Source(source.path, item, f"{source.place}.subjects") for item in source.items("subjects"))
    return tuple(
        Subject(
            item.text("name"), item.count("n"), item.count("n_correct"), *map(item.share, ("accuracy", "low", "high"))
        )
        for item in items
    )


def _read_macro(source: _Source) -> tuple[float, float, float] | None:
    found = source.value.get("macro")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 3 or not all(map(_is_finite, found)):
        raise source.fault("macro", f"found {found!r:.60}, a mean and two bounds are needed")
    return float(found[0]), float(found[1]), float(found[2])


def _is_finite(value: object) -> bool:
    return isinstance(value, float | int) and -sys.float_info.max <= value <= sys.float_info.max


def _read_recall(source: _Source) -> Recall:
    found = Recall(source.text("question_set"), *map(source.count, ("k", "n_found", "n")))
    if not 0 < found.n >= found.n_found:
        raise source.fault("n_found", f"found {found.n_found} of {found.n}")
    return found


def _read_perplexity(source: _Source) -> Perplexity:
    return Perplexity(
        source.text("model"),
        source.text("name"),
        source.count("n_texts"),
        source.count("n_tokens"),
        source.number("per_token"),
        source.number("bits_per_byte"),
    )
