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
from statistics import median
from typing import Any, BinaryIO

from kinject.disk import read_bytes
from kinject.documents.boxes import (
    WIDE,
    Box,
    Rule,
    cell_text,
    flat,
    header_only,
    in_logical_order,
    is_right_to_left,
    joined_line,
    lines_of,
    middle,
    text_of,
    without_furniture,
    words_of,
)
from kinject.documents.layout import compose, in_reading_order
from kinject.documents.letters import (
    SLANTED,
    Corners,
    Frame,
    Letter,
    Pdfium,
    letters_of,
    main_turns,
    page_with_typed_text,
)
from kinject.documents.readers import LocatedDocument, ReadOptions, UnreadPart
from kinject.documents.text import (
    goes_on_below,
    import_extra,
    library_errors,
    markdown_table,
    one_line,
    whole_file,
)
from kinject.errors import InputError
from kinject.terminal import format_count

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
        # Which browsers draw where they part a word.
        "\u2010": "-",
        # Marks of direction: the letters are in order without them.
        **dict.fromkeys("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", ""),
        "\u00a0": " ",
    }
)
_NO_TITLE = re.compile(
    r"^(?:untitled|\(?(?:anonymous|unspecified)\)?$|microsoft word|powerpoint"
    r"|.*\.(?:docx?|pdf|tex|dvi|indd|qxd|html?|pptx?)$)",
    re.IGNORECASE,
)

_LATIN_WORD = re.compile("[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]+")
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")

# In sizes of the font: letters whose middles are nearer are below one another.
_SAME_COLUMN = 0.3

_BOLD = 600
"""The weight of a font from which it is bold (400 is regular, 700 bold)."""
# Points up to which rules are one, or touch: they are drawn with a width.
_NEAR = 3
# Points: a shorter rule is a dash, a letter or a box to be ticked.
_SHORTEST_RULE = 6


Sheets = dict[int, list[Box]]
"""The words of a page by the quarter turns to the right after which they are upright."""


def read_pdf(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the text of a PDF as one document, and an error for each page that cannot be read;
    `pages` in meta are [start, number] of each page with text.

    Raises `InputError` where a password is needed, and where no page holds text (scanned images).
    """
    pdfium = import_extra("pypdfium2", path)
    document = _opened(path, read_bytes(path, options.largest, stream), pdfium)
    pages: list[Sheets] = []
    faults: dict[int, str] = {}
    comments: list[str] = []
    try:
        meta = _meta(document, pdfium.raw)
        for index in range(pdfium.raw.FPDF_GetPageCount(document)):
            number = index + 1
            try:
                with library_errors(Path(f"{path}: page {number}"), "PDF", _FIX):
                    pages.append(_page(document, index, pdfium, comments))
            except InputError as error:
                # The other pages have their text.
                faults[number] = str(error)
                pages.append({})
    finally:
        document.close()
    if not any(pages) and not faults:
        raise InputError(
            f"{path}: empty document: none of its {format_count(len(pages), 'page')} holds text. "
            "It is a scan, which needs OCR: run ocrmypdf on it."
        )
    # Without any text the file is lost.
    kind = UnreadPart if any(pages) else InputError
    for number, fault in faults.items():
        yield f"{path}: page {number}", kind(fault)
    if any(pages):
        text, starts, title = compose(_ordered(pages))
        stated = meta.pop("title", "")
        if stated and not _NO_TITLE.match(stated):
            title = stated
        meta["pages"] = starts
        without = [n for n, sheets in enumerate(pages, start=1) if not sheets and n not in faults]
        if without and len(pages) > 1:
            meta["pages_without_text"] = without
        # Below the text, as those of Word documents are.
        yield whole_file(path, title, "\n\n".join([text, *map(one_line, comments)]), meta)


def _opened(path: Path, data: bytes, pdfium: Pdfium) -> Pdfium:
    """Return the open PDF. Raises `InputError` if it needs a password or is damaged."""
    with library_errors(path, "PDF", _FIX):
        try:
            document: Pdfium = pdfium.PdfDocument(data)
            form = document.get_formtype()
            if form == pdfium.raw.FORMTYPE_XFA_FULL:
                raise InputError(
                    f"{path}: a form that only Adobe's programs show (XFA): its one page asks to "
                    "wait for them. Print it to a new PDF from Acrobat."
                )
            # Draws the values of fields that have none drawn; before any page is loaded.
            if form == pdfium.raw.FORMTYPE_ACRO_FORM:
                document.init_forms()
            return document
        except pdfium.PdfiumError as error:
            if "password" not in str(error).lower():
                raise
            raise InputError(
                f"{path}: locked: the PDF needs a password. Save a copy without one."
            ) from error


def _meta(document: Pdfium, raw: Pdfium) -> dict[str, Any]:
    """Return title, author and date, as far as the PDF states them."""
    date = re.match(r"D:(\d{4})(\d\d)(\d\d)", _stated(document, b"CreationDate", raw))
    fields = {
        "title": _stated(document, b"Title", raw),
        "author": _stated(document, b"Author", raw),
        "date": "-".join(date.groups()) if date else "",
    }
    return {key: value for key, value in fields.items() if value}


def _stated(document: Pdfium, key: bytes, raw: Pdfium) -> str:
    """Return what a PDF states of itself, without characters that no text may hold."""
    n_bytes = raw.FPDF_GetMetaText(document, key, None, 0)
    buffer = ctypes.create_string_buffer(n_bytes)
    raw.FPDF_GetMetaText(document, key, buffer, n_bytes)
    # pypdfium2's own function raises at half a surrogate pair.
    text = buffer.raw.decode("utf-16-le", "ignore")
    return one_line(_CONTROL.sub(" ", text))


def _ordered(pages: Sequence[Sheets]) -> list[list[Box]]:
    """Return the lines and tables of pages in reading order: upright text, then what is turned."""
    kept: list[Sheets] = [{} for _ in pages]
    for turn in (*range(4), SLANTED):
        # Running headers go first: of all that raised the number of cells found, this mattered
        # most.
        sheets = without_furniture([page.get(turn, []) for page in pages])
        for page, boxes in zip(kept, sheets, strict=True):
            if boxes:
                page[turn] = boxes
    # A page of nothing but its running headers keeps them.
    return [_lines(page or whole) for page, whole in zip(kept, pages, strict=True)]


def _lines(sheets: Sheets) -> list[Box]:
    """Return the lines and tables of a page."""
    n_words = {turn: len(boxes) for turn, boxes in sheets.items()}
    lines: list[Box] = []
    for turn in sorted(sheets):
        turned = in_reading_order(sheets[turn])
        if n_words[turn] < max(n_words.values()):
            # A stamp in the margin may be in the largest print, and is no heading.
            usual = median(box.size for box in flat(list(sheets.values())))
            turned = [line._replace(size=min(line.size, usual), bold=False) for line in turned]
        lines += turned
    return lines


def _page(document: Pdfium, index: int, pdfium: Pdfium, comments: list[str]) -> Sheets:
    """Return the words and the ruled tables of a page, apart by the direction of their letters;
    what its notes say goes to `comments`."""
    raw = pdfium.raw
    page = page_with_typed_text(document, index, raw, comments)
    text_page = None
    try:
        n_objects = raw.FPDFPage_CountObjects(page)
        text_page = page.get_textpage()
        n_chars = text_page.count_chars()
        if max(n_objects, n_chars) > _MOST_OPERATIONS:
            raise ValueError(f"more than {_MOST_OPERATIONS:,} drawing operations")
        turns = page.get_rotation() // 90
        main = main_turns(text_page, n_chars, raw)
        if main != turns:
            # Of lines that it does not see as level PDFium puts the letters between two kerned
            # pairs in another order, with white space within words.
            page.set_rotation(90 * main)
            text_page.close()
            text_page = page.get_textpage()
            n_chars = text_page.count_chars()
        text = text_page.get_text_range()
        frame = Frame(page.get_bbox(), turns, is_right_to_left(text))
        letters = letters_of(text_page, n_chars, frame, raw)
        if not letters:
            return {}
        counts = {turn: len(turned) for turn, turned in letters.items()}
        # The rules are those of the text that most of the page is.
        main = max(counts, key=counts.__getitem__)
        if _is_vertical(letters[main]):
            return {0: _plain_lines(text)}
        across, down = _rules(page, frame, main, pdfium)
        sheets: Sheets = {}
        for turn, turned in letters.items():
            left, _, right, _ = frame.place(turn, frame.corners)
            ordered = in_logical_order(turned, frame.is_mirrored)
            rules: list[Rule] = []
            if turn == main:
                rules = down
            drawn = _words(text_page, ordered, rules, raw)
            # What is slanted may leave the page as it is made level.
            if turn != SLANTED:
                drawn = (word for word in drawn if left - 5 <= word.x0 <= right + 5)
            # A dict: bold text may be drawn twice.
            sheets[turn] = list(dict.fromkeys(drawn))
        _take_tables(sheets, main, frame, across, down)
        sheets = {turn: boxes for turn, boxes in sheets.items() if boxes}
        own = text_of(flat(list(sheets.values())))
        if _has_letters_apart(own) and not _has_letters_apart(text):
            return {0: _plain_lines(text)}
        return sheets
    finally:
        if text_page is not None:
            text_page.close()
        page.close()


def _is_vertical(letters: Sequence[Letter]) -> bool:
    """Return whether most of the letters of Chinese or Japanese stand below one another."""
    n_below = n_wide = 0
    for letter, following in pairwise(letters):
        if not WIDE.match(letter.text):
            continue
        n_wide += 1
        is_same_column = abs(middle(following)[0] - middle(letter)[0]) < _SAME_COLUMN * letter.size
        n_below += is_same_column and following.y0 > letter.y0
    return 2 * n_below > n_wide > 0


def _has_letters_apart(text: str) -> bool:
    """Return whether over a third of the words in Latin letters are single letters."""
    words = _LATIN_WORD.findall(text)
    n_single = sum(len(word) == 1 for word in words)
    return n_single > len(words) / 3


def _plain_lines(text: str) -> list[Box]:
    """Return the lines of PDFium's own text, which has no boxes, as lines of even print."""
    boxes = []
    for number, line in enumerate(text.splitlines()):
        clean = one_line(re.sub("[\x02\ufffe]", "-", line).translate(_LIGATURES))
        if clean:
            upper = 15.0 * number
            boxes.append(Box(0, upper, 6.0 * len(clean), upper + 12, clean, 12))
    return boxes


def _words(
    text_page: Pdfium, letters: Sequence[Letter], down: list[Rule], raw: Pdfium
) -> Iterator[Box]:
    """Yield the words of letters; rules `down` part them."""
    for word in words_of(letters, down):
        text = word.text.translate(_LIGATURES)
        if not text:
            continue
        is_bold = raw.FPDFText_GetFontWeight(text_page, word.number) >= _BOLD
        yield Box(word.x0, word.y0, word.x1, word.y1, text, word.size, is_bold)


def _rules(page: Pdfium, frame: Frame, turn: int, pdfium: Pdfium) -> tuple[list[Rule], list[Rule]]:
    """Return the horizontal and the vertical rules of a page, thin rectangles as well."""
    across: list[Rule] = []
    down: list[Rule] = []
    for corners in _drawn_rules(page, pdfium):
        x0, y0, x1, y1 = frame.place(turn, corners)
        if x1 - x0 > _SHORTEST_RULE:
            across.append(Rule((y0 + y1) / 2, x0, x1))
        elif y1 - y0 > _SHORTEST_RULE:
            down.append(Rule((x0 + x1) / 2, y0, y1))
        if len(across) + len(down) > _MOST_RULES:
            return [], []
    return across, down


def _drawn_rules(page: Pdfium, pdfium: Pdfium) -> Iterator[Corners]:
    """Yield the boxes of lines and thin rectangles on a page."""
    raw = pdfium.raw
    for drawn in page.get_objects(filter=[raw.FPDF_PAGEOBJ_PATH], max_depth=4):
        try:
            left, bottom, right, upper = drawn.get_bounds()
        except pdfium.PdfiumError:
            continue
        if right - left < 3 or upper - bottom < 3:
            yield left, bottom, right, upper
            continue
        for (ax, ay), (bx, by) in pairwise(_corners(drawn, raw)):
            if abs(ay - by) < 1 or abs(ax - bx) < 1:
                yield min(ax, bx), min(ay, by), max(ax, bx), max(ay, by)


def _corners(drawn: Pdfium, raw: Pdfium) -> Iterator[tuple[float, float]]:
    """Yield the corners of a path whose lines are drawn, none of a drawing with thousands."""
    n_segments = raw.FPDFPath_CountSegments(drawn)
    stroke, fill = ctypes.c_int(), ctypes.c_int()
    if n_segments > _MOST_SEGMENTS:
        return
    if raw.FPDFPath_GetDrawMode(drawn, fill, stroke) and stroke.value:
        yield from _points(drawn, n_segments, raw)


def _points(drawn: Pdfium, n: int, raw: Pdfium) -> Iterator[tuple[float, float]]:
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


def _take_tables(
    sheets: Sheets, main: int, frame: Frame, across: list[Rule], down: list[Rule]
) -> None:
    """Put the ruled tables of a page in the place of their words; a line that stands on its side in
    one of their cells, as names of columns do, is a part of it."""
    lines: dict[int, tuple[int, list[Box]]] = {}
    labels: list[Box] = []
    for turn in sheets.keys() - {main, SLANTED}:
        for line in lines_of(sheets[turn]):
            box = joined_line(line)
            x0, y0, x1, y1 = frame.moved(box[:4], turn, main)
            label = box._replace(x0=x0, y0=y0, x1=x1, y1=y1)
            labels.append(label)
            lines[id(label)] = turn, line
    words, tables = _ruled_tables([*sheets[main], *labels], across, down)
    left_over = set(map(id, words))
    for label in labels:
        if id(label) not in left_over:
            turn, line = lines[id(label)]
            taken = set(map(id, line))
            sheets[turn] = [word for word in sheets[turn] if id(word) not in taken]
    sheets[main] = [*(word for word in words if id(word) not in lines), *tables]


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
        if not goes_on_below(rows[n_header - 1], rows[n_header]):
            break
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
