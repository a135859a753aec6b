"""The page of one run of kinject train, augment or documents: the numbers of its manifest, its curves, what was left out.

Texts and names come from documents, models and logs: all are untrusted, and the page escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kinject.disk import check_output, read_jsonl, read_manifest, write_text
from kinject.errors import InputError
from kinject.report.figures import Log, training
from kinject.report.formatting import format_date, format_name, format_percent, join_words
from kinject.report.page import (
    Bullets,
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

PAGES = {"train": "report.html", "augment": "report.html", "documents": "documents.html"}
"""Stage -> the file of its page."""
_HEADLINES = {
    "train": "{steps:,} steps in {seconds:,.0f} seconds",
    "augment": "{got:,} of {asked:,} requested rewritings are in the corpus",
    "documents": "{n_documents:,} documents from {n_read:,} of {n_files:,} files",
}
_LEFT_OUT = {
    "rejected.jsonl": ("Refused answers", {"reason": "reason", "style": "style", "document_id": "document", "detail": "found",
                                           "text": "the answer"}),
    "skipped.jsonl": ("Skipped", {"where": "file", "detail": "why"}),
    "duplicates.jsonl": ("Copies and versions", {"dropped": "left out", "version": "version", "kept": "kept", "how": "how"}),
}  # fmt: skip
"""File of a run -> the title of its table, and its columns."""
_LOGGED = ("loss", "learning_rate", "grad_norm")
_MOST_ROWS = 1_000  # of one table
_UNFOLDED = 20
_LONGEST = 400  # characters of a text
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
    path = run_dir / PAGES[stage]
    try:
        log = read_training_log(run_dir / "log.jsonl") if stage == "train" else {}
        svg = draw_figure(run_dir / "figures" / "training", training(log, _probes(manifest)), _CURVES)
        page = _make_page(run_dir, stage, manifest, log, has_curves=svg is not None)
        write_text(path, render_html(page, {} if svg is None else {"training": svg}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{run_dir}: a file of another shape ({error!r:.80}). Run kinject {stage} again.") from error
    return path


def _make_page(run_dir: Path, stage: str, manifest: Mapping[str, Any], log: Log, *, has_curves: bool) -> Page:
    counts = manifest["counts"]
    notes = tuple(format_name(str(note)) for note in (*counts.get("notes", ()), *counts.get("warnings", ())))
    numbers = tuple(line(format_name(name), text) for name, text in _flat(counts) if text)
    command = format_name(" ".join(map(str, manifest.get("command", ()))))
    sections = (
        Section("The course of the run", (FigureBlock("training", _CURVES, _CAPTION),) if has_curves else ()),
        Section("Refused and left out", tuple(_left_out(run_dir))),
        Section("Notes and warnings", (Bullets(notes),) if notes else ()),
        Section("The run in numbers", (TableBlock("", "", ("", ""), numbers),)),
        Section("Run it again", (Code((command,)),) if command else ()),
    )
    headline = _HEADLINES[stage].format_map(counts) + "".join(_course(log, _probes(manifest))) + "."
    if stage == "train" and not counts.get("finished"):
        headline += " This run is not finished."
    facts = (("date", format_date(str(manifest.get("written", "")))), ("base model", _value_of(manifest, "model")),
             ("corpus", _value_of(manifest, "corpus")))  # fmt: skip
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


def _course(log: Log, probes: Mapping[str, str]) -> Iterator[str]:
    """Yield in words how the loss and the accuracies of the probes changed, from the first to the last."""
    losses = [loss for loss in log.get("loss", ((), ()))[1] if math.isfinite(loss)]
    if losses:
        yield f"; the training loss went from {losses[0]:.2f} to {losses[-1]:.2f}"
    for name in probes:
        _, values = log.get(f"eval_{name}_accuracy", ((), ()))
        if values:
            yield f"; “{format_name(name)}” from {format_percent(values[0])} to {format_percent(values[-1])}"


def _left_out(run_dir: Path) -> Iterator[TableBlock]:
    """Yield a table of each file that lists what is not in the result."""
    for name, (title, columns) in _LEFT_OUT.items():
        rows = [row for _, row in read_jsonl(run_dir / name)] if (run_dir / name).is_file() else []
        if rows:
            lines = (
                line(*(format_name(str(row.get(key) or ""), _LONGEST) for key in columns)) for row in rows[:_MOST_ROWS]
            )
            about = f"the first {_MOST_ROWS:,}; {name} has all" if len(rows) > _MOST_ROWS else ""
            yield without_empty_columns(TableBlock(
                f"{title}: {len(rows):,}", about, tuple(columns.values()), tuple(lines), wordy=True,
                folded=len(rows) > _UNFOLDED,
            ))  # fmt: skip


def read_training_log(path: Path) -> Log:
    """Return the numbers of a training log; of rows with one step the last counts, as after a resume.

    Raises `DiskError` when the file cannot be read and `InputError` (file:line) for a row of another shape.
    """
    values: dict[str, dict[float, float]] = {}
    check_output(path, "Train again with --resume: the newest checkpoint holds the log.")
    for number, row in read_jsonl(path):
        logged = (*_LOGGED, "epoch") if "loss" in row else _LOGGED
        for key in (key for key in row if key in logged or key.startswith("eval_")):
            try:
                value = math.nan if row[key] is None else float(row[key])
                values.setdefault(key, {})[float(row["step"])] = value
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path}:{number}: {key}: found {row[key]!r:.60} at step {row.get('step')!r:.60}, numbers are "
                                 "needed.") from error  # fmt: skip
    return {key: tuple(zip(*sorted(by_step.items()), strict=True)) for key, by_step in values.items()}  # type: ignore[misc]
