"""What a study's page is made of: sections of text, lists, tables, figures and commands, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kinject.report.verdict import Answered


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: `below` stands small under `text`; `tone` is good, bad or "" as its difference is significant."""

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
    """A table; `wordy` lets its cells wrap and stand left, for text rather than numbers. `folded` shows it on demand.

    The first `heads` columns say what a line is about and stand left.
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
    """A figure by the stem of its files; `label` is what a screen reader says (words of kinject's own)."""

    name: str
    label: str
    caption: str


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
    """A list of sentences; `small` for what explains."""

    lines: tuple[str, ...]
    small: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Commands."""

    lines: tuple[str, ...]


def kind_of(block: object) -> str:
    """Return what a block is, for the template."""
    return type(block).__name__


Block = TableBlock | FigureBlock | Heading | Text | Bullets | Code


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StudyPage:
    """The whole page: the verdict first, then sections."""

    title: str
    subtitle: str
    card: str
    verdict: tuple[Answered, ...]
    sections: tuple[Section, ...]
    footer: str


def line(*values: str | Cell, kind: str = "") -> Line:
    """Return a line of texts and cells."""
    return Line(tuple(value if isinstance(value, Cell) else Cell(value) for value in values), kind)


def without_empty_columns(table: TableBlock) -> TableBlock:
    """Return `table` without the columns in which nothing stands (the first is kept)."""
    kept = [
        at for at in range(len(table.columns))
        if at == 0 or any(own.cells[at].text or own.cells[at].below for own in table.lines)
    ]  # fmt: skip
    return _columns(table, kept, table.subtitle)


def with_common_heads(table: TableBlock) -> TableBlock:
    """Return `table` with those of its head columns that hold one text throughout (the first is kept) in its subtitle."""
    same = [
        at for at in range(1, table.heads)
        if len({own.cells[at].text for own in table.lines if not own.kind}) == 1
    ]  # fmt: skip
    said = [next(own.cells[at].text for own in table.lines if not own.kind) for at in same]
    subtitle = "; ".join(part for part in (table.subtitle, *said) if part)
    return _columns(table, [at for at in range(len(table.columns)) if at not in same], subtitle)


def _columns(table: TableBlock, kept: Sequence[int], subtitle: str) -> TableBlock:
    lines = tuple(Line(tuple(own.cells[at] for at in kept), own.kind) for own in table.lines)
    columns = tuple(table.columns[at] for at in kept)
    return replace(table, subtitle=subtitle, columns=columns, lines=lines, heads=sum(at < table.heads for at in kept))
