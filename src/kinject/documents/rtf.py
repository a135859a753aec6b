"""Rich text (RTF) by its groups: paragraphs, headings, tables, notes, text boxes, and the web page
that the RTF of a mail may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from kinject.disk import read_bytes
from kinject.documents.charsets import code_page_codec
from kinject.documents.html import page_of
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.symbols import is_symbol_font, raised, symbol_of_field, symbol_text
from kinject.documents.text import (
    heading,
    library_errors,
    markdown_table,
    one_line,
    spanned,
    whole_file,
)
from kinject.errors import InputError

_TOKEN = re.compile(
    rb"\\(?P<word>[a-zA-Z]{1,32})(?P<number>-?\d{1,10})? ?|\\'(?P<hex>[0-9a-fA-F]{2})"
    rb"|\\(?P<symbol>.)|(?P<brace>[{}])|[\r\n\0]+|(?P<text>[^\\{}\r\n\0]+)",
    re.DOTALL,
)
_CHARSETS = {
    **{0: 1252, 77: 10000, 128: 932, 129: 949, 130: 1361, 134: 936, 136: 950, 161: 1253},
    **{162: 1254, 163: 1258, 177: 1255, 178: 1256, 186: 1257, 204: 1251, 222: 874, 238: 1250},
    **{254: 437, 255: 850},
}
"""The charset of a font -> its code page; of others it is that of the file."""
_FILE_CHARSETS = {"ansi": 1252, "mac": 10000, "pc": 437, "pca": 850}
_CHARACTERS = {
    "tab": "\t",
    "line": "\n",
    "lbr": "\n",
    "column": "\n",
    "emdash": "—",
    "endash": "–",
    "emspace": " ",
    "enspace": " ",
    "qmspace": " ",
    "bullet": "•",
    "lquote": "‘",
    "rquote": "’",
    "ldblquote": "“",
    "rdblquote": "”",
    "zwj": "\u200d",
    "zwnj": "\u200c",
}
_BREAKS = frozenset({"par", "row", "sect", "page"})
_SYMBOLS = {"~": "\xa0", "_": "-"}
_MATH = {
    "msup": ("^(", ")"),
    "msub": ("_(", ")"),
    "mnum": ("(", ")"),
    "mden": ("/(", ")"),
    "mrad": ("√(", ")"),
}
"""A part of an equation -> what is written before and after it."""
_NO_TEXT = """author bkmkend bkmkstart buptim category colortbl comment company creatim doccomm
    filetbl footer footerf footerl footerr ftncn ftnsep ftnsepc aftncn aftnsep aftnsepc
    header headerf headerl headerr hlinkbase keywords manager mmathPict nextfile nonesttables
    nonshppict objdata operator pict pn pnseclvl printim private revtim rxe shprslt sp stylesheet
    subject tc template txe xe"""
_UNREAD = frozenset(_NO_TEXT.split())
"""Groups whose text no reader of the document sees, or sees elsewhere."""
_LATER = """annotation do dptxbxtext fldinst footnote moMath moMathPara nesttableprops shpinst
    shptxt ud"""
_READ_AFTER_STAR = frozenset(_LATER.split())
"""Groups of later versions of RTF that are read; others whose first token is ``\\*`` are not."""
_NOTES = frozenset({"footnote", "annotation"})
_OWN_FLOWS = frozenset({*_NOTES, "shptxt", "dptxbxtext", "fldinst", "listtext", "pntext", "title"})
"""Groups whose text is not a part of the paragraph that they are in."""


_SAME_EDGE = 60
"""Twips (a 20th of a point) up to which the edges of two cells are one edge of the table."""
_DEEPEST = 16
"""Levels of tables within tables."""


def _joined_surrogates(text: str) -> str:
    """Return `text` with each pair of surrogates as the one character that they stand for."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass
class _Edge:
    """The right edge of a cell, and whether it continues the cell on its left, or above."""

    position: int
    continues_left: bool = False
    continues_above: bool = False


@dataclass
class _Table:
    rows: list[tuple[list[str], list[_Edge]]] = field(default_factory=list)
    n_header: int = 0
    cells: list[str] = field(default_factory=list)
    cell: list[str] = field(default_factory=list)


class _Flow:
    """Text as it comes, of which control words make paragraphs, cells and rows."""

    def __init__(self) -> None:
        self.mark = ""
        self.n_added = 0
        self._parts: list[str] = []
        self._line: list[str] = []
        self._boxes: list[str] = []
        self._tables: list[_Table] = []
        self._edges: list[_Edge] = []
        self._next_edge = _Edge(0)
        self._is_header = False

    def add(self, text: str) -> None:
        self.n_added += len(text)
        self._line.append(text)

    def add_box(self, text: str) -> None:
        """Add a text box, which follows the paragraph that it is fixed to."""
        self._boxes.append(text)

    def structure(self, word: str, number: int | None, level: int, outline: int) -> bool:
        """Do what a control word says to paragraphs and tables, and return whether it does.

        `level` is that of tables within tables, 0 outside of them, `outline` that of a heading."""
        if word == "par":
            self._end_paragraph(level, outline)
        elif word in ("sect", "page"):
            self._end_paragraph(level, outline)
            self._parts.append("\n")
        elif word == "cell":
            self._end_cell(1)
        elif word == "nestcell":
            self._end_cell(max(level, 2))
        elif word == "row":
            self._end_row(1)
        elif word == "nestrow":
            self._end_row(max(level, 2))
        else:
            return self._row_format(word, number)
        return True

    def _row_format(self, word: str, number: int | None) -> bool:
        if word == "trowd":
            self._edges, self._next_edge, self._is_header = [], _Edge(0), False
        elif word == "trhdr":
            self._is_header = True
        elif word in ("clmrg", "clvmrg"):
            self._next_edge.continues_left |= word == "clmrg"
            self._next_edge.continues_above |= word == "clvmrg"
        elif word == "cellx":
            self._next_edge.position = number or 0
            self._edges.append(self._next_edge)
            self._next_edge = _Edge(0)
        else:
            return False
        return True

    def text(self) -> str:
        """Return all that was added, and end it."""
        self._end_paragraph(0, 0)
        self._close_tables(0)
        return re.sub(r"\n{3,}", "\n\n", "".join(self._parts)).strip()

    def _taken_line(self) -> str:
        """Return the text since the last paragraph, with its mark and text boxes."""
        lines = [_joined_surrogates("".join(self._line)).strip(), *self._boxes]
        if lines[0]:
            lines[0] = self.mark + lines[0]
        self._line.clear()
        self._boxes.clear()
        self.mark = ""
        return "\n".join(filter(None, lines))

    def _end_paragraph(self, level: int, outline: int) -> None:
        text = self._taken_line()
        # A row that has begun goes on, though its cells do not say that they are in a table.
        if level == 0 and self._tables and self._tables[0].cells:
            level = 1
        if level:
            self._table(level).cell.append(text)
            return
        self._close_tables(0)
        if outline and text:
            text = f"\n{heading(outline, text)}\n"
        self._parts.append(f"{text}\n")

    def _table(self, level: int) -> _Table:
        """Return the table of a level, after the tables within it are closed."""
        level = min(level, _DEEPEST)
        self._close_tables(level)
        while len(self._tables) < level:
            self._tables.append(_Table())
        return self._tables[level - 1]

    def _end_cell(self, level: int) -> None:
        text = self._taken_line()
        table = self._table(level)
        lines = [*table.cell, text]
        table.cells.append("\n".join(filter(None, lines)))
        table.cell = []

    def _end_row(self, level: int) -> None:
        table = self._table(level)
        rest = [*table.cell, self._taken_line()]
        # The last cell of a row may lack its end.
        if any(rest):
            table.cells.append("\n".join(filter(None, rest)))
        if self._is_header and table.n_header == len(table.rows):
            table.n_header += 1
        table.rows.append((table.cells, self._edges))
        table.cells, table.cell = [], []

    def _close_tables(self, level: int) -> None:
        """Write the tables that are deeper than `level`: the outermost as a table, others into the
        cell that they are in."""
        while len(self._tables) > level:
            table = self._tables.pop()
            left_over = "\n".join(filter(None, [*table.cells, *table.cell]))
            if self._tables:
                lines = [": ".join(filter(None, map(one_line, cells))) for cells, _ in table.rows]
                inner = "; ".join(filter(None, [*lines, left_over]))
                self._tables[-1].cell.append(inner)
                continue
            if table.rows:
                self._parts.append(f"{_table_text(table)}\n\n")
            if left_over:
                self._parts.append(f"{left_over}\n")


def _table_text(table: _Table) -> str:
    """Return a table as Markdown; a cell over several columns or rows is in each of them."""
    columns = _columns_of(table)
    rows: list[list[tuple[str, int, int]]] = []
    above: dict[int, str] = {}
    for cells, edges in table.rows:
        row: list[tuple[str, int, int]] = []
        texts: dict[int, str] = {}
        n_columns_before = 0
        for index, text in enumerate(cells):
            width = 1
            if len(edges) == len(cells):
                edge = edges[index]
                if edge.continues_left and row:
                    text = row[-1][0]
                elif edge.continues_above:
                    text = above.get(edge.position, text)
                texts[edge.position] = text
            if columns:
                width = max(1, columns[edges[index].position] - n_columns_before)
                n_columns_before = columns[edges[index].position]
            row.append((text, 1, width))
        rows.append(row)
        above = texts
    return markdown_table(spanned(rows), max(1, table.n_header))


def _columns_of(table: _Table) -> dict[int, int]:
    """Return position of an edge -> columns of the table left of it; nothing where the rows do not
    tell."""
    positions: set[int] = set()
    most_cells = 0
    for cells, edges in table.rows:
        if len(cells) != len(edges):
            return {}
        most_cells = max(most_cells, len(cells))
        positions.update(edge.position for edge in edges)
    columns: dict[int, int] = {}
    last = 0
    for position in sorted(positions):
        if not columns or position - last > _SAME_EDGE:
            last = position
            columns[position] = max(columns.values(), default=0) + 1
        else:
            columns[position] = columns[last]
    # Rows that do not share their edges are no grid.
    n_columns = max(columns.values(), default=0)
    if n_columns >= 2 * most_cells:
        return {}
    return columns


@dataclass
class _Group:
    """What holds from here to the end of a group, and after it no longer."""

    kind: str = ""
    is_read: bool = True
    starred: bool = False
    font: int = -1
    n_replaced: int = 1
    hidden: bool = False
    deleted: bool = False
    struck: bool = False
    raised: bool = False
    outside_page: bool = False
    level: int = 0
    heading: int = 0
    after: str = ""
    n_before: int = 0
    flow: _Flow = field(default_factory=_Flow)

    def is_unseen(self) -> bool:
        """Return whether text of the group is hidden, or was taken back."""
        return self.hidden or self.deleted or self.struck


def read_rtf(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a file of rich text: headings, paragraphs, tables, text boxes, and notes at its end."""
    data = read_bytes(path, options.largest, stream)
    with library_errors(path, "RTF file", "Save it as .docx."):
        title, text = rich_text(path, data)
    yield whole_file(path, title, text)


def rich_text(path: Path, data: bytes) -> tuple[str, str]:
    """Return the title ("" without one) and the text of RTF; of RTF that holds a web page, the
    text of that."""
    if b"{\\" not in data:
        raise InputError(f"{path}: not a readable RTF file: no group is in it. Rename it to .txt.")
    parser = _Parser(data[max(0, data.find(b"{\\rtf")) :])
    parser.parse()
    if parser.holds_page:
        page = _joined_surrogates("".join(parser.page))
        return page_of(path, page, whole_page=True)[:2]
    return parser.title, parser.text()


class _Parser:
    """Reads RTF token by token into the flow of the group that is open."""

    def __init__(self, data: bytes) -> None:
        self.title = ""
        self.holds_page = False
        self.page: list[str] = []
        self._data = data
        self._main = _Flow()
        self._group = _Group(flow=self._main)
        self._outer: list[_Group] = []
        self._notes: list[str] = []
        self._codec = "cp1252"
        self._font_codecs: dict[int, str] = {}
        self._font_names: dict[int, str] = {}
        self._default_font = -1
        self._listed_font = -1
        # Bytes are decoded together: a character may have two, one of them written as a letter.
        self._bytes = bytearray()
        self._n_to_skip = 0

    def parse(self) -> None:
        position = 0
        is_whole = self._data.startswith(b"{\\rtf")
        while position < len(self._data):
            match = _TOKEN.match(self._data, position)
            # A lone backslash ends a file that is cut off.
            if match is None:
                break
            position = match.end()
            if match["word"]:
                number = int(match["number"]) if match["number"] else None
                name = match["word"].decode("ascii")
                if name == "bin":
                    # Any bytes, braces among them, follow.
                    position += max(number or 0, 0)
                else:
                    self._word(name, number)
            elif match["hex"]:
                self._add_bytes(bytes.fromhex(match["hex"].decode("ascii")))
            elif match["text"]:
                self._add_bytes(match["text"])
            # A letter of two bytes may have one of these signs as its second: \'95\\ in Japanese.
            elif match["symbol"] in (b"{", b"}", b"\\"):
                self._add_bytes(match["symbol"])
            elif match["symbol"]:
                before = self._data[match.start() - 1 : match.start()]
                self._symbol(match["symbol"].decode("latin-1"), before)
            elif match["brace"] == b"{":
                self._open()
            elif match["brace"] == b"}":
                self._close()
                # What follows the document is none of it; a fragment is groups without one.
                if not self._outer and is_whole:
                    break
        while self._outer:
            self._close()

    def text(self) -> str:
        """Return the text of the whole document, the notes below it."""
        notes = [f"\n\n[^{number}]: {note}" for number, note in enumerate(self._notes, start=1)]
        return self._main.text() + "".join(notes)

    def _open(self) -> None:
        self._decode()
        self._n_to_skip = 0
        outer = self._group
        self._outer.append(outer)
        self._group = replace(outer, kind="", starred=False, after="")
        # Of the two groups in \upr the second one says the same in Unicode.
        if outer.kind == "upr":
            outer.kind = "upr second"
            self._group.is_read = False

    def _close(self) -> None:
        self._decode()
        self._n_to_skip = 0
        if not self._outer:
            return
        group = self._group
        if group.after:
            self._add(group.after)
        self._group = self._outer.pop()
        # The sign of a field is shown where its result has no text.
        if group.kind == "fldrslt" and group.flow.n_added > group.n_before:
            self._group.after = ""
        if group.kind not in _OWN_FLOWS or not group.is_read:
            return
        text = group.flow.text()
        flow = self._group.flow
        if group.kind == "title":
            self.title = " ".join(text.split())
        elif group.kind == "fldinst":
            self._group.after = symbol_of_field(text)
        elif not text or self._group.is_unseen():
            return
        elif group.kind in _NOTES:
            self._notes.append(text)
            flow.add(f"[^{len(self._notes)}]")
        elif group.kind in ("listtext", "pntext"):
            flow.mark = "- "
            # Word's second bullet is an o of Courier; numbers have a dot or a bracket.
            if text != "o" and any(map(str.isalnum, text)):
                flow.mark = f"{text} "
        else:
            flow.add_box(text)

    def _symbol(self, symbol: str, before: bytes) -> None:
        self._decode()
        if self._replaces_unicode(symbol, _SYMBOLS):
            return
        self._n_to_skip = 0
        if symbol == "*":
            # Within a group, where StarWriter has it, a star says nothing.
            self._group.starred = before == b"{"
        elif symbol in "\r\n":
            self._word("par", None)
        elif symbol in _SYMBOLS:
            self._add(_SYMBOLS[symbol])

    def _word(self, name: str, number: int | None) -> None:
        self._decode()
        group = self._group
        if name == "u" and number is not None:
            self._unicode(number)
            return
        if self._replaces_unicode(name, _CHARACTERS):
            return
        self._n_to_skip = 0
        if self._is_in_fonts():
            self._list_font(name, number)
            return
        if self._begins_group(name):
            return
        if name in _CHARACTERS:
            self._add(_CHARACTERS[name])
        elif name in _FILE_CHARSETS or name == "ansicpg":
            self._codec = code_page_codec(_FILE_CHARSETS.get(name, number or 0)) or self._codec
        elif name == "fromhtml":
            self.holds_page = number != 0
        elif not group.is_read:
            return
        elif self.holds_page and name in _BREAKS:
            self._add("\n")
        elif not group.flow.structure(name, number, group.level, group.heading):
            self._format(name, number)

    def _begins_group(self, name: str) -> bool:
        """Note what kind of group a control word says that this one is; return whether it does."""
        group = self._group
        starred, group.starred = group.starred, False
        is_property = name.startswith("m") and name.endswith("Pr")
        is_unread = name in _UNREAD or (starred and name not in _READ_AFTER_STAR)
        # A web page in rich text has its links in tags.
        if name == "fldinst" and self.holds_page:
            is_unread = True
        if name == "htmltag" and self.holds_page:
            group.kind, group.outside_page = name, False
        elif is_unread or is_property:
            group.is_read = False
        elif name in _OWN_FLOWS:
            group.kind, group.flow, group.raised = name, _Flow(), False
            group.level = group.heading = 0
        elif name in ("upr", "fonttbl"):
            group.kind = name
        elif name == "fldrslt":
            group.kind, group.n_before = name, group.flow.n_added
        elif name in _MATH:
            before, group.after = _MATH[name]
            self._add(before)
        else:
            return False
        return True

    def _format(self, name: str, number: int | None) -> None:
        """Change how the group's text is read by a control word."""
        group = self._group
        is_on = number != 0
        if name == "f":
            group.font = number or 0
        elif name == "deff":
            self._default_font = group.font = number or 0
        elif name == "plain":
            group.font, group.hidden, group.deleted = self._default_font, False, False
            group.raised = group.struck = False
        elif name == "uc":
            group.n_replaced = max(number or 0, 0)
        elif name == "v":
            group.hidden = is_on
        # Text that is struck through was taken back, as deleted text was.
        elif name in ("strike", "striked"):
            group.struck = is_on
        elif name == "deleted":
            group.deleted = is_on
        elif name in ("super", "sub", "nosupersub"):
            group.raised = name == "super" and is_on
        elif name == "htmlrtf":
            group.outside_page = is_on
        else:
            self._format_paragraph(name, number)

    def _format_paragraph(self, name: str, number: int | None) -> None:
        group = self._group
        if name == "pard":
            group.level = group.heading = 0
        elif name == "intbl":
            group.level = max(group.level, 1)
        elif name == "itap":
            group.level = max(number or 0, 0)
        elif name == "outlinelevel" and number is not None and 0 <= number < 9:
            group.heading = number + 1

    def _list_font(self, name: str, number: int | None) -> None:
        """Note the code page of a font of the table of fonts."""
        if name == "f":
            self._listed_font = number or 0
        elif name == "fcharset" and number in _CHARSETS:
            self._font_codecs[self._listed_font] = code_page_codec(_CHARSETS[number])
        elif name == "cpg" and code_page_codec(number or 0):
            self._font_codecs[self._listed_font] = code_page_codec(number or 0)

    def _unicode(self, number: int) -> None:
        """Add a unit of UTF-16; the characters that stand for it in older programs are skipped."""
        # Numbers are signed, of 16 bits; some programs write the character's own.
        if number < 0:
            number += 0x10000
        if 0 < number <= 0x10FFFF:
            self._add(chr(number))
        self._n_to_skip = self._group.n_replaced

    def _replaces_unicode(self, name: str, characters: Mapping[str, str]) -> bool:
        """Return whether one of `characters` stands for one in Unicode: \\u8217\\rquote is one."""
        if self._n_to_skip == 0 or name not in characters:
            return False
        self._n_to_skip -= 1
        return True

    def _add_bytes(self, data: bytes) -> None:
        n_skipped = min(self._n_to_skip, len(data))
        self._n_to_skip -= n_skipped
        self._bytes += data[n_skipped:]

    def _decode(self) -> None:
        if not self._bytes:
            return
        data = bytes(self._bytes)
        self._bytes.clear()
        if is_symbol_font(self._font_names.get(self._group.font, "")):
            self._add(data.decode("latin-1"))
            return
        codec = self._font_codecs.get(self._group.font, self._codec)
        try:
            text = data.decode(codec)
        except UnicodeDecodeError:
            text = data.decode(self._codec, "replace")
        self._add(text)

    def _add(self, text: str) -> None:
        group = self._group
        text = text.replace("\0", "")
        if not group.is_read:
            return
        if self._is_in_fonts():
            name = self._font_names.get(self._listed_font, "") + text
            self._font_names[self._listed_font] = name.rstrip("; ")
            return
        text = symbol_text(text, self._font_names.get(group.font, ""))
        if group.raised:
            text = raised(text)
        if self.holds_page:
            if group.kind == "htmltag" or not group.outside_page:
                self.page.append(text)
        elif not group.is_unseen():
            group.flow.add(text)

    def _is_in_fonts(self) -> bool:
        """Return whether the group is the table of fonts, or one of its fonts."""
        if self._group.kind == "fonttbl":
            return True
        return bool(self._outer) and self._outer[-1].kind == "fonttbl"
