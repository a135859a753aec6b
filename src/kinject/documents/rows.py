"""Readers of rows, each one document: JSON lines, CSV, Parquet."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from kinject.disk import (
    LONGEST_LINE,
    Row,
    content_id,
    format_size,
    parse_json,
    parse_row,
    read_bytes,
    read_lines,
)
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import decode, is_utf16, markdown_table, whole_file
from kinject.errors import InputError, one_line
from kinject.terminal import format_count
from kinject.types import Document

JsonValue = dict[str, Any] | list[Any] | str | float | bool | None
_NAMES = {
    "text": ("text", "content", "body", "article", "passage", "Text", "Content", "Body"),
    "title": ("title", "headline", "subject", "Title", "Subject"),
    "id": ("id", "_id", "doc_id", "document_id", "ID", "Id"),
}
"""The possible names of a document's fields; the first of them that a row has counts."""
_DELIMITERS = ",;\t|"
_STATED = re.compile(r"\s*sep=(.)\s*")
"""The first line of a table by which Excel knows its delimiter."""
_SNIFFED = 20
"""Rows from which the delimiter of a table is found."""
# A comma of a sentence has a space behind it, of a table's row it may have one.
_MOSTLY = 0.8
# Cells of tables, and names in a list, are shorter than parts of sentences.
_FEW_WORDS = 4
# A cell of a language that parts no words is no label if it is longer, in characters.
_LONGEST_LABEL = 40
_FIELDS = ("id", "title", "text", "source", "meta")
_OPTIONAL = ("title", "source", "meta")
ROWS_AT_ONCE = 16
"""Rows of a table in memory at once: each may hold a long document."""


def document_of(row: Row, location: str, options: ReadOptions) -> Document:
    """Return the document in one row. Raises `InputError` at `location` on a missing or mistyped
    field."""
    written, row = row, with_plain_names(row, options)
    # Many programs write null where a row has no title.
    row = {key: value for key, value in row.items() if value is not None or key not in _OPTIONAL}
    if "text" not in row:
        keys = ", ".join(map(repr, written)) or "none"
        raise InputError(
            f"{location}: no key {options.text_field or 'text'!r} (found {keys}). "
            "It must hold the document."
        )
    for key in ("text", "title", "source"):
        if not isinstance(row.get(key, ""), str):
            raise InputError(
                f"{location}: {key}: found {type(row[key]).__name__}, expected a string."
            )
    row_id = row.get("id")
    if isinstance(row_id, bool) or not isinstance(row_id, str | int | None) or row_id == "":
        raise InputError(
            f"{location}: id: found {row_id!r}, expected a string that is not empty, or no id."
        )
    meta = row.get("meta", {})
    if not isinstance(meta, Mapping):
        raise InputError(f"{location}: meta: found {type(meta).__name__}, expected an object.")
    others = {key: value for key, value in row.items() if key not in _FIELDS}
    text, title = row["text"], row.get("title", "")
    identity = content_id(title, text) if row_id is None else str(row_id)
    return Document(identity, title, text, row.get("source") or location, {**others, **meta})


def with_plain_names(row: Row, options: ReadOptions) -> Row:
    """Return a row with the names that kinject uses: those of `options`, else the first of `_NAMES`
    that it has. Without a name that `options` has, the row has no such field."""
    chosen = {"text": options.text_field, "title": options.title_field, "id": options.id_field}
    for plain, names in _NAMES.items():
        name = chosen.get(plain) or next((name for name in names if name in row), None)
        if name is None or name == plain:
            continue
        others = {key: value for key, value in row.items() if key not in (name, plain)}
        # A text under another name than the one that was asked for is another text.
        if name in row:
            others = {plain: row[name], **others}
        row = others
    return row


def _in_utf8(path: Path, stream: BinaryIO, options: ReadOptions) -> BinaryIO:
    """Return a stream of JSON in UTF-8: PowerShell writes it in UTF-16."""
    head = stream.read(2)
    stream.seek(0)
    if not is_utf16(head):
        return stream
    text, _ = decode(path, read_bytes(path, options.largest, stream))
    return io.BytesIO(text.encode("utf-8"))


def read_json_rows(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents of a JSONL file."""
    for number, line in read_lines(path, _in_utf8(path, stream, options)):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        location = f"{path}:{number}"
        try:
            row = parse_row(line, location)
        except InputError as error:
            yield location, error
        else:
            yield _located_document(location, row, options)


def _located_document(location: str, row: Row, options: ReadOptions) -> LocatedDocument:
    """Return the document in a row, or its error."""
    try:
        return location, document_of(row, location, options)
    except InputError as error:
        return location, error


def read_json(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents of a JSON file: a list of objects (alone, or the only one in an object),
    or one object.

    A file with an object on each line is read as JSONL.
    """
    data = read_bytes(path, options.largest, _in_utf8(path, stream, options))
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        value = parse_json(data)
    except RecursionError as error:
        raise InputError(f"{path}: nested too deep. Expected a list of plain objects.") from error
    # Nor only JSONDecodeError: a number of over 4,300 digits raises a plain ValueError.
    except ValueError as error:  # also a key that is there twice, and another encoding
        first, line_end, _ = data.partition(b"\n")
        if line_end and first.strip().startswith(b"{") and first.strip().endswith(b"}"):
            yield from read_json_rows(path, io.BytesIO(data), options)
            return
        raise InputError(
            f"{path}: not JSON: {str(error)[:150]}. "
            "Expected a list of objects, or one on each line."
        ) from error
    rows = _rows_of(path, value, options)
    if not any("text" in with_plain_names(row, options) for row in rows):
        keys = ", ".join(map(repr, rows[0]))
        raise InputError(
            f"{path}: no key {options.text_field or 'text'!r} in "
            f"{format_count(len(rows), 'object')} "
            f"(the first has {keys[:300]}). It must hold the document."
        )
    for number, row in enumerate(rows, start=1):
        location = f"{path}: item {number}"
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            row = parse_row(line, location)
        except InputError as error:
            yield location, error
        else:
            yield _located_document(location, row, options)


def _rows_of(path: Path, value: JsonValue, options: ReadOptions) -> list[dict[str, Any]]:
    """Return the rows of a JSON file: a list, the only list in an object, or the object."""
    lists = []
    if isinstance(value, dict):
        lists = [item for item in value.values() if _are_rows(item)]
        if not lists or "text" in with_plain_names(value, options):
            return [value]
    elif _are_rows(value):
        lists = [value]
    if len(lists) != 1:
        raise InputError(
            f"{path}: found {type(value).__name__}, expected a list of objects with a text each."
        )
    return lists[0]


def _are_rows(value: JsonValue) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def read_csv(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents of a CSV file with a header; its columns are the keys of JSONL rows,
    empty cells are absent.

    Cells are parted by a comma, a semicolon, a tab or a bar. A table without a column of texts is
    one document, a Markdown table; a file that is no table is a text. No row is left out: one with
    fewer cells than the header is filled up, and what is too much belongs to the text.
    """
    text, meta = decode(path, read_bytes(path, options.largest, stream))
    lines = text.split("\n")
    delimiter = _delimiter(lines, options)
    if not delimiter:
        yield whole_file(path, "", _one_column(lines) or text, meta)
        return
    rows = _records(lines, delimiter)
    _, first = next(rows)
    header = list(map(str.strip, first))
    names = with_plain_names(dict(zip(header, header, strict=True)), options)
    first_rows = list(islice(rows, _SNIFFED))
    rows = chain(first_rows, rows)
    # `names` has the column under its plain name, and its own as the value.
    text_name = names.get("text", "")
    if options.text_field is None and not _has_texts(text_name, header, first_rows):
        yield from _whole_table(path, header, rows, meta)
        return
    for name in map(names.get, _NAMES):
        # A reader could not choose.
        if name and header.count(name) > 1:
            raise InputError(
                f"{path}:1: two columns are called {name!r:.80}. Give each a name of its own."
            )
    for number, cells in rows:
        cells = _fitted(cells, header, text_name, delimiter)
        # Where a space follows each comma, it belongs to no cell.
        if header != first:
            cells = list(map(str.strip, cells))
        record: dict[str, str] = {}
        for name, cell in zip(header, cells, strict=True):
            # Jira has a column for each label, all of one name.
            record[name] = "; ".join(filter(None, [record.get(name, ""), cell]))
        row: dict[str, Any] = {
            key: cell for key, cell in record.items() if cell or key == text_name
        }
        if meta:
            row["meta"] = meta
        yield _located_document(f"{path}:{number}", row, options)


def _has_texts(name: str, header: list[str], rows: list[tuple[int, list[str]]]) -> bool:
    """Return whether the column called `name` has texts. In a price list `article` has labels, and
    what the other columns have would be in no text."""
    if name not in header or name.lower() == "text":
        return name in header
    column = header.index(name)
    filled = [cells[column] for _, cells in rows if len(cells) > column and cells[column]]
    n_texts = sum(
        len(cell.split()) > _FEW_WORDS or len(cell) > _LONGEST_LABEL or _ends_sentence(cell)
        for cell in filled
    )
    return 2 * n_texts >= len(filled)


def _fitted(cells: list[str], header: list[str], text_name: str, delimiter: str) -> list[str]:
    """Return the cells of a row, as many as the header has. Of a comma too many in it the likeliest
    place is the text, if nobody has quoted it."""
    n_more = len(cells) - len(header)
    # Programs write delimiters of cells that nobody has filled.
    while n_more > 0 and not cells[-1].strip():
        cells, n_more = cells[:-1], n_more - 1
    if n_more <= 0 or text_name not in header:
        return [*cells, *[""] * -n_more][: len(header)]
    first = header.index(text_name)
    last = first + n_more + 1
    return [*cells[:first], delimiter.join(cells[first:last]), *cells[last:]]


def _whole_table(
    path: Path, header: list[str], rows: Iterator[tuple[int, list[str]]], meta: Mapping[str, Any]
) -> Iterator[LocatedDocument]:
    """Yield a table without a column of texts as one document."""
    body, size = [header], 0
    for _, cells in rows:
        body.append(cells)
        size += sum(map(len, cells)) + 3 * len(cells)
        if size > LONGEST_LINE:
            raise InputError(
                f"{path}: no column of texts (found {', '.join(header)[:200]}), and longer than "
                f"{format_size(LONGEST_LINE)} as one table. Name the column, or split the table."
            )
    yield whole_file(path, "", markdown_table(body), meta)


def _delimiter(lines: list[str], options: ReadOptions) -> str:
    """Return the delimiter of a table, "" if the lines are no table."""
    stated = _STATED.fullmatch(lines[0])
    if stated:
        lines[0] = ""
        return stated[1]
    best = ""
    best_score = (0.0, 0.0)
    for delimiter in _DELIMITERS:
        rows = [row for _, row in islice(_records(lines, delimiter), _SNIFFED)]
        if not rows:
            return ""
        header = dict.fromkeys(rows[0])
        if len(rows) > 1 and not _ends_sentence(rows[0][-1]):
            header = dict.fromkeys(map(str.strip, rows[0]))
        if options.text_field in header or "text" in with_plain_names(header, options):
            return delimiter
        if not _is_table(rows, delimiter):
            continue
        commonest, n_rows = Counter(map(len, rows)).most_common(1)[0]
        score = (n_rows / len(rows), float(commonest))
        if score > best_score:
            best, best_score = delimiter, score
    return best


def _is_table(rows: list[list[str]], delimiter: str) -> bool:
    """Return whether rows are those of a table. Sentences, too, have commas and semicolons: with a
    space behind them, and not as many in each line."""
    if len(rows[0]) < 2:
        return False
    later_cells = list(chain.from_iterable(row[1:] for row in rows))
    n_spaced = sum(cell.startswith(" ") for cell in later_cells)
    is_spaced = delimiter in ",;" and n_spaced > _MOSTLY * len(later_cells)
    if len(set(map(len, rows))) > 1:
        is_header = not any(cell.startswith(" ") for cell in rows[0][1:])
        n_wide = sum(len(row) > 1 for row in rows)
        return (is_header or delimiter not in ",;") and 2 * n_wide >= len(rows)
    if not is_spaced:
        return True
    n_words = sum(len(cell.split()) for cell in chain.from_iterable(rows))
    n_sentences = sum(_ends_sentence(row[-1]) for row in rows)
    is_prose = n_words > _FEW_WORDS * len(rows) * len(rows[0]) or 2 * n_sentences > len(rows)
    return len(rows) > 1 and not is_prose


def _ends_sentence(text: str) -> bool:
    return text.rstrip().endswith((".", "!", "?", ":", "。", "！", "？"))


def _one_column(lines: list[str]) -> str:
    """Return lines as a table of one column if they are names below the name of the column, "" for
    a text."""
    cells = [cells[0].strip() for _, cells in _records(lines, "\0")]
    n_words = max((len(cell.split()) for cell in cells), default=0)
    is_text = any(_ends_sentence(cell) or ", " in cell for cell in cells)
    if len(cells) < 2 or n_words > _FEW_WORDS or is_text:
        return ""
    rows = [f"| {cell.replace('|', chr(92) + '|')} |" for cell in cells]
    rows.insert(1, "| --- |")
    return "\n".join(rows)


def _records(lines: list[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of each row that is not blank.

    A quote that is not as in RFC 4180 is a sign as any other, so that no forgotten one joins rows.
    """
    # Python's own limit is 131,072 characters, and a cell may hold a document.
    csv.field_size_limit(LONGEST_LINE)
    index = 0
    width = 0
    doubled: list[str] = []
    while index < len(lines):
        record = _record(lines, index, delimiter, width)
        if record is None:
            # Spark and MySQL write \" in a cell, where RFC 4180 has two quotes.
            doubled = doubled or [_ESCAPED_QUOTE.sub(_as_doubled, line) for line in lines]
            record = _record(doubled, index, delimiter, width)
        if record is None:
            record = [_unquoted(cell) for cell in lines[index].split(delimiter)], 1
        cells, n_lines = record
        if any(cells):
            width = width or len(cells)
            yield index + 1, cells
        index += n_lines


_ESCAPED_QUOTE = re.compile(r'(\\+)"')


def _as_doubled(escaped: re.Match[str]) -> str:
    """Return a quote behind backslashes in the form of RFC 4180; of two backslashes the first
    escapes the second."""
    n_backslashes, is_quote = divmod(len(escaped[1]), 2)
    return "\\" * n_backslashes + '"' * (1 + is_quote)


def _record(
    lines: list[str], start: int, delimiter: str, width: int
) -> tuple[list[str], int] | None:
    """Return the cells of the row that begins with a line, and how many lines it has; None if its
    quotes are not as in RFC 4180."""
    line = lines[start]
    if '"' not in line:
        return line.split(delimiter), 1
    # A row ends where each of its quotes has its partner.
    n_quotes = line.count('"')
    end = start + 1
    while n_quotes % 2 and end < len(lines):
        n_quotes += lines[end].count('"')
        end += 1
    for last in dict.fromkeys((start + 1, end)):
        cells = _spaced_cells("\n".join(lines[start:last]), delimiter)
        if cells is not None and width in (0, len(cells)):
            return cells, last - start
    cells = _quoted_cells(line, delimiter)
    if cells is not None:
        return cells, 1
    cells = _quoted_cells("\n".join(lines[start:end]), delimiter)
    # A table with tabs need not quote at all: there a quote may be an inch.
    if cells is not None and n_quotes % 2 == 0 and (delimiter != "\t" or len(cells) == width):
        return cells, end - start
    return None


def _spaced_cells(record: str, delimiter: str) -> list[str] | None:
    """Return the cells of one row with a space between a delimiter and a quote, which would make
    the quote a plain sign; None if it is no such row."""
    spaced = re.sub(rf'({re.escape(delimiter)}) "(?!")', r'\1" ', record)
    if spaced == record:
        return None
    return _quoted_cells(spaced, delimiter)


def _quoted_cells(record: str, delimiter: str) -> list[str] | None:
    """Return the cells of one row by RFC 4180, None if it is not one row."""
    # Not pandas, which changes texts such as 1.50, 007 and NA.
    reader = csv.reader(io.StringIO(record, newline=""), strict=True, delimiter=delimiter)
    try:
        rows = list(reader)
    except csv.Error:
        return None
    if len(rows) != 1:
        return None
    return rows[0]


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of each row of a CSV file that is not blank.

    The file is read strictly (RFC 4180), so that a forgotten quote cannot join rows. Raises
    `InputError` (file:line) for a quote that is left open or not followed by a comma, and for a row
    that has more or fewer cells than the first.
    """
    csv.field_size_limit(LONGEST_LINE)
    text = decode(path, read_bytes(path))[0]
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    n_cells = 0
    while True:
        number = rows.line_num + 1
        location = f"{path}:{number}"
        try:
            cells = next(rows, None)
        except csv.Error as error:
            problem = str(error)
            if "end of data" in problem:
                problem = "a quote opened here is never closed"
            fix = "Quote cells that hold quotes, commas or line ends."
            raise InputError(f"{location}: not CSV: {problem}. {fix}") from error
        if cells is None:
            return
        n_cells = n_cells or len(cells)
        if len(cells) not in (0, n_cells):
            fix = "Quote cells with commas."
            fault = f"found {len(cells)} cells, the first row has {n_cells}. {fix}"
            raise InputError(f"{location}: {fault}")
        if cells:
            yield number, cells


def _unquoted(cell: str) -> str:
    """Return a cell without the quotes that are around it."""
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        return cell[1:-1].replace('""', '"')
    return cell


def read_parquet(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents of a Parquet file, a few rows in memory at a time."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20) as file:
            # The metadata of its columns is not asked for: of some damaged files that ends the
            # process with an uncaught C++ exception in pyarrow 26, where reading reports an error.
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield table_row(row, f"{path}:{number}", options)
    # Text that is not UTF-8 raises a ValueError.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path}:{number + 1}: not readable as Parquet ({one_line(error)}). Write it again."
        ) from error


def table_row(row: Row, location: str, options: ReadOptions) -> LocatedDocument:
    """Return the document in a row of a table; an empty cell counts as absent."""
    text = {options.text_field, "text"}
    filled = {key: value for key, value in row.items() if value is not None or key in text}
    return _located_document(location, filled, options)
