"""PDF: its words in reading order, tables as Markdown.

PDFium finds characters and rules; this module finds their meaning: columns, paragraphs, headings,
tables, running headers.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kinject.disk import read_bytes
from kinject.documents.layout import (
    Box,
    cell_text,
    compose,
    header_only,
    in_reading_order,
    lines_of,
    middle,
    without_furniture,
)
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
_FIX = "Print it to a new PDF, or take it out."
_LIGATURES = str.maketrans({
    "ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st", "\u00ad": "", "\u00a0": " ",
})  # fmt: skip
_NO_TITLE = re.compile(
    r"^(?:untitled|\(?(?:anonymous|unspecified)\)?$|microsoft word|powerpoint"
    r"|.*\.(?:docx?|pdf|tex|dvi|indd|qxd|html?|pptx?)$)",
    re.IGNORECASE,
)


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
            f"{path}: empty document: none of its {len(pages)} pages holds text. It is a scan, which needs OCR: "
            "run ocrmypdf on it."
        )
    text, starts, title = compose(
        [in_reading_order(page) if page else [] for page in without_furniture(pages)]
    )
    stated = meta.pop("title", "")
    without = [number + 1 for number, boxes in enumerate(pages) if not boxes]
    yield whole_file(
        path, title if not stated or _NO_TITLE.match(stated) else stated, text,
        {**meta, "pages": starts, **({"pages_without_text": without} if without and len(pages) > 1 else {})},
    )  # fmt: skip


def _opened(path: Path, data: bytes, pdfium: Any) -> Any:
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


def _meta(document: Any) -> dict[str, Any]:
    """Return title, author and date, as far as the PDF states them."""
    stated = document.get_metadata_dict()
    date = re.match(r"D:(\d{4})(\d\d)(\d\d)", stated["CreationDate"])
    fields = {
        "title": one_line(stated["Title"]), "author": one_line(stated["Author"]),
        "date": "-".join(date.groups()) if date else "",
    }  # fmt: skip
    return {key: value for key, value in fields.items() if value}


def _page(document: Any, number: int, pdfium: Any) -> list[Box]:
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
        words = [
            word
            for word in _words(text_page, n_chars, top, down, pdfium.raw)
            if left - 5 <= word.x0 <= right + 5
        ]
        words = list(dict.fromkeys(words))  # bold text that is drawn twice
        if not words:
            return []
        words, tables = _ruled_tables(words, across, down)
        return [*words, *tables]
    finally:
        if text_page is not None:
            text_page.close()
        page.close()


def _words(text_page: Any, n: int, top: float, down: list[Rule], raw: Any) -> Iterator[Box]:
    """Yield the words of a page in the order in which they are drawn; the rules `down` part them."""
    box = raw.FS_RECTF()
    letters: list[str] = []
    x0 = y0 = x1 = y1 = size = 0.0
    start = 0

    def word() -> Box:
        weight = raw.FPDFText_GetFontWeight(text_page, start)
        return Box(x0, y0, x1, y1, "".join(letters).translate(_LIGATURES), size, weight >= 600)

    for index in range(n):
        code = raw.FPDFText_GetUnicode(text_page, index)
        letter = (
            "-"
            if code in (2, 0xFFFE)
            else chr(code)
            if 32 < code < 0x110000 and not 0xD800 <= code < 0xE000
            else ""
        )
        if (
            not letter.strip()
            or code == 0xFFFF
            or not raw.FPDFText_GetLooseCharBox(text_page, index, box)
        ):
            if letters:
                yield word()
                letters = []
            continue
        left, right, upper, lower = box.left, box.right, top - box.top, top - box.bottom
        if letters:
            height = max(y1 - y0, 1.0)
            apart = (
                abs((upper + lower) - (y0 + y1)) / 2 > 0.5 * height
                or left - x1 > 0.25 * height
                or left < x1 - height
            )
            close = left - x1 > 0.03 * height and any(
                x1 - 1 < rule.position < left + 1 and rule.start < (y0 + y1) / 2 < rule.end
                for rule in down
            )
            if apart or close:
                yield word()
                letters = []
        if letters:
            x1, y0, y1 = max(x1, right), min(y0, upper), max(y1, lower)
        else:
            x0, y0, x1, y1, start = left, upper, right, lower, index
            size = raw.FPDFText_GetFontSize(text_page, index)
            size = lower - upper if not 0.3 * (lower - upper) < size < 3 * (lower - upper) else size
        letters.append(letter)
    if letters:
        yield word()


def _rules(page: Any, top: float, pdfium: Any) -> tuple[list[Rule], list[Rule]]:
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
            if right - left > 6:
                across.append(Rule(top - (bottom + upper) / 2, left, right))
            elif upper - bottom > 6:
                down.append(Rule((left + right) / 2, top - upper, top - bottom))
            continue
        n_segments = raw.FPDFPath_CountSegments(drawn)
        stroke, fill = ctypes.c_int(), ctypes.c_int()
        if (
            n_segments > 2_000
            or not raw.FPDFPath_GetDrawMode(drawn, fill, stroke)
            or not stroke.value
        ):
            continue
        for (ax, ay), (bx, by) in pairwise(_points(drawn, n_segments, raw)):
            if abs(ay - by) < 1 and abs(ax - bx) > 6:
                across.append(Rule(top - (ay + by) / 2, min(ax, bx), max(ax, bx)))
            elif abs(ax - bx) < 1 and abs(ay - by) > 6:
                down.append(Rule((ax + bx) / 2, top - max(ay, by), top - min(ay, by)))
    return across, down


def _points(drawn: Any, n: int, raw: Any) -> Iterator[tuple[float, float]]:
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
        xs, ys = (
            _merged(rule.position for rule in vertical),
            _merged(rule.position for rule in horizontal),
        )
        if len(xs) < 3 or len(ys) < (2 if len(xs) > 3 else 3):
            continue
        enclosed = [
            word
            for word in words
            if xs[0] < middle(word)[0] < xs[-1] and ys[0] < middle(word)[1] < ys[-1]
        ]
        if not enclosed:
            continue
        rows, n_header = _cells(enclosed, xs, ys, horizontal, vertical)
        text = markdown_table(rows, n_header) if len(rows) > 1 else header_only(rows[0])
        if text.startswith("| ") or "\n| " in text:
            enclosed_ids = set(map(id, enclosed))
            words = [word for word in words if id(word) not in enclosed_ids]
            tables.append(Box(xs[0], ys[0], xs[-1], ys[-1], text, enclosed[0].size, is_table=True))
    return words, tables


def _merged(values: Any) -> list[float]:
    """Return sorted values without those that are nearly the same."""
    merged: list[float] = []
    for value in sorted(values):
        if not merged or value - merged[-1] > 3:
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

    by_height = sorted(range(len(across)), key=lambda index: across[index].position)
    for offset, rule in enumerate(down):
        for index in by_height:
            other = across[index]
            if other.position > rule.end + 3:
                break
            if other.position > rule.start - 3 and other.start - 3 < rule.position < other.end + 3:
                parent[root(index)] = root(len(across) + offset)
    groups: defaultdict[int, tuple[list[Rule], list[Rule]]] = defaultdict(lambda: ([], []))
    for index in range(len(parent)):
        if index < len(across):
            groups[root(index)][0].append(across[index])
        else:
            groups[root(index)][1].append(down[index - len(across)])
    return sorted(
        (group for group in groups.values() if len(group[0]) > 1 and len(group[1]) > 2),
        key=lambda group: group[0][0].position,
    )


def _cells(
    words: list[Box], xs: list[float], ys: list[float], across: list[Rule], down: list[Rule]
) -> tuple[list[list[str]], int]:
    """Return the cells of a ruled grid, one that has no rule to its neighbour as part of it, and
    the rows of the header."""
    n_rows, n_columns = len(ys) - 1, len(xs) - 1
    owner = {(row, column): (row, column) for row in range(n_rows) for column in range(n_columns)}

    def root(cell: tuple[int, int]) -> tuple[int, int]:
        while owner[cell] != cell:
            cell = owner[cell]
        return cell

    for row in range(n_rows):
        for column in range(n_columns):
            x, y = (xs[column] + xs[column + 1]) / 2, (ys[row] + ys[row + 1]) / 2
            if column + 1 < n_columns and not any(
                abs(r.position - xs[column + 1]) < 4 and r.start - 1 <= y <= r.end + 1 for r in down
            ):
                owner[root((row, column + 1))] = root((row, column))
            if row + 1 < n_rows and not any(
                abs(r.position - ys[row + 1]) < 4 and r.start - 1 <= x <= r.end + 1 for r in across
            ):
                owner[root((row + 1, column))] = root((row, column))
    entries: defaultdict[tuple[int, int], list[Box]] = defaultdict(list)
    for word in words:
        x, y = middle(word)
        row = max(index for index in range(n_rows) if ys[index] <= y)
        column = max(index for index in range(n_columns) if xs[index] <= x)
        entries[root((row, column))].append(word)
    rows: list[list[str]] = []
    for row in range(n_rows):
        cells = [entries.get(root((row, column)), []) for column in range(n_columns)]
        lines = [lines_of(words_of_cell) for words_of_cell in cells]
        counts = {len(cell_lines) for cell_lines in lines if cell_lines}
        parted = (
            row > 0 and len(counts) == 1 and sum(map(bool, lines)) > 2
        )  # rows without rules between them
        for index in range(max(counts) if parted else 1):
            rows.append([cell_text(cell_lines[index] if parted else words) if cell_lines else ""  # noqa: PERF401
                         for cell_lines, words in zip(lines, cells, strict=True)])  # fmt: skip
    n_header = 1
    while n_header < n_rows - 1 and any(
        root((n_header - 1, column)) == root((n_header - 1, column + 1))
        for column in range(n_columns - 1)
    ):
        n_header += 1
    return rows, n_header
