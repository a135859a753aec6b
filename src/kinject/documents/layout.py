"""From words on a page to text: columns, tables without rules, paragraphs, headings; running
headers and footers left out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from kinject.documents.text import heading, markdown_table, one_line

_BULLET = re.compile(r"^(?:[•◦▪‣●○■□–·➢✓\ue000-\uf8ff]|[-*o](?=\s))\s*")
_MARK = re.compile(r"(?:[^\w\s]|[\ue000-\uf8ff]|o|\(?(?:\d{1,2}|[a-z]|[ivx]{1,4})[.)])")
"""The marks before an item of a list."""
_LEADERS = re.compile(r"(?:\s?\.){5,}\s*")
_NUMBERED = re.compile(r"^\(?(?:\d{1,2}|[a-z])[.)]\s+\S")
_SENTENCE_END = re.compile(r"[.!?:;…][\"'”’»)]*$")
_VARIES = re.compile(r"\d+|\b[ivxlc]+\b")
_PROSE_WORDS = 4
_EDGE = 0.12
"""The fraction of the height, above and below, where running headers and footers are."""
_EDGE_LINES = 3
"""Lines at the top and at the bottom of a page among which running headers and footers are looked
for."""


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


def middle(box: Box) -> tuple[float, float]:
    """Return the centre of a box."""
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def lines_of(words: Sequence[Box]) -> list[list[Box]]:
    """Return words grouped to lines from the top, each from the left."""
    lines: list[list[Box]] = []
    for word in sorted(words, key=lambda word: middle(word)[1]):
        last = lines[-1] if lines else None
        if last and not word.is_table and not last[0].is_table:
            y0, y1 = max(word.y0, last[0].y0), min(word.y1, last[0].y1)
            if y1 - y0 > 0.5 * min(word.y1 - word.y0, last[0].y1 - last[0].y0):
                last.append(word)
                continue
        lines.append([word])
    return [sorted(line, key=lambda word: word.x0) for line in lines]


def joined_line(words: Sequence[Box]) -> Box:
    """Return the words of a line as one box."""
    longest = max(words, key=lambda word: len(word.text))
    bold = sum(len(word.text) for word in words if word.bold) > 0.8 * sum(
        len(word.text) for word in words
    )
    return Box(
        min(word.x0 for word in words), min(word.y0 for word in words), max(word.x1 for word in words),
        max(word.y1 for word in words), _LEADERS.sub(" ", " ".join(word.text for word in words)), longest.size, bold,
        words[0].is_table,
    )  # fmt: skip


def in_reading_order(boxes: Sequence[Box], depth: int = 0) -> list[Box]:
    """Return the lines and tables of a page (or of a column): above two columns, the left one, the
    right one, below."""
    lines = lines_of(boxes)
    split = _columns(lines) if depth < 6 else None
    if split is None:
        return _with_tables(lines)
    first, last, x = split
    enclosed = [word for line in lines[first:last] for word in line]
    left = [word for word in enclosed if middle(word)[0] < x]
    right = [word for word in enclosed if middle(word)[0] >= x]
    above = [word for line in lines[:first] for word in line]
    below = [word for line in lines[last:] for word in line]
    ordered = (
        _with_tables(lines_of(above))
        + in_reading_order(left, depth + 1)
        + in_reading_order(right, depth + 1)
    )
    return ordered + (in_reading_order(below, depth + 1) if below else [])


def _columns(lines: Sequence[Sequence[Box]]) -> tuple[int, int, float] | None:
    """Return (first line, line past the last, x) of the longest run of lines with text on both
    sides of a gutter at x."""
    if len(lines) < 4:
        return None
    gaps: Counter[int] = Counter()
    for line in lines:
        for word, following in pairwise(line):
            if following.x0 - word.x1 > 0.7 * word.size:
                gaps.update(range(int(word.x1 / 2) + 1, int(following.x0 / 2) + 1))
    best: tuple[int, int, float] | None = None
    for step, n in gaps.most_common(60):
        if n < 4:
            break
        x = 2.0 * step
        start: int | None = None
        for index in range(len(lines) + 1):
            crosses = index == len(lines) or _crosses(lines[index], x)
            if not crosses and start is None:
                start = index
            if crosses and start is not None:
                if (best is None or index - start > best[1] - best[0]) and _are_columns(
                    lines[start:index], x
                ):
                    best = (*_trimmed(lines, start, index), x)
                start = None
    return best


def _crosses(line: Sequence[Box], x: float) -> bool:
    """Return whether a line goes over a gutter at x: by a word, or by the space between two words
    of a sentence."""
    left = max((word.x1 for word in line if word.x0 < x), default=None)
    right = min((word.x0 for word in line if word.x0 >= x), default=None)
    if left is not None and left > x + 0.5:
        return True
    return left is not None and right is not None and right - left < 0.8 * line[0].size


def _trimmed(lines: Sequence[Sequence[Box]], first: int, last: int) -> tuple[int, int]:
    """Return the run without the lines at its start that are larger than the rest: a title that
    happens to be short."""
    usual = median(word.size for line in lines[first:last] for word in line)
    while first < last and lines[first][0].size > 1.15 * usual:
        first += 1
    return first, last


def _are_columns(lines: Sequence[Sequence[Box]], x: float) -> bool:
    """Return whether both sides hold prose: lines of several words that fill the side."""
    for on_right in (False, True):
        sides = (
            [word for word in line if (middle(word)[0] >= x) == on_right and not word.is_table]
            for line in lines
        )
        parts = [part for part in sides if part]
        if len(parts) < 4:
            return False
        width = max(part[-1].x1 for part in parts) - min(part[0].x0 for part in parts)
        full = [
            p
            for p in parts
            if len(p) >= _PROSE_WORDS and p[-1].x1 - p[0].x0 > 0.7 * width and _is_even(p)
        ]
        if len(full) < max(3, 0.15 * len(parts)):
            return False
    return True


def _is_even(words: Sequence[Box]) -> bool:
    """Return whether the gaps between the words of a line are those of a sentence, not of a table."""
    return all(following.x0 - word.x1 < 1.2 * word.size for word, following in pairwise(words))


def _with_tables(lines: Sequence[Sequence[Box]]) -> list[Box]:
    """Return lines, with the runs of lines that form a table without vertical rules as tables."""
    boxes: list[Box] = []
    index = 0
    while index < len(lines):
        end = _table_end(lines, index)
        words = [word for line in lines[index:end] for word in line]
        table = _table(words) if end - index > 1 else None
        if end - index > 3 and _is_prose(words):
            starts = [word.x0 for word in words[:1]] + [right - 1 for _, right in _gutters(words)]
            for number in range(len(starts)):
                part = [word for word in words if _column(middle(word)[0], starts) == number]
                boxes += [joined_line(line) for line in lines_of(part)]
            index = end
        elif (
            index + 1 == len(lines)
            and not lines[index][0].is_table
            and len(_segments(lines[index])) > 2
        ):
            parts = [" ".join(word.text for word in part) for part in _segments(lines[index])]
            boxes.append(joined_line(lines[index])._replace(text=header_only(parts), is_table=True))
            index += 1
        elif table is None:
            boxes.append(joined_line(lines[index]))
            index += 1
        else:
            boxes.append(table)
            index = end
    return boxes


def header_only(cells: Sequence[str]) -> str:
    """Return the header of a table whose rows are on the next page."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n|{' --- |' * len(cells)}"


def _is_prose(words: Sequence[Box]) -> bool:
    """Return whether the columns between the gutters of `words` are prose: many lines of several
    words fill them."""
    lines = lines_of(words)
    parts = [part for line in lines for part in _segments(line)]
    full = sum(len(part) >= _PROSE_WORDS for part in parts)
    return len(parts) > 1.5 * len(lines) and full > 0.7 * len(parts)


def _segments(line: Sequence[Box]) -> list[list[Box]]:
    """Return the words of a line, parted at gaps wider than those between words."""
    parts = [[line[0]]]
    for word, following in pairwise(line):
        if following.x0 - word.x1 > 0.8 * min(word.size, following.size):
            parts.append([])
        parts[-1].append(following)
    return parts


def _gutters(words: Sequence[Box]) -> list[tuple[float, float]]:
    """Return the (left, right) of the vertical strips between the columns of `words`."""
    gutters: list[tuple[float, float]] = []
    ordered = sorted(words, key=lambda word: word.x0)
    end = ordered[0].x1
    least = 0.6 * median(word.size for word in words)
    for word in ordered[1:]:
        if word.x0 - end > least:
            gutters.append((end, word.x0))
        end = max(end, word.x1)
    return gutters


def _table_end(lines: Sequence[Sequence[Box]], first: int) -> int:
    """Return the line past the last of those from `first` on that share gutters."""
    if lines[first][0].is_table or len(_segments(lines[first])) < 2:
        return first
    words = list(lines[first])
    before = len(_gutters(words))
    end = full = first + 1
    while end < len(lines) and not lines[end][0].is_table:
        line = lines[end]
        gap = line[0].y0 - max(word.y1 for word in lines[end - 1])
        if gap > 2.5 * line[0].size:
            break
        wider = [*words, *line]
        n_gutters = len(_gutters(wider))
        if n_gutters < max(1, (before + 1) // 2):
            break
        is_one = len(_segments(line)) < 2
        if is_one and n_gutters < before:
            break
        words, before = wider, n_gutters
        end += 1
        full = end if not is_one else full
    return _with_wrapped(lines, full, end)


def _with_wrapped(lines: Sequence[Sequence[Box]], full: int, end: int) -> int:
    """Return `full`, or past the lines after it that continue a cell of the last row: close to it."""
    while (
        full < end
        and lines[full][0].y0 - max(word.y1 for word in lines[full - 1]) < 0.2 * lines[full][0].size
    ):
        full += 1
    return full


def _table(words: Sequence[Box]) -> Box | None:
    """Return a table of the words, None where they are no table."""
    gutters = _gutters(words)
    rows = _rows(words, gutters)
    starts = [min(word.x0 for word in words), *((left + right) / 2 for left, right in gutters)]
    if len(rows) < 2 or not gutters or (len(rows) == 2 and len(gutters) < 2):
        return None
    grid = [[_cell(row, index, starts) for index in range(len(starts))] for row in rows]
    filled = [sum(1 for cell in row if cell) for row in grid]
    if median(filled) < max(2, 0.5 * len(starts)):
        return None
    if len(starts) == 2 and sum(_MARK.fullmatch(row[0]) is not None for row in grid) > 0.5 * len(
        grid
    ):
        return None
    n_header = 1
    if filled[0] < len(starts) and filled[1] == len(starts):
        grid[0], n_header = _spread(rows, starts), 2
    text = markdown_table(grid, n_header)
    box = joined_line(words)
    return box._replace(text=text, is_table=True)


def _rows(words: Sequence[Box], gutters: Sequence[tuple[float, float]]) -> list[list[Box]]:
    """Return the words by rows: lines that touch one another are one, unless more than one of them
    has a first cell."""
    ordered = sorted(words, key=lambda word: word.y0)
    rows = [[ordered[0]]]
    end = ordered[0].y1
    for word in ordered[1:]:
        if word.y0 > end + 0.1 * word.size:
            rows.append([])
            end = word.y1
        rows[-1].append(word)
        end = max(end, word.y1)
    first = gutters[0][0] + 0.1 if gutters else 0.0
    if len(rows) > 1 and len(rows) >= 0.3 * sum(line[0].x0 < first for line in lines_of(words)):
        return rows
    parted: list[list[Box]] = []
    for row in rows:
        lines = lines_of(row)
        n_first = sum(line[0].x0 < first for line in lines)
        n_full = sum(len(_segments(line)) > 1 for line in lines)
        if n_first < 2 or n_full < 2:
            parted.append(row)
            continue
        for line in lines:
            if line[0].x0 < first or not parted:
                parted.append(list(line))
            else:
                parted[-1] += line
    return parted


def _cell(row: Sequence[Box], index: int, starts: Sequence[float]) -> str:
    last = index + 1 == len(starts)
    words = [
        w
        for w in row
        if middle(w)[0] >= starts[index] - 1 and (last or middle(w)[0] < starts[index + 1])
    ]
    return cell_text(words)


def cell_text(words: Sequence[Box]) -> str:
    """Return the words of a cell as one line; a hyphen at the end of a line joins it to the next
    one."""
    text = ""
    for line in lines_of(words):
        following = " ".join(word.text for word in line)
        if re.search(r"[^\W\d_]-$", text) and following[:1].islower():
            text = text[:-1] + following
        else:
            text += following if not text or re.search(r"\w-$", text) else f" {following}"
    return _LEADERS.sub(" ", text)


def _spread(rows: Sequence[Sequence[Box]], starts: Sequence[float]) -> list[str]:
    """Return the cells of the first row, whose texts span several columns, in each of these.

    A text that ends where its last column does spans those to its left, any other those to its
    right.
    """
    ends = [max((w.x1 for row in rows[1:] for w in row if _column(middle(w)[0], starts) == i), default=0.0)
            for i in range(len(starts))]  # fmt: skip
    cells = [""] * len(starts)
    free = 0
    for part in _segments(sorted(rows[0], key=lambda word: word.x0)):
        text = " ".join(word.text for word in part)
        first, last = _column(part[0].x0 + 1, starts), _column(part[-1].x1 - 1, starts)
        is_right = free > 0 and abs(part[-1].x1 - ends[last]) < 4
        for index in range(free if is_right else first, last + 1):
            cells[index] = text
        for index in range(free, 0 if is_right else first):
            cells[index] = cells[free - 1] if free else ""
        free = last + 1
    for index in range(free, len(cells)):
        cells[index] = cells[free - 1]
    return cells


def _column(x: float, starts: Sequence[float]) -> int:
    return max(index for index, start in enumerate(starts) if start <= x or not index)


def compose(pages: Sequence[Sequence[Box]]) -> tuple[str, list[list[int | str]], str]:
    """Return the Markdown of pages of lines, [start, number from 1] of each page with text, and the
    largest heading."""
    sizes: Counter[float] = Counter()
    for box in (box for page in pages for box in page if not box.is_table):
        sizes[round(box.size * 2) / 2] += len(box.text)
    body = sizes.most_common(1)[0][0] if sizes else 0.0
    larger = sorted(
        (size for size in sizes if size > 1.12 * body and sizes[size] < 0.3 * sizes.total()),
        reverse=True,
    )
    levels = {size: min(level, 4) for level, size in enumerate(larger, start=1)}
    text, title = "", ""
    starts: list[list[int | str]] = []
    for number, page in enumerate(pages, start=1):
        blocks = _blocks(page, levels, min(len(larger), 4) + 1)
        title = title or next(
            (block.lstrip("# ") for block in blocks if block.startswith("# ")), ""
        )
        following = "\n\n".join(blocks)
        if not following:
            continue
        rows = _table_rows(text, following)
        if rows is not None:
            starts.append([len(text) + 1, number])
            text += f"\n{rows}"
            continue
        goes_on = (
            text
            and not re.search(r"[|`]$", text)
            and not _SENTENCE_END.search(text)
            and following[:1].islower()
        )
        if goes_on and re.search(r"[^\W\d_]-$", text):
            text = text[:-1]
        elif text:
            text += " " if goes_on else "\n\n"
        starts.append([len(text), number])
        text += following
    return text, starts, title


def _table_rows(text: str, following: str) -> str | None:
    """Return `following` as rows of the table that ends `text`, without a header, or None where it
    is no such table."""
    last = text[text.rfind("\n\n") + 2 :].split("\n")
    first, _, rest = following.partition("\n\n")
    lines = first.split("\n")
    if not (
        last[-1].startswith("| ")
        and len(last) > 1
        and last[1].startswith("| ---")
        and lines[0].startswith("| ")
    ):
        return None
    if len(lines) < 2 or last[1] != lines[1]:
        return None
    rows = lines[2:] if lines[0] == last[0] else [lines[0], *lines[2:]]
    return "\n".join(rows) + (f"\n\n{rest}" if rest else "")


def without_furniture(pages: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """Return pages of words without the lines at the edge that other pages have at the same height,
    and page numbers."""
    pages_with: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    top = min((box.y0 for page in pages for box in page), default=0.0)
    bottom = max((box.y1 for page in pages for box in page), default=0.0)
    zone = _EDGE * (bottom - top)
    edges = [_edge(page, top + zone, bottom - zone) for page in pages]
    for number, edge in enumerate(edges):
        for box, _ in edge:
            for height in (round(box.y0 / 6), round(box.y0 / 6) + 1):
                pages_with[_pattern(box.text), height].add(number)
    least = max(3, 0.3 * len(pages)) if len(pages) > 3 else 2
    kept = []
    for page, edge in zip(pages, edges, strict=True):
        dropped = {
            id(word) for box, words in edge for word in words
            if len(pages) > 1 and (
                re.fullmatch(r"\W*(?:page|seite|p\.)?\s*#\W*(?:(?:of|von|/)\s*#\W*)?", _pattern(box.text))
                or any(len(pages_with[_pattern(box.text), round(box.y0 / 6) + more]) >= least for more in (0, 1))
            )
        }  # fmt: skip
        kept.append([box for box in page if id(box) not in dropped] or list(page))
    return kept


def _pattern(text: str) -> str:
    return _VARIES.sub("#", one_line(text).lower())[:200]


def _edge(page: Sequence[Box], top: float, bottom: float) -> list[tuple[Box, list[Box]]]:
    """Return the lines that are the highest on a page, above `top`, and the lowest, below `bottom`,
    each with its words."""
    lines = [(joined_line(words), words) for words in lines_of(page)]
    return [
        line for line in [*lines[:_EDGE_LINES], *lines[max(_EDGE_LINES, len(lines) - _EDGE_LINES) :]]
        if not line[0].is_table and len(line[0].text) < 200 and (line[0].y0 < top or line[0].y1 > bottom)
    ]  # fmt: skip


def _blocks(page: Sequence[Box], levels: Mapping[float, int], bold_level: int) -> list[str]:
    """Return the paragraphs, headings, lists and tables of a page."""
    blocks: list[str] = []
    previous: Box | None = None
    gaps = [b.y0 - a.y1 for a, b in pairwise(page) if abs(b.y0 - a.y1) < b.size]
    usual = median(gaps) if gaps else 0.0
    level = 0
    for index, box in enumerate(page):
        near = page[max(0, index - 8) : index + 8]
        right = max(
            (
                other.x1
                for other in near
                if not other.is_table and other.x0 < box.x1 and other.x1 > box.x0
            ),
            default=0.0,
        )
        before, level = level, 0 if box.is_table else _level(box, levels, bold_level)
        item = _BULLET.match(box.text)
        text = f"- {box.text[item.end() :]}" if item and not level else box.text
        continues = (
            previous is not None and not box.is_table and not previous.is_table and level == before and not item
            and _continues(previous, box, usual, right)
        )  # fmt: skip
        if (
            previous is not None
            and previous.is_table
            and not box.is_table
            and len(blocks) > 1
            and text[:1].islower()
            and not (level or item or blocks[-2][0] in "#-|" or _SENTENCE_END.search(blocks[-2]))
        ):  # the table parts a sentence: it goes above its paragraph
            blocks[-2:] = [blocks[-1], blocks[-2]]
            continues = True
        if continues and re.search(r"[^\W\d_]-$", blocks[-1]) and text[:1].islower():
            blocks[-1] = blocks[-1][:-1] + text
        elif continues:
            blocks[-1] += f" {text}"
        elif (
            item and blocks and previous is not None and re.search(r"(?:^|\n)- [^\n]*$", blocks[-1])
        ):
            blocks[-1] += f"\n{text}"
        else:
            blocks.append(heading(level, text) if level else text)
        previous = box
    return blocks


def _level(box: Box, levels: Mapping[float, int], bold_level: int) -> int:
    """Return the level of a heading, 0 for other lines."""
    level = levels.get(round(box.size * 2) / 2, bold_level if box.bold else 0)
    is_title = (
        len(box.text) < 150
        and re.search(r"[^\W\d_]{2}", box.text) is not None
        and not box.text.endswith((".", ",", ";"))
    )
    return level if is_title and not _BULLET.match(box.text) else 0


def _continues(previous: Box, box: Box, usual: float, right: float) -> bool:
    """Return whether a line continues the paragraph of the one before it."""
    gap = box.y0 - previous.y1
    if gap > usual + 0.4 * box.size:
        return False
    if gap < -2 * box.size:  # the next column
        return not _SENTENCE_END.search(previous.text) and box.text[:1].islower()
    if _NUMBERED.match(box.text) and _SENTENCE_END.search(previous.text):
        return False
    if (
        abs(box.size - previous.size) > 0.15 * previous.size
        or box.x0 - previous.x0 > 0.9 * box.size
    ):
        return abs(box.size - previous.size) <= 0.15 * previous.size and not _SENTENCE_END.search(
            previous.text
        )
    is_short = previous.x1 < max(right, box.x1) - 0.25 * (max(right, box.x1) - previous.x0)
    return not (is_short and (_SENTENCE_END.search(previous.text) or box.text[:1].isupper()))
