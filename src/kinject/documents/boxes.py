"""Letters and words on a page, their lines and cells; running headers and footers are left out.

Letters are put in the order in which they are read (UAX 9) by their places alone: the order of
drawing, and PDFium's, is another one where Hebrew or Arabic meets numbers or Latin words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

from kinject.documents.letters import Letter
from kinject.documents.symbols import raised
from kinject.documents.text import one_line

_LEADERS = re.compile(r"(?:\s?\.){5,}\s*")
_VARIES = re.compile(r"\d+|\b[ivxlc]+\b")
HYPHEN = re.compile(r"[^\W\d_]-$")
"""A letter and a hyphen at the end of a line: the word may go on in the next one."""
_KEPT_HYPHEN = re.compile(
    r"(?<![^\W_])(?:well|self|half|high|low|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)-$",
    re.IGNORECASE,
)
"""What begins words that are written with a hyphen: well-known, thirty-two."""
_ENDING = re.compile(r"(?:ness|less|ish|er|est|ly|land|lands|life|time|way|lights?)\b")
"""What continues a word in whose middle such a beginning is: well-ness, high-est."""
_SECOND_WORD = re.compile(r"(?:und|oder|bzw|sowie|and)\b")
"""What follows the hyphen of a word whose second part is in the next one: Nord- und Ostsee."""
WIDE = re.compile("[\u3001-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff60]")
"""Letters and marks of Chinese and Japanese."""
_PAGE_NUMBER = re.compile(r"[^\w#]*(?:page|seite|p\.)?\s*#[^\w#]*(?:(?:of|von|/)\s*#[^\w#]*)?")
"""The pattern of a page's number: of one number, or of two with "of" between them."""

# Where running headers and footers are: this fraction of the height, above and below, and in it
# this many lines.
_EDGE = 0.12
_EDGE_LINES = 3
# A line at the edge that is longer, in characters, is a paragraph.
_LONGEST_FURNITURE = 200
# Points within which a running header is at the same height on two pages.
_SAME_HEIGHT = 6
# A running header is on this fraction of the pages, and on at least three; on all of two or three.
_FURNITURE_PAGES = 0.3
# Before and after a page so many of those with the same line are looked at: the left and the right
# one of two may differ.
_NEAR_PAGES = 2
# Words whose boxes overlap by this much of the lower one's height are on one line.
_SAME_LINE = 0.5
# A line is bold if this much of its text is: a few words in it may be set otherwise.
_MOSTLY_BOLD = 0.8
# Lines whose sizes differ by more belong to different paragraphs.
_SIZE_CHANGE = 0.15
# Lines of a row are this close: their boxes nearly touch.
_TOUCHING = 0.1

# In heights of a letter, as fonts differ: a letter whose middle is further up or down is on another
# line,
_OTHER_LINE = 0.5
# and one that is further to the right begins another word,
_SPACE = 0.25
# as does one with a smaller space and a rule in it: cells of a table may touch.
_RULE_SPACE = 0.03
# Where directions meet, letters that are neighbours were not drawn one after the other, so that the
# spaces between them are known by their width only; this is half of a narrow one.
_NARROW_SPACE = 0.1
# Points between the parts of one drawing.
_SAME_EDGE = 0.1
# No number or name goes on over a gap this wide: cells, or columns.
_WIDE_SPACE = 0.8

# A raised digit is smaller than this part of its word's letters (Chromium's 0.83, Word's 0.65),
_RAISED_SIZE = 0.9
# and its box ends above the word's by this part of the height; small capitals end at 0.04.
_LIFT = 0.15
_RAISED = str.maketrans("0123456789+-−–", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻")
"""Of 10 and a raised 6 a reader would see 106."""

_CODES = {"R": "R", "AL": "R", "L": "L", "EN": "N", "AN": "N", "ES": "S", "CS": "S", "ET": "T"}
"""The directions of Unicode -> the codes of the patterns below: letters from right to left, from
left to right, digits, separators in numbers, signs beside numbers."""
_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff]")
_LEFT_TO_RIGHT = re.compile(r"[LN]*L(?:[^R|]*[LN])?|T*N+(?:SN+)*[TP]*")
"""Codes, as they stand on the page, of names and numbers within text from right to left."""
_RIGHT_TO_LEFT = re.compile(r"R(?:[^L|]*R)?")
_PAIRS = {
    **dict.fromkeys("()", "()"),
    **dict.fromkeys("[]", "[]"),
    **dict.fromkeys("{}", "{}"),
    **dict.fromkeys("«»", "«»"),
}
_LAM_ALEF = re.compile("ل[اأإآٱ]")


class Rule(NamedTuple):
    """A horizontal (`position` is y) or vertical (`position` is x) rule from `start` to `end`."""

    position: float
    start: float
    end: float


class Box(NamedTuple):
    """A word, a line, or a table: points from the left and from the top of the page, its text and
    its font."""

    x0: float
    y0: float
    x1: float
    y1: float
    text: str
    size: float
    bold: bool = False
    is_table: bool = False


Placed = TypeVar("Placed", Box, Letter)
left_edge = attrgetter("x0")
_upper_edge = attrgetter("y0")


def middle(box: Box | Letter) -> tuple[float, float]:
    """Return the centre of a box."""
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def is_same_size(box: Box, other: Box) -> bool:
    """Return whether two lines are in print of one size, so that they may be one paragraph."""
    return abs(box.size - other.size) <= _SIZE_CHANGE * other.size


def _middle_width(box: Box | Letter) -> float:
    return middle(box)[0]


def _middle_height(box: Box | Letter) -> float:
    return middle(box)[1]


def _text_length(box: Box) -> int:
    return len(box.text)


class Word:
    """The letters of a word, as they are read."""

    def __init__(self, first: Letter) -> None:
        self.last = first
        self.number, self.size = first.number, first.size
        self._letters = [(first.text, False)]
        self.x0, self.y0, self.x1, self.y1 = first[:4]

    def add(self, letter: Letter) -> None:
        self.last = letter
        self._letters.append((letter.text, self._is_raised(letter)))
        self.x1 = max(self.x1, letter.x1)
        self.y0 = min(self.y0, letter.y0)
        self.y1 = max(self.y1, letter.y1)

    @property
    def text(self) -> str:
        """Its letters, those that are raised with what shows it."""
        parts = []
        for is_raised, letters in groupby(self._letters, key=itemgetter(1)):
            part = "".join(text for text, _ in letters)
            shown = part
            if is_raised:
                shown = raised(part)
            # Of several marks of notes the digits are raised: a,1
            if is_raised and shown == part:
                shown = part.translate(_RAISED)
            parts.append(shown)
        return "".join(parts)

    def _is_raised(self, letter: Letter) -> bool:
        """Return whether a letter is an exponent of the word or the mark of a note: smaller, and
        higher."""
        lift = (self.y1 - letter.y1) / max(self.y1 - self.y0, 1.0)
        return letter.size < _RAISED_SIZE * self.size and lift > _LIFT

    def is_continued_by(self, letter: Letter, down: Sequence[Rule]) -> bool:
        """Return whether a letter is close enough, and no rule of `down` is before it."""
        if letter.word != self.last.word:
            return False
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


def words_of(letters: Sequence[Letter], down: Sequence[Rule]) -> Iterator[Word]:
    """Yield the words of letters, which are in order; rules `down` part them."""
    word: Word | None = None
    for letter in letters:
        if word is not None and word.is_continued_by(letter, down):
            word.add(letter)
            continue
        if word is not None:
            yield word
        word = Word(letter)
    if word is not None:
        yield word


def is_right_to_left(text: str) -> bool:
    """Return whether most letters of a text are those of Hebrew, Arabic and the like."""
    if not _TO_LEFT.search(text):
        return False
    directions = [_code(character) for character in text]
    return directions.count("R") > directions.count("L")


def _code(text: str) -> str:
    """Return the code of the direction of a letter; brackets and percent have their own."""
    first = text[0]
    if first in _PAIRS:
        return "b"
    if first in "%٪":
        return "P"
    return _CODES.get(unicodedata.bidirectional(first), "o")


def in_logical_order(letters: Sequence[Letter], is_mirrored: bool) -> list[Letter]:
    """Return letters, some of which run from right to left, in the order in which they are read,
    at places from left to right. Where none does, they are returned as they are.

    `is_mirrored`: the page is, as its lines run from right to left.
    """
    if not is_mirrored and not _any_to_left(letters):
        return list(letters)
    ordered: list[Letter] = []
    for line in lines_of(_glyphs(letters)):
        if is_mirrored or _any_to_left(line):
            ordered += _line_in_order(line, is_mirrored)
        else:
            ordered += sorted(line, key=attrgetter("number"))
    return ordered


def _any_to_left(letters: Sequence[Letter]) -> bool:
    return _TO_LEFT.search("".join(letter.text for letter in letters)) is not None


def _glyphs(letters: Sequence[Letter]) -> list[Letter]:
    """Return letters with those of a ligature as one, in their order."""
    glyphs: list[Letter] = []
    for letter in letters:
        if glyphs and letter[:4] == glyphs[-1][:4]:
            glyphs[-1] = glyphs[-1]._replace(text=glyphs[-1].text + letter.text)
        else:
            glyphs.append(letter)
    # PDFium turns text from right to left letter by letter, within ligatures as well unless they
    # are characters of their own. No font draws an alef before a lam, or a mark before its letter,
    # as one: they tell which it was.
    n_forwards = sum(_is_forwards(glyph.text) for glyph in glyphs)
    if n_forwards >= sum(_is_forwards(glyph.text[::-1]) for glyph in glyphs):
        return glyphs
    for index, glyph in enumerate(glyphs):
        if _code(glyph.text) in "Ro":
            glyphs[index] = glyph._replace(text=glyph.text[::-1])
    return glyphs


def _is_forwards(text: str) -> bool:
    """Return whether `text` is a ligature of lam and alef, or of a letter and its mark."""
    is_marked = unicodedata.combining(text[-1]) > 0 and not unicodedata.combining(text[0])
    return is_marked or _LAM_ALEF.fullmatch(text) is not None


def _line_in_order(line: Sequence[Letter], is_mirrored: bool) -> list[Letter]:
    """Return the letters of a line in the order in which they are read: what runs against the
    direction of the page is turned in its place."""
    letters = sorted(_with_marks(line, is_mirrored), key=_middle_width)
    # The line as it is seen: the codes of letters and gaps, and the letter of each.
    codes, indices = "", []
    for index, letter in enumerate(letters):
        gap = _gap_code(letters[index - 1], letter) if index else ""
        codes += gap + _code(letter.text)
        indices += [index] * (len(gap) + 1)
    spans = [match.span() for match in _RIGHT_TO_LEFT.finditer(codes)]
    if is_mirrored:
        codes, indices, spans = codes[::-1], indices[::-1], [(0, len(codes))]
    for start, end in spans:
        for match in _LEFT_TO_RIGHT.finditer(codes, start, end):
            first, last = match.span()
            # The last bracket of a name belongs to it: Python (LTS).
            if match[0].count("b") % 2 and codes[last : last + 1] == "b":
                last += 1
            _reflect(letters, indices[first:last])
        if not is_mirrored:
            if codes.count("b", start, end) % 2 and codes[start - 1 : start] == "b":
                start -= 1
            _reflect(letters, indices[start:end])
    letters.sort(key=_middle_width)
    ordered: list[Letter] = []
    word = letters[0].number
    for index, letter in enumerate(letters):
        if index and _gap_code(letters[index - 1], letter):
            word = letter.number
        ordered.append(letter._replace(word=word))
    return _with_brackets(ordered)


def _with_marks(line: Sequence[Letter], is_mirrored: bool) -> list[Letter]:
    """Return the letters of a line, each with the marks (vowels, accents) above and below it."""
    letters = [letter for letter in line if not unicodedata.combining(letter.text[0])]
    if not letters:
        return list(line)
    marks = [letter for letter in line if unicodedata.combining(letter.text[0])]
    # In the order of reading: of the parts of one drawing the letter is the first.
    if not is_mirrored:
        marks.reverse()
    for mark in marks:
        part_of = [index for index, letter in enumerate(letters) if _are_parts(letter, mark)]
        if part_of:
            whole = letters[part_of[0]]
            x0, x1 = min(whole.x0, mark.x0), max(whole.x1, mark.x1)
            letters[part_of[0]] = whole._replace(text=whole.text + mark.text, x0=x0, x1=x1)
            continue
        distances = [abs(_middle_width(letter) - _middle_width(mark)) for letter in letters]
        nearest = distances.index(min(distances))
        letters[nearest] = letters[nearest]._replace(text=letters[nearest].text + mark.text)
    return letters


def _are_parts(letter: Letter, mark: Letter) -> bool:
    """Return whether a letter and a mark were drawn as one: PDFium gives each a part of the
    drawing's box."""
    distance = min(abs(letter.x0 - mark.x1), abs(mark.x0 - letter.x1))
    return distance < _SAME_EDGE and letter.y0 == mark.y0


def _gap_code(letter: Letter, following: Letter) -> str:
    """Return the code of the gap between two neighbours: wide, a space, or none."""
    gap = following.x0 - letter.x1
    height = max(letter.y1 - letter.y0, 1.0)
    # With white space between the two there is one more number.
    is_next = abs(letter.number - following.number) <= len(letter.text + following.text)
    least = _NARROW_SPACE
    # PDFium puts white space beside a letter whose mark is a drawing of its own.
    is_marked = len(letter.text) > 1 or len(following.text) > 1
    is_bracket = "b" in (_code(letter.text), _code(following.text))
    if is_marked or (letter.word == following.word and (is_next or is_bracket)):
        least = _SPACE
    if gap > _WIDE_SPACE * letter.size:
        return "|"
    if gap > least * height:
        return " "
    return ""


def _reflect(letters: list[Letter], indices: Sequence[int]) -> None:
    """Turn neighbours around within their place."""
    left = min(letters[index].x0 for index in indices)
    right = max(letters[index].x1 for index in indices)
    for index in set(indices):
        letter = letters[index]
        x0, x1 = left + right - letter.x1, left + right - letter.x0
        letters[index] = letter._replace(x0=x0, x1=x1)


def _with_brackets(letters: Sequence[Letter]) -> list[Letter]:
    """Return the letters of a line with its brackets open before a word and closed after it: PDFium
    mirrors some of those that stand between directions, and not others."""
    turned = list(letters)
    for index, letter in enumerate(letters):
        pair = _PAIRS.get(letter.text)
        if pair is None:
            continue
        is_after, is_before = (
            0 <= other < len(letters)
            and letters[other].word == letter.word
            and _code(letters[other].text) in "RLN"
            for other in (index - 1, index + 1)
        )
        if is_after != is_before:
            turned[index] = letter._replace(text=pair[is_after])
    return turned


def text_of(words: Sequence[Box]) -> str:
    return " ".join(word.text for word in words)


def flat(lines: Sequence[Sequence[Box]]) -> list[Box]:
    return list(chain.from_iterable(lines))


def lines_of(words: Sequence[Placed]) -> list[list[Placed]]:
    """Return words grouped to lines from the top, each from the left."""
    lines: list[list[Placed]] = []
    for word in sorted(words, key=_middle_height):
        if lines and _is_beside(word, lines[-1][0]):
            lines[-1].append(word)
        else:
            lines.append([word])
    return [sorted(line, key=left_edge) for line in lines]


def spaced_rows(words: Sequence[Box]) -> list[list[Box]]:
    """Return the words by rows that space parts."""
    ordered = sorted(words, key=_upper_edge)
    rows = [[ordered[0]]]
    end = ordered[0].y1
    for word in ordered[1:]:
        if word.y0 > end + _TOUCHING * word.size:
            rows.append([])
            end = word.y1
        rows[-1].append(word)
        end = max(end, word.y1)
    return rows


def _is_beside(word: Box | Letter, first: Box | Letter) -> bool:
    """Return whether a word is on the line of `first`."""
    if word.is_table or first.is_table:
        return False
    y0, y1 = max(word.y0, first.y0), min(word.y1, first.y1)
    return y1 - y0 > _SAME_LINE * min(word.y1 - word.y0, first.y1 - first.y0)


def joined_line(words: Sequence[Box]) -> Box:
    """Return the words of a line as one box."""
    longest = max(words, key=_text_length)
    n_bold = sum(len(word.text) for word in words if word.bold)
    return Box(
        min(word.x0 for word in words),
        min(word.y0 for word in words),
        max(word.x1 for word in words),
        max(word.y1 for word in words),
        _LEADERS.sub(" ", text_of(words)),
        longest.size,
        bold=n_bold > _MOSTLY_BOLD * sum(map(_text_length, words)),
        is_table=words[0].is_table,
    )


def header_only(cells: Sequence[str]) -> str:
    """Return the header of a table whose rows are on the next page."""
    escaped = " | ".join(cell.replace("|", "\\|") for cell in cells)
    return f"| {escaped} |\n|{' --- |' * len(cells)}"


def with_line_after_hyphen(text: str, line: str) -> str:
    """Return a text that ends in a hyphen with its next line: the hyphen parts a word, or two."""
    if _SECOND_WORD.match(line):
        return f"{text} {line}"
    if _KEPT_HYPHEN.search(text) and not _ENDING.match(line):
        return text + line
    return text[:-1] + line


def cell_text(words: Sequence[Box]) -> str:
    """Return the words of a cell as one line; a hyphen at the end of a line joins it to the next
    one."""
    text = ""
    for line in lines_of(words):
        following = text_of(line)
        if HYPHEN.search(text) and following[:1].islower():
            text = with_line_after_hyphen(text, following)
        elif not text or re.search(r"\w-$", text):
            text += following
        else:
            text += f" {following}"
    return _LEADERS.sub(" ", text)


def without_furniture(pages: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """Return pages of words without the lines at the edge that other pages have at the same height,
    with the same numbers or some that count the pages, and page numbers."""
    if len(pages) < 2:
        return [list(page) for page in pages]
    top = min((box.y0 for box in flat(pages)), default=0.0)
    bottom = max((box.y1 for box in flat(pages)), default=0.0)
    zone = _EDGE * (bottom - top)
    edges = [_edge(page, top + zone, bottom - zone) for page in pages]
    pages_with = _pages_with(edges)
    least = max(3, _FURNITURE_PAGES * len(pages)) if len(pages) > 3 else 2
    kept = []
    for number, (page, edge) in enumerate(zip(pages, edges, strict=True)):
        dropped: set[int] = set()
        for box, words in edge:
            is_page_number = _PAGE_NUMBER.fullmatch(_pattern(box.text)) is not None
            if is_page_number or _is_running(box, number, pages_with, least):
                dropped.update(map(id, words))
        kept.append([box for box in page if id(box) not in dropped])
    return kept


def _pages_with(
    edges: Sequence[Sequence[tuple[Box, list[Box]]]],
) -> dict[tuple[str, int], dict[int, list[str]]]:
    """Return the pages that have a pattern at a height, and their numbers in it, for each line at
    their edges."""
    pages_with: defaultdict[tuple[str, int], dict[int, list[str]]] = defaultdict(dict)
    for number, edge in enumerate(edges):
        for box, _ in edge:
            for place in _places(box):
                pages_with[place][number] = _numbers(box)
    return pages_with


def _numbers(box: Box) -> list[str]:
    """Return what is left out of the pattern of a line."""
    return _VARIES.findall(one_line(box.text).lower())


def _is_running(
    box: Box,
    page: int,
    pages_with: Mapping[tuple[str, int], Mapping[int, Sequence[str]]],
    least: float,
) -> bool:
    """Return whether a line of a page is at its height on `least` pages, and has the numbers of one
    of the next of these, but for those that count the pages.

    A row of a table is at the edge of each page that the table fills, with other numbers.
    """
    numbers = _numbers(box)
    for place in _places(box):
        found = pages_with[place]
        if len(found) < least:
            continue
        pages = list(found)  # in their order
        index = pages.index(page)
        near = pages[max(0, index - _NEAR_PAGES) : index + _NEAR_PAGES + 1]
        near.remove(page)
        if any(_are_as_far(numbers, found[other], other - page) for other in near):
            return True
    return False


def _are_as_far(numbers: Sequence[str], others: Sequence[str], n_pages: int) -> bool:
    """Return whether the numbers of two lines are the same, or as far from one another as the pages
    of the lines are."""
    # A # in the text itself is in the pattern as a number is.
    if len(numbers) != len(others):
        return False
    for number, other in zip(numbers, others, strict=True):
        # Roman numerals, and words that look so, are not counted.
        if not (number.isdecimal() and other.isdecimal()):
            continue
        if int(other) - int(number) not in (0, n_pages):
            return False
    return True


def _places(box: Box) -> list[tuple[str, int]]:
    """Return the pattern of a line at its height and at the next one, as heights vary a little."""
    pattern, height = _pattern(box.text), round(box.y0 / _SAME_HEIGHT)
    return [(pattern, height), (pattern, height + 1)]


def _pattern(text: str) -> str:
    return _VARIES.sub("#", one_line(text).lower())[:_LONGEST_FURNITURE]


def _edge(page: Sequence[Box], top: float, bottom: float) -> list[tuple[Box, list[Box]]]:
    """Return the lines that are the highest on a page, above `top`, and the lowest, below `bottom`,
    each with its words."""
    lines = lines_of(page)
    outer = [*lines[:_EDGE_LINES], *lines[max(_EDGE_LINES, len(lines) - _EDGE_LINES) :]]
    edge = []
    for words in outer:
        line = joined_line(words)
        is_outside = line.y0 < top or line.y1 > bottom
        if is_outside and not line.is_table and len(line.text) < _LONGEST_FURNITURE:
            edge.append((line, words))
    return edge
