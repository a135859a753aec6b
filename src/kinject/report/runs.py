"""The page of one run of kinject train, augment or documents: the numbers of its manifest, its curves, what was refused.

Texts and names come from documents, models and logs: all are untrusted, and the page escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kinject.disk import Row, check_output, read_jsonl, read_manifest, write_text
from kinject.errors import InputError
from kinject.report import figures
from kinject.report.formatting import (
    ROLES,
    format_count,
    format_date,
    format_name,
    format_percent,
    format_points,
    join_words,
)
from kinject.report.page import (
    Block,
    Bullets,
    Cell,
    Code,
    FigureBlock,
    Page,
    Section,
    TableBlock,
    line,
    render_html,
    without_empty_columns,
)
from kinject.report.style import draw_figure
from kinject.report.view import Series, TrainingLog

PAGES = {"train": "report.html", "augment": "report.html", "documents": "documents.html"}
"""Stage -> the file of its page."""
_MOST_EXAMPLES = 3  # refused answers of one reason
_MOST_ROWS = 1_000  # of one table
_UNFOLDED = 20
_LONGEST = 400  # characters of a text
_LARGEST = 1e9
_FIX = "Train again with --resume: the newest checkpoint holds the log."
_CURVES = "Loss, learning rate, gradient norm and probe accuracies by step"
_CAPTION = (
    "By step; a light line ends an epoch. A loss that steps down at those lines is memorisation: it falls because the same text "
    "comes again."
)


def write_run_report(run_dir: Path) -> Path:
    """Write the page of a finished run (and a training's figure); return the page's path.

    Raises `InputError` when `run_dir` holds no finished run of one of these stages, or one of its files is damaged.
    """
    manifest = read_manifest(run_dir / "manifest.json")
    stage = "" if manifest is None else str(manifest.get("stage"))
    if manifest is None or stage not in PAGES:
        raise InputError(f"{run_dir}: holds no finished run of kinject {join_words(list(PAGES))}. Give its run_dir.")
    path, plots, log = run_dir / PAGES[stage], {}, None
    try:
        if stage == "train":
            log = read_training_log(run_dir.name, run_dir / "log.jsonl")
            draw = partial(figures.training, log, _probes(manifest))
            plot = draw_figure(run_dir / "figures" / "training", draw, _CURVES, 2)
            plots = {} if plot is None else {"training": plot}
        write_text(path, render_html(_make_page(run_dir, stage, manifest, log), plots))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{run_dir}: a file of another shape ({error!r:.80}). Run kinject {stage} again.") from error
    return path


def _make_page(run_dir: Path, stage: str, manifest: Mapping[str, Any], log: TrainingLog | None) -> Page:
    counts = manifest["counts"]
    headline = {"train": _trained, "augment": _rewritten, "documents": _collected}[stage](counts, manifest, log)
    curves: tuple[Block, ...] = ()
    if log is not None and log.series:
        curves = (FigureBlock("training", _CURVES, _CAPTION), *_evaluations(log, _probes(manifest)))
    refused = {"train": (), "augment": _refused(run_dir), "documents": _skipped(run_dir)}[stage]
    notes = [str(note) for note in (*_gaps(log), *counts.get("notes", ()), *counts.get("warnings", ()))]
    numbers = tuple(line(format_name(name), text) for name, text in _flat(counts) if text)
    command = format_name(" ".join(map(str, manifest.get("command", ()))))
    sections = (
        Section("The course of the run", curves),
        Section("Refused and left out", tuple(refused)),
        Section("Notes and warnings", (Bullets(tuple(map(format_name, notes))),) if notes else ()),
        Section("The run in numbers", (TableBlock("", "", ("", ""), numbers),)),
        Section("Run it again", (Code((command,)),) if command else ()),
    )
    # A training's inputs are hashes by kind; its corpus has a line of its own.
    inputs = [format_name(Path(name).name, 40) for name in manifest.get("inputs", ()) if stage != "train"]
    facts = (("date", format_date(str(manifest.get("written", "")))), ("from", join_words(inputs[:6])),
             ("base model", _value_of(manifest, "model")), ("corpus", _value_of(manifest, "corpus")))  # fmt: skip
    versions = (manifest.get("versions") or {}).get("kinject", "")
    return Page(
        title=format_name(run_dir.name), subtitle=f"kinject {stage}", description="",
        facts=tuple(fact for fact in facts if fact[1]), headline=headline,
        sections=tuple(section for section in sections if section.blocks),
        footer=format_name(f"Written with kinject {versions}." if versions else ""),
    )  # fmt: skip


def _value_of(manifest: Mapping[str, Any], section: str) -> str:
    value = (manifest.get("recipe") or {}).get(section)
    return format_name(str(value.get("path") or "")) if isinstance(value, dict) else ""


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the numbers and short texts of a manifest's counts by their keys, joined: ``tokens: trained``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}: {key}".removeprefix(": ").replace("_", " "))
    elif isinstance(value, bool) or value is None or isinstance(value, list):
        return
    elif isinstance(value, float):
        yield name, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    else:
        yield name, f"{value:,}" if isinstance(value, int) else format_name(str(value), 80)


def _probes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the question sets that probed the training, with their roles."""
    sets = ((manifest.get("recipe") or {}).get("probes") or {}).get("questions", {})
    return {name: item.get("role", "learning") if isinstance(item, dict) else "learning" for name, item in sets.items()}


def _trained(counts: Mapping[str, Any], manifest: Mapping[str, Any], log: TrainingLog | None) -> str:
    """Return steps, loss and the accuracies of the probes, from the first to the last, in a sentence."""
    text = f"{counts.get('steps', 0):,} steps in {counts.get('seconds', 0):,.0f} seconds"
    epochs = counts.get("epochs")
    if isinstance(epochs, float | int) and epochs:
        text += (
            f", {epochs:.3g} times through the rows"
            if epochs >= 0.99
            else f", through {format_percent(epochs)} of the rows"
        )
    losses = [loss for loss in log.loss.values if math.isfinite(loss)] if log is not None else []
    text += f"; the training loss went from {losses[0]:.2f} to {losses[-1]:.2f}" if losses else ""
    for name, role in _probes(manifest).items():
        values = (log.series.get(f"eval_{name}_accuracy", Series()) if log is not None else Series()).values
        if values:
            text += f"; “{format_name(name)}” ({ROLES[role]}) from {format_percent(values[0])} to {format_percent(values[-1])}"
            text += f" ({format_points(values[-1] - values[0])} points)"
    return text + ("." if counts.get("finished") else ". This run is not finished.")


def _rewritten(counts: Mapping[str, Any], _: Mapping[str, Any], __: TrainingLog | None) -> str:
    """Return the yield, the refusals and the cost in a sentence or two."""
    text = f"{counts['got']:,} of {counts['asked']:,} requested rewritings are in the corpus"
    refused, failed = sum(counts["refused"].values()), sum(counts["failed"].values())
    reasons = [f"{format_name(reason)} {n:,}" for reason, n in list(counts["refused"].items())[:3]]
    text += (
        f"; {format_count(refused, 'answer')} refused on the way ({', '.join(reasons)})"
        if refused
        else "; no answer refused"
    )
    text += f"; {failed:,} got no answer" if failed else ""
    text += f"; it cost {counts['cost']:,.2f}" if counts["cost"] else ""
    return text + (". The budget ended the run." if counts["out_of_budget"] else ".")


def _collected(counts: Mapping[str, Any], _: Mapping[str, Any], __: TrainingLog | None) -> str:
    skipped, copies = counts["skipped"], sum(counts["duplicates"].values())
    text = f"{counts['n_documents']:,} documents from {counts['n_read']:,} of {counts['n_files']:,} files"
    text += f"; {skipped:,} files or parts of one could not be read" if skipped else "; everything could be read"
    return text + (f"; {copies:,} copies were left out." if copies else ".")


def _rows(run_dir: Path, name: str) -> list[Row]:
    return [row for _, row in read_jsonl(run_dir / name)] if (run_dir / name).is_file() else []


def _refused(run_dir: Path) -> Iterator[TableBlock]:
    """Yield the refused answers of an augmentation: a count and the first examples of each reason."""
    by_reason: dict[str, list[Row]] = {}
    for row in _rows(run_dir, "rejected.jsonl"):
        by_reason.setdefault(row["reason"], []).append(row)
    lines = []
    for reason, rows in by_reason.items():
        head = Cell(format_name(reason), "", format_count(len(rows), "answer"))
        for row in rows[:_MOST_EXAMPLES]:
            found, text = (format_name(str(row[key]), _LONGEST) for key in ("detail", "text"))
            lines.append(line(head, format_name(f"{row['style']}, {row['document_id']}", 80), found, text))
    if lines:
        about = f"at most {_MOST_EXAMPLES} of a reason; rejected.jsonl has all"
        columns = ("reason", "style, document", "found", "the answer")
        yield TableBlock("Refused answers", about, columns, tuple(lines), wordy=True)


def _skipped(run_dir: Path) -> Iterator[TableBlock]:
    """Yield the files that were skipped, each with its reason, and the copies that were left out."""
    skipped = sorted(_rows(run_dir, "skipped.jsonl"), key=lambda row: bool(row.get("left_out")))
    lines = [line(format_name(row["where"], 100), format_name(row["detail"], _LONGEST)) for row in skipped]
    yield from _table("Skipped", "skipped.jsonl has all", ("file", "why"), lines)
    copies = [
        line(format_name(row.get("dropped") or row["version"], 100), format_name(str(row.get("kept", "")), 100), str(row["how"]),
             format_name(row.get("line") or " ".join(row.get("words_only_here", ())), 120),
             format_name(" ".join(row.get("words_only_there", ())), 120))
        for row in _rows(run_dir, "duplicates.jsonl")
    ]  # fmt: skip
    columns = ("left out, or a version", "kept", "how", "words only in the first", "in the other instead")
    yield from _table("Copies and versions", "duplicates.jsonl has all", columns, copies)


def _table(title: str, about: str, columns: tuple[str, ...], lines: list[Any]) -> Iterator[TableBlock]:
    if lines:
        title = f"{title}: {len(lines):,}" + (f", the first {_MOST_ROWS:,}" if len(lines) > _MOST_ROWS else "")
        shown, folded = tuple(lines[:_MOST_ROWS]), len(lines) > _UNFOLDED
        yield without_empty_columns(TableBlock(title, about, columns, shown, wordy=True, folded=folded))


def _evaluations(log: TrainingLog, probes: Mapping[str, str]) -> Iterator[TableBlock]:
    """Yield the probes' accuracies and the held-out loss of each evaluation."""
    keys = {f"eval_{name}_accuracy": format_name(name) for name in probes} | {"eval_loss": "held-out loss"}
    by_key = {
        key: dict(zip(log.series[key].steps, log.series[key].values, strict=True)) for key in keys if key in log.series
    }
    lines = []
    for step in sorted({step for of in by_key.values() for step in of}):
        values = [of.get(step) for of in by_key.values()]
        texts = ("" if v is None else "not finite" if not math.isfinite(v) else f"{v:.3f}" for v in values)
        lines.append(line(f"{step:,.0f}", *texts))
    if lines:
        columns = ("step", *(keys[key] for key in by_key))
        yield TableBlock("Evaluations", "accuracies as fractions", columns, tuple(lines), folded=len(lines) > _UNFOLDED)


def _gaps(log: TrainingLog | None) -> Iterator[str]:
    lost = (
        [s for s, v in zip(log.loss.steps, log.loss.values, strict=True) if not math.isfinite(v)]
        if log is not None
        else []
    )
    if lost and log is not None:
        yield f"The loss is not finite at {len(lost):,} of {len(log.loss.steps):,} logged steps, first at {lost[0]:,.0f}."


def read_training_log(name: str, path: Path) -> TrainingLog:
    """Return the numbers of a training log; of rows with one step the last counts, as after a resume.

    Raises `DiskError` when the file cannot be read and `InputError` (file:line) when a value is not a number.
    """
    values: dict[str, dict[float, float]] = {}
    check_output(path, _FIX)
    for number, row in read_jsonl(path):
        location = f"{path}:{number}"
        step = _number(row, "step", location)
        if step is None and "loss" in row:
            raise InputError(f"{location}: has a loss but no step. Each row of a training log names its step.")
        for key in row if step is not None else ():
            if (
                key in ("loss", "learning_rate", "grad_norm")
                or key.startswith("eval_")
                or (key, "loss" in row) == ("epoch", True)
            ):
                value = _number(row, key, location)
                values.setdefault(key, {})[step or 0.0] = math.nan if value is None else value
    by_key = {
        key: Series(tuple(sorted(by_step)), tuple(by_step[step] for step in sorted(by_step)))
        for key, by_step in values.items()
    }
    return TrainingLog(name, by_key)


def _number(row: Row, key: str, location: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{location}: {key}: found {value!r}, a number is needed.")
    # A loss that is not finite is a finding; a step that is not is damage.
    if key in ("step", "epoch", "learning_rate") and not 0 <= value < _LARGEST:
        raise InputError(f"{location}: {key}: found {value!r}, allowed is 0 to {_LARGEST:.0e}.")
    return float(value)
