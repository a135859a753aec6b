"""Reads report.json; writes report.html and the figures, and a report as text for terminal and model card.

The report and the manifests beside the training logs that it names decide every byte. At the end the page of one run of
kinject train, augment or documents. Texts and names come from documents, models and logs: the pages escape all of them.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinject.disk import check_output, check_version, file_name, read_json, read_jsonl, read_manifest, write_text
from kinject.errors import InputError
from kinject.report import figures
from kinject.report.figures import Log, training
from kinject.report.formatting import (
    ROLES,
    Training,
    View,
    escape_markdown,
    format_count,
    format_date,
    format_name,
    format_percent,
    join_words,
    unscored_text,
)
from kinject.report.page import (
    Block,
    Bullets,
    Code,
    FigureBlock,
    Page,
    Section,
    TableBlock,
    line,
    render_html,
    render_markdown_table,
    render_text_block,
    without_empty_columns,
)
from kinject.report.style import draw_figure
from kinject.report.tables import (
    arms_table,
    changes_table,
    choices_table,
    claims_table,
    claims_text,
    cost_table,
    headline_table,
    names_table,
    results_table,
    small_tables,
)
from kinject.report.words import limitations, write_opening
from kinject.results import Report

_MOST_NAMED = 4  # arms in the title, question sets in the head
_CAPTIONS = {
    "accuracy": (
        "Accuracy by arm; the numbers are in the tables below",
        "Correct answers with 95% intervals; the number in the margin is the accuracy in percent. Ticks below a mark: single "
        "seeds. Dashed: guessing. Thin line: the base without passages.",
    ),
    "frontier": (
        "Learning against forgetting; the numbers are in the tables",
        "Up: more learned. Right: more kept. A model better than another lies above and to the right of it. Thin lines: 95% "
        "intervals.",
    ),
    "sweep": (
        "Accuracy along a sweep; its numbers are in the table of results",
        "95% intervals over documents and seeds. Thin line: the base on the first set. Dotted: the control.",
    ),
}
"""Figure -> its label for screen readers, and its caption."""
_ABOUT = (
    "“p, Holm”: corrected for all comparisons of a family: the first prompt format without context and with the chosen K is one, "
    "everything else another. ▲ and ▼: differs from base, corrected p below 0.05. Questions "
    "without a score are left out of every number.",
)
_RERUN = "A finished stage is found again by its content: a second run does only what is missing or changed."
_FOOTER_VERSIONS = ("kinject", "torch", "transformers", "trl", "python")
_FIX = "Run kinject eval or kinject study again."


def read_report(path: Path) -> Report:
    """Return the report at `path` (a report.json).

    Raises `DiskError` when it cannot be read, and `InputError` naming the field when it is damaged or of a
    newer format. Unknown keys are ignored.
    """
    value = read_json(path, _FIX)
    check_version(value.get("format_version", 1), f"{path}: format_version")
    try:
        return _from_json(value, str(path))
    except InputError as error:
        raise InputError(f"{error} {_FIX}") from None


def _from_json(value: Mapping[str, Any], source: str) -> Report:
    """Return the report that `value` (JSON values) describes. Raises `InputError` naming the first field that is wrong."""
    from pydantic import TypeAdapter, ValidationError

    try:
        report = TypeAdapter(Report).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part:.60}" for part in first["loc"]).removeprefix(
            "."
        )
        found = "missing" if first["type"] == "missing" else f"found {first['input']!r:.60}: {first['msg']}"
        raise InputError(f"{source}: damaged report: {place or 'report'}: {found}.") from None
    return report


def write_report(run_dir: Path, report: Report) -> Path:
    """Write report.html and figures/ (PNG and SVG) into `run_dir`; return report.html's path.

    An evaluation's commands and versions come from the manifests in `run_dir` and beside its training logs, its changed
    answers from flips.jsonl. Figures of an earlier report are removed. Raises `InputError` when an evaluation has no
    results, or flips.jsonl is damaged; `DiskError` on I/O.
    """
    if report.kind == "evaluation" and not report.results and not report.unscored:
        raise InputError(f"{run_dir}: the report has no results. Evaluate at least one model on one question set.")
    report = _with_manifests(run_dir, report)
    view = View(report, _read_trainings(run_dir, report))
    plots = _draw_figures(run_dir, view)
    page = _make_page(view, plots, changes_table(run_dir / "flips.jsonl"))
    path = run_dir / "report.html"
    write_text(path, render_html(page, plots))
    return path


def redraw_report(run_dir: Path) -> Path:
    """Write the page and figures of a finished run again, whichever verb made it; return the HTML's path.

    Raises `DiskError` when there is none, `InputError` when one of its files is damaged.
    """
    stage = (read_manifest(run_dir / "manifest.json") or {}).get("stage")
    if stage in ("train", "augment", "documents"):
        return write_run_report(run_dir)
    return write_report(run_dir, read_report(run_dir / "report.json"))


def render_summary(report: Report) -> str:
    """Return `report` as text for the terminal, without a trailing newline: tables and notes, the opening last."""
    view = View(report)
    tables = ([headline_table(view)] if view.set_results else []) + [t for t in small_tables(view) if not t.folded]
    blocks = [report.title, *("\n".join(render_text_block(table)) for table in tables), "\n".join(claims_text(view))]
    blocks += ["\n".join(map(unscored_text, report.unscored)), "\n".join(f"note: {note}" for note in report.notes)]
    return "\n\n".join(block for block in (*blocks, *write_opening(view).paragraphs()) if block)


def render_card_tables(report: Report) -> str:
    """Return the opening and the headline table as Markdown, for a model card."""
    view = View(report)
    paragraphs = [escape_markdown(text) for text in write_opening(view).paragraphs()]
    return "\n\n".join([*paragraphs, "\n".join(render_markdown_table(headline_table(view)))])


def _with_manifests(run_dir: Path, report: Report) -> Report:
    """Return an evaluation's `report` with the date, commands and versions of its manifests; a study's holds its own."""
    if report.kind == "study":
        return report
    manifest = read_manifest(run_dir / "manifest.json")
    paths = [run_dir / log for *_, log in report.logs]
    manifests = [*(read_manifest(path.parent / "manifest.json") for path in paths), manifest]
    commands = [item["command"] for item in manifests if item and isinstance(item.get("command"), list)]
    lines = tuple(dict.fromkeys(shlex.join(map(str, command)) for command in commands))
    versions = manifest.get("versions") if manifest else None
    date = str(manifest.get("written", "")) if manifest else ""
    return replace(report, written=date, commands=lines, versions=dict(versions) if isinstance(versions, dict) else {})


def _read_trainings(run_dir: Path, report: Report) -> dict[tuple[str, str], Training]:
    """Return what each trained arm read, from the manifests beside the training logs of the first seed."""
    trained = {(arm.model, arm.name) for arm in report.arms if arm.trained}
    trainings: dict[tuple[str, str], Training] = {}
    for model, arm, _, path in report.logs:
        manifest = read_manifest((run_dir / path).parent / "manifest.json")
        if manifest is None or (model, arm) not in trained or (model, arm) in trainings:
            continue
        counts, epochs = manifest.get("counts") or {}, (manifest.get("counts") or {}).get("epochs")
        trainings[model, arm] = Training(
            _reading(run_dir, manifest), int(counts.get("steps") or 0),
            float(epochs) if isinstance(epochs, int | float) else None, bool(counts.get("finished", True)),
        )  # fmt: skip
    return trainings


def _reading(run_dir: Path, manifest: Mapping[str, Any]) -> str:
    """Return what a training read: ``paraphrases of the documents, each document about 18 times``."""
    section = (manifest.get("recipe") or {}).get("corpus") or {}
    corpus = section.get("path") if isinstance(section, dict) else None
    if not isinstance(corpus, str):
        return ""
    folders = [folder / Path(corpus).parent for folder in run_dir.resolve().parents]
    sources = [read_manifest(folder / "manifest.json") for folder in folders if (folder / "manifest.json").is_file()]
    rewritten = any(source is not None and source.get("stage") == "augment" for source in sources)
    words = "paraphrases of the documents" if rewritten else f"the texts of {format_name(Path(corpus).name, 40)}"
    counts = manifest.get("counts") or {}
    times = ((counts.get("exposures") or {}).get("rows") or {}).get("median")
    if isinstance(times, int | float) and times >= 1.5:
        words += f", each document about {times:.0f} times"
    replay = (counts.get("fractions") or {}).get("replay")
    return words + (f", with {replay:.0%} older texts" if isinstance(replay, float) and replay else "")


def _make_page(view: View, plots: Mapping[str, str], changes: TableBlock | None) -> Page:
    report, sets = view.report, view.sets()
    counts = ((len(report.models), "base model"), (len(report.arms), "arm"), (len(sets), "question set"))
    parts = [format_count(n, noun) for n, noun in counts]
    versions = ", ".join(f"{name} {report.versions[name]}" for name in _FOOTER_VERSIONS if name in report.versions)
    written = f"Evaluated {report.written}" if report.written else "Written by kinject"
    opening = write_opening(view)
    first = _sections(_first_sheet(view))
    return Page(
        title=_title(view),
        subtitle=f"kinject {report.kind}: {', '.join(parts)}, {format_count(len(report.seeds), 'seed')}",
        description=format_name(report.description),
        facts=tuple((label, text) for label, text in _facts(view) if text),
        headline=opening.effect, figure=next(iter(_figure("accuracy", plots)), None), answers=opening.answers, open=opening.open,
        sections=(*first, *_sections(_details(view, plots, changes))), n_first=len(first),
        footer=format_name(written + (f" with {versions}." if versions else ".")),
    )  # fmt: skip


def _sections(parts: Iterator[tuple[str, tuple[Block, ...]]]) -> tuple[Section, ...]:
    return tuple(Section(title, blocks) for title, blocks in parts if blocks)


def _figure(name: str, plots: Mapping[str, str], kind: str = "") -> tuple[FigureBlock, ...]:
    return (FigureBlock(name, *_CAPTIONS[kind or name]),) if name in plots else ()


def _first_sheet(view: View) -> Iterator[tuple[str, tuple[Block, ...]]]:
    """Yield the parts of the page that fit on one sheet with the answers."""
    yield "Before and after", (headline_table(view),) if view.set_results else ()
    yield "What the names mean", (names_table(view),)


def _details(
    view: View, plots: Mapping[str, str], changes: TableBlock | None
) -> Iterator[tuple[str, tuple[Block, ...]]]:
    """Yield the other sections, in order; a section without blocks is left out."""
    report = view.report
    yield "What these data cannot tell", (Bullets(tuple(limitations(view))),)
    yield "Claims", (claims_table(report.claims),) if report.claims else ()
    yield "Learning against forgetting", _figure("frontier", plots)
    for stem, name in _sweep_stems(report).items():
        yield f"Sweep: {format_name(name)}", _figure(stem, plots, "sweep")
    yield "Answers that changed", (changes,) if changes is not None else ()
    yield "Choices on validation questions", (choices_table(view),) if report.choices else ()
    about = Bullets(_ABOUT, small=True)
    yield "Every number", (results_table(view), *small_tables(view), about) if report.results else ()
    yield "Cost and arms", (*((cost_table(view),) if report.costs else ()), arms_table(view))
    yield "Notes", (Bullets(tuple(map(format_name, report.notes)), small=True),) if report.notes else ()
    commands = tuple(format_name(command) for command in report.commands)
    yield "Run it again", (Code(commands), Bullets((_RERUN,), small=True)) if commands else ()


def _title(view: View) -> str:
    """Return a study's title, or an evaluation's with the arms that it compares."""
    title = format_name(view.report.title) or view.report.kind.capitalize()
    if view.is_study:
        return title
    trained = [format_name(arm.name) for arm in view.report.arms if arm.trained]
    names = join_words(trained) if len(trained) <= _MOST_NAMED else f"{len(trained)} models"
    base = format_name(view.base(view.report.models[0]))
    models = f"{names} against {base}" if trained else base
    return models if title == "eval" else f"{title}: {models}"  # the folder's name says nothing more


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the page's head: when, which models, which questions."""
    report = view.report
    yield "date", format_date(report.written)
    sources = [(format_name(name), format_name(report.model_sources.get(name, ""))) for name in report.models]
    yield "base model", join_words([f"{name} ({source})" if source else name for name, source in sources])
    sets = [view.first(name) for name in view.sets()]
    named = [f"“{format_name(r.question_set)}” {ROLES.get(r.role, '')}" for r in sets[:_MOST_NAMED]]
    more = [f"{len(sets) - _MOST_NAMED} more sets"] if len(sets) > _MOST_NAMED else []
    yield "questions", "; ".join([*named, *more])


def _sweep_stems(report: Report) -> dict[str, str]:
    """Return stem of the figure's files -> name of each sweep."""
    names = dict.fromkeys(sweep.name for sweep in report.sweeps)
    return {file_name(f"sweep-{name}"): name for name in names}


def _draw_figures(run_dir: Path, view: View) -> dict[str, str]:
    """Write the files of each figure that has something to draw, remove older ones, and return the figures by stem."""
    drawn = {"accuracy": figures.accuracy(view), "frontier": figures.frontier(view)}
    for stem, name in _sweep_stems(view.report).items():
        drawn[stem] = figures.sweep(view, [sweep for sweep in view.report.sweeps if sweep.name == name])
    plots = {}
    for name, figure in drawn.items():
        svg = draw_figure(run_dir / "figures" / name, figure, _CAPTIONS.get(name, _CAPTIONS["sweep"])[0])
        if svg is not None:
            plots[name] = svg
    for path in (run_dir / "figures").glob("*.*"):
        if path.stem not in plots and path.suffix in (".png", ".svg"):
            path.unlink()  # of an earlier report
    return plots


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
    "duplicates.jsonl": ("Copies and versions", {
        "dropped": "left out", "version": "version", "kept": "kept", "how": "how", "words_only_here": "words only in the first",
        "words_only_there": "in the other instead",
    }),
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
        page = _make_run_page(run_dir, stage, manifest, log, has_curves=svg is not None)
        write_text(path, render_html(page, {} if svg is None else {"training": svg}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{run_dir}: a file of another shape ({error!r:.80}). Run kinject {stage} again.") from error
    return path


def _make_run_page(run_dir: Path, stage: str, manifest: Mapping[str, Any], log: Log, *, has_curves: bool) -> Page:
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
                line(*(format_name(_text(row.get(key)), _LONGEST) for key in columns)) for row in rows[:_MOST_ROWS]
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


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")
