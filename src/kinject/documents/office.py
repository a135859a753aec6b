"""Word documents, slides and spreadsheets of the Open XML formats."""

from __future__ import annotations

import datetime
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from kinject.disk import read_bytes
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import (
    DEEPEST_ITEM,
    XmlElement,
    check_archive,
    heading,
    import_extra,
    joined,
    library_errors,
    markdown_table,
    one_line,
    parse_xml,
    spanned,
    tables_of,
    whole_file,
)
from kinject.errors import InputError

if TYPE_CHECKING:
    from docx.document import Document as WordDocument
    from pptx.chart.chart import Chart
    from pptx.shapes.autoshape import Shape as AutoShape
    from pptx.shapes.base import BaseShape
    from pptx.shapes.graphfrm import GraphicFrame
    from pptx.slide import Slide
    from pptx.table import Table

CellValue = (
    str
    | bool
    | float
    | datetime.datetime
    | datetime.date
    | datetime.time
    | datetime.timedelta
    | None
)
"""A value of a cell of a sheet, or of a chart."""
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_OTHER_MAIN = re.compile(
    rb"application/[\w.-]*(?:macroEnabled|template|slideshow)[\w.-]*\.main\+xml", re.IGNORECASE
)


def read_docx(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a Word document: headings, paragraphs, lists, tables, text boxes and footnotes, in
    their order."""
    data = _read_archive(path, stream, options)
    docx = import_extra("docx", path)
    with library_errors(path, "Word document", "Save it again as .docx."):
        word = _Word(path, docx.Document(data))
        text = word.text()
        properties = word.document.core_properties
        meta = _properties(properties, str(properties.author or ""))
        title = str(properties.title or "").strip() or word.title
    yield whole_file(path, title, text, meta)


def _read_archive(path: Path, stream: BinaryIO, options: ReadOptions) -> BytesIO:
    """Return the bytes of a document, its main part named as that of a .docx or .pptx: the
    libraries read no other types."""
    data = BytesIO(read_bytes(path, options.largest, stream))
    check_archive(path, data, options)
    with library_errors(path, "Office file", "Save it again."), zipfile.ZipFile(data) as archive:
        types = archive.read("[Content_Types].xml")
        plain = _OTHER_MAIN.sub(_main_type, types)
        if plain == types:
            data.seek(0)
            return data
        changed = BytesIO()
        with zipfile.ZipFile(changed, "w") as copy:
            for member in archive.infolist():
                is_types = member.filename == "[Content_Types].xml"
                copy.writestr(member, plain if is_types else archive.read(member))
        return changed


def _main_type(match: re.Match[bytes]) -> bytes:
    kind = b"presentationml.presentation"
    if b"word" in match[0].lower():
        kind = b"wordprocessingml.document"
    return b"application/vnd.openxmlformats-officedocument." + kind + b".main+xml"


# Merged cells of one area that are filled: whole columns may be merged, a million rows long.
_LARGEST_MERGED = 10_000


class _Properties(Protocol):
    """The core properties of a document, in each of the three libraries."""

    @property
    def created(self) -> datetime.datetime | None: ...

    @property
    def modified(self) -> datetime.datetime | None: ...


class _Cell(Protocol):
    """The part of openpyxl's cells that is read; the library has no types."""

    value: CellValue
    number_format: str
    row: int
    column: int


class _Range(Protocol):
    """The part of openpyxl's ranges of cells that is read."""

    min_row: int
    min_col: int
    max_row: int
    max_col: int
    size: Mapping[str, int]


class _Ranges(Protocol):
    ranges: Iterable[_Range]


class _Sheet(Protocol):
    """The part of openpyxl's sheets that is read."""

    title: str
    merged_cells: _Ranges
    _cells: Mapping[tuple[int, int], _Cell]


class _Word:
    """The Markdown of a Word document."""

    def __init__(self, path: Path, document: WordDocument) -> None:
        self.path, self.document = path, document
        self.title = ""
        self._styles = {style.style_id: style for style in document.styles if style.style_id}
        self._levels: dict[str, int] = {}
        self._bullets = self._numberings()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._notes: list[str] = []

    def text(self) -> str:
        blocks: list[str] = []
        in_list = False
        for element in _blocks(self.document.element.body):
            if element.tag == f"{_W}tbl":
                block, is_item = self._table(element), False
            else:
                block, is_item = self._paragraph(element)
            if block:
                blocks.append(("\n" if is_item and in_list else "\n\n") + block)
                in_list = is_item
        blocks += [f"\n\n{note}" for note in self._footnotes()]
        return "".join(blocks).strip()

    def _paragraph(self, element: XmlElement) -> tuple[str, bool]:
        """Return a paragraph (with its text boxes below), and whether it is an item of a list."""
        text = _run_text(element).strip()
        boxes = self._text_boxes(element)
        self._notes += [note.get(f"{_W}id") for note in element.iter(f"{_W}footnoteReference")]
        level, item = self._level(element), self._item(element)
        if text and level is not None:
            self.title = self.title or one_line(text)
            text = heading(level, text)
        elif text and item:
            text = item + one_line(text)
        return "\n\n".join(filter(None, [text, *boxes])), bool(item) and level is None

    def _text_boxes(self, element: XmlElement) -> list[str]:
        """Return the paragraphs of the text boxes in a paragraph."""
        texts = []
        for box in element.iter(f"{_W}txbxContent"):
            # A box is there twice: the second time for programs that cannot read the first.
            if any(above.tag == _FALLBACK for above in box.iterancestors()):
                continue
            paragraphs = _children(box, f"{_W}p")
            texts += [self._paragraph(paragraph)[0] for paragraph in paragraphs]
        return texts

    def _level(self, element: XmlElement) -> int | None:
        """Return the level of a heading, from its own outline level or its style's, else None."""
        outline = element.find(f"{_W}pPr/{_W}outlineLvl")
        if outline is not None:
            level = int(outline.get(f"{_W}val", "9"))
            return level + 1 if level < 6 else None
        style = element.find(f"{_W}pPr/{_W}pStyle")
        return self._style_level(style.get(f"{_W}val")) if style is not None else None

    def _style_level(self, style_id: str, depth: int = 0) -> int | None:
        if style_id not in self._levels:
            style = self._styles.get(style_id)
            level = 0
            if style is not None and depth < 20:
                name = str(style.name or "").lower()
                outline = style.element.find(f"{_W}pPr/{_W}outlineLvl")
                based = style.element.find(f"{_W}basedOn")
                if name == "title":
                    level = 1
                elif name.startswith("heading ") and name[8:].isdecimal():
                    level = int(name[8:])
                elif outline is not None and outline.get(f"{_W}val", "9") in "012345":
                    level = int(outline.get(f"{_W}val")) + 1
                elif based is not None and not name.startswith("toc "):
                    level = self._style_level(based.get(f"{_W}val"), depth + 1) or 0
            self._levels[style_id] = level
        return self._levels[style_id] or None

    def _numberings(self) -> Mapping[tuple[str, int], bool]:
        """Return (numbering, level) -> whether it is a bullet."""
        bullets: dict[tuple[str, int], bool] = {}
        if not any(
            relation.reltype.endswith("/numbering") for relation in self.document.part.rels.values()
        ):
            return bullets
        root = self.document.part.numbering_part.element
        kinds = {}
        for abstract in root.iter(f"{_W}abstractNum"):
            for level in abstract.iter(f"{_W}lvl"):
                key = abstract.get(f"{_W}abstractNumId"), level.get(f"{_W}ilvl")
                kinds[key] = level.find(f"{_W}numFmt")
        for number in root.iter(f"{_W}num"):
            abstract = number.find(f"{_W}abstractNumId")
            if abstract is None:
                continue
            for (name, depth), kind in kinds.items():
                if name == abstract.get(f"{_W}val") and depth.isdecimal():
                    is_bullet = kind is None or kind.get(f"{_W}val") in ("bullet", "none")
                    bullets[number.get(f"{_W}numId"), int(depth)] = is_bullet
        return bullets

    def _item(self, element: XmlElement) -> str:
        """Return the mark of an item of a list with its indentation, "" for any other paragraph."""
        properties = element.find(f"{_W}pPr/{_W}numPr")
        style = element.find(f"{_W}pPr/{_W}pStyle")
        name = ""
        if properties is None and style is not None and style.get(f"{_W}val") in self._styles:
            list_style = self._styles[style.get(f"{_W}val")]
            properties = list_style.element.find(f"{_W}pPr/{_W}numPr")
            name = str(list_style.name or "").lower()
        if properties is None:
            if not name.startswith("list bullet"):
                return ""
            depth = int(name[-1]) - 1 if name[-1:].isdecimal() else 0
            return "  " * depth + "- "
        number, level = properties.find(f"{_W}numId"), properties.find(f"{_W}ilvl")
        depth = 0
        deeper_style = re.search(r" ([2-9])$", name)  # List Bullet 2
        if level is not None:
            depth = int(level.get(f"{_W}val"))
        elif deeper_style:
            depth = int(deeper_style[1]) - 1
        numbering = "" if number is None else number.get(f"{_W}val")
        # Word's numbering 0 takes a paragraph out of the list of its style.
        if numbering == "0":
            return ""
        mark = "- "
        n = self._count_item(numbering, depth)
        if not self._bullets.get((numbering, depth), True):
            mark = f"{n}. "
        return "  " * min(depth, DEEPEST_ITEM) + mark

    def _count_item(self, numbering: str, depth: int) -> int:
        """Return the number of the next item of a list; lists within it begin at 1 again."""
        for other in list(self._counts):
            if other[0] == numbering and other[1] > depth:
                del self._counts[other]
        self._counts[numbering, depth] += 1
        return self._counts[numbering, depth]

    def _table(self, table: XmlElement) -> str:
        """Return a table; merged cells are repeated in each grid cell that they cover."""
        rows: list[list[tuple[str, int, int]]] = []
        n_header = 0
        above: dict[int, str] = {}
        has_merged = False
        for row in _children(table, f"{_W}tr"):
            cells, n_columns, above = self._row(row, above)
            marked = row.find(f"{_W}trPr/{_W}tblHeader") is not None
            # A header over merged cells goes on in the row below.
            if n_header == len(rows) and (marked or (has_merged and n_header > 0)):
                n_header += 1
            has_merged = 1 < len(cells) < n_columns
            if len(rows) == n_header == 0:
                n_header = 1
            rows.append(cells)
        return markdown_table(spanned(rows), min(n_header, max(1, len(rows) - 1)))

    def _row(
        self, row: XmlElement, above: Mapping[int, str]
    ) -> tuple[list[tuple[str, int, int]], int, dict[int, str]]:
        """Return the cells of a row, its columns in the grid, and the texts of its cells that may
        go on below; `above` are those of the row before."""
        cells: list[tuple[str, int, int]] = []
        skipped = row.find(f"{_W}trPr/{_W}gridBefore")
        if skipped is not None:
            cells = [("", 1, 1)] * min(int(skipped.get(f"{_W}val", "0")), 100)
        column = len(cells)
        below: dict[int, str] = {}
        for cell in _children(row, f"{_W}tc"):
            span = cell.find(f"{_W}tcPr/{_W}gridSpan")
            merge = cell.find(f"{_W}tcPr/{_W}vMerge")
            n_columns = 1
            if span is not None:
                n_columns = min(int(span.get(f"{_W}val", "1")), 1000)
            text = self._cell(cell)
            if merge is not None:
                if merge.get(f"{_W}val", "continue") == "continue":
                    text = above.get(column, text)
                below[column] = text
            cells.append((text, 1, n_columns))
            column += n_columns
        return cells, column, below

    def _cell(self, cell: XmlElement) -> str:
        """Return the content of a cell, tables within it included, on one line."""
        return one_line(" ".join(_run_text(paragraph) for paragraph in cell.iter(f"{_W}p")))

    def _footnotes(self) -> list[str]:
        """Return the footnotes that the text refers to, as ``[^1]: ...``."""
        if not self._notes:
            return []
        notes = {}
        for relation in self.document.part.rels.values():
            if relation.reltype.endswith("/footnotes"):
                root = parse_xml(self.path, relation.target_part.blob)
                for note in root.iter(f"{_W}footnote"):
                    notes[note.get(f"{_W}id")] = self._cell(note)
        return [f"[^{name}]: {notes[name]}" for name in self._notes if notes.get(name)]


def _inner(element: XmlElement) -> list[XmlElement]:
    """Return the element, or its content: content controls and tracked insertions wrap others."""
    if element.tag == f"{_W}sdt":
        children = list(chain.from_iterable(element.iterchildren(f"{_W}sdtContent")))
    elif element.tag in (f"{_W}ins", f"{_W}customXml", f"{_W}moveTo"):
        children = list(element.iterchildren())
    else:
        return [element]
    return list(chain.from_iterable(map(_inner, children)))


def _children(parent: XmlElement, *tags: str) -> Iterator[XmlElement]:
    """Yield the children of `parent` with one of these tags, those that are wrapped as well."""
    for child in parent.iterchildren():
        for element in _inner(child):
            if element.tag in tags:
                yield element


def _blocks(parent: XmlElement) -> Iterator[XmlElement]:
    """Yield the paragraphs and tables in `parent`, those in content controls as well."""
    return _children(parent, f"{_W}p", f"{_W}tbl")


_UNREAD = (*(f"{_W}{name}" for name in ("del", "moveFrom", "pPr", "rPr", "txbxContent")), _FALLBACK)


def _run_text(paragraph: XmlElement) -> str:
    """Return the text of a paragraph with tracked insertions and without deletions; its text boxes
    are left out."""
    parts = []
    stack = [paragraph]
    while stack:
        element = stack.pop()
        tag = element.tag
        if tag in (f"{_W}t", f"{_MATH}t"):
            parts.append(element.text or "")
        elif tag == f"{_W}tab":
            # Elsewhere than in a run it is the position of a tab stop.
            if element.getparent().tag == f"{_W}r":
                parts.append("\t")
        elif tag in (f"{_W}br", f"{_W}cr"):
            parts.append("\n")
        elif tag == f"{_W}noBreakHyphen":
            parts.append("-")
        elif tag == f"{_W}footnoteReference":
            parts.append(f"[^{element.get(f'{_W}id')}]")
        elif tag not in _UNREAD:
            stack += reversed([child for child in element if isinstance(child.tag, str)])
    return "".join(parts)


def _properties(properties: _Properties, author: str) -> dict[str, Any]:
    """Return author and date of a document's core properties."""
    date = properties.modified or properties.created
    fields = {"author": author.strip(), "date": date.date().isoformat() if date else ""}
    return {key: value for key, value in fields.items() if value and value != "openpyxl"}


def read_pptx(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a slide deck: a heading for each slide, then its texts, tables, charts and notes.
    `slides` is in meta."""
    data = _read_archive(path, stream, options)
    pptx = import_extra("pptx", path)
    with library_errors(path, "slide deck", "Save it again as .pptx."):
        deck = pptx.Presentation(data)
        slides = list(enumerate(map(_slide_text, deck.slides), start=1))
        meta = _properties(deck.core_properties, str(deck.core_properties.author or ""))
        title = str(deck.core_properties.title or "").strip()
        first = next((_slide_title(slide) for slide in deck.slides), "")
    text, starts = joined(slides)
    # PowerPoint's own title of every deck that has none.
    if title.lower() in ("", "powerpoint presentation"):
        title = first
    yield whole_file(path, title, text, {**meta, "slides": starts})


def _slide_title(slide: Slide) -> str:
    shape = slide.shapes.title
    if shape is None or not shape.has_text_frame:
        return ""
    return one_line(shape.text_frame.text)


# Placeholders of the slide number, the footer and the date: the same on every slide.
_FURNITURE = (13, 15, 16)


def _slide_text(slide: Slide) -> str:
    title = _slide_title(slide)
    blocks = [heading(2, title)] if title else []
    title_id = slide.shapes.title.shape_id if slide.shapes.title is not None else None
    for shape in sorted(_shapes(slide.shapes), key=_position):
        if shape.is_placeholder and shape.placeholder_format.type in _FURNITURE:
            continue
        if shape.shape_id != title_id:
            blocks.append(_shape_text(shape))
    notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
    if notes is not None and notes.text.strip():
        blocks.append(f"Notes: {notes.text.strip()}")
    return "\n\n".join(filter(None, blocks))


def _position(shape: BaseShape) -> tuple[int, int]:
    """Return where a shape is read on its slide: from the top, then from the left."""
    return shape.top or 0, shape.left or 0


def _shapes(shapes: Iterable[BaseShape], depth: int = 0) -> Iterator[BaseShape]:
    """Yield the shapes, those of groups as well."""
    for shape in shapes:
        if hasattr(shape, "shapes") and depth < 20:
            yield from _shapes(shape.shapes, depth + 1)
        else:
            yield shape


def _shape_text(shape: BaseShape) -> str:
    if getattr(shape, "has_table", False):
        return _slide_table(cast("GraphicFrame", shape).table)
    if getattr(shape, "has_chart", False):
        try:
            return _chart_text(cast("GraphicFrame", shape).chart)
        # A chart that the library cannot read.
        except (NotImplementedError, KeyError, ValueError, AttributeError):
            return ""
    if not shape.has_text_frame:
        return ""
    lines = []
    for paragraph in cast("AutoShape", shape).text_frame.paragraphs:
        line = one_line(paragraph.text)
        if line:
            lines.append((paragraph.level, line))
    if len(lines) < 2:
        return "".join(line for _, line in lines)
    return "\n".join(f"{'  ' * level}- {line}" for level, line in lines)


def _slide_table(table: Table) -> str:
    """Return a table of a slide; merged cells are repeated in each grid cell that they cover."""
    rows: list[list[tuple[str, int, int]]] = []
    for row in table.rows:
        cells = []
        for cell in row.cells:
            if cell.is_merge_origin:
                cells.append((cell.text, cell.span_height, cell.span_width))
            elif not cell.is_spanned:
                cells.append((cell.text, 1, 1))
        rows.append(cells)
    return markdown_table(spanned(rows))


def _chart_text(chart: Chart) -> str:
    """Return the title of a chart, and its values as a table: a row for each category."""
    title = ""
    if chart.has_title and chart.chart_title.has_text_frame:
        title = one_line(chart.chart_title.text_frame.text)
    plots = [plot for plot in chart.plots if len(plot.categories)]
    if not plots:
        return title
    series = list(chain.from_iterable(plot.series for plot in plots))
    values = [list(curve.values) for curve in series]
    rows = [["", *(str(curve.name or "") for curve in series)]]
    for index, category in enumerate(plots[0].categories):
        # A curve may have fewer values than the chart has categories.
        numbers = [curve_values[index : index + 1] or [None] for curve_values in values]
        rows.append([str(category), *(_cell_text(number) for (number,) in numbers)])
    return "\n\n".join(filter(None, [title, markdown_table(rows)]))


def read_xlsx(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a workbook: a heading for each visible sheet, then its lines and tables. `sheets` is in
    meta."""
    data = BytesIO(read_bytes(path, options.largest, stream))
    # Before the library unpacks it, into memory.
    check_archive(path, data, options)
    openpyxl = import_extra("openpyxl", path)
    with library_errors(path, "workbook", "Save it again as .xlsx."):
        book = openpyxl.load_workbook(data, data_only=True, keep_links=False)
        visible = [sheet for sheet in book.worksheets if sheet.sheet_state == "visible"]
        texts = [(sheet.title, _sheet_text(sheet)) for sheet in visible]
        meta = _properties(book.properties, str(book.properties.creator or ""))
        title = str(book.properties.title or "").strip()
    sheets = [(name, f"{heading(1, name)}\n\n{text}") for name, text in texts if text]
    hidden = [sheet.title for sheet in book.worksheets if sheet not in visible]
    text, starts = joined(sheets)
    meta["sheets"] = starts
    if hidden:
        meta["hidden_sheets"] = hidden
    yield whole_file(path, title, text, meta)
    n_unknown = _formulas_without_values(data)
    if n_unknown:
        fix = "Open it in a spreadsheet program and save it, so that they are computed."
        fault = f"{path}: formulas: {n_unknown:,} have no stored value and are not read. {fix}"
        yield f"{path}: formulas", InputError(fault)


_NO_VALUE = re.compile(rb"</f>\s*(?:<v\s*/>|<v></v>|</c>)")


def _formulas_without_values(data: BytesIO) -> int:
    n = 0
    with zipfile.ZipFile(data) as archive:
        for name in archive.namelist():
            if name.startswith("xl/worksheets/sheet"):
                n += len(_NO_VALUE.findall(archive.read(name)))
    return n


def _sheet_text(sheet: _Sheet) -> str:
    """Return the lines and tables of a sheet."""
    cells: dict[int, dict[int, str]] = {}
    for cell in sheet._cells.values():  # only the cells that are there: one far away costs nothing
        text = _cell_text(cell.value, cell.number_format)
        if text:
            cells.setdefault(cell.row, {})[cell.column] = text
    wide = _fill_merged(sheet, cells)
    columns = sorted(set().union(*cells.values()))
    ordered: list[list[str]] = []
    wide_rows: list[bool] = []
    for number in sorted(cells):
        if ordered and number - 1 not in cells:
            ordered.append([""])
            wide_rows.append(False)
        ordered.append(_dense(cells[number], columns))
        wide_rows.append(number in wide)
    return tables_of(ordered, wide_rows)


def _fill_merged(sheet: _Sheet, cells: dict[int, dict[int, str]]) -> set[int]:
    """Repeat the text of merged cells in each that they cover; return the rows in which they span
    columns."""
    wide: set[int] = set()
    for area in sheet.merged_cells.ranges:
        text = cells.get(area.min_row, {}).get(area.min_col, "")
        if not text or area.size["rows"] * area.size["columns"] > _LARGEST_MERGED:
            continue
        columns = range(area.min_col, area.max_col + 1)
        for number in range(area.min_row, area.max_row + 1):
            cells.setdefault(number, {}).update(dict.fromkeys(columns, text))
        if area.min_col < area.max_col:
            wide.update(range(area.min_row, area.max_row + 1))
    return wide


def _dense(row: Mapping[int, str], columns: Sequence[int]) -> list[str]:
    """Return a row's cells in the columns that the sheet uses, with an empty one for each gap
    between them."""
    line: list[str] = []
    for index, column in enumerate(columns):
        if index and column > columns[index - 1] + 1:
            line.append("")
        line.append(row.get(column, ""))
    return line


def _cell_text(value: CellValue, number_format: str = "") -> str:
    """Return a value of a cell as people see it: dates in ISO 8601, per cent, no float noise."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime.datetime):
        if value.time() == datetime.time():
            return value.date().isoformat()
        return value.isoformat(" ", "seconds")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, int | float):
        if "%" in number_format:
            return f"{value * 100:.10g}%"
        return f"{value:.15g}" if isinstance(value, float) else str(value)
    return str(value).strip()
