"""The letters of a page of a PDF as PDFium finds them, held so that their lines are level and run
from left to right."""

from __future__ import annotations

import ctypes
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

from kinject.documents.office import comment_text


class Pdfium(Protocol):
    """A part of pypdfium2 (the module, a file, a page, PDFium's functions), which has no types."""

    def __getattr__(self, name: str) -> Any: ...


Corners = tuple[float, float, float, float]
"""Left, bottom, right and top of a box in points from the left lower corner of the page; where the
page is held to be read, left, upper, right and lower."""

SLANTED = 4
"""The number, after those of the four quarter turns, of text in any other direction."""
# Points between upright text and text that is turned, once it is.
_AWAY = 10_000
# Degrees: a scan lies on the glass by a few, a watermark or the name of a column by 30 and more.
_MOST_TILT = 15
# Degrees from which lines of the width of a page reach into one another.
_LEAST_TILT = 0.3
# In sizes of the font: the box of a letter begins so far below the line that it stands on,
_BELOW = 0.22
# and ends so far above it.
_ABOVE = 0.93
# A lower box than Courier's, of 0.786, is that of the ink, which PDFium gives for letters that a
# PDF names itself (ActualText, in Chromium's of Arabic): a dot and its letter are on two lines.
_INK = 0.78
# Where the boxes in the middle of a page are lower than this, its fonts do not state their sizes.
_LEAST_OF_SIZE = 0.3
# No letter is thinner.
_THINNEST = 0.05
# Letters of a page by which its direction is found.
_SAMPLED = 300


class Letter(NamedTuple):
    """A letter, or several that are drawn as one: its box, the size of its font, its number in the
    order of drawing, and that of its word: white space parts words."""

    x0: float
    y0: float
    x1: float
    y1: float
    text: str
    size: float
    number: int
    word: int
    is_table: bool = False


class Frame(NamedTuple):
    """How a page is held to read it: its corners, the quarter turns after which it is upright, and
    whether it is mirrored, so that lines from right to left run from left to right."""

    corners: Corners
    turns: int
    is_mirrored: bool

    def place(self, turn: int, corners: Corners) -> Corners:
        """Return (left, upper, right, lower) of a box on the page, points from the top, after
        `turn` more quarter turns; what is slanted is level already."""
        turns = 0
        if turn != SLANTED:
            turns = self.turns + turn
        left, bottom, right, upper = _turned(corners, turns)
        top = _turned(self.corners, turns)[3]
        if self.is_mirrored:
            left, right = -right, -left
        # Far from the upright text, so that nothing there continues it.
        away = turn * _AWAY
        return left + away, top - upper + away, right + away, top - bottom + away

    def moved(self, box: Corners, turn: int, other: int) -> Corners:
        """Return the place after `other` quarter turns of a box that `place` puts after `turn`."""
        x0, y0, x1, y1 = (edge - turn * _AWAY for edge in box)
        top = _turned(self.corners, self.turns + turn)[3]
        if self.is_mirrored:
            x0, x1 = -x1, -x0
        corners = _turned((x0, top - y1, x1, top - y0), -(self.turns + turn))
        return self.place(other, corners)


def _turned(corners: Corners, quarters: int) -> Corners:
    """Return the corners of a box after quarter turns to the right of the page that it is on."""
    left, bottom, right, top = corners
    for _ in range(quarters % 4):
        left, bottom, right, top = bottom, -right, top, -left
    return left, bottom, right, top


class _Glyph(NamedTuple):
    """A letter as PDFium states it: its place on the page, the size of its font as stated and as
    seen, its direction in degrees to the left."""

    text: str
    corners: Corners
    size: float
    seen_size: float
    direction: float
    number: int
    word: int

    @property
    def quarters(self) -> int:
        return round(self.direction / 90)

    @property
    def height(self) -> float:
        left, bottom, right, top = self.corners
        if self.quarters % 2:
            return right - left
        return top - bottom


def page_with_typed_text(document: Pdfium, index: int, raw: Pdfium, comments: list[str]) -> Pdfium:
    """Return a page of which what was typed into its form, or onto it, is a part: these lie above
    its text, where PDFium reads none. What its sticky notes and stamps say goes to `comments`."""
    page: Pdfium = document.get_page(index)
    comments += _comments_on(page, f"page {index + 1}", raw)
    n_typed = 0
    # From the end, as those after one that is taken out move up.
    for number in reversed(range(raw.FPDFPage_GetAnnotCount(page))):
        note = raw.FPDFPage_GetAnnot(page, number)
        is_typed = _is_typed(note, document, raw)
        raw.FPDFPage_CloseAnnot(note)
        if is_typed:
            n_typed += 1
        else:
            raw.FPDFPage_RemoveAnnot(page, number)
    if n_typed:
        raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
        page.close()
        page = document.get_page(index)
    return page


def _comments_on(page: Pdfium, place: str, raw: Pdfium) -> list[str]:
    """Return the texts of the sticky notes and stamps on a page, in their order."""
    texts = []
    for number in range(raw.FPDFPage_GetAnnotCount(page)):
        note = raw.FPDFPage_GetAnnot(page, number)
        if raw.FPDFAnnot_GetSubtype(note) in (raw.FPDF_ANNOT_TEXT, raw.FPDF_ANNOT_STAMP):
            text = _value_of(note, b"Contents", raw)
            if text.strip():
                texts.append(comment_text(text, _value_of(note, b"T", raw), place))
        raw.FPDFPage_CloseAnnot(note)
    return texts


def _value_of(note: Pdfium, key: bytes, raw: Pdfium) -> str:
    """Return what a note has as its text or its author, "" without it."""
    n_bytes = raw.FPDFAnnot_GetStringValue(note, key, None, 0)
    buffer = (ctypes.c_ushort * (n_bytes // 2))()
    raw.FPDFAnnot_GetStringValue(note, key, buffer, n_bytes)
    return bytes(buffer).decode("utf-16-le", "ignore").rstrip("\0")


def _is_typed(note: Pdfium, document: Pdfium, raw: Pdfium) -> bool:
    """Return whether what lies above a page is text: a field of a form but its buttons, or text
    that was written onto the page."""
    kind = raw.FPDFAnnot_GetSubtype(note)
    if kind != raw.FPDF_ANNOT_WIDGET or document.formenv is None:
        return kind in (raw.FPDF_ANNOT_WIDGET, raw.FPDF_ANNOT_FREETEXT)
    field = raw.FPDFAnnot_GetFormFieldType(document.formenv, note)
    return bool(field != raw.FPDF_FORMFIELD_PUSHBUTTON)


def letters_of(
    text_page: Pdfium, n_chars: int, frame: Frame, raw: Pdfium
) -> dict[int, list[Letter]]:
    """Return the letters of a page in the order in which they are drawn, by the quarter turns after
    which they are upright, or `SLANTED`."""
    glyphs = _with_whole_boxes(list(_glyphs(text_page, n_chars, raw)), text_page, raw)
    groups: defaultdict[int, list[_Glyph]] = defaultdict(list)
    for glyph in glyphs:
        turn = (glyph.quarters - frame.turns) % 4
        if abs(_tilt(glyph)) > _MOST_TILT:
            turn = SLANTED
        groups[turn].append(glyph)
    return {turn: _placed(group, turn, frame) for turn, group in groups.items()}


def _tilt(glyph: _Glyph) -> float:
    """Return the degrees between the direction of a letter and the nearest quarter turn."""
    return glyph.direction - 90 * glyph.quarters


def _placed(glyphs: Sequence[_Glyph], turn: int, frame: Frame) -> list[Letter]:
    """Return letters of one group where they are once their lines are level."""
    tilt = median(map(_tilt, glyphs))
    left, bottom, right, top = frame.corners
    middle = (left + right) / 2, (bottom + top) / 2
    letters = []
    for glyph in glyphs:
        corners = glyph.corners
        if turn == SLANTED:
            corners = _level(glyph, glyph.direction, middle)
        elif abs(tilt) > _LEAST_TILT:
            corners = _level(glyph, tilt, middle)
        x0, y0, x1, y1 = frame.place(turn, corners)
        # A file may state another size and scale the page, by little (WeasyPrint) or by much.
        size = glyph.seen_size
        if not 0.3 * (y1 - y0) < glyph.size < 3 * (y1 - y0):
            size = y1 - y0
        letters.append(Letter(x0, y0, x1, y1, glyph.text, size, glyph.number, glyph.word))
    return letters


def _level(glyph: _Glyph, degrees: float, middle: tuple[float, float]) -> Corners:
    """Return the box of a letter after a turn by `degrees` to the right around `middle`."""
    left, bottom, right, top = glyph.corners
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = (left + right) / 2 - middle[0], (bottom + top) / 2 - middle[1]
    x, y = middle[0] + x * cosine + y * sine, middle[1] + y * cosine - x * sine
    # PDFium's box is the upright one around the slanted one, of which the height is the font's.
    height = (_ABOVE + _BELOW) * glyph.seen_size
    direction = math.radians(glyph.direction)
    cosine, sine = abs(math.cos(direction)), abs(math.sin(direction))
    if cosine > sine:
        width = (right - left - height * sine) / cosine
    else:
        width = (top - bottom - height * cosine) / sine
    width = max(width, _THINNEST * glyph.seen_size)
    if round((glyph.direction - degrees) / 90) % 2:
        width, height = height, width
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _with_whole_boxes(glyphs: list[_Glyph], text_page: Pdfium, raw: Pdfium) -> list[_Glyph]:
    """Return the letters of a page, those whose boxes are only of their ink with boxes as high as
    those of other fonts."""
    whole = []
    fractions = [glyph.height / glyph.seen_size for glyph in glyphs if glyph.seen_size]
    if not fractions or median(fractions) < _LEAST_OF_SIZE:
        return glyphs
    x, y = ctypes.c_double(), ctypes.c_double()
    for glyph in glyphs:
        is_ink = glyph.height < _INK * glyph.seen_size
        if is_ink and raw.FPDFText_GetCharOrigin(text_page, glyph.number, x, y):
            glyph = glyph._replace(corners=_whole_box(glyph, x.value, y.value))
        whole.append(glyph)
    return whole


def _whole_box(glyph: _Glyph, x: float, y: float) -> Corners:
    """Return the box of a letter that stands on the line at (x, y)."""
    left, bottom, right, top = glyph.corners
    below, above = _BELOW * glyph.seen_size, _ABOVE * glyph.seen_size
    if glyph.quarters % 4 == 0:
        return left, y - below, right, y + above
    if glyph.quarters % 4 == 1:
        return x - above, bottom, x + below, top
    if glyph.quarters % 4 == 2:
        return left, y - above, right, y + below
    return x - below, bottom, x + above, top


def main_turns(text_page: Pdfium, n_chars: int, raw: Pdfium) -> int:
    """Return the quarter turns to the left of most of the letters of a page."""
    matrix = raw.FS_MATRIX()
    counts: Counter[int] = Counter()
    for index in range(0, n_chars, max(1, n_chars // _SAMPLED)):
        if not _character(raw.FPDFText_GetUnicode(text_page, index)):
            continue
        raw.FPDFText_GetMatrix(text_page, index, matrix)
        direction = math.atan2(matrix.b, matrix.a)
        if raw.FPDFText_GetFontSize(text_page, index) < 0:
            direction += math.pi
        counts[round(direction / (math.pi / 2)) % 4] += 1
    return max(counts, key=counts.__getitem__, default=0)


def _glyphs(text_page: Pdfium, n_chars: int, raw: Pdfium) -> Iterator[_Glyph]:
    """Yield the letters of a page; white space parts their words."""
    n_words = 0
    box, matrix = raw.FS_RECTF(), raw.FS_MATRIX()
    for index in range(n_chars):
        text = _character(raw.FPDFText_GetUnicode(text_page, index))
        if not text or not raw.FPDFText_GetLooseCharBox(text_page, index, box):
            n_words += 1
            continue
        raw.FPDFText_GetMatrix(text_page, index, matrix)
        size = raw.FPDFText_GetFontSize(text_page, index)
        direction = math.degrees(math.atan2(matrix.b, matrix.a))
        # Some files draw upright text by two wrongs: upside down, in a font of negative size.
        if size < 0:
            direction += 180
        seen_size = abs(size) * math.hypot(matrix.c, matrix.d)
        corners = box.left, box.bottom, box.right, box.top
        yield _Glyph(text, corners, size, seen_size, direction, index, n_words)


def _character(code: int) -> str:
    """Return a character of a page; nothing for white space and what is no character."""
    # PDFium's marks of a hyphen at the end of a line.
    if code in (2, 0xFFFE):
        return "-"
    if code <= 32 or code >= 0x110000 or 0xD800 <= code < 0xE000 or code == 0xFFFF:
        return ""
    return chr(code).strip()
