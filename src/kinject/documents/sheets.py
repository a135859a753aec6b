"""Spreadsheets (.xlsx)."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kinject.documents.number_formats import moment_text, shown_number
from kinject.documents.office import (
    CHART,
    RELATION,
    Package,
    attribute_at,
    chart_text,
    comment_text,
    diagram_text,
    runs_text,
    whole_number,
)
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.symbols import raised, symbol_text
from kinject.documents.text import (
    XmlElement,
    heading,
    import_extra,
    joined,
    library_errors,
    tables_of,
    whole_file,
)

_S = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
# Merged cells of one area that are filled: whole columns may be merged, a million rows long.
_LARGEST_MERGED = 10_000
# Signs that XML cannot hold are written as their numbers.
_ESCAPED = re.compile(r"_x([0-9A-Fa-f]{4})_")
# lxml's for a text that is no XML, the package's for a part that is not there.
_DAMAGED = (SyntaxError, KeyError)
# What Excel writes into the older kind of comment, for programs that do not know threads.
_THREADED = "[Threaded comment]"
_READ = (f"{_S}row", f"{_S}mergeCell", f"{_S}col", f"{_S}sheetPr")
_TRUE = ("1", "true")
Area = tuple[int, int, int, int]
"""First column, first row, last column, last row."""


@dataclass
class _Sheet:
    """The cells of a sheet: row -> column -> text; the merged areas; hidden rows, and the first and
    last of hidden columns; formulas without a value."""

    name: str
    part: str
    row: int = 0
    cells: dict[int, dict[int, str]] = field(default_factory=dict)
    merged: list[Area] = field(default_factory=list)
    hidden_rows: set[int] = field(default_factory=set)
    hidden_columns: list[tuple[int, int]] = field(default_factory=list)
    n_unknown: int = 0

    def has_hidden(self, column: int) -> bool:
        """Return whether a column is hidden."""
        return any(first <= column <= last for first, last in self.hidden_columns)


def read_xlsx(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a workbook: a heading for each visible sheet, then its lines and tables, and comments.
    `sheets` is in meta."""
    sheets: list[tuple[int | str, str]] = []
    hidden = []
    hidden_cells = {}
    n_unknown = 0
    with library_errors(path, "workbook", "Save it again as .xlsx."):
        book = _Book(Package(path, stream, options))
        package = book.package
        for entry in package.root(package.main).iter(f"{_S}sheet"):
            name = entry.get("name", "")
            if entry.get("state", "visible") != "visible":
                hidden.append(name)
                continue
            part = package.target(package.main, entry.get(f"{RELATION}id", ""))
            sheet = book.read_sheet(_Sheet(name, part))
            n_unknown += sheet.n_unknown
            n_hidden = _n_hidden(sheet)
            if n_hidden:
                hidden_cells[name] = n_hidden
            blocks = [_sheet_text(sheet), *book.drawings(sheet), *book.comments(sheet)]
            text = "\n\n".join(filter(None, blocks))
            if text:
                sheets.append((name, f"{heading(1, name)}\n\n{text}"))
        book.name_what_is_lost()
        title, meta = package.properties()
    text, starts = joined(sheets)
    found: dict[str, Any] = {**meta, "sheets": starts}
    if hidden:
        found["hidden_sheets"] = hidden
    if hidden_cells:
        found["hidden_cells"] = hidden_cells
    yield whole_file(path, title, text, found)
    yield from package.faults
    if n_unknown:
        package.faults.clear()
        package.add_fault(
            "formulas",
            f"{n_unknown:,} have no stored value and are not read. Open it in a spreadsheet "
            "program and save it, so that they are computed.",
        )
        yield from package.faults


class _Book:
    """What the sheets of a workbook share: texts, formats of numbers, the first day of dates."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self._numbers = import_extra("openpyxl.styles.numbers", package.path)
        self._dates = import_extra("openpyxl.utils.datetime", package.path)
        self._ranges = import_extra("openpyxl.utils.cell", package.path)
        self._texts: list[str] = []
        # What is lost of them is named only if a cell shows it.
        with contextlib.suppress(*_DAMAGED):
            for name in package.related(package.main, "sharedStrings"):
                for item in package.elements(name, f"{_S}si"):
                    self._texts.append(_rich_text(item))
        self._n_without_text = 0
        self._struck = self._struck_styles()
        self._formats = self._number_formats()
        self._n_without_format = 0
        self._epoch = self._dates.WINDOWS_EPOCH
        properties = package.root(package.main).find(f"{_S}workbookPr")
        if properties is not None and properties.get("date1904") in _TRUE:
            self._epoch = self._dates.MAC_EPOCH

    def _number_formats(self) -> dict[int, str]:
        """Return style -> format of numbers."""
        known: dict[int, str] = dict(self._numbers.BUILTIN_FORMATS)
        formats: dict[int, str] = {}
        for root in self.package.optional_roots(self.package.main, "styles"):
            for element in root.iter(f"{_S}numFmt"):
                known[whole_number(element.get("numFmtId"))] = element.get("formatCode", "")
            for styles in root.iterchildren(f"{_S}cellXfs"):
                for style, element in enumerate(styles.iterchildren(f"{_S}xf")):
                    formats[style] = known.get(whole_number(element.get("numFmtId")), "")
        return formats

    def _struck_styles(self) -> set[int]:
        """Return the styles whose text is struck through: it was taken back."""
        struck: set[int] = set()
        for root in self.package.optional_roots(self.package.main, "styles"):
            fonts = [_is_struck(font) for font in root.iterfind(f"{_S}fonts/{_S}font")]
            for style, element in enumerate(root.iterfind(f"{_S}cellXfs/{_S}xf")):
                font = whole_number(element.get("fontId"))
                if font < len(fonts) and fonts[font]:
                    struck.add(style)
        return struck

    def read_sheet(self, sheet: _Sheet) -> _Sheet:
        """Return a sheet with its cells, up to a damage, which is named."""
        is_filtered = False
        try:
            for element in self.package.elements(sheet.part, *_READ):
                if element.tag == f"{_S}row":
                    self._read_row(element, sheet)
                elif element.tag == f"{_S}mergeCell":
                    sheet.merged.append(self._ranges.range_boundaries(element.get("ref")))
                elif element.tag == f"{_S}col" and _is_hidden(element):
                    columns = whole_number(element.get("min")), whole_number(element.get("max"))
                    sheet.hidden_columns.append(columns)
                elif element.get("filterMode") in _TRUE:
                    is_filtered = True
        except _DAMAGED:
            self.package.add_fault(
                f"sheet {sheet.name}", "missing from the file, or damaged. Save the file again."
            )
        # A filter is a way to look at the rows, all of which belong to the sheet.
        if is_filtered:
            sheet.hidden_rows.clear()
        return sheet

    def _read_row(self, row: XmlElement, sheet: _Sheet) -> None:
        # A row or a cell without a place follows the one before.
        sheet.row = whole_number(row.get("r")) or sheet.row + 1
        if _is_hidden(row):
            sheet.hidden_rows.add(sheet.row)
        cells: dict[int, str] = {}
        column = 0
        for cell in row.iterchildren(f"{_S}c"):
            column += 1
            place = cell.get("r", "")
            if place:
                column = self._ranges.coordinate_to_tuple(place)[1]
            formula, value = cell.find(f"{_S}f"), cell.findtext(f"{_S}v")
            # An empty text is a value as well.
            is_text = cell.get("t", "n") == "str" and value is not None
            if formula is not None and not value and not is_text:
                sheet.n_unknown += 1
            text = self._cell_text(cell, value or "").strip()
            if text:
                cells[column] = text
        if cells:
            sheet.cells[sheet.row] = cells

    def _cell_text(self, cell: XmlElement, value: str) -> str:
        """Return the value of a cell as people see it: dates in ISO 8601, per cent, no float
        noise."""
        kind = cell.get("t", "n")
        style = whole_number(cell.get("s"))
        if style in self._struck:
            return ""
        if kind == "inlineStr":
            return _rich_text(cell)
        if not value:
            return ""
        if kind == "s":
            index = whole_number(value, len(self._texts))
            if index < len(self._texts):
                return self._texts[index]
            self._n_without_text += 1
            return ""
        if kind == "b":
            return {"1": "TRUE", "0": "FALSE"}.get(value, value)
        if kind == "d":
            return self._iso_text(value, self._formats.get(style, ""))
        if kind != "n":
            return _unescaped(value)
        self._n_without_format += style > 0 and not self._formats
        # A cell may have a style that the file does not define.
        number_format = self._formats.get(style, "")
        number: int | float = float(value)
        # A long whole number keeps its digits.
        if value.lstrip("-").isdecimal():
            number = int(value)
        return shown_number(number, number_format, self._epoch, self.package.path)

    def _iso_text(self, value: str, number_format: str) -> str:
        """Return a date in ISO 8601, as Strict Open XML has them, as one that is a number."""
        try:
            moment = datetime.datetime.fromisoformat(value).replace(tzinfo=None)
        except ValueError:
            return value
        # Days before the first one that Excel counts are times without a day.
        if moment.date() <= self._dates.WINDOWS_EPOCH.date() + datetime.timedelta(days=1):
            return moment.time().isoformat("seconds")
        if "T" not in value and " " not in value:
            return moment.date().isoformat()
        return moment_text(moment, number_format)

    def name_what_is_lost(self) -> None:
        """Name cells without their text, and numbers without their format, by which one may be a
        date."""
        if self._n_without_text:
            self.package.add_fault(
                "texts of cells",
                f"missing from the file, or damaged: {self._n_without_text:,} cells are left out. "
                "Save the file again.",
            )
        if self._n_without_format:
            self.package.add_fault(
                "formats of numbers",
                f"missing from the file, or damaged: {self._n_without_format:,} numbers are read "
                "as they are stored, dates among them. Save the file again.",
            )

    def drawings(self, sheet: _Sheet) -> list[str]:
        """Return the text boxes and diagrams of a sheet, and the charts of other sheets' cells:
        those of its own only show them again."""
        texts: list[str] = []
        own = re.compile(rf"'?{re.escape(sheet.name.replace(chr(39), chr(39) * 2))}'?!")
        place = f"drawings on sheet {sheet.name}"
        for root in self.package.wanted_roots(sheet.part, "drawing", place):
            texts += map(runs_text, root.iter("{*}txBody"))
        for drawing in self.package.related(sheet.part, "drawing"):
            texts += map(diagram_text, self.package.wanted_roots(drawing, "diagramData", place))
            for chart in self.package.wanted_roots(drawing, "chart", place):
                sources = [formula.text or "" for formula in chart.iter(f"{CHART}f")]
                if not any(map(own.match, sources)):
                    texts.append(chart_text(chart, self.package.path))
        return texts

    def comments(self, sheet: _Sheet) -> list[str]:
        """Return the comments on the cells of a sheet; Excel has two formats of them."""
        texts = []
        people = self._people()
        place = f"comments on sheet {sheet.name}"
        for root in self.package.wanted_roots(sheet.part, "comments", place):
            authors = {}
            for number, author in enumerate(root.iter(f"{_S}author")):
                authors[str(number)] = author.text or ""
            for comment in root.iter(f"{_S}comment"):
                text = _rich_text(comment)
                if text.strip() and not text.startswith(_THREADED):
                    person = authors.get(comment.get("authorId", ""), "")
                    texts.append(comment_text(text, person, comment.get("ref", "")))
        for root in self.package.wanted_roots(sheet.part, "threadedComment", place):
            for comment in root.iter("{*}threadedComment"):
                text = comment.findtext("{*}text") or ""
                person = people.get(comment.get("personId", ""), "")
                texts.append(comment_text(text, person, comment.get("ref", "")))
        return texts

    def _people(self) -> dict[str, str]:
        """Return id -> name of those who comment in threads."""
        names = {}
        for root in self.package.optional_roots(self.package.main, "person"):
            for person in root.iterchildren():
                names[person.get("id", "")] = person.get("displayName", "")
        return names


def _is_hidden(element: XmlElement) -> bool:
    """Return whether a row or columns are hidden, and not only folded: these have a button."""
    return element.get("hidden") in _TRUE and not whole_number(element.get("outlineLevel"))


def _n_hidden(sheet: _Sheet) -> int:
    """Return how many cells with a text are hidden."""
    n_hidden = 0
    for number, row in sheet.cells.items():
        if number in sheet.hidden_rows:
            n_hidden += len(row)
        else:
            n_hidden += sum(map(sheet.has_hidden, row))
    return n_hidden


def _is_struck(font: XmlElement) -> bool:
    strike = font.find(f"{_S}strike")
    return strike is not None and strike.get("val", "1") in _TRUE


def _rich_text(item: XmlElement) -> str:
    """Return the text of a cell without the readings above its words."""
    read = []
    for element in item.iter(f"{_S}t"):
        run = element.getparent()
        if run.tag == f"{_S}rPh":
            continue
        # Text that is struck through was taken back.
        if any(map(_is_struck, run.iterfind(f"{_S}rPr"))):
            continue
        text = symbol_text(element.text or "", attribute_at(run, f"{_S}rPr/{_S}rFont", "val"))
        if attribute_at(run, f"{_S}rPr/{_S}vertAlign", "val") == "superscript":
            text = raised(text)
        read.append(text)
    return _unescaped("".join(read))


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(_sign, text)


def _sign(escaped: re.Match[str]) -> str:
    sign = chr(int(escaped[1], 16))
    if sign.isprintable():
        return sign
    return " "


def _sheet_text(sheet: _Sheet) -> str:
    """Return the lines and tables of a sheet."""
    cells = sheet.cells
    wide = _fill_merged(sheet)
    columns = sorted(set().union(*cells.values()))
    hidden = set(filter(sheet.has_hidden, columns))
    ordered: list[list[str]] = []
    wide_rows: list[bool] = []
    for number in sorted(cells):
        if ordered and number - 1 not in cells:
            ordered.append([""])
            wide_rows.append(False)
        if number not in sheet.hidden_rows:
            ordered.append(_dense(cells[number], columns, hidden))
            wide_rows.append(number in wide)
    return tables_of(ordered, wide_rows)


def _fill_merged(sheet: _Sheet) -> set[int]:
    """Repeat the text of merged cells in each that they cover; return the rows in which they span
    columns."""
    wide: set[int] = set()
    for first_column, first_row, last_column, last_row in sheet.merged:
        text = sheet.cells.get(first_row, {}).get(first_column, "")
        columns = range(first_column, last_column + 1)
        rows = range(first_row, last_row + 1)
        if not text or len(rows) * len(columns) > _LARGEST_MERGED:
            continue
        for number in rows:
            sheet.cells.setdefault(number, {}).update(dict.fromkeys(columns, text))
        if len(columns) > 1:
            wide.update(rows)
    return wide


def _dense(row: Mapping[int, str], columns: Sequence[int], hidden: set[int]) -> list[str]:
    """Return a row's cells in the columns that the sheet uses and shows, with an empty one for each
    gap between them."""
    line: list[str] = []
    for index, column in enumerate(columns):
        if index and column > columns[index - 1] + 1:
            line.append("")
        if column not in hidden:
            line.append(row.get(column, ""))
    return line
