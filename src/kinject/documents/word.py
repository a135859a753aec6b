"""Word documents (.docx)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kinject.documents.equations import MATH, UnwritableMath, equation_text
from kinject.documents.numbering import WordLists
from kinject.documents.office import (
    ALTERNATIVES,
    FALLBACK,
    OFF,
    RELATION,
    Package,
    attribute_at,
    comment_text,
    drawing_texts,
    whole_number,
)
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.symbols import (
    raised,
    symbol_of_field,
    symbol_of_font,
    symbol_text,
)
from kinject.documents.text import (
    DEEPEST_ITEM,
    XmlElement,
    below_table,
    goes_on_below,
    heading,
    library_errors,
    markdown_table,
    one_line,
    spanned,
    whole_file,
)

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_VAL = f"{_W}val"
_HEADING_STYLE = re.compile(r"heading ?(\d)", re.IGNORECASE)
_UNREAD = frozenset(
    [f"{_W}{name}" for name in ("del", "moveFrom", "pPr", "rPr", "txbxContent", "rt")] + [FALLBACK]
)
"""What is no text of its paragraph; w:rt is the reading above a word."""
_SIGNS = {
    f"{_W}br": "\n",
    f"{_W}cr": "\n",
    f"{_W}noBreakHyphen": "-",
    f"{_W}ptab": "\t",
}
# Styles that extend one another; more are those that lead to themselves.
_DEEPEST_STYLE = 20
_NOTES = {
    f"{_W}footnoteReference": ("footnote", ""),
    f"{_W}endnoteReference": ("endnote", "e"),
    f"{_W}commentReference": ("comment", "c"),
}
"""The mark of a note -> (its kind, the letter before its number)."""


def read_docx(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a Word document: headings, paragraphs, lists, tables, text boxes, equations and charts
    in their order, then the footnotes, endnotes and comments."""
    with library_errors(path, "Word document", "Save it again as .docx."):
        package = Package(path, stream, options)
        word = _Word(package)
        text = word.text()
        title, meta = package.properties()
    yield whole_file(path, title or word.title, text, meta)
    yield from package.faults


_FIELD_PARTS = frozenset({f"{_W}fldChar", f"{_W}instrText"})


class _Field(NamedTuple):
    """A field that has begun: where its instruction, or its result, does among the parts of its
    paragraph; its instruction; and what a field of a form shows that has no result."""

    start: int
    shown: str
    instruction: str = ""
    is_result: bool = False


class _Word:
    """The Markdown of a Word document."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.body = package.root(package.main)
        self.title = ""
        self._styles: dict[str, XmlElement] = {}
        for root in package.optional_roots(package.main, "styles"):
            for style in root.iter(f"{_W}style"):
                self._styles[style.get(f"{_W}styleId", "")] = style
        self._levels: dict[str, int] = {}
        self._properties: dict[tuple[str, str], str] = {}
        self._lists = WordLists(self.package.optional_roots(self.package.main, "numbering"))
        self._notes: dict[tuple[str, str], str] = {}
        self._n_paragraphs = 0
        self._initial = ""

    def text(self) -> str:
        blocks = [self._text_of_blocks(body) for body in self.body.iter(f"{_W}body")]
        return "\n\n".join(filter(None, [*blocks, self._initial, *self._note_texts()]))

    def _text_of_blocks(self, parent: XmlElement) -> str:
        """Return the paragraphs and tables in an element; items of a list without blank lines."""
        text = ""
        in_list = False
        for element in _blocks(parent):
            if element.tag == f"{_W}tbl":
                block, is_item = self._table(element), False
            elif element.tag == f"{_W}altChunk":
                block, is_item = self._chunk(element), False
            else:
                block, is_item = self._paragraph(element)
            if block and is_item and in_list:
                text += f"\n{block}"
            elif block:
                text += f"\n\n{block}"
                in_list = is_item
        return text.strip()

    def _paragraph(self, element: XmlElement) -> tuple[str, bool]:
        """Return a paragraph (with its text boxes below), and whether it is an item of a list."""
        text = self._own_text(element)
        boxes = self._boxes(element)
        level, item = self._level(element), self._item(element)
        if text and level is not None:
            self.title = self.title or one_line(text)
            if item and not item.endswith("- "):
                text = item.strip() + f" {text}"
            text = heading(level, text)
        elif text and item:
            text = item + one_line(text)
        return "\n\n".join(filter(None, [text, *boxes])), bool(item) and level is None

    def _own_text(self, element: XmlElement) -> str:
        """Return the text of a paragraph without its boxes. One that cannot be written is named."""
        self._n_paragraphs += 1
        try:
            text = self._run_text(element)
            # A large first letter is a paragraph of its own, in the file only.
            drop_cap = attribute_at(element, f"{_W}pPr/{_W}framePr", f"{_W}dropCap")
            if drop_cap in ("drop", "margin") or _is_end_deleted(element):
                self._initial += text
                return ""
            if text.strip():
                text, self._initial = self._initial + text, ""
            return text.strip()
        except UnwritableMath as error:
            self.package.add_fault(
                f"paragraph {self._n_paragraphs}",
                f"its equation ({error}) cannot be written as text, and the paragraph is left "
                "out. Write the equation with Insert > Equation.",
            )
            return ""

    def _chunk(self, chunk: XmlElement) -> str:
        """Return the text of a file (a web page, a document) that is a part of this one."""
        name = self.package.target(self.package.main, chunk.get(f"{RELATION}id", ""))
        return self.package.text_of_file(name)

    def _boxes(self, paragraph: XmlElement, in_cell: bool = False) -> list[str]:
        """Return the text boxes, charts and diagrams in a paragraph."""
        texts: list[str] = []
        # Most paragraphs have none, and are not walked through again.
        if not _has(paragraph, f"{_W}txbxContent") and not _has(paragraph, f"{_W}drawing"):
            return texts
        stack = [paragraph]
        while stack:
            element = stack.pop()
            if element.tag == f"{_W}txbxContent":
                if in_cell:
                    texts.append(self._cell(element))
                else:
                    texts.append(self._text_of_blocks(element))
                continue
            if element.tag == f"{_W}drawing":
                texts += drawing_texts(self.package, self.package.main, element)
            stack += [child for child in reversed(list(element)) if child.tag != FALLBACK]
        return texts

    def _run_text(self, paragraph: XmlElement) -> str:
        """Return the text of a paragraph with tracked insertions and without deletions; its text
        boxes are left out."""
        parts: list[str] = []
        equation_end = -1
        fields: list[_Field] = []
        style = _value(paragraph, f"pPr/{_W}pStyle")
        stack = [paragraph]
        while stack:
            element = stack.pop()
            tag = element.tag
            if tag == f"{_W}t":
                parts.append(self._letters(element))
            elif tag == f"{_W}r" and self._is_unseen(element, style):
                continue
            elif tag in _FIELD_PARTS:
                _check_written(element)
                _follow_field(element, fields, parts)
            elif tag == f"{MATH}oMath":
                # Equations beside each other are shown on lines of their own.
                if equation_end == len(parts):
                    parts.append(" ")
                parts.append(equation_text(element))
                equation_end = len(parts)
            elif tag == f"{_W}tab":
                # Elsewhere than in a run it is the position of a tab stop.
                if element.getparent().tag == f"{_W}r":
                    parts.append("\t")
            elif tag in _SIGNS:
                parts.append(_SIGNS[tag])
            elif tag == f"{_W}sym":
                parts.append(_symbol(element))
            elif tag in _NOTES:
                parts.append(self._note_mark(element))
            elif tag not in _UNREAD:
                _check_written(element)
                stack += reversed([child for child in element if isinstance(child.tag, str)])
        return "".join(parts)

    def _letters(self, element: XmlElement) -> str:
        """Return the text of a run, its digits raised if they are."""
        text = element.text or ""
        run = element.getparent()
        text = symbol_text(text, attribute_at(run, f"{_W}rPr/{_W}rFonts", f"{_W}ascii"))
        if self._run_property(run, "vertAlign") == "superscript":
            return raised(text)
        return text

    def _is_unseen(self, run: XmlElement, paragraph_style: str) -> bool:
        """Return whether a run, its style or that of its paragraph is marked as hidden text, or as
        struck through: such text was taken back."""
        for name in ("vanish", "strike", "dstrike"):
            switch = self._run_property(run, name)
            if not switch:
                switch = self._style_property(paragraph_style, name)
            if switch not in ("", *OFF):
                return True
        return False

    def _run_property(self, run: XmlElement, name: str) -> str:
        """Return a property of a run: its own, else that of its style, "" without one."""
        own = run.find(f"{_W}rPr/{_W}{name}")
        if own is None:
            return self._style_property(attribute_at(run, f"{_W}rPr/{_W}rStyle", _VAL), name)
        return str(own.get(_VAL, "1"))

    def _style_property(self, style_id: str, name: str) -> str:
        """Return a property that a style, or one that it extends, gives to runs, "" without one."""
        key = style_id, name
        if key not in self._properties:
            found = (style.find(f"{_W}rPr/{_W}{name}") for style in self._style_and_above(style_id))
            nearest = next((element for element in found if element is not None), None)
            self._properties[key] = ""
            if nearest is not None:
                self._properties[key] = nearest.get(_VAL, "1")
        return self._properties[key]

    def _note_mark(self, reference: XmlElement) -> str:
        """Return the mark of a note: they are counted in the order of their marks."""
        kind, letter = _NOTES[reference.tag]
        key = kind, reference.get(f"{_W}id", "")
        if key not in self._notes:
            number = sum(known == kind for known, _ in self._notes) + 1
            self._notes[key] = f"[^{letter}{number}]"
        return self._notes[key]

    def _note_texts(self) -> list[str]:
        """Return the notes that the text refers to, as ``[^1]: ...``."""
        texts: dict[str, str] = {}
        for kind in ("footnote", "endnote", "comment"):
            if not any(known == kind for known, _ in self._notes):
                continue
            parts = self.package.related(self.package.main, f"{kind}s")
            root = self.package.wanted(next(iter(parts), ""), f"{kind}s")
            if root is None:
                continue
            for note in root.iter(f"{_W}{kind}"):
                mark = self._notes.get((kind, note.get(f"{_W}id", "")))
                if mark is not None:
                    texts[mark] = self._note_text(note)
        # A note may itself hold the mark of a comment, which is then found here.
        return [f"{mark}: {texts[mark]}" for mark in self._notes.values() if texts.get(mark)]

    def _note_text(self, note: XmlElement) -> str:
        text = self._cell(note)
        if note.tag == f"{_W}comment" and text:
            return comment_text(text, note.get(f"{_W}author", ""))
        return text

    def _level(self, element: XmlElement) -> int | None:
        """Return the level of a heading, from its own outline level or its style's, else None."""
        outline = _value(element, f"pPr/{_W}outlineLvl")
        if not outline:
            return self._style_level(_value(element, f"pPr/{_W}pStyle"))
        level = whole_number(outline, 9) + 1
        # A paragraph may leave the outline that its style puts it into.
        if level > 6:
            return None
        return level

    def _style_level(self, style_id: str, depth: int = 0) -> int | None:
        """Return the level of headings of a style, which may be that of the style it extends."""
        if style_id not in self._levels:
            style = self._styles.get(style_id)
            # Of a style that the file does not define its id is the name.
            name = style_id
            if style is not None:
                name = _value(style, "name")
            level = 0
            heading_style = _HEADING_STYLE.fullmatch(name)
            if name.lower() == "title":
                level = 1
            elif heading_style:
                level = int(heading_style[1])
            elif style is not None and depth < _DEEPEST_STYLE:
                outline = style.find(f"{_W}pPr/{_W}outlineLvl")
                based = style.find(f"{_W}basedOn")
                if outline is not None and outline.get(_VAL, "9") in "012345":
                    level = int(outline.get(_VAL)) + 1
                elif based is not None and not name.lower().startswith("toc "):
                    level = self._style_level(based.get(_VAL, ""), depth + 1) or 0
            self._levels[style_id] = level
        return self._levels[style_id] or None

    def _style_and_above(self, style_id: str) -> Iterator[XmlElement]:
        """Yield a style and those that it extends, each of which has what the next one has unless
        it changes it."""
        for _ in range(_DEEPEST_STYLE):
            style = self._styles.get(style_id)
            if style is None:
                return
            yield style
            style_id = _value(style, "basedOn")

    def _item(self, element: XmlElement) -> str:
        """Return the mark of an item of a list with its indentation, "" for any other paragraph."""
        if _is_end_deleted(element):
            return ""
        properties = element.find(f"{_W}pPr/{_W}numPr")
        name = ""
        if properties is None:
            for style in self._style_and_above(_value(element, f"pPr/{_W}pStyle")):
                properties = style.find(f"{_W}pPr/{_W}numPr")
                name = _value(style, "name").lower()
                if properties is not None or name.startswith("list bullet"):
                    break
        if properties is None:
            if not name.startswith("list bullet"):
                return ""
            return "  " * _style_depth(name) + "- "
        depth = whole_number(_value(properties, "ilvl"), _style_depth(name))
        numbering = _value(properties, "numId")
        # Word's numbering 0 takes a paragraph out of the list of its style.
        if numbering == "0":
            return ""
        return "  " * min(depth, DEEPEST_ITEM) + self._lists.next_mark(numbering, depth)

    def _table(self, table: XmlElement) -> str:
        """Return a table; merged cells are repeated in each grid cell that they cover."""
        frame = _only_cell(table)
        if frame is not None:
            return self._text_of_blocks(frame)
        rows: list[list[tuple[str, int, int]]] = []
        n_header = 0
        above: dict[int, str] = {}
        has_merged = False
        inner: list[tuple[str, str]] = []
        for row in _children(table, f"{_W}tr"):
            within: list[XmlElement] = []
            cells, n_columns, above = self._row(row, above, within)
            inner += [(cells[0][0], self._table(element)) for element in within]
            marked = row.find(f"{_W}trPr/{_W}tblHeader") is not None
            # A header with merged cells goes on in the row below, which parts them.
            is_parted = has_merged and n_header > 0 and len(cells) > len(rows[-1])
            if is_parted:
                is_parted = goes_on_below(*spanned([rows[-1], cells]))
            if n_header == len(rows) and (marked or is_parted):
                n_header += 1
            has_merged = 1 < len(cells) < n_columns
            if len(rows) == n_header == 0:
                n_header = 1
            rows.append(cells)
        text = markdown_table(spanned(rows), min(n_header, max(1, len(rows) - 1)))
        return below_table(text, inner)

    def _row(
        self, row: XmlElement, above: Mapping[int, str], within: list[XmlElement]
    ) -> tuple[list[tuple[str, int, int]], int, dict[int, str]]:
        """Return the cells of a row, its columns in the grid, and the texts of its cells that may
        go on below; `above` are those of the row before. Tables in its cells go to `within`."""
        n_skipped = whole_number(_value(row, f"trPr/{_W}gridBefore"))
        cells: list[tuple[str, int, int]] = [("", 1, 1)] * min(n_skipped, 100)
        column = len(cells)
        below: dict[int, str] = {}
        for cell in _children(row, f"{_W}tc"):
            merge = cell.find(f"{_W}tcPr/{_W}vMerge")
            n_columns = min(whole_number(_value(cell, f"tcPr/{_W}gridSpan"), 1), 1000)
            if cells and _continues_left(cell):
                text, n_rows, n_before = cells[-1]
                cells[-1] = text, n_rows, n_before + n_columns
                column += n_columns
                continue
            text = self._cell(cell, within)
            if merge is not None:
                if merge.get(_VAL, "continue") == "continue":
                    text = above.get(column, text)
                below[column] = text
            cells.append((text, 1, n_columns))
            column += n_columns
        return cells, column, below

    def _cell(self, cell: XmlElement, within: list[XmlElement] | None = None) -> str:
        """Return the content of a cell on one line, tables within it included, but for those with
        rows and columns where `within` takes them."""
        texts = []
        for element in _blocks(cell):
            if element.tag == f"{_W}p":
                text = self._own_text(element)
                # Within a cell a heading is a text as any other.
                if text and self._level(element) is None:
                    text = self._item(element) + text
                texts += [text, *self._boxes(element, in_cell=True)]
                continue
            if element.tag == f"{_W}altChunk":
                texts.append(self._chunk(element))
                continue
            cells = [list(_children(row, f"{_W}tc")) for row in _children(element, f"{_W}tr")]
            if within is not None and len(cells) > 1 and max(map(len, cells)) > 1:
                within.append(element)
            else:
                texts += map(self._cell, chain(*cells))
        return one_line(" ".join(texts))


def _is_end_deleted(paragraph: XmlElement) -> bool:
    """Return whether the end of a paragraph is tracked as deleted: what follows it continues it."""
    return paragraph.find(f"{_W}pPr/{_W}rPr/{_W}del") is not None


def _continues_left(cell: XmlElement) -> bool:
    """Return whether a cell is a part of the one on its left, as older programs write it."""
    merge = cell.find(f"{_W}tcPr/{_W}hMerge")
    return merge is not None and merge.get(_VAL, "continue") == "continue"


def _has(element: XmlElement, tag: str) -> bool:
    return next(iter(element.iter(tag)), None) is not None


def _value(parent: XmlElement, name: str) -> str:
    """Return the value of a property, "" without one."""
    return attribute_at(parent, f"{_W}{name}", _VAL)


def _style_depth(name: str) -> int:
    """Return the depth of the items of a style: List Bullet 2 is within another list."""
    deeper = re.search(r" ([2-9])$", name)
    if deeper is None:
        return 0
    return int(deeper[1]) - 1


def _follow_field(mark: XmlElement, fields: list[_Field], parts: list[str]) -> None:
    """Follow the beginning, the middle or the end of a field: of its instruction, in which other
    fields may have results, nothing is text. A field without a result shows its sign or choice."""
    kind = mark.get(f"{_W}fldCharType")
    if kind == "begin":
        fields.append(_Field(len(parts), _form_value(mark)))
    elif fields and mark.tag == f"{_W}instrText":
        instruction = fields[-1].instruction + (mark.text or "")
        fields[-1] = fields[-1]._replace(instruction=instruction)
    elif fields:
        field = fields.pop()
        if not field.is_result:
            del parts[field.start :]
        if kind == "separate":
            fields.append(field._replace(is_result=True))
        elif not "".join(parts[field.start :]):
            parts.append(field.shown or symbol_of_field(field.instruction))


def _form_value(mark: XmlElement) -> str:
    """Return what a box to be ticked, or a list to choose from, shows in a form; "" without one."""
    box = mark.find(f"{_W}ffData/{_W}checkBox")
    if box is not None:
        for name in ("checked", "default"):
            switch = box.find(f"{_W}{name}")
            if switch is not None:
                return {True: "☐", False: "☒"}[switch.get(_VAL, "1") in OFF]
        return "☐"
    choices = mark.find(f"{_W}ffData/{_W}ddList")
    if choices is None:
        return ""
    entries = [entry.get(_VAL, "") for entry in choices.iterchildren(f"{_W}listEntry")]
    chosen = whole_number(_value(choices, "result") or _value(choices, "default"))
    return "".join(entries[chosen : chosen + 1])


def _symbol(element: XmlElement) -> str:
    """Return the sign of a font, unless only that font knows which one it is."""
    code = element.get(f"{_W}char", "")
    if not re.fullmatch("[0-9A-Fa-f]{2,5}", code):
        return ""
    return symbol_of_font(int(code, 16), element.get(f"{_W}font", ""))


def _check_written(element: XmlElement) -> None:
    """Raise `UnwritableMath` if an element is an equation that only its own program can show."""
    name = element.tag.rpartition("}")[2]
    if name == "OLEObject" and element.get("ProgID", "").startswith("Equation"):
        raise UnwritableMath(element.get("ProgID"))
    # A field has its instruction in runs of their own, or in an attribute.
    instruction = ""
    if name == "instrText":
        instruction = element.text or ""
    elif name == "fldSimple":
        instruction = element.get(f"{_W}instr", "")
    if re.match(r"\s*EQ\s", instruction):
        raise UnwritableMath("EQ field")


def _only_cell(table: XmlElement) -> XmlElement | None:
    """Return the cell of a table of one cell: a frame around its content."""
    cells: list[XmlElement] = []
    for row in _children(table, f"{_W}tr"):
        cells += _children(row, f"{_W}tc")
    if len(cells) != 1:
        return None
    return cells[0]


def _inner(element: XmlElement) -> list[XmlElement]:
    """Return the element, or its content: content controls, tracked insertions and contents with a
    fallback wrap others."""
    if element.tag == f"{_W}sdt":
        children = list(chain.from_iterable(element.iterchildren(f"{_W}sdtContent")))
    elif element.tag == ALTERNATIVES:
        choices = (child for child in element.iterchildren() if child.tag != FALLBACK)
        children = list(chain.from_iterable(choices))
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
    """Yield the paragraphs, tables and files in `parent`, those in content controls as well."""
    return _children(parent, f"{_W}p", f"{_W}tbl", f"{_W}altChunk")
