"""Reads report.json; writes report.html and the figures, and a report as text for terminal and
model card.

The report and the manifests beside the training logs that it names decide every byte. Texts and
names come from documents, models and logs: the page escapes all of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kinject.disk import (
    check_version,
    delete_file,
    file_lock,
    parse_fields,
    read_json,
    write_text,
)
from kinject.errors import InputError
from kinject.manifests import (
    AugmentManifest,
    FinishedTraining,
    TrainManifest,
    WritingCounts,
    read_manifest,
    read_train_manifest,
)
from kinject.report import figures
from kinject.report.doubts import limitations
from kinject.report.formatting import (
    ROLES,
    Training,
    View,
    escape_markdown,
    format_command,
    format_name,
    join_words,
    unscored_text,
    with_details,
)
from kinject.report.page import (
    Block,
    Bullets,
    Code,
    FigureBlock,
    Page,
    Plot,
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
    published_table,
    small_tables,
)
from kinject.report.words import write_opening
from kinject.results import Report
from kinject.terminal import format_count

_MOST_NAMED = 4  # arms in the title, question sets in the head
_CAPTIONS = {
    "accuracy": (
        "Accuracy by arm; the numbers are in the tables below",
        "Correct answers with 95% intervals; the number in the margin is the accuracy in percent. "
        "Ticks below a mark: single seeds. Dashed: guessing. Thin line: the base without passages.",
    ),
    "frontier": (
        "Learning against forgetting; the numbers are in the tables",
        "Up: more learned. Right: more kept. A model better than another lies above and to the "
        "right of it. Thin lines: 95% intervals.",
    ),
}
"""Figure -> its label for screen readers, and its caption."""
_ABOUT = (
    "“p, Holm”: corrected for all comparisons of a family: the first prompt format without context "
    "and with the chosen K is one, everything else another. ▲ and ▼: differs from base, corrected "
    "p below 0.05. Questions without a score are left out of every number."
)
_RERUN = (
    "A finished stage is found again by its content: a second run does only what is missing or "
    "changed."
)
_FOOTER_VERSIONS = ("kinject", "torch", "transformers", "trl", "python")
_REPEATED = 1.5
"""Readings of a document from which on their number rounds to several."""
_QUESTIONS = "sft.jsonl"
"""The questions and dialogues of kinject augment."""
_FIX = "Run kinject eval or kinject study again."


def read_report(path: Path) -> Report:
    """Return the report at `path` (a report.json).

    Raises `DiskError` when it cannot be read, and `InputError` naming the field when it is damaged
    or of a newer format. Unknown keys are ignored.
    """
    value = read_json(path, _FIX)
    # A report without a version is read as it stands.
    check_version(value.get("format_version", 1), f"{path}: format_version")
    report = parse_fields(Report, value, f"{path}: damaged report", _FIX)
    fault = _fault_of(report)
    if fault:
        raise InputError(f"{path}: damaged report: {fault}. {_FIX}")
    return report


def _fault_of(report: Report) -> str:
    """Return which list of a report is empty, or not of the things of its other one, "" if none
    is."""
    if not report.models:
        return "models: is empty"
    for result in report.results:
        if not result.by_seed:
            return f"results: {result.arm!r:.60}: by_seed is empty"
    for item in report.perplexities:
        # A report of an earlier version has neither.
        if item.losses and (len(item.losses) != len(item.lengths) or not any(item.lengths)):
            return f"perplexities: {item.arm!r:.60}: losses and lengths are not of the same texts"
    judge = report.judge
    if (
        judge is not None
        and not judge.recall.keys() == judge.precision.keys() == judge.planted.keys()
    ):
        return "judge: precision, recall and planted are not of the same grades"
    return ""


def write_report(run_dir: Path, report: Report) -> Path:
    """Write report.html and figures/ (PNG and SVG) into `run_dir`; return report.html's path.

    An evaluation's commands and versions come from the manifests in `run_dir` and beside its
    training logs, its changed answers from flips.jsonl. Figures of an earlier report are removed.
    Raises `InputError` when an evaluation has no results, or flips.jsonl is damaged; `DiskError` on
    I/O.
    """
    if report.kind == "evaluation" and not report.results and not report.unscored:
        raise InputError(
            f"{run_dir}: the report has no results. Evaluate at least one model on one question "
            "set."
        )
    report = _with_manifests(run_dir, report)
    view = read_view(run_dir, report)
    path = run_dir / "report.html"
    # Two that draw at once would delete each other's figures.
    with file_lock(run_dir / ".report.lock"):
        plots = _draw_figures(run_dir, view)
        page = _make_page(view, plots, changes_table(run_dir / "flips.jsonl"))
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
    tables = [table for table in small_tables(view) if not table.folded]
    if view.set_results:
        tables.insert(0, headline_table(view))
    blocks = [
        format_name(report.title),
        *("\n".join(render_text_block(table)) for table in tables),
        "\n".join(claims_text(view)),
        "\n".join(map(unscored_text, report.unscored)),
        "\n".join(f"note: {format_name(note)}" for note in report.notes),
        *write_opening(view).paragraphs(),
    ]
    return "\n\n".join(filter(None, blocks))


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
    manifest = read_manifest(run_dir)
    of_trainings = [read_manifest((run_dir / log).parent) for *_, log in report.logs]
    # Trainings ran before they were evaluated, so their commands come first.
    found = [item for item in (*of_trainings, manifest) if item is not None]
    commands = tuple(dict.fromkeys(shlex.join(item.command) for item in found))
    if manifest is None:
        return replace(report, written="", commands=commands, versions={})
    return replace(
        report, written=manifest.written, commands=commands, versions=dict(manifest.versions)
    )


def _read_trainings(run_dir: Path, report: Report) -> dict[tuple[str, str], Training]:
    """Return what each trained arm read, from the manifests beside the training logs of the first
    seed."""
    trained = {(arm.model, arm.name) for arm in report.arms if arm.trained}
    trainings: dict[tuple[str, str], Training] = {}
    for model, arm, _, path in report.logs:
        manifest = read_train_manifest((run_dir / path).parent)
        if manifest is None or (model, arm) not in trained or (model, arm) in trainings:
            continue
        reading, counts = _reading(run_dir, manifest), manifest.finished()
        if counts is None:
            trainings[model, arm] = Training(reading, 0, None, False)
        else:
            trainings[model, arm] = Training(
                reading, counts.steps, counts.epochs, True, counts.warnings
            )
    return trainings


def _reading(run_dir: Path, manifest: TrainManifest) -> str:
    """Return what a training read: ``paraphrases of the documents, each document about 18
    times``."""
    corpus = Path(manifest.recipe.corpus.path)
    # The recipe's path is relative to the folder where kinject ran: one above the report's.
    sources = [read_manifest(folder / corpus.parent) for folder in run_dir.resolve().parents]
    augmented = [source.counts for source in sources if isinstance(source, AugmentManifest)]
    written = [of_corpus.got for of_corpus in augmented]
    if written and not any(written):
        words = "the documents as they are"
    elif written and corpus.name == _QUESTIONS:
        words = "questions and dialogues on the documents"
    elif written:
        words = "paraphrases of the documents"
    else:
        words = f"the texts of {format_name(corpus.name, 40)}"
    counts = manifest.finished()
    if counts is None:
        return words
    replay = counts.fractions.get("replay")
    words += _times_read(corpus.name, augmented, counts)
    if replay:
        words += f", with {replay:.0%} older texts"
    return words


def _times_read(corpus: str, augmented: Sequence[WritingCounts], counts: FinishedTraining) -> str:
    """Return ``, each document about 18 times``, "" for less than twice. `augmented` are the counts
    of the run of kinject augment that wrote the corpus."""
    rows = counts.exposures.rows
    if rows is None:
        return ""
    unit, times = "document", rows.median
    for of_corpus in augmented:
        # Each passage of a long document has rows of its own: 3 passages with 10 texts each were
        # "each document about 30 times".
        if corpus == "corpus.jsonl" and of_corpus.n_passages > of_corpus.n_documents:
            unit, times = "passage", counts.epochs * of_corpus.n_rows / of_corpus.n_passages
    if times < _REPEATED:
        return ""
    if augmented and corpus == _QUESTIONS:  # a row is no reading of its document
        return f", about {times:.0f} on each document"
    return f", each {unit} about {times:.0f} times"


def _make_page(view: View, plots: Mapping[str, Plot], changes: TableBlock | None) -> Page:
    first = _sections(_first_sheet(view))
    return Page(
        title=_title(view),
        subtitle=_subtitle(view),
        description=format_name(view.report.description),
        facts=tuple((label, text) for label, text in _facts(view) if text),
        opening=write_opening(view),
        figure=next(iter(_figure("accuracy", plots)), None),
        sections=(*first, *_sections(_details(view, plots, changes))),
        n_first=len(first),
        footer=format_name(_footer(view.report)),
    )


def _subtitle(view: View) -> str:
    """Return ``kinject study: 1 base model, 5 arms, 3 question sets, 3 seeds``."""
    report = view.report
    counts = (
        format_count(len(report.models), "base model"),
        format_count(len(report.arms), "arm"),
        format_count(len(view.sets()), "question set"),
        format_count(len(report.seeds), "seed"),
    )
    return f"kinject {report.kind}: {', '.join(counts)}"


def _footer(report: Report) -> str:
    """Return ``Evaluated 2026-01-02 with torch 2.13.``."""
    footer = "Written by kinject"
    if report.written:
        footer = f"Evaluated {report.written}"
    versions = [
        f"{name} {report.versions[name]}" for name in _FOOTER_VERSIONS if name in report.versions
    ]
    if versions:
        footer += f" with {', '.join(versions)}"
    return f"{footer}."


def _sections(parts: Iterator[tuple[str, tuple[Block, ...]]]) -> tuple[Section, ...]:
    return tuple(Section(title, blocks) for title, blocks in parts if blocks)


def _figure(name: str, plots: Mapping[str, Plot]) -> tuple[FigureBlock, ...]:
    return (FigureBlock(name, *_CAPTIONS[name]),) if name in plots else ()


def _first_sheet(view: View) -> Iterator[tuple[str, tuple[Block, ...]]]:
    """Yield the parts of the page that fit on one sheet with the answers."""
    if view.set_results:
        yield "Before and after", (headline_table(view),)
    yield "What the names mean", (names_table(view),)


def _details(
    view: View, plots: Mapping[str, Plot], changes: TableBlock | None
) -> Iterator[tuple[str, tuple[Block, ...]]]:
    """Yield the other sections, in order; a section without blocks is left out."""
    report = view.report
    yield "What these data cannot tell", _bullets(limitations(view))
    if report.claims:
        yield "Claims", (claims_table(report.claims),)
    if report.published:
        yield "Published numbers", (published_table(view),)
    yield "Learning against forgetting", _figure("frontier", plots)
    yield "Sweeps", tuple(sweep_tables(view))
    if changes is not None:
        yield "Answers that changed", (changes,)
    if report.choices:
        yield "Choices on validation questions", (choices_table(view),)
    if report.results:
        about = Bullets((_ABOUT,), small=True)
        yield "Every number", (results_table(view), *small_tables(view), about)
    if report.costs:
        yield "Cost and arms", (cost_table(view), arms_table(view))
    else:
        yield "Cost and arms", (arms_table(view),)
    yield "Notes", _bullets(map(format_name, report.notes), small=True)
    if report.commands:
        commands = Code(tuple(map(format_command, report.commands)))
        yield "Run it again", (commands, Bullets((_RERUN,), small=True))


def _bullets(lines: Iterable[str], *, small: bool = False) -> tuple[Bullets, ...]:
    """Return a list of `lines`, nothing without any."""
    texts = tuple(lines)
    return (Bullets(texts, small),) if texts else ()


def _title(view: View) -> str:
    """Return a study's title, or an evaluation's with the arms that it compares."""
    title = format_name(view.report.title) or view.report.kind.capitalize()
    if view.is_study:
        return title
    models = format_name(view.base(view.report.models[0]))
    trained = [format_name(arm.name) for arm in view.report.arms if arm.trained]
    if len(trained) > _MOST_NAMED:
        models = f"{len(trained)} models against {models}"
    elif trained:
        models = f"{join_words(trained)} against {models}"
    # "eval" is the folder that recipes name: it tells nothing more.
    return models if title == "eval" else f"{title}: {models}"


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the page's head: when, which models, which questions."""
    report = view.report
    yield "date", format_name(report.written[:10])
    yield "base model", join_words([_model(report, name) for name in report.models])
    sets = [view.first(name) for name in view.sets()]
    named = [f"“{format_name(r.question_set)}” {ROLES.get(r.role, '')}" for r in sets[:_MOST_NAMED]]
    if len(sets) > _MOST_NAMED:
        named.append(format_count(len(sets) - _MOST_NAMED, "more set"))
    yield "questions", "; ".join(named)


def _model(report: Report, name: str) -> str:
    """Return the name of a base model, with its source if the study did not make it."""
    return with_details(format_name(name), format_name(report.model_sources.get(name, "")))


def _draw_figures(run_dir: Path, view: View) -> dict[str, Plot]:
    """Write the files of each figure that has something to draw, remove older ones, and return the
    figures by stem."""
    plots: dict[str, Plot] = {}
    for name, draw in (("accuracy", figures.accuracy), ("frontier", figures.frontier)):
        svg = figures.draw_figure(run_dir / "figures" / name, draw(view))
        narrow = draw(view, figures.NARROW)
        if svg is not None and narrow is not None:
            shown = (svg, figures.render_svg(narrow))
            plots[name] = Plot(*map(figures.follow_page, shown))
    for path in (run_dir / "figures").glob("*.*"):
        if path.stem not in plots and path.suffix in (".png", ".svg"):
            delete_file(path)  # of an earlier report
    return plots
