"""What readers write: Markdown headings, lists, fenced code, and tables whose header names each column."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

_MOST_CELLS = 2_000_000
"""Cells of one table, after cells that span rows and columns are repeated in each."""
DEEPEST_ITEM = 8
"""Levels of a list within lists that are shown by indentation."""
_SPACE = re.compile(r"\s+")
_FENCES = re.compile(r"^\s*(`{3,})", re.MULTILINE)


def one_line(text: str) -> str:
    """Return `text` with single spaces between its words."""
    return _SPACE.sub(" ", text).strip()


def heading(level: int, text: str) -> str:
    """Return a heading of level 1 to 6 (deeper ones are 6)."""
    return f"{'#' * min(max(level, 1), 6)} {one_line(text)}"


def fenced(code: str, language: str = "") -> str:
    """Return `code` between fences that none of its own lines closes."""
    longest = max((len(match[1]) for match in _FENCES.finditer(code)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{code.strip(chr(10))}\n{fence}"


def markdown_table(rows: Sequence[Sequence[str]], n_header: int = 1) -> str:
    """Return rows of cells as a Markdown table whose header is the first `n_header` rows, joined column by column.

    Empty rows and columns are left out. Rows that hold one text across all columns are lines above and, as rows with an
    empty rest, within the table. What has one column or one row is no table: its cells are lines.
    """
    width = max(map(len, rows), default=0)
    grid = [[one_line(cell) for cell in row] + [""] * (width - len(row)) for row in rows]
    above = []
    while grid and width > 1 and len(set(grid[0])) == 1 and len(grid) > 1:  # a title over all columns
        above.append(grid.pop(0)[0])
        n_header = max(1, n_header - 1)
    header = [" ".join(dict.fromkeys(filter(None, column))) for column in zip(*grid[:n_header], strict=True)]
    body = [row for row in grid[n_header:] if any(row)]
    kept = [index for index, name in enumerate(header) if name or any(row[index] for row in body)]
    lines = [[row[index] for index in kept] for row in (header, *body)]
    lines = [[row[0], *[""] * (len(row) - 1)] if len(row) > 2 and len(set(row)) == 1 else row for row in lines]
    if len(kept) < 2 or not body:
        text = [" | ".join(filter(None, row)) for row in lines]
    else:
        escaped = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in lines]
        text = ["| " + line + " |" for line in escaped]
        text.insert(1, "|" + " --- |" * len(kept))
    head = "\n\n".join(filter(None, above))
    return (f"{head}\n\n" if head else "") + "\n".join(filter(None, text))


def spanned(rows: Iterable[Iterable[tuple[str, int, int]]]) -> list[list[str]]:
    """Return the grid of rows of (text, rows spanned, columns spanned): a text is in each place that its cell covers.

    Raises `ValueError` if the grid is larger than any table.
    """
    grid: list[list[str]] = []
    hanging: dict[int, tuple[str, int]] = {}
    n_cells = 0
    for cells in rows:
        line: list[str] = []

        def hang(line: list[str] = line) -> None:
            while len(line) in hanging:
                text, left = hanging.pop(len(line))
                if left > 1:
                    hanging[len(line)] = text, left - 1
                line.append(text)

        for text, n_rows, n_columns in cells:
            hang()
            for _ in range(max(1, n_columns)):
                if n_rows > 1:
                    hanging[len(line)] = text, n_rows - 1
                line.append(text)
                if n_cells + len(line) > _MOST_CELLS:
                    raise ValueError(f"a table of more than {_MOST_CELLS:,} cells")
        hang()
        n_cells += len(line)
        grid.append(line)
    return grid


def tables_of(rows: Sequence[Sequence[str]], wide: Sequence[bool] = ()) -> str:
    """Return a sheet's rows as text and tables: blank rows and blank columns part them, lone cells are lines of text.

    `wide[i]` says that row i has a cell which spans some of the columns, so that the next row belongs to its header. A block
    that follows a blank row under the same columns, and begins with a number, continues the table before it.
    """
    blocks: list[tuple[tuple[int, int], list[tuple[list[str], bool]]]] = []
    for blank, group in groupby(range(len(rows)), key=lambda index: not any(map(str.strip, rows[index]))):
        if blank:
            continue
        indices = list(group)
        for first, last in _column_runs([rows[index] for index in indices]):
            block = [(list(rows[index][first:last]), bool(wide) and wide[index]) for index in indices]
            earlier = blocks[-1] if blocks else None
            if earlier and earlier[0] == (first, last) and len(earlier[1][0][0]) > 1 and _has_number(block[0][0]):
                earlier[1].extend(block)
            else:
                blocks.append(((first, last), block))
    return "\n\n".join(_block_text(block) for _, block in blocks)


def _column_runs(block: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return (first, past the last) of the runs of columns that are not blank in `block`."""
    width = max(map(len, block))
    filled = [any(index < len(row) and row[index].strip() for row in block) for index in range(width)]
    return [
        (run[0], run[-1] + 1)
        for full, group in groupby(range(width), key=lambda index: filled[index])
        if full and (run := list(group))
    ]


def _has_number(row: Sequence[str]) -> bool:
    return any(re.fullmatch(r"[-+]?[\d.,:%€$£ -]*\d[\d.,:%€$£ -]*", cell.strip()) for cell in row if cell.strip())


def _block_text(block: list[tuple[list[str], bool]]) -> str:
    """Return a block as lines of text as long as rows hold one cell, then as a table."""
    lines = []
    while block and len(block[0][0]) > 1 and sum(1 for cell in set(block[0][0]) if cell.strip()) == 1:
        lines.append(one_line(next(cell for cell in block.pop(0)[0] if cell.strip())))
    n_header = 1
    while n_header < len(block) - 1 and block[n_header - 1][1]:
        n_header += 1
    table = markdown_table([row for row, _ in block], n_header) if block else ""
    return "\n\n".join(filter(None, [*lines, table]))
