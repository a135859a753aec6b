"""Words on a page, their lines and cells; running headers and footers are left out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from kinject.documents.text import one_line

_LEADERS = re.compile(r"(?:\s?\.){5,}\s*")
_VARIES = re.compile(r"\d+|\b[ivxlc]+\b")
HYPHEN = re.compile(r"[^\W\d_]-$")
"""A letter and a hyphen at the end of a line: the word may go on in the next one."""
_PAGE_NUMBER = re.compile(r"\W*(?:page|seite|p\.)?\s*#\W*(?:(?:of|von|/)\s*#\W*)?")

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
# Words whose boxes overlap by this much of the lower one's height are on one line.
_SAME_LINE = 0.5
# A line is bold if this much of its text is: a few words in it may be set otherwise.
_MOSTLY_BOLD = 0.8


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


left_edge = attrgetter("x0")


def middle(box: Box) -> tuple[float, float]:
    """Return the centre of a box."""
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def _middle_height(box: Box) -> float:
    return middle(box)[1]


def _text_length(box: Box) -> int:
    return len(box.text)


def text_of(words: Sequence[Box]) -> str:
    return " ".join(word.text for word in words)


def flat(lines: Sequence[Sequence[Box]]) -> list[Box]:
    return list(chain.from_iterable(lines))


def lines_of(words: Sequence[Box]) -> list[list[Box]]:
    """Return words grouped to lines from the top, each from the left."""
    lines: list[list[Box]] = []
    for word in sorted(words, key=_middle_height):
        if lines and _is_beside(word, lines[-1][0]):
            lines[-1].append(word)
        else:
            lines.append([word])
    return [sorted(line, key=left_edge) for line in lines]


def _is_beside(word: Box, first: Box) -> bool:
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


def cell_text(words: Sequence[Box]) -> str:
    """Return the words of a cell as one line; a hyphen at the end of a line joins it to the next
    one."""
    text = ""
    for line in lines_of(words):
        following = text_of(line)
        if HYPHEN.search(text) and following[:1].islower():
            text = text[:-1] + following
        elif not text or re.search(r"\w-$", text):
            text += following
        else:
            text += f" {following}"
    return _LEADERS.sub(" ", text)


def without_furniture(pages: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """Return pages of words without the lines at the edge that other pages have at the same height,
    and page numbers."""
    if len(pages) < 2:
        return [list(page) for page in pages]
    top = min((box.y0 for box in flat(pages)), default=0.0)
    bottom = max((box.y1 for box in flat(pages)), default=0.0)
    zone = _EDGE * (bottom - top)
    edges = [_edge(page, top + zone, bottom - zone) for page in pages]
    pages_with = _pages_with(edges)
    least = max(3, _FURNITURE_PAGES * len(pages)) if len(pages) > 3 else 2
    kept = []
    for page, edge in zip(pages, edges, strict=True):
        dropped: set[int] = set()
        for box, words in edge:
            is_repeated = any(len(pages_with[place]) >= least for place in _places(box))
            if is_repeated or _PAGE_NUMBER.fullmatch(_pattern(box.text)):
                dropped.update(map(id, words))
        kept.append([box for box in page if id(box) not in dropped] or list(page))
    return kept


def _pages_with(
    edges: Sequence[Sequence[tuple[Box, list[Box]]]],
) -> dict[tuple[str, int], set[int]]:
    """Return the pages that have a pattern at a height, for each line at their edges."""
    pages_with: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for number, edge in enumerate(edges):
        for box, _ in edge:
            for place in _places(box):
                pages_with[place].add(number)
    return pages_with


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
