"""A report's page as plain values (sections of text, lists, tables, figures, commands), and
rendered as HTML.

Tables are rendered as Markdown and as text too.

Names and texts come from recipes, question files and logs, so HTML escapes all of them, and
Markdown all that it would read as markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kinject.report.formatting import escape_markdown, with_details
from kinject.terminal import aligned

_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_POLICY = "@POLICY@"
SETTLE = "What is not known, and what would settle it"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One arm on one question set: a tag of a few words, its tone (good, bad, flat), and the
    numbers as a sentence."""

    arm: str
    question_set: str
    tag: str
    tone: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A practitioner's question, its answer, and the numbers behind it."""

    question: str
    lead: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """The first sentences of a report: what was measured, what it advises, what it allows to say,
    and what would settle the rest."""

    effect: str
    answers: tuple[Answer, ...]
    open: tuple[str, ...]
    advice: str = ""

    def paragraphs(self) -> list[str]:
        """Return the opening as plain paragraphs."""
        leads = [f"{answer.question} {answer.lead}" for answer in self.answers]
        texts = [self.effect, self.advice, *leads]
        if self.open:
            texts.append(f"{SETTLE}: {' '.join(self.open)}")
        return [text for text in texts if text]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: `below` is set small under `text`; `tone` is good, bad or "" as its difference is
    significant."""

    text: str
    tone: str = ""
    below: str = ""


Line = tuple[Cell, ...]
"""One line of a table, its first cell the head."""


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; `wordy` lets its cells wrap and align left, for text rather than numbers. `folded`
    shows it on demand.

    The first `heads` columns are the heads of a line and align left.
    """

    title: str
    subtitle: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    wordy: bool = False
    folded: bool = False
    heads: int = 1


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """A figure by the stem of its files; `label` is for screen readers (words of kinject's own)."""

    name: str
    label: str
    caption: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of sentences; `small` for explanations."""

    lines: tuple[str, ...]
    small: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Commands."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as SVG: as wide as the page, and once more for a phone."""

    wide: str
    narrow: str


Block = TableBlock | FigureBlock | Bullets | Code


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the blocks under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The whole page: `facts` (label, text), the opening, then the sections.

    `figure` stands under its effect. The `n_first` first sections belong to the sheet that is
    printed; the others are details.
    """

    title: str
    subtitle: str
    description: str
    facts: tuple[tuple[str, str], ...]
    opening: Opening
    sections: tuple[Section, ...]
    footer: str
    figure: FigureBlock | None = None
    n_first: int = 0


def line(*values: str | Cell) -> Line:
    """Return a line of texts and cells."""
    return tuple(value if isinstance(value, Cell) else Cell(value) for value in values)


def without_empty_columns(table: TableBlock) -> TableBlock:
    """Return `table` without its empty columns (the first is kept)."""
    used = [i for i in range(len(table.columns)) if i == 0 or _is_used(table, i)]
    lines = tuple(tuple(row[i] for i in used) for row in table.lines)
    columns = tuple(table.columns[i] for i in used)
    # A column that is left out may be one of the heads.
    return replace(table, columns=columns, lines=lines, heads=sum(i < table.heads for i in used))


def _is_used(table: TableBlock, column: int) -> bool:
    return any(row[column].text or row[column].below for row in table.lines)


def render_html(page: Page, figures: Mapping[str, Plot]) -> str:
    """Return the page with its figures as one HTML file.

    Nothing is fetched, everything but kinject's own script is escaped. Its policy allows the one
    style sheet and the one script, each by its hash, and images that the file holds. It allows
    nothing else: no other script, no font, frame, form or address.
    """
    # Here: the summary for a terminal needs no jinja2.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kinject.report", "templates"),
        autoescape=True,
        # A misspelt name in a template is an error, not an empty text.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    # Images in the page itself are the only ones that its policy allows.
    plots = {name: Plot(_base64(plot.wide), _base64(plot.narrow)) for name, plot in figures.items()}
    rendered = template.render(
        page=page, plots=plots, kind_of=_kind_of, policy=_POLICY, settle=SETTLE
    )
    html = rendered.lstrip()
    # Last, because the policy holds the hashes of the rendered style and script.
    return html.replace(_POLICY, policy_of(html), 1)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _kind_of(block: Block) -> str:
    return type(block).__name__


def policy_of(html: str) -> str:
    """Return the content security policy that allows the inline style sheet and script of a page,
    by hash, and no more."""
    return (
        f"default-src 'none'; script-src 'sha256-{_hash_of(_SCRIPT, html)}'; "
        f"style-src 'sha256-{_hash_of(_STYLE, html)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash_of(element: re.Pattern[str], html: str) -> str:
    """Return the hash of the first `element` of a page as a policy has it, of "" without one."""
    text = "".join(element.findall(html)[:1])
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render_markdown_table(block: TableBlock) -> list[str]:
    """Return the lines of a table as Markdown."""
    lines = []
    if block.title:
        title = with_details(escape_markdown(block.title), escape_markdown(block.subtitle))
        lines += [f"### {title}", ""]
    alignment = "---" if block.wordy else "---:"
    rulers = ["---", *[alignment] * (len(block.columns) - 1)]
    lines += [f"| {' | '.join(map(escape_markdown, block.columns))} |", f"|{'|'.join(rulers)}|"]
    lines += [f"| {' | '.join(map(_markdown_cell, row))} |" for row in block.lines]
    return lines


def _markdown_cell(cell: Cell) -> str:
    text = escape_markdown(cell.text)
    if cell.tone and text:
        # Markdown has no colours, so what is significant is bold.
        text = f"**{text}**"
    return with_details(text, escape_markdown(cell.below))


def render_text_block(table: TableBlock) -> list[str]:
    """Return the lines of a table as plain text, for the terminal."""
    rows = [table.columns, *(tuple(map(_plain, row)) for row in table.lines)]
    title = with_details(table.title, table.subtitle)
    numbers = frozenset(range(table.heads, len(table.columns)))
    return [title, aligned(rows, numbers)]


def _plain(cell: Cell) -> str:
    return with_details(cell.text, cell.below)
