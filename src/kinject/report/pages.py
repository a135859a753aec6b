"""The report as text: one content, rendered as Markdown and as a self-contained HTML page.

Names, notes and titles come from recipes and question files, so they are data: HTML escapes all of them, Markdown
escapes whatever it would read as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from kinject.report.flips import NO_FLIPS, Flips, markdown_flips
from kinject.report.formatting import (
    ROLES,
    arm_names,
    deciding_p,
    escape_markdown,
    format_name,
    format_p,
    format_percent,
    format_points,
    format_way,
    is_significant,
)
from kinject.report.html import render_template
from kinject.report.training_log import TrainingLog
from kinject.report.verdict import Answered, render_verdict
from kinject.types import Cell, Report

COLUMNS = (
    "arm", "accuracy", "95% interval", "to base, points", "95% interval", "gain", "became right", "became wrong", "p",
    "p, Holm", "detectable",
)  # fmt: skip
RUN_COLUMNS = ("run", "steps", "epochs", "first loss", "last loss", "highest learning rate")

_ABOUT = (
    "Intervals of accuracy: Wilson, 95%. Chance: the mean of one over the number of choices.",
    "Differences are paired, question by question, with base; their 95% interval resamples source documents (a question "
    "without one counts alone). “gain”: the change over base’s accuracy. “became right” counts answers that base had wrong.",
    "p: exact two-sided McNemar test; “p, Holm”: corrected for all comparisons of this report. Bold with ▲ or ▼: the "
    "corrected p (where there is none, p) is below 0.05. “detectable”: the least change, in points, that as many questions "
    "would show with 80% power.",
    "In the verdict, arms other than base are compared by the interval of Newcombe (1998), which ignores that the "
    "questions were the same and so errs on the careful side.",
    "Questions that could not be scored count as wrong.",
    "All of it speaks of these questions and one training run for each model: another seed would move the numbers too.",
)
_ACCURACY_CAPTION = (
    "Share of questions answered rightly, with its 95% interval. A figure in the margin is the accuracy in percent. "
    "Dashed: chance. Thin line: base without context."
)
_LOSS_CAPTION = (
    "Loss on the training text; in grey the other runs (of many, some twenty) over the same steps. A light line ends an "
    "epoch. A loss that steps down at those lines is memorisation: it falls because the same text comes again."
)
_RERUN = (
    "Each stage resumes: what is there already is not computed again. manifest.json in each run folder holds the whole "
    "recipe, the hashes of the inputs, the seed and the versions."
)


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as inline SVG: for wide pages and for narrow ones."""

    wide: str
    narrow: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; `tone` (good, bad or "") says whether its difference is significant."""

    values: tuple[str, ...]
    tone: str


@dataclass(frozen=True, slots=True)
class Table:
    """The arms on one question set, asked in one way."""

    title: str
    subtitle: str
    role: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = COLUMNS


@dataclass(frozen=True, slots=True)
class Page:
    """What stands on the page, as plain text."""

    title: str
    subtitle: str
    verdict: tuple[Answered, ...]
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    beside: tuple[Table, ...]
    flips: Flips
    runs: tuple[tuple[str, ...], ...]
    commands: tuple[str, ...]
    footer: str


def make_page(
    report: Report, logs: Sequence[TrainingLog], commands: Sequence[str], footer: str, flips: Flips = NO_FLIPS
) -> Page:
    """Return the content of the page for `report`; `commands` remake it, `footer` says what made it."""
    sets, arms = dict.fromkeys(c.question_set for c in report.cells), arm_names(report.cells)
    counts = [(len(arms), "arm"), (len(sets), "question set"), (max(c.n for c in report.cells), "question")]
    parts = [f"{n:,} {word}{'' if n == 1 else 's'}" for n, word in counts]
    return Page(
        title=format_name(report.title) or "Report",
        subtitle=f"kinject report: {parts[0]}, {parts[1]} of up to {parts[2]}",
        verdict=render_verdict(report),
        notes=tuple(format_name(note) for note in report.notes),
        tables=_tables(report),
        beside=(*_subject_tables(report), *_recall_table(report), *_perplexity_tables(report)),
        flips=flips,
        runs=tuple(_run_row(log) for log in logs),
        commands=tuple(format_name(command) for command in commands),
        footer=footer,
    )


def _tables(report: Report) -> tuple[Table, ...]:
    names = arm_names(report.cells)
    found = []
    for question_set, role, way in dict.fromkeys((c.question_set, c.role, format_way(c)) for c in report.cells):
        cells = [c for c in report.cells if (c.question_set, c.role, format_way(c)) == (question_set, role, way)]
        n = f"{cells[0].n:,} question{'' if cells[0].n == 1 else 's'}"
        rows = tuple(_row(cell, names[cell.arm, cell.k]) for cell in cells)
        subtitle = f"{way} · {n}, chance {format_percent(cells[0].chance)}"
        found.append(Table(f"{format_name(question_set)}: {ROLES[role]}", subtitle, role, rows))
    return tuple(found)


def _row(cell: Cell, name: str) -> Row:
    accuracy = format_percent(cell.accuracy) + (f" ({cell.n_unscored:,} unscored)" if cell.n_unscored else "")
    start = (name, accuracy, _interval(cell.low, cell.high))
    if cell.difference is None:
        return Row((*start, "base", *[""] * 7), "")
    paired = cell.difference
    tone = ("good" if paired.delta > 0 else "bad") if is_significant(deciding_p(paired)) else ""
    mark = {"good": " ▲", "bad": " ▼", "": ""}[tone]
    bounds = "" if paired.low is None or paired.high is None else (
        f"{format_points(paired.low)} to {format_points(paired.high)}"
    )  # fmt: skip
    values = (
        format_points(paired.delta) + mark,
        bounds,
        "" if paired.relative is None else f"{100 * paired.relative:+.1f}%".replace("-", "−"),
        f"{paired.wrong_to_right:,}",
        f"{paired.right_to_wrong:,}",
        _bare_p(paired.p),
        "" if paired.p_holm is None else _bare_p(paired.p_holm),
        "" if paired.smallest is None else f"{100 * paired.smallest:.1f}",
    )
    return Row((*start, *values), tone)


def _bare_p(p: float) -> str:
    return format_p(p).removeprefix("p ").removeprefix("= ")


def _interval(low: float, high: float) -> str:
    return f"{100 * low:.1f} – {100 * high:.1f}"


def _short(share: float, low: float, high: float) -> str:
    return f"{100 * share:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def _subject_tables(report: Report) -> Iterator[Table]:
    """Yield a table for each set and way of asking with several subjects; what there is less of stands in columns."""
    names = arm_names(report.cells)
    with_subjects = [cell for cell in report.cells if cell.subjects]
    for question_set, way in dict.fromkeys((cell.question_set, format_way(cell)) for cell in with_subjects):
        cells = [cell for cell in with_subjects if (cell.question_set, format_way(cell)) == (question_set, way)]
        columns = [("", *(names[cell.arm, cell.k] for cell in cells))]
        for index, subject in enumerate(cells[0].subjects):
            parts = (cell.subjects[index] for cell in cells)
            shown = (_short(part.accuracy, part.low, part.high) for part in parts)
            columns.append((f"{format_name(subject.name) or '(none)'}, n = {subject.n:,}", *shown))
        means = (cell.macro for cell in cells)
        columns.append(("mean of subjects", *("" if mean is None else _short(*mean) for mean in means)))
        lines = list(zip(*columns, strict=True)) if len(cells) > len(columns) - 1 else columns
        rows = tuple(Row(tuple(line), "") for line in lines[1:])
        about = f"{way} · accuracy in percent with its 95% interval"
        yield Table(f"{format_name(question_set)} by subject", about, "", rows, tuple(lines[0]))


def _recall_table(report: Report) -> Iterator[Table]:
    """Yield the table of how often retrieval found the document that answers, where there was retrieval."""
    ks = list(dict.fromkeys(recall.k for recall in report.recalls))
    rows = []
    for name, n in {recall.question_set: recall.n for recall in report.recalls}.items():
        own = {recall.k: recall for recall in report.recalls if recall.question_set == name}
        shares = (format_percent(own[k].n_found / own[k].n) if k in own else "" for k in ks)
        rows.append(Row((format_name(name), f"{n:,}", *shares), ""))
    if rows:
        about = "questions whose document is among the K passages, of those that name one"
        yield Table("Recall of retrieval", about, "", tuple(rows), ("questions", "n", *(f"K = {k}" for k in ks)))


def _perplexity_tables(report: Report) -> Iterator[Table]:
    """Yield a table for each file of held-out texts: a row a model, the change to the first of them."""
    for name in dict.fromkeys(found.name for found in report.perplexities):
        own = [found for found in report.perplexities if found.name == name]
        rows = []
        for found in own:
            change = "base" if found is own[0] else f"{100 * (found.per_token / own[0].per_token - 1):+.1f}%"
            change = change if found.n_tokens == own[0].n_tokens else "other tokens"
            sizes = (f"{found.n_texts:,}", f"{found.n_tokens:,}", f"{found.per_token:.3f}")
            values = (format_name(found.model), *sizes, change.replace("-", "−"), f"{found.bits_per_byte:.4f}")
            rows.append(Row(values, ""))
        columns = ("model", "texts", "tokens", "perplexity", "to base", "bits per byte")
        yield Table("Perplexity of held-out texts", format_name(name), "", tuple(rows), columns)


def _run_row(log: TrainingLog) -> tuple[str, ...]:
    if not log.steps:
        return (format_name(log.name), "no loss logged", "", "", "", "")
    epochs = f"{log.epochs[-1]:.3g}" if log.epochs else ""
    rate = f"{max(log.learning_rates):.2g}" if log.learning_rates else ""
    losses = [f"{loss:.3f}" if math.isfinite(loss) else "not finite" for loss in (log.losses[0], log.losses[-1])]
    return (format_name(log.name), f"{log.steps[-1]:,.0f}", epochs, *losses, rate)


def render_html(page: Page, accuracy: Plot, loss: Plot | None) -> str:
    """Return the page as one HTML file: no script, nothing fetched, everything but the figures escaped."""
    from markupsafe import Markup

    plots = {
        name: plot and {size: Markup(svg) for size, svg in asdict(plot).items()}  # noqa: S704 - of our own making
        for name, plot in (("accuracy", accuracy), ("loss", loss))
    }
    return render_template(
        "report.html.j2",
        **{name: getattr(page, name) for name in page.__slots__},
        **plots,
        run_columns=RUN_COLUMNS,
        about=_ABOUT,
        accuracy_caption=_ACCURACY_CAPTION,
        loss_caption=_LOSS_CAPTION,
        rerun=_RERUN,
    )


def render_markdown(page: Page, *, has_loss: bool) -> str:
    """Return the page as Markdown, its figures by their file names."""
    lines = [f"# {escape_markdown(page.title)}", "", escape_markdown(page.subtitle), ""]
    for answered in page.verdict:
        lines += [f"## {answered.question}", "", escape_markdown(answered.lead), ""]
        lines += [
            f"- **{escape_markdown(claim.arm)}** on {escape_markdown(claim.question_set)}, *{claim.tag}*: "
            f"{escape_markdown(claim.text)}"
            for claim in answered.claims
        ]
        lines += [""] if answered.claims else []
    lines += ["## Accuracy by arm", "", "![Accuracy by arm](figures/accuracy.png)", "", _ACCURACY_CAPTION, ""]
    lines += ["## The numbers", ""]
    for table in page.tables:
        lines += [f"### {escape_markdown(table.title)} ({escape_markdown(table.subtitle)})", ""]
        rows = [_emphasised(row) for row in table.rows]
        lines += [*_markdown_table(table.columns, rows), ""]
    lines += [*(f"- {line}" for line in _ABOUT), ""]
    for table in page.beside:
        lines += [f"### {escape_markdown(table.title)} ({escape_markdown(table.subtitle)})", ""]
        lines += [
            *_markdown_table([escape_markdown(name) for name in table.columns], [row.values for row in table.rows]),
            "",
        ]
    lines += markdown_flips(page.flips)
    if page.notes:
        lines += ["## Notes of the evaluation", "", *(f"- {escape_markdown(note)}" for note in page.notes), ""]
    lines += ["## Training loss", ""]
    lines += ["![Training loss](figures/loss.png)", "", _LOSS_CAPTION, ""] if has_loss else []
    lines += _markdown_table(RUN_COLUMNS, page.runs) if page.runs else ["No training log was given."]
    lines += ["", "## Run it again", "", _RERUN, ""]
    lines += [*(f"    {command}" for command in page.commands), ""] if page.commands else []
    return "\n".join([*lines, escape_markdown(page.footer)]) + "\n"


def _emphasised(row: Row) -> tuple[str, ...]:
    difference = f"**{row.values[3]}**" if row.tone else row.values[3]
    return (*row.values[:3], difference, *row.values[4:])


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = "|".join(["---", *["---:"] * (len(columns) - 1)])
    return [
        f"| {' | '.join(columns)} |",
        f"|{ruler}|",
        *(f"| {' | '.join([escape_markdown(row[0]), *row[1:]])} |" for row in rows),
    ]
