"""PDF: its words in reading order, tables as Markdown.

PDFium finds characters and rules; this module finds their meaning: columns, paragraphs, headings,
tables, running headers.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from kinject.disk import read_bytes
from kinject.documents.boxes import (
    Box,
    cell_text,
    header_only,
    lines_of,
    middle,
    without_furniture,
)
from kinject.documents.layout import compose, in_reading_order
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import (
    import_extra,
    library_errors,
    markdown_table,
    one_line,
    whole_file,
)
from kinject.errors import InputError

_MOST_OPERATIONS = 200_000
"""Texts and drawings on one page of a PDF, and characters: a dense map has some ten thousand."""
_MOST_RULES = 5_000
"""Rules of one page among which tables are looked for."""
_MOST_SEGMENTS = 2_000
"""Lines of a path that may be rules: one with more is a drawing."""
_FIX = "Print it to a new PDF, or take it out."
_LIGATURES = str.maketrans(
    {
        **{"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl"},
        **dict.fromkeys("ﬅﬆ", "st"),
        # A soft hyphen shows at the end of a line only.
        "\u00ad": "",
        "\u00a0": " ",
    }
)
_NO_TITLE = re.compile(
    r"^(?:untitled|\(?(?:anonymous|unspecified)\)?$|microsoft word|powerpoint"
    r"|.*\.(?:docx?|pdf|tex|dvi|indd|qxd|html?|pptx?)$)",
    re.IGNORECASE,
)


# In heights of a word, as fonts differ: a letter whose middle is further up or down is on another
# line,
_OTHER_LINE = 0.5
# and one that is further to the right begins another word,
_SPACE = 0.25
# as does one with a smaller space and a rule in it: cells of a table may touch.
_RULE_SPACE = 0.03
_BOLD = 600
"""The weight of a font from which it is bold (400 is regular, 700 bold)."""
# Points up to which rules are one, or touch: they are drawn with a width.
_NEAR = 3
# Points: a shorter rule is a dash, a letter or a box to be ticked.
_SHORTEST_RULE = 6


class PdfPath(Protocol):
    """A path of pypdfium2's, which has no types."""

    def get_bounds(self) -> tuple[float, float, float, float]: ...

    def get_matrix(self) -> Any: ...


class PdfTextPage(Protocol):
    def count_chars(self) -> int: ...

    def close(self) -> None: ...


class PdfPage(Protocol):
    def get_textpage(self) -> PdfTextPage: ...

    def get_bbox(self) -> tuple[float, float, float, float]: ...

    def get_objects(self, *, filter: Sequence[int], max_depth: int) -> Iterator[PdfPath]: ...

    def close(self) -> None: ...


class PdfFile(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> PdfPage: ...

    def get_metadata_dict(self) -> dict[str, str]: ...

    def close(self) -> None: ...


class PdfiumRaw(Protocol):
    """PDFium's own functions, by their names in C."""

    def __getattr__(self, name: str) -> Any: ...


class Pdfium(Protocol):
    """The module pypdfium2."""

    raw: PdfiumRaw
    PdfiumError: type[Exception]

    def PdfDocument(self, data: bytes) -> PdfFile: ...


class Rule(NamedTuple):
    """A horizontal (`position` is y) or vertical (`position` is x) rule from `start` to `end`."""

    position: float
    start: float
    end: float


def read_pdf(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the text of a PDF as one document; `pages` in meta are [start, number] of each page
    with text.

    Raises `InputError` naming the page that cannot be read, where a password is needed, and where
    no page holds text (scanned images).
    """
    pdfium = import_extra("pypdfium2", path)
    document = _opened(path, read_bytes(path, options.largest, stream), pdfium)
    pages: list[list[Box]] = []
    try:
        meta = _meta(document)
        for number in range(len(document)):
            with library_errors(Path(f"{path}: page {number + 1}"), "PDF", _FIX):
                pages.append(_page(document, number, pdfium))
    finally:
        document.close()
    if not any(pages):
        raise InputError(
            f"{path}: empty document: none of its {len(pages)} pages holds text. "
            "It is a scan, which needs OCR: run ocrmypdf on it."
        )
    # Running headers go first: of all that raised the number of cells found, this mattered most.
    ordered = [in_reading_order(page) if page else [] for page in without_furniture(pages)]
    text, starts, title = compose(ordered)
    stated = meta.pop("title", "")
    if stated and not _NO_TITLE.match(stated):
        title = stated
    meta["pages"] = starts
    without = [number for number, boxes in enumerate(pages, start=1) if not boxes]
    if without and len(pages) > 1:
        meta["pages_without_text"] = without
    yield whole_file(path, title, text, meta)


def _opened(path: Path, data: bytes, pdfium: Pdfium) -> PdfFile:
    """Return the open PDF. Raises `InputError` if it needs a password or is damaged."""
    with library_errors(path, "PDF", _FIX):
        try:
            return pdfium.PdfDocument(data)
        except pdfium.PdfiumError as error:
            if "password" not in str(error).lower():
                raise
            raise InputError(
                f"{path}: locked: the PDF needs a password. Save a copy without one."
            ) from error


def _meta(document: PdfFile) -> dict[str, Any]:
    """Return title, author and date, as far as the PDF states them."""
    stated = document.get_metadata_dict()
    date = re.match(r"D:(\d{4})(\d\d)(\d\d)", stated["CreationDate"])
    fields = {
        "title": one_line(stated["Title"]),
        "author": one_line(stated["Author"]),
        "date": "-".join(date.groups()) if date else "",
    }
    return {key: value for key, value in fields.items() if value}


def _page(document: PdfFile, number: int, pdfium: Pdfium) -> list[Box]:
    """Return the words of a page, and its ruled tables."""
    page = document[number]
    text_page = None
    try:
        n_objects = pdfium.raw.FPDFPage_CountObjects(page)
        text_page = page.get_textpage()
        n_chars = text_page.count_chars()
        if max(n_objects, n_chars) > _MOST_OPERATIONS:
            raise ValueError(f"more than {_MOST_OPERATIONS:,} drawing operations")
        left, _, right, top = page.get_bbox()
        across, down = _rules(page, top, pdfium)
        drawn = _words(text_page, n_chars, top, down, pdfium.raw)
        # A dict: bold text may be drawn twice.
        words = list(dict.fromkeys(word for word in drawn if left - 5 <= word.x0 <= right + 5))
        if not words:
            return []
        words, tables = _ruled_tables(words, across, down)
        return [*words, *tables]
    finally:
        if text_page is not None:
            text_page.close()
        page.close()


class _Letter(NamedTuple):
    """A character on a page, with its box: points from the left and from the top."""

    text: str
    number: int
    x0: float
    y0: float
    x1: float
    y1: float


class _Word:
    """The letters of a word, as they are drawn."""

    def __init__(self, first: _Letter, size: float) -> None:
        self.number, self.size = first.number, size
        self.letters = [first.text]
        _, _, self.x0, self.y0, self.x1, self.y1 = first

    def add(self, letter: _Letter) -> None:
        self.letters.append(letter.text)
        self.x1 = max(self.x1, letter.x1)
        self.y0 = min(self.y0, letter.y0)
        self.y1 = max(self.y1, letter.y1)

    def is_continued_by(self, letter: _Letter, down: list[Rule]) -> bool:
        """Return whether a letter is close enough, and no rule of `down` is before it."""
        height = max(self.y1 - self.y0, 1.0)
        gap = letter.x0 - self.x1
        if abs((letter.y0 + letter.y1) - (self.y0 + self.y1)) / 2 > _OTHER_LINE * height:
            return False
        # Far to the right, or back to the left: another word.
        if gap > _SPACE * height or letter.x0 < self.x1 - height:
            return False
        if gap <= _RULE_SPACE * height:
            return True
        y = (self.y0 + self.y1) / 2
        return not any(
            self.x1 - 1 < rule.position < letter.x0 + 1 and rule.start < y < rule.end
            for rule in down
        )


def _words(
    text_page: PdfTextPage, n: int, top: float, down: list[Rule], raw: PdfiumRaw
) -> Iterator[Box]:
    """Yield the words of a page in the order in which they are drawn; rules `down` part them."""
    word: _Word | None = None
    for index in range(n):
        letter = _letter(text_page, index, top, raw)
        if letter is None:
            if word is not None:
                yield _box(text_page, word, raw)
            word = None
        elif word is None:
            word = _Word(letter, _size(text_page, letter, raw))
        elif word.is_continued_by(letter, down):
            word.add(letter)
        else:
            yield _box(text_page, word, raw)
            word = _Word(letter, _size(text_page, letter, raw))
    if word is not None:
        yield _box(text_page, word, raw)


def _letter(text_page: PdfTextPage, index: int, top: float, raw: PdfiumRaw) -> _Letter | None:
    """Return a character of a page, None for white space and what is no character."""
    code = raw.FPDFText_GetUnicode(text_page, index)
    letter = ""
    # PDFium's marks of a hyphen at the end of a line.
    if code in (2, 0xFFFE):
        letter = "-"
    elif 32 < code < 0x110000 and not 0xD800 <= code < 0xE000:
        letter = chr(code)
    if not letter.strip() or code == 0xFFFF:
        return None
    box = raw.FS_RECTF()
    if not raw.FPDFText_GetLooseCharBox(text_page, index, box):
        return None
    return _Letter(letter, index, box.left, top - box.top, box.right, top - box.bottom)


def _size(text_page: PdfTextPage, letter: _Letter, raw: PdfiumRaw) -> float:
    """Return the size of a letter's font; a file may state another and scale the page."""
    size: float = raw.FPDFText_GetFontSize(text_page, letter.number)
    height = letter.y1 - letter.y0
    return size if 0.3 * height < size < 3 * height else height


def _box(text_page: PdfTextPage, word: _Word, raw: PdfiumRaw) -> Box:
    text = "".join(word.letters).translate(_LIGATURES)
    is_bold = raw.FPDFText_GetFontWeight(text_page, word.number) >= _BOLD
    return Box(word.x0, word.y0, word.x1, word.y1, text, word.size, is_bold)


def _rules(page: PdfPage, top: float, pdfium: Pdfium) -> tuple[list[Rule], list[Rule]]:
    """Return the horizontal and the vertical rules of a page, thin rectangles as well."""
    raw = pdfium.raw
    across: list[Rule] = []
    down: list[Rule] = []
    for drawn in page.get_objects(filter=[raw.FPDF_PAGEOBJ_PATH], max_depth=4):
        if len(across) + len(down) > _MOST_RULES:
            return [], []
        try:
            left, bottom, right, upper = drawn.get_bounds()
        except pdfium.PdfiumError:
            continue
        if right - left < 3 or upper - bottom < 3:
            if right - left > _SHORTEST_RULE:
                across.append(Rule(top - (bottom + upper) / 2, left, right))
            elif upper - bottom > _SHORTEST_RULE:
                down.append(Rule((left + right) / 2, top - upper, top - bottom))
            continue
        for (ax, ay), (bx, by) in pairwise(_corners(drawn, raw)):
            if abs(ay - by) < 1 and abs(ax - bx) > _SHORTEST_RULE:
                across.append(Rule(top - (ay + by) / 2, min(ax, bx), max(ax, bx)))
            elif abs(ax - bx) < 1 and abs(ay - by) > _SHORTEST_RULE:
                down.append(Rule((ax + bx) / 2, top - max(ay, by), top - min(ay, by)))
    return across, down


def _corners(drawn: PdfPath, raw: PdfiumRaw) -> Iterator[tuple[float, float]]:
    """Yield the corners of a path whose lines are drawn, none of a drawing with thousands."""
    n_segments = raw.FPDFPath_CountSegments(drawn)
    stroke, fill = ctypes.c_int(), ctypes.c_int()
    if n_segments > _MOST_SEGMENTS:
        return
    if raw.FPDFPath_GetDrawMode(drawn, fill, stroke) and stroke.value:
        yield from _points(drawn, n_segments, raw)


def _points(drawn: PdfPath, n: int, raw: PdfiumRaw) -> Iterator[tuple[float, float]]:
    """Yield the corners of a path on the page; NaN separates its subpaths."""
    matrix = drawn.get_matrix()
    x, y = ctypes.c_float(), ctypes.c_float()
    first: tuple[float, float] | None = None
    for index in range(n):
        segment = raw.FPDFPath_GetPathSegment(drawn, index)
        raw.FPDFPathSegment_GetPoint(segment, x, y)
        point = matrix.on_point(x.value, y.value)
        if raw.FPDFPathSegment_GetType(segment) == raw.FPDF_SEGMENT_MOVETO:
            yield float("nan"), float("nan")
            first = point
        yield point
        if first is not None and raw.FPDFPathSegment_GetClose(segment):
            yield first


def _ruled_tables(
    words: list[Box], across: list[Rule], down: list[Rule]
) -> tuple[list[Box], list[Box]]:
    """Return the words outside of tables whose cells are ruled, and these tables."""
    tables = []
    for horizontal, vertical in _grids(across, down):
        xs = _merged(rule.position for rule in vertical)
        ys = _merged(rule.position for rule in horizontal)
        # Two cells side by side are no table, three may be its header.
        if len(xs) < 3 or len(ys) < 2 or (len(xs) == 3 and len(ys) == 2):
            continue
        enclosed = []
        for word in words:
            x, y = middle(word)
            if xs[0] < x < xs[-1] and ys[0] < y < ys[-1]:
                enclosed.append(word)
        if not enclosed:
            continue
        rows, n_header = _cells(enclosed, xs, ys, horizontal, vertical)
        text = markdown_table(rows, n_header) if len(rows) > 1 else header_only(rows[0])
        if text.startswith("| ") or "\n| " in text:
            enclosed_ids = set(map(id, enclosed))
            words = [word for word in words if id(word) not in enclosed_ids]
            tables.append(Box(xs[0], ys[0], xs[-1], ys[-1], text, enclosed[0].size, is_table=True))
    return words, tables


def _merged(values: Iterable[float]) -> list[float]:
    """Return sorted values without those that are nearly the same."""
    merged: list[float] = []
    for value in sorted(values):
        if not merged or value - merged[-1] > _NEAR:
            merged.append(value)
    return merged


def _grids(across: list[Rule], down: list[Rule]) -> list[tuple[list[Rule], list[Rule]]]:
    """Return the groups of rules that touch one another."""
    parent = list(range(len(across) + len(down)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    by_height = sorted(enumerate(across), key=_height)
    for offset, rule in enumerate(down):
        for index, other in by_height:
            if other.position > rule.end + _NEAR:
                break
            touches = other.start - _NEAR < rule.position < other.end + _NEAR
            if touches and other.position > rule.start - _NEAR:
                parent[root(index)] = root(len(across) + offset)
    groups: dict[int, tuple[list[Rule], list[Rule]]] = {}
    for index in range(len(parent)):
        horizontal, vertical = groups.setdefault(root(index), ([], []))
        if index < len(across):
            horizontal.append(across[index])
        else:
            vertical.append(down[index - len(across)])
    # A grid has a rule above and below, and one within it.
    grids = [group for group in groups.values() if len(group[0]) > 1 and len(group[1]) > 2]
    return sorted(grids, key=_first_height)


def _height(numbered: tuple[int, Rule]) -> float:
    return numbered[1].position


def _first_height(grid: tuple[list[Rule], list[Rule]]) -> float:
    return grid[0][0].position


Cell = tuple[int, int]
"""Row and column in a ruled grid."""


def _cells(
    words: list[Box], xs: list[float], ys: list[float], across: list[Rule], down: list[Rule]
) -> tuple[list[list[str]], int]:
    """Return the cells of a ruled grid, one that has no rule to its neighbour as part of it, and
    the rows of the header."""
    n_rows, n_columns = len(ys) - 1, len(xs) - 1
    owner = _owners(xs, ys, across, down)
    entries: defaultdict[Cell, list[Box]] = defaultdict(list)
    for word in words:
        x, y = middle(word)
        row = max(index for index in range(n_rows) if ys[index] <= y)
        column = max(index for index in range(n_columns) if xs[index] <= x)
        entries[owner[row, column]].append(word)
    rows: list[list[str]] = []
    for row in range(n_rows):
        cells = [entries.get(owner[row, column], []) for column in range(n_columns)]
        rows += _parted_rows(cells) if row else [list(map(cell_text, cells))]
    n_header = 1
    while n_header < n_rows - 1 and _has_merged(owner, n_header - 1, n_columns):
        n_header += 1
    return rows, n_header


def _has_merged(owner: Mapping[Cell, Cell], row: int, n_columns: int) -> bool:
    """Return whether a cell of a row spans columns, so that the header goes on below it."""
    owners = [owner[row, column] for column in range(n_columns)]
    return any(cell == following for cell, following in pairwise(owners))


def _parted_rows(cells: list[list[Box]]) -> list[list[str]]:
    """Return a row of a grid as its rows of text: several if there are no rules between them."""
    lines = [lines_of(words) for words in cells]
    counts = {len(cell_lines) for cell_lines in lines if cell_lines}
    # Three cells or more with as many lines each: wrapped texts would differ.
    if len(counts) != 1 or sum(map(bool, lines)) < 3:
        return [list(map(cell_text, cells))]
    n_lines = counts.pop()
    columns = [list(map(cell_text, cell_lines)) or [""] * n_lines for cell_lines in lines]
    return list(map(list, zip(*columns, strict=True)))


def _owners(
    xs: list[float], ys: list[float], across: list[Rule], down: list[Rule]
) -> dict[Cell, Cell]:
    """Return, for each cell of a grid, the first of the cells that no rule parts from it."""
    n_rows, n_columns = len(ys) - 1, len(xs) - 1
    owner = {cell: cell for cell in product(range(n_rows), range(n_columns))}

    def root(cell: Cell) -> Cell:
        while owner[cell] != cell:
            cell = owner[cell]
        return cell

    for row, column in product(range(n_rows), range(n_columns)):
        x, y = (xs[column] + xs[column + 1]) / 2, (ys[row] + ys[row + 1]) / 2
        if column + 1 < n_columns and not _is_ruled(down, xs[column + 1], y):
            owner[root((row, column + 1))] = root((row, column))
        if row + 1 < n_rows and not _is_ruled(across, ys[row + 1], x):
            owner[root((row + 1, column))] = root((row, column))
    return {cell: root(cell) for cell in owner}


def _is_ruled(rules: list[Rule], position: float, middle: float) -> bool:
    """Return whether one of the rules is between two cells."""
    return any(
        abs(rule.position - position) < 4 and rule.start - 1 <= middle <= rule.end + 1
        for rule in rules
    )
