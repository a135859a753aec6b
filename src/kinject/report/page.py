"""A report's page as plain values (sections of text, lists, tables, figures, commands), and rendered as HTML and Markdown.

Names and texts come from recipes, question files and logs, so HTML escapes all of them, and Markdown all that it
would read as markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import read_manifest, write_text
from kinject.errors import InputError
from kinject.report.formatting import escape_markdown

if TYPE_CHECKING:
    from kinject.report.flips import Flips
    from kinject.report.plots.style import Plot
    from kinject.report.verdict import AnsweredQuestion

_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_POLICY = "@POLICY@"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: `below` is set small under `text`; `tone` is good, bad or "" as its difference is significant."""

    text: str
    tone: str = ""
    below: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table, its first cell the head; `kind` is "" or "published" (another's numbers)."""

    cells: tuple[Cell, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; `wordy` lets its cells wrap and align left, for text rather than numbers. `folded` shows it on demand.

    The first `heads` columns are the heads of a line and align left.
    """

    title: str
    subtitle: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    role: str = ""
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
class FlipsBlock:
    """The answers that changed, with text and context."""

    flips: Flips


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of sentences; `small` for explanations."""

    lines: tuple[str, ...]
    small: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Commands."""

    lines: tuple[str, ...]


Block = TableBlock | FigureBlock | FlipsBlock | Heading | Text | Bullets | Code


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the blocks under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The whole page: `facts` (label, text), the headline (and how sure it is) and the verdict first, then sections."""

    title: str
    subtitle: str
    description: str
    facts: tuple[tuple[str, str], ...]
    headline: str
    verdict: tuple[AnsweredQuestion, ...]
    sections: tuple[Section, ...]
    footer: str
    sureness: str = ""


def line(*values: str | Cell, kind: str = "") -> Line:
    """Return a line of texts and cells."""
    return Line(tuple(value if isinstance(value, Cell) else Cell(value) for value in values), kind)


def without_empty_columns(table: TableBlock) -> TableBlock:
    """Return `table` without its empty columns (the first is kept)."""
    used = [
        i for i in range(len(table.columns))
        if i == 0 or any(row.cells[i].text or row.cells[i].below for row in table.lines)
    ]  # fmt: skip
    return _columns(table, used, table.subtitle)


def with_common_heads(table: TableBlock) -> TableBlock:
    """Return `table` without the head columns that hold one text throughout: it goes to the subtitle (not the first's)."""
    same = [
        i for i in range(1, table.heads)
        if len({row.cells[i].text for row in table.lines if not row.kind}) == 1
    ]  # fmt: skip
    common = [next(row.cells[i].text for row in table.lines if not row.kind) for i in same]
    subtitle = "; ".join(part for part in (table.subtitle, *common) if part)
    return _columns(table, [i for i in range(len(table.columns)) if i not in same], subtitle)


def _columns(table: TableBlock, indices: Sequence[int], subtitle: str) -> TableBlock:
    lines = tuple(Line(tuple(row.cells[i] for i in indices), row.kind) for row in table.lines)
    columns = tuple(table.columns[i] for i in indices)
    return replace(table, subtitle=subtitle, columns=columns, lines=lines, heads=sum(i < table.heads for i in indices))


def render_html(page: Page, plots: Mapping[str, Plot]) -> str:
    """Return the page as one HTML file: nothing fetched, everything but the figures and kinject's own script escaped.

    Its policy allows the one style sheet and the one script, each by its hash, and style attributes (figures have them). It
    allows nothing else: no other script, image, font, frame, form or address. Browsers that do not know ``style-src-elem``
    follow ``style-src``.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("kinject.report", "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    figures = {  # of our own making
        name: {size: Markup(svg) for size, svg in asdict(plot).items()} for name, plot in plots.items()  # noqa: S704
    }  # fmt: skip
    html = str(environment.get_template("report.html.j2").render(
        page=page, plots=figures, kind_of=lambda block: type(block).__name__, policy=_POLICY,
    )).lstrip()  # fmt: skip
    sheet, script = (_hash_of("".join(inline.findall(html)[:1])) for inline in (_STYLE, _SCRIPT))
    policy = (
        f"default-src 'none'; script-src {script}; style-src 'unsafe-inline'; style-src-elem {sheet}; "
        "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
    return html.replace(_POLICY, policy, 1)


def write_page(folder: Path, stage: str, name: str, make: Callable[[Mapping[str, Any]], Page]) -> Path:
    """Write the page `name` that `make` returns for the manifest of a finished run of ``kinject STAGE``; return its path.

    Raises `InputError` when `folder` holds no such run, or one of its files is damaged; `DiskError` on I/O.
    """
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None or manifest.get("stage") != stage:
        raise InputError(f"{folder}: holds no finished run of kinject {stage}. Give its run_dir.")
    try:
        page = make(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder}: a file of another shape ({error!r:.80}). Run kinject {stage} again.") from error
    path = folder / name
    write_text(path, render_html(page, {}))
    return path


def _hash_of(text: str) -> str:
    """Return the source that a content security policy knows an inline sheet or script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_markdown(page: Page) -> str:
    """Return the page as Markdown, its figures by their file names."""
    lines = [f"# {escape_markdown(page.title)}", "", escape_markdown(page.subtitle), ""]
    lines += [escape_markdown(page.description), ""] if page.description else []
    lines += [f"- {label}: {escape_markdown(text)}" for label, text in page.facts]
    lines += ["", f"**{escape_markdown(page.headline)}** {escape_markdown(page.sureness)}", ""]
    for answered in page.verdict:
        lines += [f"## {answered.question}", "", escape_markdown(answered.lead), ""]
        lines += [
            f"- **{escape_markdown(finding.arm)}** on {escape_markdown(finding.question_set)}, *{finding.tag}*: "
            f"{escape_markdown(finding.text)}"
            for finding in answered.findings
        ]
        lines += [""] if answered.findings else []
    for section in page.sections:
        lines += [f"## {escape_markdown(section.title)}", ""]
        for block in section.blocks:
            lines += [*render_markdown_block(block), ""]
    return "\n".join([*lines, escape_markdown(page.footer)]) + "\n"


def render_markdown_block(block: Block) -> list[str]:
    """Return the lines of one block of a page as Markdown."""
    render: Mapping[type, Callable[..., list[str]]] = {
        TableBlock: _markdown_table,
        FigureBlock: lambda b: [f"![{b.label}](figures/{b.name}.png)", "", escape_markdown(b.caption)],
        FlipsBlock: lambda b: b.flips.markdown_lines(),
        Heading: lambda b: [f"### {escape_markdown(b.text)}"],
        Text: lambda b: [escape_markdown(b.text)],
        Bullets: lambda b: [f"- {escape_markdown(item)}" for item in b.lines],
        Code: lambda b: [f"    {item}" for item in b.lines],
    }
    return render[type(block)](block)


def _markdown_table(block: TableBlock) -> list[str]:
    lines = []
    if block.title:
        subtitle = f" ({escape_markdown(block.subtitle)})" if block.subtitle else ""
        lines += [f"### {escape_markdown(block.title)}{subtitle}", ""]
    ruler = "|".join(["---", *["---" if block.wordy else "---:"] * (len(block.columns) - 1)])
    lines += [f"| {' | '.join(map(escape_markdown, block.columns))} |", f"|{ruler}|"]
    for row in block.lines:
        cells = []
        for cell in row.cells:
            text = escape_markdown(cell.text)
            text = f"**{text}**" if cell.tone and text else f"*{text}*" if row.kind and text else text
            cells.append(f"{text} ({escape_markdown(cell.below)})" if cell.below else text)
        lines.append(f"| {' | '.join(cells)} |")
    return lines
