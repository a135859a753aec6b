"""Word documents, slides and spreadsheets of the Open XML formats."""

from __future__ import annotations

import datetime
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from kinject.disk import read_bytes
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import (
    DEEPEST_ITEM,
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
                copy.writestr(
                    member,
                    plain if member.filename == "[Content_Types].xml" else archive.read(member),
                )
        return changed


def _main_type(match: re.Match[bytes]) -> bytes:
    word = b"word" in match[0].lower()
    kind = b"wordprocessingml.document" if word else b"presentationml.presentation"
    return b"application/vnd.openxmlformats-officedocument." + kind + b".main+xml"


class _Word:
    """The Markdown of a Word document."""

    def __init__(self, path: Path, document: Any) -> None:
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
        return "".join([*blocks, *(f"\n\n{note}" for note in self._footnotes())]).strip()

    def _paragraph(self, element: Any) -> tuple[str, bool]:
        """Return a paragraph (with its text boxes below), and whether it is an item of a list."""
        text = _run_text(element).strip()
        boxes = [
            self._paragraph(inner)[0]
            for box in element.iter(f"{_W}txbxContent")
            if not any(above.tag == _FALLBACK for above in box.iterancestors())
            for inner in _blocks(box)
            if inner.tag == f"{_W}p"
        ]
        self._notes += [note.get(f"{_W}id") for note in element.iter(f"{_W}footnoteReference")]
        level, item = self._level(element), self._item(element)
        if text and level is not None:
            self.title = self.title or one_line(text)
            text = heading(level, text)
        elif text and item:
            text = item + one_line(text)
        return "\n\n".join(filter(None, [text, *boxes])), bool(item) and level is None

    def _level(self, element: Any) -> int | None:
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
        kinds = {
            (abstract.get(f"{_W}abstractNumId"), level.get(f"{_W}ilvl")): level.find(f"{_W}numFmt")
            for abstract in root.iter(f"{_W}abstractNum")
            for level in abstract.iter(f"{_W}lvl")
        }
        for number in root.iter(f"{_W}num"):
            abstract = number.find(f"{_W}abstractNumId")
            for (name, level), kind in kinds.items() if abstract is not None else ():
                if name == abstract.get(f"{_W}val") and level.isdecimal():
                    is_bullet = kind is None or kind.get(f"{_W}val") in ("bullet", "none")
                    bullets[number.get(f"{_W}numId"), int(level)] = is_bullet
        return bullets

    def _item(self, element: Any) -> str:
        """Return the mark of an item of a list with its indentation, "" for any other paragraph."""
        properties = element.find(f"{_W}pPr/{_W}numPr")
        style = element.find(f"{_W}pPr/{_W}pStyle")
        name = ""
        if properties is None and style is not None and style.get(f"{_W}val") in self._styles:
            list_style = self._styles[style.get(f"{_W}val")]
            properties, name = (
                list_style.element.find(f"{_W}pPr/{_W}numPr"),
                str(list_style.name or "").lower(),
            )
        if properties is None:
            depth = int(name[-1]) - 1 if name[-1:].isdecimal() else 0
            return "  " * depth + "- " if name.startswith("list bullet") else ""
        number, level = properties.find(f"{_W}numId"), properties.find(f"{_W}ilvl")
        deeper_style = re.search(r" ([2-9])$", name)  # List Bullet 2
        depth = (
            int(level.get(f"{_W}val"))
            if level is not None
            else int(deeper_style[1]) - 1
            if deeper_style
            else 0
        )
        key = number.get(f"{_W}val") if number is not None else "", depth
        if key[0] == "0":
            return ""
        for deeper in [other for other in self._counts if other[0] == key[0] and other[1] > key[1]]:
            del self._counts[deeper]
        self._counts[key] += 1
        return "  " * min(key[1], DEEPEST_ITEM) + (
            "- " if self._bullets.get(key, True) else f"{self._counts[key]}. "
        )

    def _table(self, table: Any) -> str:
        """Return a table; merged cells are repeated in each grid cell that they cover."""
        rows: list[list[tuple[str, int, int]]] = []
        n_header = 0
        above: dict[int, str] = {}
        has_merged = False
        for row in (
            element
            for element in table.iterchildren()
            for element in _inner(element)
            if element.tag == f"{_W}tr"
        ):
            cells: list[tuple[str, int, int]] = []
            column, below = 0, dict[int, str]()
            skipped = row.find(f"{_W}trPr/{_W}gridBefore")
            for _ in range(
                min(int(skipped.get(f"{_W}val", "0")), 100) if skipped is not None else 0
            ):
                cells.append(("", 1, 1))
                column += 1
            for cell in (
                inner
                for element in row.iterchildren()
                for inner in _inner(element)
                if inner.tag == f"{_W}tc"
            ):
                properties = cell.find(f"{_W}tcPr")
                span = properties.find(f"{_W}gridSpan") if properties is not None else None
                merge = properties.find(f"{_W}vMerge") if properties is not None else None
                n_columns = min(int(span.get(f"{_W}val", "1")), 1000) if span is not None else 1
                text = self._cell(cell)
                if merge is not None and merge.get(f"{_W}val", "continue") == "continue":
                    text = above.get(column, text)
                if merge is not None:
                    below[column] = text
                cells.append((text, 1, n_columns))
                column += n_columns
            above = below
            marked = row.find(f"{_W}trPr/{_W}tblHeader") is not None
            n_header += n_header == len(rows) and (marked or (has_merged and n_header > 0))
            has_merged = 1 < len(cells) < column
            if len(rows) == n_header == 0:
                n_header = 1
            rows.append(cells)
        return markdown_table(spanned(rows), min(n_header, max(1, len(rows) - 1)))

    def _cell(self, cell: Any) -> str:
        """Return the content of a cell, tables within it included, on one line."""
        return one_line(" ".join(_run_text(paragraph) for paragraph in cell.iter(f"{_W}p")))

    def _footnotes(self) -> list[str]:
        """Return the footnotes that the text refers to, as ``[^1]: ...``."""
        if not self._notes:
            return []
        parts = [
            relation.target_part
            for relation in self.document.part.rels.values()
            if relation.reltype.endswith("/footnotes")
        ]
        notes = {
            note.get(f"{_W}id"): self._cell(note)
            for part in parts
            for note in parse_xml(self.path, part.blob).iter(f"{_W}footnote")
        }
        return [f"[^{name}]: {notes[name]}" for name in self._notes if notes.get(name)]


def _inner(element: Any) -> list[Any]:
    """Return the element, or its content: content controls and tracked insertions wrap others."""
    if element.tag == f"{_W}sdt":
        return [
            inner
            for content in element.iterchildren(f"{_W}sdtContent")
            for child in content
            for inner in _inner(child)
        ]
    if element.tag in (f"{_W}ins", f"{_W}customXml", f"{_W}moveTo"):
        return [inner for child in element.iterchildren() for inner in _inner(child)]
    return [element]


def _blocks(parent: Any) -> Iterator[Any]:
    """Yield the paragraphs and tables in `parent`, those in content controls as well."""
    for child in parent.iterchildren():
        for element in _inner(child):
            if element.tag in (f"{_W}p", f"{_W}tbl"):
                yield element


def _run_text(paragraph: Any) -> str:
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
            parts.append("\t" if element.getparent().tag == f"{_W}r" else "")
        elif tag in (f"{_W}br", f"{_W}cr"):
            parts.append("\n")
        elif tag == f"{_W}noBreakHyphen":
            parts.append("-")
        elif tag == f"{_W}footnoteReference":
            parts.append(f"[^{element.get(f'{_W}id')}]")
        elif tag not in (
            f"{_W}del",
            f"{_W}moveFrom",
            f"{_W}txbxContent",
            _FALLBACK,
            f"{_W}pPr",
            f"{_W}rPr",
        ):
            stack += reversed([child for child in element if isinstance(child.tag, str)])
    return "".join(parts)


def _properties(properties: Any, author: str) -> dict[str, Any]:
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
        slides = [(number, _slide_text(slide)) for number, slide in enumerate(deck.slides, start=1)]
        meta = _properties(deck.core_properties, str(deck.core_properties.author or ""))
        title = str(deck.core_properties.title or "").strip()
        first = next((_slide_title(slide) for slide in deck.slides), "")
    text, starts = joined(slides)
    title = title if title and title.lower() != "powerpoint presentation" else first
    yield whole_file(path, title, text, {**meta, "slides": starts})


def _slide_title(slide: Any) -> str:
    shape = slide.shapes.title
    return one_line(shape.text_frame.text) if shape is not None and shape.has_text_frame else ""


def _slide_text(slide: Any) -> str:
    title = _slide_title(slide)
    blocks = [heading(2, title)] if title else []
    for shape in sorted(_shapes(slide.shapes), key=lambda shape: (shape.top or 0, shape.left or 0)):
        if shape.is_placeholder and shape.placeholder_format.type in (
            13,
            15,
            16,
        ):  # slide number, footer, date
            continue
        if slide.shapes.title is not None and shape.shape_id == slide.shapes.title.shape_id:
            continue
        blocks.append(_shape_text(shape))
    notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
    if notes is not None and notes.text.strip():
        blocks.append(f"Notes: {notes.text.strip()}")
    return "\n\n".join(filter(None, blocks))


def _shapes(shapes: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the shapes, those of groups as well."""
    for shape in shapes:
        if hasattr(shape, "shapes") and depth < 20:
            yield from _shapes(shape.shapes, depth + 1)
        else:
            yield shape


def _shape_text(shape: Any) -> str:
    if getattr(shape, "has_table", False):
        rows = [
            [
                (cell.text, cell.span_height, cell.span_width)
                if cell.is_merge_origin
                else (cell.text, 1, 1)
                for cell in row.cells
                if not cell.is_spanned
            ]
            for row in shape.table.rows
        ]
        return markdown_table(spanned(rows))
    if getattr(shape, "has_chart", False):
        try:
            return _chart_text(shape.chart)
        except (
            NotImplementedError,
            KeyError,
            ValueError,
            AttributeError,
        ):  # a chart that the library cannot read
            return ""
    if not shape.has_text_frame:
        return ""
    lines = [
        (paragraph.level, one_line(paragraph.text)) for paragraph in shape.text_frame.paragraphs
    ]
    lines = [(level, line) for level, line in lines if line]
    if len(lines) < 2:
        return "".join(line for _, line in lines)
    return "\n".join(f"{'  ' * level}- {line}" for level, line in lines)


def _chart_text(chart: Any) -> str:
    """Return the title of a chart, and its values as a table: a row for each category."""
    title = (
        chart.chart_title.text_frame.text
        if chart.has_title and chart.chart_title.has_text_frame
        else ""
    )
    plots = [plot for plot in chart.plots if len(plot.categories)]
    if not plots:
        return one_line(title)
    series = [curve for plot in plots for curve in plot.series]
    values = [list(curve.values) for curve in series]
    rows = [["", *(str(curve.name or "") for curve in series)]]
    for index, category in enumerate(plots[0].categories):
        rows.append(
            [
                str(category),
                *(_cell_text(numbers[index]) if index < len(numbers) else "" for numbers in values),
            ]
        )
    return "\n\n".join(filter(None, [one_line(title), markdown_table(rows)]))


def read_xlsx(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a workbook: a heading for each visible sheet, then its lines and tables. `sheets` is in
    meta."""
    data = BytesIO(read_bytes(path, options.largest, stream))
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
    yield whole_file(
        path,
        title,
        text,
        {**meta, "sheets": starts, **({"hidden_sheets": hidden} if hidden else {})},
    )
    n_unknown = _formulas_without_values(data)
    if n_unknown:
        fix = "Open it in a spreadsheet program and save it, so that they are computed."
        fault = f"{path}: formulas: {n_unknown:,} have no stored value and are not read. {fix}"
        yield f"{path}: formulas", InputError(fault)


def _formulas_without_values(data: BytesIO) -> int:
    with zipfile.ZipFile(data) as archive:
        sheets = (
            archive.read(name)
            for name in archive.namelist()
            if name.startswith("xl/worksheets/sheet")
        )
        return sum(len(re.findall(rb"</f>\s*(?:<v\s*/>|<v></v>|</c>)", sheet)) for sheet in sheets)


def _sheet_text(sheet: Any) -> str:
    """Return the lines and tables of a sheet."""
    cells: dict[int, dict[int, str]] = {}
    wide: set[int] = set()
    for cell in sheet._cells.values():  # only the cells that are there: one far away costs nothing
        text = _cell_text(cell.value, cell.number_format)
        if text:
            cells.setdefault(cell.row, {})[cell.column] = text
    for area in sheet.merged_cells.ranges:
        text = cells.get(area.min_row, {}).get(area.min_col, "")
        if text and area.size["rows"] * area.size["columns"] <= 10_000:
            for number in range(area.min_row, area.max_row + 1):
                cells.setdefault(number, {}).update(
                    dict.fromkeys(range(area.min_col, area.max_col + 1), text)
                )
            if area.min_col < area.max_col:
                wide.update(range(area.min_row, area.max_row + 1))
    columns = sorted({column for row in cells.values() for column in row})
    ordered: list[list[str]] = []
    wide_rows: list[bool] = []
    for number in sorted(cells):
        if ordered and number - 1 not in cells:
            ordered.append([""])
            wide_rows.append(False)
        ordered.append(_dense(cells[number], columns))
        wide_rows.append(number in wide)
    return tables_of(ordered, wide_rows)


def _dense(row: Mapping[int, str], columns: Sequence[int]) -> list[str]:
    """Return a row's cells in the columns that the sheet uses, with an empty one for each gap
    between them."""
    line: list[str] = []
    for index, column in enumerate(columns):
        if index and column > columns[index - 1] + 1:
            line.append("")
        line.append(row.get(column, ""))
    return line


def _cell_text(value: Any, number_format: str = "") -> str:
    """Return a value of a cell as people see it: dates in ISO 8601, per cent, no float noise."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime.datetime):
        return (
            value.date().isoformat()
            if value.time() == datetime.time()
            else value.isoformat(" ", "seconds")
        )
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, int | float):
        if "%" in number_format:
            return f"{value * 100:.10g}%"
        return f"{value:.15g}" if isinstance(value, float) else str(value)
    return str(value).strip()
