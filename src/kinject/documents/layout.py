"""From words on a page to text: columns, tables without rules, paragraphs, headings; running
headers and footers left out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from kinject.documents.text import heading, markdown_table, one_line

_BULLET = re.compile(r"^(?:[•◦▪‣●○■□–·➢✓\ue000-\uf8ff]|[-*o](?=\s))\s*")
# Private characters are bullets of symbol fonts, which PDFium cannot name.
_MARK = re.compile(r"(?:[^\w\s]|[\ue000-\uf8ff]|o|\(?(?:\d{1,2}|[a-z]|[ivx]{1,4})[.)])")
"""The marks before an item of a list."""
_LEADERS = re.compile(r"(?:\s?\.){5,}\s*")
_NUMBERED = re.compile(r"^\(?(?:\d{1,2}|[a-z])[.)]\s+\S")
_SENTENCE_END = re.compile(r"[.!?:;…][\"'”’»)]*$")
_VARIES = re.compile(r"\d+|\b[ivxlc]+\b")
_HYPHEN = re.compile(r"[^\W\d_]-$")
"""A letter and a hyphen at the end of a line: the word may go on in the next one."""
_PAGE_NUMBER = re.compile(r"\W*(?:page|seite|p\.)?\s*#\W*(?:(?:of|von|/)\s*#\W*)?")
_ENDS_IN_ITEM = re.compile(r"(?:^|\n)- [^\n]*$")

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

# Distances in font sizes, so that they hold for small and for large print.
# Two words of one line have a smaller gap between them.
_WORD_GAP = 0.8
# In justified prose, whose words are drawn apart, gaps are wider than `_WORD_GAP`.
_JUSTIFIED_GAP = 1.2
# A gap between words as wide as this may be part of a gutter between columns of text.
_COLUMN_GAP = 0.7
# As wide as this, and free of words in all rows, it parts the columns of a table.
_TABLE_GUTTER = 0.6
# A table ends where the space to the next line is larger.
_TABLE_END = 2.5
# A line this close to the row above it continues one of its cells.
_WRAPPED_CELL = 0.2
# Lines of a row are this close: their boxes nearly touch.
_TOUCHING = 0.1
# A paragraph ends where the space is this much larger than the page's usual one,
_PARAGRAPH_SPACE = 0.4
# and where a line is indented by more.
_INDENT = 0.9
# A line that is this far above the one before is at the top of the next column.
_NEXT_COLUMN = -2

# Fractions.
# Words whose boxes overlap by this much of the lower one's height are on one line.
_SAME_LINE = 0.5
# A line is bold if this much of its text is: a few words in it may be set otherwise.
_MOSTLY_BOLD = 0.8
# A heading's font is larger than the body's by this factor, and sets less than this part of the
# text.
_HEADING_SIZE = 1.12
_HEADING_TEXT = 0.3
# A line above columns whose font is larger by this factor is a title, not a part of one.
_TITLE_SIZE = 1.15
# Lines whose sizes differ by more belong to different paragraphs.
_SIZE_CHANGE = 0.15
# A line that leaves this much of the width free ends its paragraph.
_SHORT_LINE = 0.25
# A line of prose fills this much of its column; a cell of a table is shorter.
_FULL_LINE = 0.7
# So many of a column's lines are full, for it to be prose.
_FULL_LINES = 0.15
# Prose between gutters: most lines are parted, and so many of the parts have several words.
_PARTS_PER_LINE = 1.5
_PROSE_PARTS = 0.7
# A table whose rows fill fewer of its columns, in the middle, is none.
_FILLED_CELLS = 0.5
# Two columns whose first holds the marks of a list in more of the rows are a list.
_MARKS = 0.5
# So many of the lines with a first cell begin a row of their own, if space parts the rows.
_SPACED_ROWS = 0.3

# Words of a line from which it is prose.
_PROSE_WORDS = 4
# Lines on both sides of a gutter without which they are no columns.
_COLUMN_LINES = 4
# Lines that fill their column, at least.
_FEWEST_FULL = 3
# Columns within columns that are looked for.
_DEEPEST_COLUMNS = 6
# Points between the places where a gutter is looked for, and the most of these that are tried.
_STEP = 2
_MOST_GUTTERS = 60
# Points by which a word may reach into a gutter: boxes of letters are not exact.
_REACHES_IN = 0.5
# Points between the right edges of texts that are aligned there.
_ALIGNED = 4
# Levels of headings that sizes of fonts make; a bold line is one below.
_MOST_LEVELS = 4
# Characters of the longest heading.
_LONGEST_HEADING = 150
# Lines before and after one that tell how far its column reaches to the right.
_NEAR_LINES = 8


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


_left = attrgetter("x0")
_upper = attrgetter("y0")


def middle(box: Box) -> tuple[float, float]:
    """Return the centre of a box."""
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def _middle_height(box: Box) -> float:
    return middle(box)[1]


def _text_length(box: Box) -> int:
    return len(box.text)


def _text_of(words: Sequence[Box]) -> str:
    return " ".join(word.text for word in words)


def _flat(lines: Sequence[Sequence[Box]]) -> list[Box]:
    return list(chain.from_iterable(lines))


def _gap(word: Box, following: Box) -> float:
    """Return the space between two words of a line."""
    return following.x0 - word.x1


def lines_of(words: Sequence[Box]) -> list[list[Box]]:
    """Return words grouped to lines from the top, each from the left."""
    lines: list[list[Box]] = []
    for word in sorted(words, key=_middle_height):
        if lines and _is_beside(word, lines[-1][0]):
            lines[-1].append(word)
        else:
            lines.append([word])
    return [sorted(line, key=_left) for line in lines]


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
        _LEADERS.sub(" ", _text_of(words)),
        longest.size,
        bold=n_bold > _MOSTLY_BOLD * sum(map(_text_length, words)),
        is_table=words[0].is_table,
    )


def in_reading_order(boxes: Sequence[Box], depth: int = 0) -> list[Box]:
    """Return the lines and tables of a page (or of a column): above two columns, the left one, the
    right one, below."""
    lines = lines_of(boxes)
    columns = _columns(lines) if depth < _DEEPEST_COLUMNS else None
    if columns is None:
        return _with_tables(lines)
    first, last, x = columns
    enclosed = _flat(lines[first:last])
    left = [word for word in enclosed if middle(word)[0] < x]
    right = [word for word in enclosed if middle(word)[0] >= x]
    below = _flat(lines[last:])
    ordered = _with_tables(lines_of(_flat(lines[:first])))
    for part in (left, right, below):
        if part:
            ordered += in_reading_order(part, depth + 1)
    return ordered


def _columns(lines: Sequence[Sequence[Box]]) -> tuple[int, int, float] | None:
    """Return (first line, line past the last, x) of the longest run of lines with text on both
    sides of a gutter at x."""
    if len(lines) < _COLUMN_LINES:
        return None
    best: tuple[int, int, float] | None = None
    for step, n in _gap_steps(lines).most_common(_MOST_GUTTERS):
        if n < _COLUMN_LINES:
            break
        x = float(_STEP * step)
        for start, end in _runs_around(lines, x):
            is_longer = best is None or end - start > best[1] - best[0]
            if is_longer and _are_columns(lines[start:end], x):
                best = (*_trimmed(lines, start, end), x)
    return best


def _gap_steps(lines: Sequence[Sequence[Box]]) -> Counter[int]:
    """Return, for each step of x, in how many lines it is in a wide gap."""
    steps: Counter[int] = Counter()
    for line in lines:
        for word, following in pairwise(line):
            if _gap(word, following) > _COLUMN_GAP * word.size:
                steps.update(range(int(word.x1 / _STEP) + 1, int(following.x0 / _STEP) + 1))
    return steps


def _runs_around(lines: Sequence[Sequence[Box]], x: float) -> Iterator[tuple[int, int]]:
    """Yield (first line, line past the last) of each run of lines that do not cross x."""
    start: int | None = None
    for index, line in enumerate(lines):
        if not _crosses(line, x):
            start = index if start is None else start
        elif start is not None:
            yield start, index
            start = None
    if start is not None:
        yield start, len(lines)


def _crosses(line: Sequence[Box], x: float) -> bool:
    """Return whether a line goes over a gutter at x: by a word, or by the space between two words
    of a sentence."""
    left = max((word.x1 for word in line if word.x0 < x), default=None)
    right = min((word.x0 for word in line if word.x0 >= x), default=None)
    if left is None:
        return False
    if left > x + _REACHES_IN:
        return True
    return right is not None and right - left < _WORD_GAP * line[0].size


def _trimmed(lines: Sequence[Sequence[Box]], first: int, last: int) -> tuple[int, int]:
    """Return the run without the lines at its start that are larger than the rest: a title that
    happens to be short."""
    usual = median(word.size for word in _flat(lines[first:last]))
    while first < last and lines[first][0].size > _TITLE_SIZE * usual:
        first += 1
    return first, last


def _are_columns(lines: Sequence[Sequence[Box]], x: float) -> bool:
    """Return whether both sides hold prose: lines of several words that fill the side."""
    left: list[list[Box]] = []
    right: list[list[Box]] = []
    for line in lines:
        words = [word for word in line if not word.is_table]
        left.append([word for word in words if middle(word)[0] < x])
        right.append([word for word in words if middle(word)[0] >= x])
    return _fill_a_column(left) and _fill_a_column(right)


def _fill_a_column(lines: Sequence[Sequence[Box]]) -> bool:
    """Return whether the lines (some may be empty) are prose that fills a column."""
    lines = [line for line in lines if line]
    if len(lines) < _COLUMN_LINES:
        return False
    width = max(line[-1].x1 for line in lines) - min(line[0].x0 for line in lines)
    n_full = 0
    for line in lines:
        is_wide = line[-1].x1 - line[0].x0 > _FULL_LINE * width
        n_full += len(line) >= _PROSE_WORDS and is_wide and _is_even(line)
    return n_full >= max(_FEWEST_FULL, _FULL_LINES * len(lines))


def _is_even(words: Sequence[Box]) -> bool:
    """Return whether the gaps between the words of a line are those of a sentence."""
    return all(
        _gap(word, following) < _JUSTIFIED_GAP * word.size for word, following in pairwise(words)
    )


def _with_tables(lines: Sequence[Sequence[Box]]) -> list[Box]:
    """Return lines, with the runs of lines that form a table without vertical rules as tables."""
    boxes: list[Box] = []
    index = 0
    while index < len(lines):
        end = _table_end(lines, index)
        words = _flat(lines[index:end])
        if end - index >= _COLUMN_LINES and _is_prose(words):
            boxes += _prose_columns(words)
            index = end
            continue
        table = _table(words) if end - index > 1 else None
        if table is not None:
            boxes.append(table)
            index = end
            continue
        is_last = index + 1 == len(lines)
        boxes.append(_header_or_line(lines[index]) if is_last else joined_line(lines[index]))
        index += 1
    return boxes


def _prose_columns(words: Sequence[Box]) -> list[Box]:
    """Return the lines of the columns between the gutters of `words`, column after column."""
    starts = [words[0].x0] + [right - 1 for _, right in _gutters(words)]
    boxes: list[Box] = []
    for number in range(len(starts)):
        column = [word for word in words if _column(middle(word)[0], starts) == number]
        boxes += map(joined_line, lines_of(column))
    return boxes


def _header_or_line(line: Sequence[Box]) -> Box:
    """Return the last line of a page: the header of a table if it has three cells or more."""
    box = joined_line(line)
    cells = _segments(line)
    if box.is_table or len(cells) < 3:
        return box
    return box._replace(text=header_only([_text_of(cell) for cell in cells]), is_table=True)


def header_only(cells: Sequence[str]) -> str:
    """Return the header of a table whose rows are on the next page."""
    escaped = " | ".join(cell.replace("|", "\\|") for cell in cells)
    return f"| {escaped} |\n|{' --- |' * len(cells)}"


def _is_prose(words: Sequence[Box]) -> bool:
    """Return whether the columns between the gutters of `words` are prose: many lines of several
    words fill them."""
    lines = lines_of(words)
    parts = list(chain.from_iterable(map(_segments, lines)))
    n_full = sum(len(part) >= _PROSE_WORDS for part in parts)
    return len(parts) > _PARTS_PER_LINE * len(lines) and n_full > _PROSE_PARTS * len(parts)


def _segments(line: Sequence[Box]) -> list[list[Box]]:
    """Return the words of a line, parted at gaps wider than those between words."""
    parts = [[line[0]]]
    for word, following in pairwise(line):
        if _gap(word, following) > _WORD_GAP * min(word.size, following.size):
            parts.append([])
        parts[-1].append(following)
    return parts


def _gutters(words: Sequence[Box]) -> list[tuple[float, float]]:
    """Return the (left, right) of the vertical strips between the columns of `words`."""
    gutters: list[tuple[float, float]] = []
    ordered = sorted(words, key=_left)
    end = ordered[0].x1
    least = _TABLE_GUTTER * median(word.size for word in words)
    for word in ordered[1:]:
        if word.x0 - end > least:
            gutters.append((end, word.x0))
        end = max(end, word.x1)
    return gutters


def _space_above(lines: Sequence[Sequence[Box]], index: int) -> float:
    """Return the space between a line and the one before it."""
    return lines[index][0].y0 - max(word.y1 for word in lines[index - 1])


def _table_end(lines: Sequence[Sequence[Box]], first: int) -> int:
    """Return the line past the last of those from `first` on that share gutters."""
    if lines[first][0].is_table or len(_segments(lines[first])) < 2:
        return first
    words = list(lines[first])
    before = len(_gutters(words))
    end = full = first + 1
    while end < len(lines) and not lines[end][0].is_table:
        line = lines[end]
        if _space_above(lines, end) > _TABLE_END * line[0].size:
            break
        words = [*words, *line]
        n_gutters = len(_gutters(words))
        # A text that spans columns may close some of the gutters, not most of them.
        if n_gutters < max(1, (before + 1) // 2):
            break
        is_one = len(_segments(line)) < 2
        if is_one and n_gutters < before:
            break
        before = n_gutters
        end += 1
        if not is_one:
            full = end
    return _with_wrapped(lines, full, end)


def _with_wrapped(lines: Sequence[Sequence[Box]], full: int, end: int) -> int:
    """Return `full`, or past the lines after it that continue a cell of the last row."""
    while full < end and _space_above(lines, full) < _WRAPPED_CELL * lines[full][0].size:
        full += 1
    return full


def _table(words: Sequence[Box]) -> Box | None:
    """Return a table of the words, None where they are no table."""
    gutters = _gutters(words)
    rows = _rows(words, gutters)
    starts = [min(word.x0 for word in words), *((left + right) / 2 for left, right in gutters)]
    n_columns = len(starts)
    # Two rows of two cells are too few: any two short lines side by side look so.
    if len(rows) < 2 or n_columns < 2 or (len(rows) == 2 and n_columns == 2):
        return None
    grid = [_cells(row, starts) for row in rows]
    filled = [sum(map(bool, row)) for row in grid]
    if median(filled) < max(2, _FILLED_CELLS * n_columns):
        return None
    n_marks = sum(_MARK.fullmatch(row[0]) is not None for row in grid)
    if n_columns == 2 and n_marks > _MARKS * len(grid):
        return None
    n_header = 1
    if filled[0] < n_columns and filled[1] == n_columns:
        grid[0], n_header = _spread(rows, starts), 2
    return joined_line(words)._replace(text=markdown_table(grid, n_header), is_table=True)


def _rows(words: Sequence[Box], gutters: Sequence[tuple[float, float]]) -> list[list[Box]]:
    """Return the words by rows: lines that touch one another are one, unless more than one of them
    has a first cell."""
    rows = _spaced_rows(words)
    first = gutters[0][0] + 0.1 if gutters else 0.0
    n_with_first = sum(line[0].x0 < first for line in lines_of(words))
    if len(rows) > 1 and len(rows) >= _SPACED_ROWS * n_with_first:
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


def _spaced_rows(words: Sequence[Box]) -> list[list[Box]]:
    """Return the words by rows that space parts."""
    ordered = sorted(words, key=_upper)
    rows = [[ordered[0]]]
    end = ordered[0].y1
    for word in ordered[1:]:
        if word.y0 > end + _TOUCHING * word.size:
            rows.append([])
            end = word.y1
        rows[-1].append(word)
        end = max(end, word.y1)
    return rows


def _cells(row: Sequence[Box], starts: Sequence[float]) -> list[str]:
    """Return the texts of a row in its columns, which begin at `starts`."""
    cells = []
    for start, end in pairwise([*starts, float("inf")]):
        cells.append(cell_text([word for word in row if start - 1 <= middle(word)[0] < end]))
    return cells


def cell_text(words: Sequence[Box]) -> str:
    """Return the words of a cell as one line; a hyphen at the end of a line joins it to the next
    one."""
    text = ""
    for line in lines_of(words):
        following = _text_of(line)
        if _HYPHEN.search(text) and following[:1].islower():
            text = text[:-1] + following
        elif not text or re.search(r"\w-$", text):
            text += following
        else:
            text += f" {following}"
    return _LEADERS.sub(" ", text)


def _spread(rows: Sequence[Sequence[Box]], starts: Sequence[float]) -> list[str]:
    """Return the cells of the first row, whose texts span several columns, in each of these.

    A text that ends where its last column does spans those to its left, any other those to its
    right.
    """
    ends = _column_ends(rows[1:], starts)
    cells = [""] * len(starts)
    free = 0
    for part in _segments(sorted(rows[0], key=_left)):
        first, last = _column(part[0].x0 + 1, starts), _column(part[-1].x1 - 1, starts)
        is_right = free > 0 and abs(part[-1].x1 - ends.get(last, 0.0)) < _ALIGNED
        if is_right:
            first = free
        elif free:
            cells[free:first] = [cells[free - 1]] * (first - free)
        cells[first : last + 1] = [_text_of(part)] * (last + 1 - first)
        free = last + 1
    cells[free:] = [cells[free - 1]] * (len(cells) - free)
    return cells


def _column_ends(rows: Sequence[Sequence[Box]], starts: Sequence[float]) -> dict[int, float]:
    """Return column -> the right edge of its widest cell."""
    ends: dict[int, float] = {}
    for word in _flat(rows):
        column = _column(middle(word)[0], starts)
        ends[column] = max(ends.get(column, word.x1), word.x1)
    return ends


def _column(x: float, starts: Sequence[float]) -> int:
    return max(index for index, start in enumerate(starts) if start <= x or not index)


def compose(pages: Sequence[Sequence[Box]]) -> tuple[str, list[list[int | str]], str]:
    """Return the Markdown of pages of lines, [start, number from 1] of each page with text, and the
    largest heading."""
    levels, bold_level = _heading_levels(pages)
    text, title = "", ""
    starts: list[list[int | str]] = []
    for number, page in enumerate(pages, start=1):
        blocks = _blocks(page, levels, bold_level)
        headings = (block.lstrip("# ") for block in blocks if block.startswith("# "))
        title = title or next(headings, "")
        following = "\n\n".join(blocks)
        if not following:
            continue
        rows = _table_rows(text, following)
        if rows is not None:
            starts.append([len(text) + 1, number])
            text += f"\n{rows}"
            continue
        if text and _is_broken_off(text) and following[:1].islower():
            text = text[:-1] if _HYPHEN.search(text) else f"{text} "
        elif text:
            text += "\n\n"
        starts.append([len(text), number])
        text += following
    return text, starts, title


def _rounded_size(box: Box) -> float:
    """Return the size of a font to half a point: that of one font varies a little."""
    return round(box.size * 2) / 2


def _heading_levels(pages: Sequence[Sequence[Box]]) -> tuple[dict[float, int], int]:
    """Return size -> level of the headings, and the level of those that are only bold."""
    sizes: Counter[float] = Counter()
    for box in _flat(pages):
        if not box.is_table:
            sizes[_rounded_size(box)] += len(box.text)
    if not sizes:
        return {}, 1
    body, _ = sizes.most_common(1)[0]
    most = _HEADING_TEXT * sizes.total()
    larger = [size for size in sizes if size > _HEADING_SIZE * body and sizes[size] < most]
    levels = {}
    for level, size in enumerate(sorted(larger, reverse=True), start=1):
        levels[size] = min(level, _MOST_LEVELS)
    return levels, min(len(larger), _MOST_LEVELS) + 1


def _is_broken_off(text: str) -> bool:
    """Return whether a page ends within a sentence."""
    return not text.endswith(("|", "`")) and not _SENTENCE_END.search(text)


def _table_rows(text: str, following: str) -> str | None:
    """Return `following` as rows of the table that ends `text`, without a header, or None where it
    is no such table."""
    last = text[text.rfind("\n\n") + 2 :].split("\n")
    first, _, rest = following.partition("\n\n")
    lines = first.split("\n")
    are_tables = last[-1].startswith("| ") and lines[0].startswith("| ")
    if not are_tables or len(last) < 2 or len(lines) < 2:
        return None
    if not last[1].startswith("| ---") or last[1] != lines[1]:
        return None
    rows = lines[2:]
    if lines[0] != last[0]:
        rows.insert(0, lines[0])
    continued = "\n".join(rows)
    return f"{continued}\n\n{rest}" if rest else continued


def without_furniture(pages: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """Return pages of words without the lines at the edge that other pages have at the same height,
    and page numbers."""
    if len(pages) < 2:
        return [list(page) for page in pages]
    top = min((box.y0 for box in _flat(pages)), default=0.0)
    bottom = max((box.y1 for box in _flat(pages)), default=0.0)
    zone = _EDGE * (bottom - top)
    edges = [_edge(page, top + zone, bottom - zone) for page in pages]
    pages_with: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for number, edge in enumerate(edges):
        for box, _ in edge:
            for place in _places(box):
                pages_with[place].add(number)
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


def _blocks(page: Sequence[Box], levels: Mapping[float, int], bold_level: int) -> list[str]:
    """Return the paragraphs, headings, lists and tables of a page."""
    blocks: list[str] = []
    previous: Box | None = None
    usual = _usual_space(page)
    level = 0
    for index, box in enumerate(page):
        before, level = level, _level(box, levels, bold_level)
        item = _BULLET.match(box.text)
        text = f"- {box.text[item.end() :]}" if item and not level else box.text
        continues = False
        if previous is not None and level == before and not item:
            continues = _continues(previous, box, usual, _right_edge(page, index))
        if (
            previous is not None
            and previous.is_table
            and not (box.is_table or level or item)
            and _is_parted_sentence(blocks, text)
        ):
            # The table parts a sentence: it goes above its paragraph.
            blocks[-2:] = [blocks[-1], blocks[-2]]
            continues = True
        if continues:
            blocks[-1] = _with_line(blocks[-1], text)
        elif item and blocks and _ENDS_IN_ITEM.search(blocks[-1]):
            blocks[-1] += f"\n{text}"
        else:
            blocks.append(heading(level, text) if level else text)
        previous = box
    return blocks


def _with_line(paragraph: str, line: str) -> str:
    """Return a paragraph with its next line; a hyphen between them is taken out of a word."""
    if _HYPHEN.search(paragraph) and line[:1].islower():
        return paragraph[:-1] + line
    return f"{paragraph} {line}"


def _usual_space(page: Sequence[Box]) -> float:
    """Return the space between most lines of a page."""
    spaces = []
    for line, following in pairwise(page):
        space = following.y0 - line.y1
        if abs(space) < following.size:
            spaces.append(space)
    return median(spaces) if spaces else 0.0


def _right_edge(page: Sequence[Box], index: int) -> float:
    """Return how far the lines near a line, and above or below it, reach to the right."""
    box = page[index]
    edge = box.x1
    for other in page[max(0, index - _NEAR_LINES) : index + _NEAR_LINES]:
        if not other.is_table and other.x0 < box.x1 and other.x1 > box.x0:
            edge = max(edge, other.x1)
    return edge


def _is_parted_sentence(blocks: Sequence[str], text: str) -> bool:
    """Return whether `text` continues the paragraph before the table that is the last block."""
    if len(blocks) < 2 or not text[:1].islower():
        return False
    return blocks[-2][0] not in "#-|" and not _SENTENCE_END.search(blocks[-2])


def _level(box: Box, levels: Mapping[float, int], bold_level: int) -> int:
    """Return the level of a heading, 0 for other lines and tables."""
    if box.is_table or len(box.text) >= _LONGEST_HEADING:
        return 0
    if box.text.endswith((".", ",", ";")) or _BULLET.match(box.text):
        return 0
    # A formula or a number in large print is none.
    if not re.search(r"[^\W\d_]{2}", box.text):
        return 0
    return levels.get(_rounded_size(box), bold_level if box.bold else 0)


def _continues(previous: Box, box: Box, usual: float, right: float) -> bool:
    """Return whether a line continues the paragraph of the one before it."""
    if previous.is_table or box.is_table:
        return False
    space = box.y0 - previous.y1
    if space > usual + _PARAGRAPH_SPACE * box.size:
        return False
    ends = _SENTENCE_END.search(previous.text) is not None
    if space < _NEXT_COLUMN * box.size:
        return not ends and box.text[:1].islower()
    if _NUMBERED.match(box.text) and ends:
        return False
    if abs(box.size - previous.size) > _SIZE_CHANGE * previous.size:
        return False
    if box.x0 - previous.x0 > _INDENT * box.size:
        return not ends
    is_short = previous.x1 < right - _SHORT_LINE * (right - previous.x0)
    return not (is_short and (ends or box.text[:1].isupper()))
