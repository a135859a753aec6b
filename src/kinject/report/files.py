"""Reads report.json; writes report.html and the figures, and a report as text for terminal and
model card.

The report and the manifests beside the training logs that it names decide every byte. Texts and
names come from documents, models and logs: the page escapes all of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinject.disk import check_version, read_json, read_manifest, write_text
from kinject.errors import InputError
from kinject.report import figures
from kinject.report.doubts import limitations
from kinject.report.formatting import (
    ROLES,
    Training,
    View,
    escape_markdown,
    format_count,
    format_name,
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
    render_html,
    render_markdown_table,
    render_text_block,
)
from kinject.report.result_tables import (
    changes_table,
    headline_table,
    results_table,
    sweep_tables,
)
from kinject.report.tables import (
    arms_table,
    choices_table,
    claims_table,
    claims_text,
    cost_table,
    names_table,
    small_tables,
)
from kinject.report.words import write_opening
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

    Raises `DiskError` when it cannot be read, and `InputError` naming the field when it is damaged
    or of a newer format. Unknown keys are ignored.
    """
    from pydantic import TypeAdapter, ValidationError

    value = read_json(path, _FIX)
    check_version(value.get("format_version", 1), f"{path}: format_version")
    try:
        return TypeAdapter(Report).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part:.60}" for part in first["loc"]
        )
        found = f"found {first['input']!r:.60}: {first['msg']}"
        raise InputError(
            f"{path}: damaged report: {place.removeprefix('.')}: {found}. {_FIX}"
        ) from None


def write_report(run_dir: Path, report: Report) -> Path:
    """Write report.html and figures/ (PNG and SVG) into `run_dir`; return report.html's path.

    An evaluation's commands and versions come from the manifests in `run_dir` and beside its
    training logs, its changed answers from flips.jsonl. Figures of an earlier report are removed.
    Raises `InputError` when an evaluation has no results, or flips.jsonl is damaged; `DiskError` on
    I/O.
    """
    if report.kind == "evaluation" and not report.results and not report.unscored:
        raise InputError(
            f"{run_dir}: the report has no results. Evaluate at least one model on one question set."
        )
    report = _with_manifests(run_dir, report)
    view = read_view(run_dir, report)
    plots = _draw_figures(run_dir, view)
    page = _make_page(view, plots, changes_table(run_dir / "flips.jsonl"))
    path = run_dir / "report.html"
    write_text(path, render_html(page, plots))
    return path


def read_view(run_dir: Path, report: Report) -> View:
    """Return the view of the report of `run_dir`, with what the manifests beside its training logs
    say of its trainings."""
    return View(report, _read_trainings(run_dir, report))


def render_summary(run_dir: Path, report: Report) -> str:
    """Return the report of `run_dir` as text for the terminal, without a trailing newline: tables,
    notes, the opening last."""
    view = read_view(run_dir, report)
    tables = ([headline_table(view)] if view.set_results else []) + [
        t for t in small_tables(view) if not t.folded
    ]
    blocks = [
        report.title,
        *("\n".join(render_text_block(table)) for table in tables),
        "\n".join(claims_text(view)),
    ]
    blocks += [
        "\n".join(map(unscored_text, report.unscored)),
        "\n".join(f"note: {note}" for note in report.notes),
    ]
    return "\n\n".join(block for block in (*blocks, *write_opening(view).paragraphs()) if block)


def render_card_tables(run_dir: Path, report: Report) -> str:
    """Return the opening and the headline table of the report of `run_dir` as Markdown, for a model
    card."""
    view = read_view(run_dir, report)
    paragraphs = [escape_markdown(text) for text in write_opening(view).paragraphs()]
    return "\n\n".join([*paragraphs, "\n".join(render_markdown_table(headline_table(view)))])


def _with_manifests(run_dir: Path, report: Report) -> Report:
    """Return an evaluation's `report` with the date, commands and versions of its manifests; a
    study's holds its own."""
    if report.kind == "study":
        return report
    manifest = read_manifest(run_dir / "manifest.json")
    paths = [run_dir / log for *_, log in report.logs]
    manifests = [*(read_manifest(path.parent / "manifest.json") for path in paths), manifest]
    commands = [
        item["command"] for item in manifests if item and isinstance(item.get("command"), list)
    ]
    lines = tuple(dict.fromkeys(shlex.join(map(str, command)) for command in commands))
    versions = manifest.get("versions") if manifest else None
    date = str(manifest.get("written", "")) if manifest else ""
    return replace(
        report,
        written=date,
        commands=lines,
        versions=dict(versions) if isinstance(versions, dict) else {},
    )


def _read_trainings(run_dir: Path, report: Report) -> dict[tuple[str, str], Training]:
    """Return what each trained arm read, from the manifests beside the training logs of the first
    seed."""
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
    sources = [
        read_manifest(folder / "manifest.json")
        for folder in folders
        if (folder / "manifest.json").is_file()
    ]
    rewritten = any(source is not None and source.get("stage") == "augment" for source in sources)
    words = (
        "paraphrases of the documents"
        if rewritten
        else f"the texts of {format_name(Path(corpus).name, 40)}"
    )
    counts = manifest.get("counts") or {}
    times = ((counts.get("exposures") or {}).get("rows") or {}).get("median")
    if isinstance(times, int | float) and times >= 1.5:
        words += f", each document about {times:.0f} times"
    replay = (counts.get("fractions") or {}).get("replay")
    return words + (
        f", with {replay:.0%} older texts" if isinstance(replay, float) and replay else ""
    )


def _make_page(view: View, plots: Mapping[str, str], changes: TableBlock | None) -> Page:
    report, sets = view.report, view.sets()
    counts = (
        (len(report.models), "base model"),
        (len(report.arms), "arm"),
        (len(sets), "question set"),
    )
    parts = [format_count(n, noun) for n, noun in counts]
    versions = ", ".join(
        f"{name} {report.versions[name]}" for name in _FOOTER_VERSIONS if name in report.versions
    )
    written = f"Evaluated {report.written}" if report.written else "Written by kinject"
    first = _sections(_first_sheet(view))
    return Page(
        title=_title(view),
        subtitle=f"kinject {report.kind}: {', '.join(parts)}, {format_count(len(report.seeds), 'seed')}",
        description=format_name(report.description),
        facts=tuple((label, text) for label, text in _facts(view) if text),
        opening=write_opening(view), figure=next(iter(_figure("accuracy", plots)), None),
        sections=(*first, *_sections(_details(view, plots, changes))), n_first=len(first),
        footer=format_name(written + (f" with {versions}." if versions else ".")),
    )  # fmt: skip


def _sections(parts: Iterator[tuple[str, tuple[Block, ...]]]) -> tuple[Section, ...]:
    return tuple(Section(title, blocks) for title, blocks in parts if blocks)


def _figure(name: str, plots: Mapping[str, str]) -> tuple[FigureBlock, ...]:
    return (FigureBlock(name, *_CAPTIONS[name]),) if name in plots else ()


def _first_sheet(view: View) -> Iterator[tuple[str, tuple[Block, ...]]]:
    """Yield the parts of the page that fit on one sheet with the answers."""
    yield "Before and after", (headline_table(view),) if view.set_results else ()
    yield "What the names mean", (names_table(view),)


def _details(
    view: View, plots: Mapping[str, str], changes: TableBlock | None
) -> Iterator[tuple[str, tuple[Block, ...]]]:
    """Yield the other sections, in order; a section without blocks is left out."""
    report = view.report
    limits = tuple(limitations(view))
    yield "What these data cannot tell", (Bullets(limits),) if limits else ()
    yield "Claims", (claims_table(report.claims),) if report.claims else ()
    yield "Learning against forgetting", _figure("frontier", plots)
    yield "Sweeps", tuple(sweep_tables(view))
    yield "Answers that changed", (changes,) if changes is not None else ()
    yield "Choices on validation questions", (choices_table(view),) if report.choices else ()
    about = Bullets(_ABOUT, small=True)
    yield (
        "Every number",
        (results_table(view), *small_tables(view), about) if report.results else (),
    )
    yield "Cost and arms", (*((cost_table(view),) if report.costs else ()), arms_table(view))
    yield (
        "Notes",
        (Bullets(tuple(map(format_name, report.notes)), small=True),) if report.notes else (),
    )
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
    return (
        models if title == "eval" else f"{title}: {models}"
    )  # the folder's name says nothing more


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the page's head: when, which models, which questions."""
    report = view.report
    yield "date", format_name(report.written[:10])
    sources = [
        (format_name(name), format_name(report.model_sources.get(name, "")))
        for name in report.models
    ]
    yield (
        "base model",
        join_words([f"{name} ({source})" if source else name for name, source in sources]),
    )
    sets = [view.first(name) for name in view.sets()]
    named = [f"“{format_name(r.question_set)}” {ROLES.get(r.role, '')}" for r in sets[:_MOST_NAMED]]
    more = [format_count(len(sets) - _MOST_NAMED, "more set")] if len(sets) > _MOST_NAMED else []
    yield "questions", "; ".join([*named, *more])


def _draw_figures(run_dir: Path, view: View) -> dict[str, str]:
    """Write the files of each figure that has something to draw, remove older ones, and return the
    figures by stem."""
    drawn = {"accuracy": figures.accuracy(view), "frontier": figures.frontier(view)}
    svgs = {
        name: figures.draw_figure(run_dir / "figures" / name, figure)
        for name, figure in drawn.items()
    }
    plots = {name: svg for name, svg in svgs.items() if svg is not None}
    for path in (run_dir / "figures").glob("*.*"):
        if path.stem not in plots and path.suffix in (".png", ".svg"):
            path.unlink()  # of an earlier report
    return plots
