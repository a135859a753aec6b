"""From words on a page to text: columns, tables without rules, paragraphs, headings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, pairwise
from operator import attrgetter
from statistics import median

from kinject.documents.boxes import (
    HYPHEN,
    WIDE,
    Box,
    cell_text,
    flat,
    header_only,
    is_same_size,
    joined_line,
    left_edge,
    lines_of,
    middle,
    spaced_rows,
    text_of,
    with_line_after_hyphen,
)
from kinject.documents.text import goes_on_below, heading, markdown_table

_BULLET = re.compile(r"^(?:[•◦▪‣●○■□–·➢✓\ue000-\uf8ff]|[-*o](?=\s))\s*")
# Private characters are bullets of symbol fonts, which PDFium cannot name.
_MARK = re.compile(r"(?:[^\w\s]|[\ue000-\uf8ff]|o|\(?(?:\d{1,2}|[a-z]|[ivx]{1,4})[.)])")
"""The marks before an item of a list."""
_NUMBERED = re.compile(r"^\(?(?:\d{1,2}|[a-z])[.)]\s+\S")
_SENTENCE_END = re.compile(r"[.!?:;…。！？।॥۔؟][\"'”’»)]*$")
_ENDS_IN_ITEM = re.compile(r"(?:^|\n)- [^\n]*$")

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
# A paragraph ends where the space is this much larger than the page's usual one,
_PARAGRAPH_SPACE = 0.4
# and where a line is indented by more.
_INDENT = 0.9
# A line that is this far above the one before is at the top of the next column.
_NEXT_COLUMN = -2

# Fractions.
# A heading's font is larger than the body's by this factor, and sets less than this part of the
# text.
_HEADING_SIZE = 1.12
_HEADING_TEXT = 0.3
# A line above columns whose font is larger by this factor is a title, not a part of one.
_TITLE_SIZE = 1.15
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
# Rows parted by space found more cells than rows parted by their first cells.
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
# Columns of a table up to which the texts above them are divided among them.
_MOST_DIVIDED = 12
# Levels of headings that sizes of fonts make; a bold line is one below.
_MOST_LEVELS = 4
# Characters of the longest heading.
_LONGEST_HEADING = 150
# Lines before and after one that tell how far its column reaches to the right.
_NEAR_LINES = 8


def _gap(word: Box, following: Box) -> float:
    """Return the space between two words of a line."""
    return following.x0 - word.x1


def in_reading_order(boxes: Sequence[Box], depth: int = 0) -> list[Box]:
    """Return the lines and tables of a page (or of a column): above two columns, the left one, the
    right one, below."""
    lines = lines_of(boxes)
    columns = _columns(lines) if depth < _DEEPEST_COLUMNS else None
    if columns is None:
        return _with_tables(lines)
    first, last, x = columns
    enclosed = flat(lines[first:last])
    left = [word for word in enclosed if middle(word)[0] < x]
    right = [word for word in enclosed if middle(word)[0] >= x]
    below = flat(lines[last:])
    ordered = _with_tables(lines_of(flat(lines[:first])))
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
                best = (*_trimmed(lines, start, end, x), x)
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
    """Return whether a line goes over a gutter at x: by a word, or the space of a sentence."""
    left = max((word for word in line if word.x0 < x), key=attrgetter("x1"), default=None)
    right = min((word for word in line if word.x0 >= x), key=left_edge, default=None)
    if left is None:
        return False
    # Beside a heading may be the text of the other column.
    is_space = right is not None and _gap(left, right) < _WORD_GAP * min(left.size, right.size)
    return is_space or left.x1 > x + _REACHES_IN


def _trimmed(lines: Sequence[Sequence[Box]], first: int, last: int, x: float) -> tuple[int, int]:
    """Return the run without the lines at its start that are larger than the rest: a title that
    happens to be short, but no heading of the left column beside the text of the right one."""
    usual = median(word.size for word in flat(lines[first:last]))
    while first < last and lines[first][0].size > _TITLE_SIZE * usual:
        beside = [word.size for word in lines[first] if middle(word)[0] >= x]
        if beside and lines[first][0].size > _TITLE_SIZE * min(beside):
            break
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
        words = flat(lines[index:end])
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
    return box._replace(text=header_only([text_of(cell) for cell in cells]), is_table=True)


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
    ordered = sorted(words, key=left_edge)
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
    gutters = _column_gutters(words)
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
    if filled[1] == n_columns:
        names = _group_names(rows, starts)
        if names and goes_on_below(names, grid[1]):
            grid[0], n_header = names, 2
    return joined_line(words)._replace(text=markdown_table(grid, n_header), is_table=True)


def _column_gutters(words: Sequence[Box]) -> list[tuple[float, float]]:
    """Return the gutters between the columns of a table. Names of several columns each, with none
    above the first, may be over a gutter or within it."""
    first, *others = lines_of(words)
    if len(others) > 1:
        below = _gutters(flat(others))
        if below and first[0].x0 > below[0][0] and 1 < len(_segments(first)) < len(below):
            return below
    return _gutters(words)


def _rows(words: Sequence[Box], gutters: Sequence[tuple[float, float]]) -> list[list[Box]]:
    """Return the words by rows: lines that touch one another are one, unless more than one of them
    has a first cell."""
    rows = spaced_rows(words)
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


def _cells(row: Sequence[Box], starts: Sequence[float]) -> list[str]:
    """Return the texts of a row in its columns, which begin at `starts`."""
    cells = []
    for start, end in pairwise([*starts, float("inf")]):
        cells.append(cell_text([word for word in row if start - 1 <= middle(word)[0] < end]))
    return cells


def _group_names(rows: Sequence[Sequence[Box]], starts: Sequence[float]) -> list[str]:
    """Return the texts of the first row over the columns that each of them spans, but for the first
    column; [] where they are as many as the columns, or one is above the first.

    Of all divisions of the columns it is the one whose parts begin, end or have their middles
    nearest to those of the texts.
    """
    parts = _segments(sorted(rows[0], key=left_edge))
    n_columns = len(starts)
    is_over_first = parts[0][0].x0 < starts[1]
    if is_over_first or len(parts) >= n_columns - 1 or n_columns > _MOST_DIVIDED:
        return []
    lefts, rights = _column_edges(flat(rows[1:]), starts)
    best: tuple[float, list[str]] = (math.inf, [])
    for cuts in combinations(range(2, n_columns), len(parts) - 1):
        ranges = list(pairwise([1, *cuts, n_columns]))
        distances = [0.0, 0.0, 0.0]
        names = [""]
        for part, (first, end) in zip(parts, ranges, strict=True):
            left, right = part[0].x0 - lefts[first], part[-1].x1 - rights[end - 1]
            for place, distance in enumerate((left, right, (left + right) / 2)):
                distances[place] += abs(distance)
            names += [text_of(part)] * (end - first)
        best = min(best, (min(distances), names))
    return best[1]


def _column_edges(
    words: Sequence[Box], starts: Sequence[float]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return column -> the left edge of its words, and the right one."""
    lefts: dict[int, float] = {}
    rights: dict[int, float] = {}
    for word in words:
        column = _column(middle(word)[0], starts)
        lefts[column] = min(lefts.get(column, word.x0), word.x0)
        rights[column] = max(rights.get(column, word.x1), word.x1)
    return lefts, rights


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
            text = _with_line(text, following)
        elif text:
            text += f"\n\n{following}"
        else:
            text = following
        starts.append([len(text) - len(following), number])
    return text, starts, title


def _rounded_size(box: Box) -> float:
    """Return the size of a font to half a point: that of one font varies a little."""
    return round(box.size * 2) / 2


def _heading_levels(pages: Sequence[Sequence[Box]]) -> tuple[dict[float, int], int]:
    """Return size -> level of the headings, and the level of those that are only bold."""
    sizes: Counter[float] = Counter()
    for box in flat(pages):
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
    if HYPHEN.search(paragraph) and line[:1].islower():
        return with_line_after_hyphen(paragraph, line)
    # Chinese and Japanese have no white space between words.
    if WIDE.match(paragraph[-1:]) and WIDE.match(line):
        return paragraph + line
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
        # A heading may be above several columns.
        if other.is_table or not is_same_size(other, box):
            continue
        if other.x0 < box.x1 and other.x1 > box.x0:
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
    if not is_same_size(box, previous):
        return False
    if box.x0 - previous.x0 > _INDENT * box.size:
        return not ends
    is_short = previous.x1 < right - _SHORT_LINE * (right - previous.x0)
    return not (is_short and (ends or box.text[:1].isupper()))
