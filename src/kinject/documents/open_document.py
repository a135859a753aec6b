"""Texts, workbooks and slides of OpenDocument (ODT, ODS, ODP), which are pages of XML in a zip."""

from __future__ import annotations

import html
import io
import posixpath
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from kinject.disk import read_bytes
from kinject.documents.equations import UnwritableMath, equation_text
from kinject.documents.html import page_of
from kinject.documents.number_formats import number_text
from kinject.documents.numbering import item_number
from kinject.documents.office import attribute_at, comment_text, whole_number
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import (
    DAMAGED_ARCHIVE,
    XmlElement,
    check_archive,
    library_errors,
    parse_xml,
    whole_file,
)
from kinject.errors import InputError

_TAGS = {
    "h": "h{level}",
    "p": "p",
    "list-item": "li",
    "table-row": "tr",
    "table-cell": "td",
    "line-break": "br",
    "page": "section",
    **dict.fromkeys(("covered-table-cell", "tracked-changes", "forms"), ""),
    **dict.fromkeys(("note-citation", "ruby-text"), ""),
    # What may be on each slide, as its number is.
    **dict.fromkeys(("footer-decl", "header-decl", "date-time-decl"), ""),
}
"""Element of OpenDocument -> that of HTML; "" leaves it out with its content, others are their
content."""
_SPACES = {"s": " ", "tab": "\t"}
# The style of Writer for lines of code, each a paragraph of its own.
_CODE = "Preformatted_20_Text"
_OASIS = "urn:oasis:names:tc:opendocument:xmlns"
_OFFICE = f"{{{_OASIS}:office:1.0}}"
_DRAW = f"{{{_OASIS}:drawing:1.0}}"
_TEXT = f"{{{_OASIS}:text:1.0}}"
_STYLE = f"{{{_OASIS}:style:1.0}}"
_PICTURE = f"{{{_OASIS}:svg-compatible:1.0}}"
_CHART = f"{{{_OASIS}:chart:1.0}}"
_PRESENTATION = f"{{{_OASIS}:presentation:1.0}}"
_TABLE = f"{{{_OASIS}:table:1.0}}"
_COLUMNS_REPEATED = f"{_TABLE}number-columns-repeated"
_CELLS = (f"{_TABLE}table-cell", f"{_TABLE}covered-table-cell")
_LINK = "{http://www.w3.org/1999/xlink}"
_DUBLIN = "{http://purl.org/dc/elements/1.1/}"
_SPANS = {"rowspan": "number-rows-spanned", "colspan": "number-columns-spanned"}
_MOST_REPEATED = 50
"""Cells of the same content in a row that are written; a sheet's empty rest repeats thousands of
times."""
# Styles above one another; more are those that lead to themselves.
_DEEPEST_STYLE = 20
_MOST_BLANK = 1_000
"""Blank cells between two filled ones of a row that are written, so that each column keeps its
place."""
_REPEATED = ("number-columns-repeated", "number-rows-repeated")
_FIELDS = {"title": "title", "author": "creator", "date": "date"}
"""Key of meta -> element of Dublin Core."""


def read_open_document(
    path: Path, stream: BinaryIO, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield a text, a workbook (a heading for each sheet) or slides of OpenDocument, by way of
    HTML."""
    data = io.BytesIO(read_bytes(path, options.largest, stream))
    check_archive(path, data, options)
    with (
        library_errors(path, "OpenDocument file", "Save it again."),
        zipfile.ZipFile(data) as archive,
    ):
        listed = "META-INF/manifest.xml"
        if listed in archive.namelist() and b"encryption-data" in archive.read(listed):
            raise InputError(f"{path}: locked with a password. Save a copy without one.")
        content = parse_xml(path, archive.read("content.xml"))
        # Without a body the file is damaged: the error of its first use is reported.
        body = cast("XmlElement", content.find("{*}body"))
        embedded: dict[str, str] = {}
        for element in body.iter(f"{_DRAW}object"):
            name = element.get(f"{_LINK}href", "")
            embedded[name] = _embedded_html(path, archive, name)
        # The styles of a text are in one part, those of changes by hand in the other.
        roots = [content, _optional_root(path, archive, "styles.xml")]
        looks = _looks_of([root for root in roots if root is not None], embedded)
        # The file may have no properties, or damaged ones.
        stated = _optional_root(path, archive, "meta.xml")
        if stated is None:
            stated = body
        meta: dict[str, Any] = {}
        for key, name in _FIELDS.items():
            value = stated.findtext(f".//{_DUBLIN}{name}")
            meta[key] = (value or "").strip()
        meta["hidden_sheets"] = [
            table.get(f"{_TABLE}name", "")
            for table in body.iter(f"{_TABLE}table")
            if table.get(f"{_TABLE}style-name") in looks.hidden
        ]
        meta["hidden_slides"] = [
            number
            for number, slide in enumerate(body.iter(f"{_DRAW}page"), start=1)
            if slide.get(f"{_DRAW}style-name") in looks.hidden
        ]
        meta["hidden_cells"] = _take_hidden_cells(body)
        content_html = re.sub(r"</pre>\s*<pre>", "", _as_html(body, looks))
        _, text, _ = page_of(path, f"<html><body>{content_html}</body></html>", whole_page=True)
    heading = re.search(r"^#+ (.+)$", text, re.MULTILINE)
    title = meta.pop("title") or (heading[1] if heading else "")
    meta["date"] = meta["date"][:10]
    yield whole_file(path, title, text, {key: value for key, value in meta.items() if value})


class _Headings:
    """The headings of a text, counted as they come; `roots` are those of the parts with its styles,
    of which one numbers the headings of each level, and `parents` the style above each."""

    def __init__(self, roots: Sequence[XmlElement], parents: Mapping[str, str]) -> None:
        self._levels: dict[int, XmlElement] = {}
        self._parents = parents
        # Styles with another list, or with none, which is a list of the name "".
        self._listed: dict[str, str] = {}
        for root in roots:
            for level in root.iter(f"{_TEXT}outline-level-style"):
                if level.get(f"{_STYLE}num-format"):
                    self._levels[whole_number(level.get(f"{_TEXT}level"), 1)] = level
            for style in root.iter(f"{_STYLE}style"):
                if f"{_STYLE}list-style-name" in style.attrib:
                    name = style.get(f"{_STYLE}name", "")
                    self._listed[name] = name
        self._counts: dict[int, int] = {}

    def next_mark(self, heading: XmlElement) -> str:
        """Return the number of the next heading as its reader sees it, with a space behind it; ""
        if it has none."""
        depth = whole_number(heading.get(f"{_TEXT}outline-level"), 1)
        level = self._levels.get(depth)
        is_numbered = heading.get(f"{_TEXT}is-list-header") != "true"
        has_own_list = _own(heading.get(f"{_TEXT}style-name", ""), self._listed, self._parents)
        if level is None or not is_numbered or has_own_list:
            return ""
        self._counts[depth] = self._last(depth) + 1
        for deeper in [other for other in self._counts if other > depth]:
            del self._counts[deeper]
        n_shown = whole_number(level.get(f"{_TEXT}display-levels"), 1)
        numbers = []
        for shown in range(depth - n_shown + 1, depth + 1):
            if shown in self._levels:
                kind = self._levels[shown].get(f"{_STYLE}num-format")
                numbers.append(item_number(max(1, self._last(shown)), kind))
        before = level.get(f"{_STYLE}num-prefix", "")
        after = level.get(f"{_STYLE}num-suffix", "")
        return f"{before}{'.'.join(numbers)}{after} "

    def _last(self, depth: int) -> int:
        """Return the number of the last heading of a level, one less than the first before it."""
        first = whole_number(self._levels[depth].get(f"{_TEXT}start-value"), 1)
        return self._counts.get(depth, first - 1)


class _Looks(NamedTuple):
    """What the parts of an OpenDocument file look like: the objects in it by their names, styles of
    raised text, and of hidden or struck text, hidden sheets and slides, (style, depth) of lists ->
    kind of their numbers and the first, the last number of each; numbers of headings; code."""

    embedded: Mapping[str, str]
    raised: frozenset[str]
    hidden: frozenset[str]
    numbered: Mapping[tuple[str, int], tuple[str, int]]
    last_numbers: dict[tuple[str, int], int]
    headings: _Headings
    code: frozenset[str]


_NO_LOOKS = _Looks({}, frozenset(), frozenset(), {}, {}, _Headings([], {}), frozenset())
"""Of what has no styles, as titles and comments."""


def _looks_of(roots: Sequence[XmlElement], embedded: Mapping[str, str]) -> _Looks:
    places: dict[str, str] = {}
    shown: dict[str, str] = {}
    parents: dict[str, str] = {}
    numbered: dict[tuple[str, int], tuple[str, int]] = {}
    for root in roots:
        for style in root.iter(f"{_STYLE}style"):
            name = style.get(f"{_STYLE}name", "")
            properties = f"{_STYLE}text-properties"
            places[name] = attribute_at(style, properties, f"{_STYLE}text-position")
            shown[name] = attribute_at(style, properties, f"{_TEXT}display")
            # Text that is struck through was taken back.
            struck = attribute_at(style, properties, f"{_STYLE}text-line-through-style", "none")
            if struck != "none":
                shown[name] = "none"
            # Of a sheet.
            if attribute_at(style, f"{_STYLE}table-properties", f"{_TABLE}display") == "false":
                shown[name] = "none"
            slide = f"{_STYLE}drawing-page-properties"
            if attribute_at(style, slide, f"{_PRESENTATION}visibility") == "hidden":
                shown[name] = "none"
            parents[name] = style.get(f"{_STYLE}parent-style-name", "")
        for list_style in root.iter(f"{_TEXT}list-style"):
            name = list_style.get(f"{_STYLE}name", "")
            for level in list_style.iterchildren(f"{_TEXT}list-level-style-number"):
                depth = whole_number(level.get(f"{_TEXT}level"), 1)
                kind = level.get(f"{_STYLE}num-format", "")
                if kind:
                    first = whole_number(level.get(f"{_TEXT}start-value"), 1)
                    numbered[name, depth] = kind, first
    # "super 58%", or how far it is raised: "33% 58%"; lowered text has a minus.
    raised = {name for name in parents if re.match("super|[1-9]", _own(name, places, parents))}
    hidden = {name for name in parents if _own(name, shown, parents) == "none"}
    headings, code = _Headings(roots, parents), _styles_of_code(parents)
    return _Looks(embedded, frozenset(raised), frozenset(hidden), numbered, {}, headings, code)


def _styles_of_code(parents: Mapping[str, str]) -> frozenset[str]:
    """Return the style of lines of code, and the styles below it."""
    below = (name for name in parents if _own(name, {_CODE: _CODE}, parents))
    return frozenset({_CODE, *below})


def _take_hidden_cells(body: XmlElement) -> dict[str, int]:
    """Take the cells of hidden rows and columns out of the sheets in `body`; return name of a sheet
    -> how many of them are filled, for sheets with some. Rows that a filter hides belong to the
    sheet."""
    n_hidden: dict[str, int] = {}
    for workbook in body.iter(f"{_OFFICE}spreadsheet"):
        for sheet in workbook.iterchildren(f"{_TABLE}table"):
            n_taken = sum(map(_n_filled_cells, _take_collapsed(sheet)))
            if n_taken:
                n_hidden[sheet.get(f"{_TABLE}name", "")] = n_taken
    return n_hidden


def _take_collapsed(sheet: XmlElement) -> Iterator[XmlElement]:
    """Take what is hidden out of a sheet, and yield it: rows, and cells of other rows."""
    columns = list(_collapsed_columns(sheet))
    for row in list(sheet.iter(f"{_TABLE}table-row")):
        if _is_collapsed(row):
            row.getparent().remove(row)
            yield row
        elif columns:
            yield from _take_cells(row, columns)


def _collapsed_columns(sheet: XmlElement) -> Iterator[range]:
    first = 0
    for column in sheet.iter(f"{_TABLE}table-column"):
        end = first + whole_number(column.get(_COLUMNS_REPEATED), 1)
        if _is_collapsed(column):
            yield range(first, end)
        first = end


def _take_cells(row: XmlElement, columns: list[range]) -> Iterator[XmlElement]:
    """Take the cells in hidden `columns` out of a row, and yield those of which none is left."""
    first = 0
    for cell in list(row.iterchildren(*_CELLS)):
        repeated = whole_number(cell.get(_COLUMNS_REPEATED), 1)
        end = first + repeated
        # A sheet's empty rest may repeat thousands of times, so cells are not counted one by one.
        n_hidden = sum(len(range(max(first, c.start), min(end, c.stop))) for c in columns)
        first = end
        if n_hidden == repeated:
            row.remove(cell)
            yield cell
        elif n_hidden:
            cell.set(_COLUMNS_REPEATED, str(repeated - n_hidden))


def _is_collapsed(element: XmlElement) -> bool:
    """Return whether a row or columns are hidden, and not only folded: these have a button."""
    is_folded = element.getparent().tag.endswith("-group")
    return element.get(f"{_TABLE}visibility") == "collapse" and not is_folded


def _n_filled_cells(element: XmlElement) -> int:
    """Return how many cells of a row, or a cell itself, are filled."""
    return sum(map(_is_filled_cell, element.iter(f"{_TABLE}table-cell")))


def _own(name: str, values: Mapping[str, str], parents: Mapping[str, str]) -> str:
    """Return a property of a style: its own, else that of the next style above it that has one."""
    for _ in range(_DEEPEST_STYLE):
        if values.get(name):
            break
        name = parents.get(name, "")
    return values.get(name, "")


def _list_html(element: XmlElement, inner: str, looks: _Looks) -> str:
    """Return a list, with the numbers that its style gives to lists of its depth."""
    outer = [other for other in element.iterancestors() if other.tag == element.tag]
    names = [other.get(f"{_TEXT}style-name", "") for other in (element, *outer)]
    place = next(filter(None, names), ""), len(outer) + 1
    kind, start = looks.numbered.get(place, ("", 1))
    if not kind:
        return f"<ul>{inner}</ul>"
    if element.get(f"{_TEXT}continue-numbering") == "true" or element.get(f"{_TEXT}continue-list"):
        start = looks.last_numbers.get(place, start - 1) + 1
    number = start - 1
    for item in element.iterchildren(f"{_TEXT}list-item"):
        number = whole_number(item.get(f"{_TEXT}start-value"), number + 1)
    looks.last_numbers[place] = number
    return f'<ol type="{html.escape(kind)}" start="{start}">{inner}</ol>'


def _cell_value(values: Mapping[str, str]) -> str:
    """Return the value of a cell that has no text: programs without a window write such cells."""
    for name in ("string-value", "date-value", "time-value"):
        if values.get(name):
            return values[name]
    value = values.get("value", "")
    try:
        if values.get("value-type") == "percentage":
            return number_text(float(value), "0%")
    except ValueError:
        return value
    if values.get("value-type") == "currency":
        return f"{value} {values.get('currency', '')}".strip()
    return value or values.get("boolean-value", "").upper()


def _is_filled_cell(cell: XmlElement) -> bool:
    """Return whether a cell has a value or a text; one that another cell covers has none."""
    if cell.tag != f"{_TABLE}table-cell":
        return False
    if cell.get(f"{_OFFICE}value-type"):
        return True
    return any((part.text or "").strip() for part in cell.iter("*"))


def _optional_root(path: Path, archive: zipfile.ZipFile, name: str) -> XmlElement | None:
    """Return the root of a part without which there is a text, None if it cannot be read."""
    try:
        return cast("XmlElement | None", parse_xml(path, archive.read(name)))
    except (KeyError, SyntaxError, *DAMAGED_ARCHIVE):
        return None


def _embedded_html(path: Path, archive: zipfile.ZipFile, name: str) -> str:
    """Return an equation, or the title and the values of a chart, as HTML; "" for other objects."""
    part = posixpath.normpath(posixpath.join(name, "content.xml"))
    root = _optional_root(path, archive, part)
    if root is None:
        return ""
    if root.tag.endswith("}math"):
        try:
            return html.escape(equation_text(root))
        except UnwritableMath:
            return "[an equation]"
    texts = [f"<p>{_as_html(title, _NO_LOOKS)}</p>" for title in root.iter(f"{_CHART}title")]
    texts += [
        f"<table>{_as_html(table, _NO_LOOKS)}</table>" for table in root.iter(f"{_TABLE}table")
    ]
    return "".join(texts)


def _comment_html(annotation: XmlElement) -> str:
    """Return a comment in brackets, as notes are."""
    author = annotation.findtext(f"{_DUBLIN}creator") or ""
    paragraphs = [_as_html(part, _NO_LOOKS) for part in annotation.iterchildren("{*}p")]
    text = re.sub("<[^>]*>", " ", " ".join(paragraphs))
    if not text.strip():
        return ""
    return f" ({comment_text(text, html.escape(author))})"


def _as_html(element: XmlElement, looks: _Looks) -> str:
    """Return the content of an element, with what follows its children, as HTML; `looks` has
    what they look like."""
    parts = [html.escape(element.text or "")]
    for child in element:
        # A comment in the file has no name.
        if isinstance(child.tag, str):
            parts.append(_child_html(element, child, looks))
        parts.append(html.escape(child.tail or ""))
    return "".join(parts)


def _child_html(parent: XmlElement, child: XmlElement, looks: _Looks) -> str:
    name = child.tag.rpartition("}")[2]
    values = {str(key).rpartition("}")[2]: value for key, value in child.attrib.items()}
    if name in _SPACES:
        return _SPACES[name] * min(whole_number(values.get("c"), 1), _MOST_BLANK)
    # The name and the description of a picture.
    if child.tag.startswith(_PICTURE) or _TAGS.get(name) == "":
        return ""
    if values.get("style-name") in looks.hidden or values.get("display") == "none":
        if name != "table-cell":
            return ""
        # Without a struck cell those behind it would be in other columns.
        n_struck = whole_number(values.get("number-columns-repeated"), 1)
        return "<td></td>" * min(n_struck, _MOST_BLANK)
    if name == "table":
        sheet = ""
        # A workbook's tables are its sheets, whose names are headings.
        if parent.tag.endswith("spreadsheet"):
            sheet = f"<h1>{html.escape(values.get('name', ''))}</h1>"
        return f"{sheet}<table>{_as_html(child, looks)}</table>"
    if name == "object":
        return looks.embedded.get(values.get("href", ""), "")
    if name == "annotation":
        return _comment_html(child)
    if name == "note":
        return f" ({_html_on_one_line(child, looks)})"
    # Of a slide.
    if name == "frame" and values.get("class") == "title":
        return f"<h2>{_html_on_one_line(child, looks)}</h2>"
    if name == "list":
        return _list_html(child, _as_html(child, looks), looks)
    return _element_html(child, _TAGS.get(name, ""), values, looks)


def _html_on_one_line(element: XmlElement, looks: _Looks) -> str:
    return " ".join(re.sub("</?p(?:re)?>", " ", _as_html(element, looks)).split())


def _inner_html(element: XmlElement, tag: str, values: Mapping[str, str], looks: _Looks) -> str:
    """Return the content of an element: a heading's behind its number, of a cell its value."""
    inner = _as_html(element, looks)
    if element.tag == f"{_TEXT}h":
        mark = looks.headings.next_mark(element)
        if not inner.strip():
            return ""
        return html.escape(mark) + inner
    if tag == "td" and not inner:
        return html.escape(_cell_value(values))
    return inner


def _element_html(element: XmlElement, tag: str, values: Mapping[str, str], looks: _Looks) -> str:
    """Return an element as the `tag` of HTML, "" for its content alone, by its attributes."""
    tag = tag.format(level=min(int(values.get("outline-level", 1)), 6))
    inner = _inner_html(element, tag, values, looks)
    if tag == "p" and values.get("style-name") in looks.code:
        return f"<pre>{inner}\n</pre>"
    n = 1
    # An empty row has cells without text.
    if re.search(r"(?:^|>)\s*[^<\s]", inner):
        for name in _REPEATED:
            n = min(n * int(values.get(name, 1)), _MOST_REPEATED)
    elif tag == "td" and any(map(_is_filled_cell, element.itersiblings())):
        n = min(int(values.get("number-columns-repeated", 1)), _MOST_BLANK)
    if not tag:
        if values.get("style-name") in looks.raised and element.tag == f"{_TEXT}span":
            return f"<sup>{inner}</sup>"
        return inner * n
    spans = ""
    if tag == "li" and "start-value" in values:
        spans = f' value="{html.escape(values["start-value"])}"'
    for key, name in _SPANS.items():
        if name in values:
            spans += f" {key}={values[name]}"
    return f"<{tag}{spans}>{inner}</{tag}>" * n
