"""Slides (.pptx)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kinject.documents.equations import MATH, UnwritableMath, equation_text
from kinject.documents.numbering import item_number
from kinject.documents.office import (
    DRAWING,
    FALLBACK,
    RELATION,
    Package,
    attribute_at,
    comment_text,
    drawing_texts,
    runs_text,
    whole_number,
)
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.symbols import raised, symbol_text
from kinject.documents.text import (
    XmlElement,
    heading,
    joined,
    library_errors,
    markdown_table,
    one_line,
    spanned,
    whole_file,
)

_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
# Placeholders of the slide number, the footer and the date: the same on every slide.
_FURNITURE = frozenset({"sldNum", "ftr", "dt"})
_PLACEHOLDER = {"idx": "0", "type": "obj"}
"""The attributes of a placeholder that it may leave out."""
_SAME_ROW = 45_720
"""How far below the shape before it, in English Metric Units (a twentieth of an inch), the top of a
shape of the same row may be."""
_TITLES = frozenset({"title", "ctrTitle"})


class _Shape(NamedTuple):
    """A shape on a slide, and the kind and number of its placeholder."""

    element: XmlElement
    top: int
    left: int
    kind: str
    is_title: bool


class _Frame(NamedTuple):
    """Where the shapes of a group are on their slide: their own places are within the group, which
    keeps them when it is moved or made larger."""

    left: float
    top: float
    width_scale: float
    height_scale: float

    def place(self, offset: tuple[int, int]) -> tuple[int, int]:
        left, top = offset
        return (
            round(self.left + left * self.width_scale),
            round(self.top + top * self.height_scale),
        )

    def within(self, group: XmlElement) -> _Frame:
        """Return the frame of a group that lies in this one."""
        form = group.find(f"{_P}grpSpPr/{DRAWING}xfrm")
        if form is None:
            return self
        x, y = _pair(form, "off", "x", "y")
        width, height = _pair(form, "ext", "cx", "cy")
        inner_x, inner_y = _pair(form, "chOff", "x", "y")
        inner_width, inner_height = _pair(form, "chExt", "cx", "cy")
        x_scale = width / (inner_width or width or 1)
        y_scale = height / (inner_height or height or 1)
        return _Frame(
            self.left + (x - inner_x * x_scale) * self.width_scale,
            self.top + (y - inner_y * y_scale) * self.height_scale,
            self.width_scale * x_scale,
            self.height_scale * y_scale,
        )


_WHOLE = _Frame(0, 0, 1, 1)


def _pair(form: XmlElement, name: str, first: str, second: str) -> tuple[int, int]:
    """Return the two lengths of a part of a shape's form."""
    path = f"{DRAWING}{name}"
    return _length(attribute_at(form, path, first)), _length(attribute_at(form, path, second))


def read_pptx(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a slide deck: a heading for each slide that is shown, then its texts, tables, charts,
    notes and comments. `slides` is in meta."""
    slides: list[tuple[int | str, str]] = []
    hidden = []
    first = ""
    with library_errors(path, "slide deck", "Save it again as .pptx."):
        package = Package(path, stream, options)
        authors = _authors(package)
        entries = package.root(package.main).iter(f"{_P}sldId")
        for number, entry in enumerate(entries, start=1):
            name = package.target(package.main, entry.get(f"{RELATION}id", ""))
            root = package.wanted(name, f"slide {number}")
            if root is None:
                continue
            if root.get("show", "1") in ("0", "false"):
                hidden.append(number)
                continue
            slide = _Slide(package, name, root, f"slide {number}")
            text = slide.text()
            comments = _comments(package, name, f"comments on slide {number}", authors)
            if not slides:
                first = slide.title
            slides.append((number, "\n\n".join(filter(None, [text, *comments]))))
        title, meta = package.properties()
    text, starts = joined(slides)
    # PowerPoint's own title of every deck that has none.
    if title.lower() in ("", "powerpoint presentation"):
        title = first
    found: dict[str, object] = {**meta, "slides": starts}
    if hidden:
        found["hidden_slides"] = hidden
    yield whole_file(path, title, text, found)
    yield from package.faults


class _Slide:
    """The Markdown of a slide; `place` is its name in messages."""

    def __init__(self, package: Package, name: str, root: XmlElement, place: str) -> None:
        self.package, self.name, self.place = package, name, place
        self.shapes = list(self._shapes(root))
        self.title = ""
        for shape in self.shapes:
            if shape.is_title and not self.title:
                self.title = one_line(" ".join(line for _, _, line in self._lines(shape.element)))

    def text(self) -> str:
        blocks = []
        if self.title:
            blocks.append(heading(2, self.title))
        for shape in _in_reading_order(self.shapes):
            if shape.kind not in _FURNITURE and not shape.is_title:
                blocks += self._shape_texts(shape.element)
        notes = self._notes()
        if notes:
            blocks.append(f"Notes: {notes}")
        return "\n\n".join(filter(None, blocks))

    def _shapes(self, root: XmlElement) -> Iterator[_Shape]:
        """Yield the shapes in their order, those of groups as well."""
        stack = [(root, _WHOLE)]
        has_title = False
        while stack:
            element, frame = stack.pop()
            if element.tag not in (f"{_P}sp", f"{_P}graphicFrame"):
                if element.tag == f"{_P}grpSp":
                    frame = frame.within(element)
                stack += [(child, frame) for child in reversed(_shown_children(element))]
                continue
            mark = element.find(f".//{_P}nvPr/{_P}ph")
            kind, top, left, is_title = "", 0, 0, False
            if mark is not None:
                kind = mark.get("type", "obj")
                # The placeholder without a number is that of the title.
                is_title = not has_title and mark.get("idx", "0") == "0"
                has_title = has_title or is_title
            # A title is hidden where the slide shows it as a picture.
            if _is_hidden(element) and not is_title:
                continue
            offset = _offset(element)
            if offset is None and mark is not None:
                offset = self._inherited_offset(mark)
            if offset is not None:
                left, top = frame.place(offset)
            yield _Shape(element, top, left, kind, is_title)

    def _inherited_offset(self, mark: XmlElement) -> tuple[int, int] | None:
        """Return where the layout, or the master of the layout, has the placeholder `mark`."""
        for layout in self.package.related(self.name, "slideLayout"):
            offset = self._offset_on(layout, "idx", mark.get("idx", "0"))
            if offset is not None:
                return offset
            kind = _kind_on_master(mark.get("type", "obj"))
            for master in self.package.related(layout, "slideMaster"):
                return self._offset_on(master, "type", kind)
        return None

    def _offset_on(self, part: str, key: str, value: str) -> tuple[int, int] | None:
        """Return where a layout or a master has the placeholder with `value` as its `key`."""
        root = self.package.optional(part)
        if root is None:
            return None
        for shape in root.iter(f"{_P}sp"):
            mark = shape.find(f".//{_P}nvPr/{_P}ph")
            if mark is not None and mark.get(key, _PLACEHOLDER[key]) == value:
                return _offset(shape)
        return None

    def _shape_texts(self, shape: XmlElement) -> list[str]:
        """Return a shape's table, charts and diagrams, or its paragraphs."""
        table = shape.find(f".//{DRAWING}tbl")
        if table is not None:
            return [self._table(table)]
        if shape.tag == f"{_P}graphicFrame":
            return drawing_texts(self.package, self.name, shape)
        lines = self._lines(shape)
        if len(lines) < 2:
            return [line for _, _, line in lines]
        return ["\n".join(f"{'  ' * level}{mark} {line}" for level, mark, line in lines)]

    def _lines(self, shape: XmlElement) -> list[tuple[int, str, str]]:
        """Return (level, mark, text) of the paragraphs of a shape that are not blank."""
        lines = []
        counts: dict[int, int] = {}
        for paragraph in shape.iter(f"{DRAWING}p"):
            line = one_line(self._paragraph(paragraph))
            if not line:
                continue
            level = min(whole_number(attribute_at(paragraph, f"{DRAWING}pPr", "lvl")), 8)
            numbering = paragraph.find(f"{DRAWING}pPr/{DRAWING}buAutoNum")
            mark = "-"
            # A bullet, or an item of a list around it, ends the list.
            for other in list(counts):
                if other > level or (other == level and numbering is None):
                    del counts[other]
            if numbering is not None:
                start = whole_number(numbering.get("startAt"), 1)
                counts[level] = counts.get(level, start - 1) + 1
                mark = _numbered(counts[level], numbering.get("type", ""))
            lines.append((level, mark, line))
        return lines

    def _paragraph(self, paragraph: XmlElement) -> str:
        """Return the text of a paragraph. One that cannot be written is named."""
        parts = []
        stack = [paragraph]
        while stack:
            element = stack.pop()
            if element.tag == f"{DRAWING}t":
                parts.append(_letters(element))
            elif element.tag == f"{DRAWING}br":
                parts.append("\n")
            elif element.tag == f"{MATH}oMath":
                try:
                    parts.append(equation_text(element))
                except UnwritableMath as error:
                    self.package.add_fault(
                        self.place,
                        f"an equation ({error}) cannot be written as text, and its paragraph is "
                        "left out. Write it with Insert > Equation.",
                    )
                    return ""
            elif element.tag != FALLBACK:
                stack += reversed([child for child in element if isinstance(child.tag, str)])
        return "".join(parts)

    def _table(self, table: XmlElement) -> str:
        """Return a table; merged cells are repeated in each grid cell that they cover."""
        rows: list[list[tuple[str, int, int]]] = []
        for row in table.iterchildren(f"{DRAWING}tr"):
            cells = []
            for cell in row.iterchildren(f"{DRAWING}tc"):
                if cell.get("hMerge", "0") in ("1", "true"):
                    continue
                if cell.get("vMerge", "0") in ("1", "true"):
                    continue
                text = "\n".join(line for _, _, line in self._lines(cell))
                n_rows = min(whole_number(cell.get("rowSpan"), 1), 1000)
                n_columns = min(whole_number(cell.get("gridSpan"), 1), 1000)
                cells.append((text, n_rows, n_columns))
            rows.append(cells)
        return markdown_table(spanned(rows))

    def _notes(self) -> str:
        """Return the speaker's notes."""
        place = f"notes of {self.place}"
        for root in self.package.wanted_roots(self.name, "notesSlide", place):
            for shape in root.iter(f"{_P}sp"):
                mark = shape.find(f".//{_P}nvPr/{_P}ph")
                if mark is not None and mark.get("type", "obj") == "body":
                    paragraphs = map(self._paragraph, shape.iter(f"{DRAWING}p"))
                    return "\n".join(paragraphs).strip()
        return ""


def _shown_children(element: XmlElement) -> list[XmlElement]:
    """Return the children of an element without groups that are hidden, and what is there twice."""
    children = [child for child in element if isinstance(child.tag, str)]
    children = [child for child in children if child.tag != FALLBACK]
    return [child for child in children if child.tag != f"{_P}grpSp" or not _is_hidden(child)]


def _is_hidden(shape: XmlElement) -> bool:
    """Return whether a shape or a group is hidden on its slide."""
    return attribute_at(shape, f"*/{_P}cNvPr", "hidden") in ("1", "true")


_LETTERS = {"alphaLc": "a", "alphaUc": "A", "romanLc": "i", "romanUc": "I"}


def _numbered(n: int, form: str) -> str:
    """Return the number of an item in a form of PowerPoint: alphaLcParenBoth is (b)."""
    name, _, around = form.partition("Paren")
    number = item_number(n, _LETTERS.get(name.removesuffix("Period"), "1"))
    return {"Both": f"({number})", "R": f"{number})"}.get(around, f"{number}.")


def _in_reading_order(shapes: Iterable[_Shape]) -> list[_Shape]:
    """Return shapes as they are read: row after row, from the left in each. Shapes that were put
    beside each other by hand are a hair above or below their neighbours."""
    ordered: list[_Shape] = []
    row: list[_Shape] = []
    for shape in sorted(shapes, key=attrgetter("top")):
        if row and shape.top - row[-1].top > _SAME_ROW:
            ordered += sorted(row, key=attrgetter("left"))
            row = []
        row.append(shape)
    return ordered + sorted(row, key=attrgetter("left"))


def _offset(shape: XmlElement) -> tuple[int, int] | None:
    """Return the left and the upper edge of a shape, None if it has no position of its own."""
    for place in (f"{_P}spPr/{DRAWING}xfrm", f"{_P}xfrm"):
        offset = shape.find(f"{place}/{DRAWING}off")
        if offset is not None:
            return _length(offset.get("x", "0")), _length(offset.get("y", "0"))
    return None


_LENGTH = re.compile(r"(-?\d+(?:\.\d+)?)([a-z]{2})?")
# In English Metric Units, in which a length without a unit is.
_UNITS = {"in": 914_400, "cm": 360_000, "mm": 36_000, "pt": 12_700, "pc": 152_400, "pi": 152_400}


def _length(text: str) -> int:
    """Return a length, which may have a unit: 2.5cm."""
    match = _LENGTH.fullmatch(text)
    if match is None:
        return 0
    return round(float(match[1]) * _UNITS.get(match[2], 1))


def _kind_on_master(kind: str) -> str:
    """Return the kind of the placeholder of a master that one of a slide follows."""
    if kind in _TITLES:
        return "title"
    if kind in _FURNITURE:
        return kind
    return "body"


def _letters(element: XmlElement) -> str:
    """Return the text of a run, its digits raised if they are."""
    text = element.text or ""
    run = element.getparent()
    # Text that is struck through was taken back.
    if attribute_at(run, f"{DRAWING}rPr", "strike", "noStrike") != "noStrike":
        return ""
    text = symbol_text(text, attribute_at(run, f"{DRAWING}rPr/{DRAWING}latin", "typeface"))
    # The arrow that PowerPoint makes of "-->" is a letter with an accent in this font.
    signs = attribute_at(run, f"{DRAWING}rPr/{DRAWING}sym", "typeface")
    text = symbol_text(text, signs, are_letters=False)
    height = attribute_at(run, f"{DRAWING}rPr", "baseline")
    # Thousandths of a per cent, in Strict Open XML 30%; below zero the text is lowered.
    if whole_number(height.rstrip("%")):
        return raised(text)
    return text


def _authors(package: Package) -> dict[str, str]:
    """Return id -> name of those who comment; PowerPoint has two formats of comments."""
    names = {}
    for kind in ("commentAuthors", "authors"):
        for root in package.optional_roots(package.main, kind):
            for author in root.iterchildren():
                names[author.get("id", "")] = author.get("name", "")
    return names


def _comments(package: Package, slide: str, place: str, authors: dict[str, str]) -> list[str]:
    """Return the comments on a slide, each followed by its replies."""
    texts = []
    for root in package.wanted_roots(slide, "comments", place):
        for element in root.iter("{*}*"):
            if element.tag.rpartition("}")[2] not in ("cm", "reply"):
                continue
            text = element.findtext(f"{_P}text") or ""
            body = element.find("{*}txBody")
            if body is not None:
                text = runs_text(body)
            if text.strip():
                texts.append(comment_text(text, authors.get(element.get("authorId", ""), "")))
    return texts
