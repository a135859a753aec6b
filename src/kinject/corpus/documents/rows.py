"""Readers of rows, each one document: JSON lines, CSV, Parquet, folders that `datasets` saved, names on the hub."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kinject.corpus.documents.readers import Found, ReadOptions
from kinject.disk import LONGEST_LINE, Row, content_id, parse_row, read_lines
from kinject.errors import InputError
from kinject.hub import check_data_set
from kinject.types import Document

HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?::(?P<config>[\w.-]*))?(?::(?P<split>\w+))?"
)
"""``owner/name``, ``owner/name:config`` or ``owner/name:config:split`` (``train`` if it is left out).

After the name, ``@`` and a commit, tag or branch pin its revision.
"""
_FIELDS = ("id", "title", "text", "source", "meta")
_MOST_EXPANSION = 2_000
"""How many times larger a table may be when it is unpacked: text packs about tenfold."""
_ROWS = 16
"""Rows of a table in memory at once: each may hold a long document."""


def document_of(row: Row, where: str) -> Document:
    """Return the document in one row. Raises `InputError` at `where` on a missing or mistyped field."""
    if "text" not in row:
        raise InputError(
            f"{where}: no key 'text' (found {', '.join(map(repr, row)) or 'none'}). It must hold the document."
        )
    for key in ("text", "title", "source"):
        if not isinstance(row.get(key, ""), str):
            raise InputError(f"{where}: {key}: found {type(row[key]).__name__}, expected a string.")
    row_id = row.get("id")
    if isinstance(row_id, bool) or not isinstance(row_id, str | int | None) or row_id == "":
        raise InputError(f"{where}: id: found {row_id!r}, expected a string that is not empty, or no id.")
    meta = row.get("meta", {})
    if not isinstance(meta, Mapping):
        raise InputError(f"{where}: meta: found {type(meta).__name__}, expected an object.")
    others = {key: value for key, value in row.items() if key not in _FIELDS}
    text, title = row["text"], row.get("title", "")
    identity = content_id(title, text) if row_id is None else str(row_id)
    return Document(identity, title, text, row.get("source") or where, {**others, **meta})


def read_json_rows(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[Found]:
    """Yield the documents of a JSONL file."""
    for number, line in read_lines(path, stream):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = parse_row(line, where)
        except InputError as error:
            yield where, error
        else:
            yield _found(where, row)


def _found(where: str, row: Row) -> Found:
    """Return the document in a row, or its error."""
    try:
        return where, document_of(row, where)
    except InputError as error:
        return where, error


def read_csv(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[Found]:
    """Yield the documents of a CSV file with a header; its columns are the keys of JSONL rows, empty cells are absent.

    Raises `InputError` (file:line) as `csv_records`, but a row with more or fewer cells than the header is yielded.
    """
    for number, record in _records(path, stream):
        where = f"{path}:{number}"
        if isinstance(record, InputError):
            yield where, record
        else:
            yield _found(where, {key: cell for key, cell in record.items() if cell or key == "text"})


def csv_records(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (first line, cell by column) of each row of a CSV file whose first row names the columns.

    Raises `InputError` (file:line) as `csv_rows`, and if two columns have one name: a reader could not choose.
    """
    for number, record in _records(path):
        if isinstance(record, InputError):
            raise record
        yield number, record


def _records(path: Path, stream: BinaryIO | None = None) -> Iterator[tuple[int, dict[str, str] | InputError]]:
    header: list[str] | None = None
    for number, cells in _rows(path, "header", stream):
        if isinstance(cells, InputError):
            yield number, cells
        elif header is not None:
            yield number, dict(zip(header, cells, strict=True))
        else:
            header = cells
            repeated = next((name for name in header if header.count(name) > 1), None)
            if repeated is not None:
                fault = f"two columns are called {repeated!r:.80}. Give each a name of its own."
                raise InputError(f"{path}:{number}: {fault}")


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of each row of a CSV file that is not blank.

    The file is read strictly (RFC 4180), so that a forgotten quote cannot join rows. Raises `InputError` (file:line) for
    a quote that is left open, that is inside an unquoted cell or not followed by a comma, for a row that has more or
    fewer cells than the first, for a NUL character, and for a byte-order mark after the first line.
    """
    for number, cells in _rows(path, "first row"):
        if isinstance(cells, InputError):
            raise cells
        yield number, cells


def _rows(path: Path, first: str, stream: BinaryIO | None = None) -> Iterator[tuple[int, list[str] | InputError]]:
    """Yield as `csv_rows`, but for a row of another length than the first (called `first` in the message) its error."""
    csv.field_size_limit(LONGEST_LINE)
    taken: list[str] = []

    def lines() -> Iterator[str]:
        for line in _text_lines(path, stream):
            taken.append(line)
            yield line

    rows = csv.reader(lines(), strict=True)
    n_cells = 0
    while True:
        number = rows.line_num + 1
        where = f"{path}:{number}"
        taken.clear()
        try:
            cells = next(rows, None)
        except csv.Error as error:
            problem = "a quote opened here is never closed" if "end of data" in str(error) else str(error)
            raise InputError(
                f"{where}: not CSV: {problem}. Quote cells that hold quotes, commas or line ends."
            ) from error
        if cells is None:
            return
        _check_record("".join(taken), where)
        n_cells = n_cells or len(cells)
        if len(cells) not in (0, n_cells):
            fault = f"found {len(cells)} cells, the {first} has {n_cells}. Quote cells with commas."
            yield number, InputError(f"{where}: {fault}")
        elif cells:
            yield number, cells


_CELL = r'(?:"(?:[^"]++|"")*+"|[^",\r\n]*+)'
_RECORD = re.compile(rf"{_CELL}(?:,{_CELL})*+(?:\r?\n|\r)?")


def _check_record(text: str, where: str) -> None:
    """Raise `InputError` for what the csv module takes as it is: quotes inside unquoted cells, NUL, a byte-order mark."""
    if '"' in text and not _RECORD.fullmatch(text):
        fault = "a quote inside a cell that is not quoted. Quote the whole cell, and write each quote in it twice"
        raise InputError(f"{where}: not CSV: {fault}.")
    if "\0" in text:
        raise InputError(f"{where}: a NUL character. Is this UTF-16? Save the file as UTF-8.")
    if text.startswith("\ufeff"):
        raise InputError(f"{where}: a byte-order mark inside the file. Were two files joined? Take it out.")


def _text_lines(path: Path, stream: BinaryIO | None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their ends. Raises `InputError` (file:line) if it is not UTF-8."""
    for number, line in read_lines(path, stream):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}:{number}: not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error


def read_parquet(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[Found]:
    """Yield the documents of a Parquet file, a few rows in memory at a time."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    number, packed = 0, stream.seek(0, os.SEEK_END)
    stream.seek(0)
    try:
        with parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20) as file:
            check_parquet(path, file, packed)
            for batch in file.iter_batches(batch_size=_ROWS, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield _table_row(row, f"{path}:{number}")
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also text that is not UTF-8
        raise InputError(
            f"{path}:{number + 1}: not readable as Parquet ({str(error)[:150]}). Write it again."
        ) from error


def check_parquet(path: Path, file: Any, packed: int) -> None:
    """Raise `InputError` if a `pyarrow.parquet.ParquetFile` of `packed` bytes has two equal column names or unpacks to too much.

    Only the sizes of row groups are read: on a damaged column pyarrow (26) ends the process.
    """
    names = file.schema_arrow.names
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"{path}: two columns are called {repeated!r:.80}. Give each a name of its own.")
    groups = range(file.metadata.num_row_groups)
    whole = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    if whole > LONGEST_LINE and whole > _MOST_EXPANSION * packed:
        raise InputError(
            f"{path}: unpacks from {packed:,} bytes to {whole:,}, allowed: {_MOST_EXPANSION:,} times as much. Is this text? "
            "Take it out."
        )


def _table_row(row: Row, where: str) -> Found:
    """Return the document in a row of a table; an empty cell counts as absent."""
    return _found(where, {key: value for key, value in row.items() if value is not None or key == "text"})


def is_saved_dataset(path: Path) -> bool:
    """Return whether `path` is a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def read_saved_dataset(path: Path) -> Iterator[Found]:
    """Yield the documents of a folder that `datasets` saved; of all its splits, one after the other."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:  # the library raises whatever its JSON and Arrow readers raise
        raise InputError(
            f"{path}: not a folder that datasets can load ({_first_line(error)}). Save it again."
        ) from error
    splits = loaded if isinstance(loaded, Mapping) else {"": loaded}
    for name, split in splits.items():
        number = 0
        for columns in split.iter(_ROWS):
            for values in zip(*columns.values(), strict=True):
                number += 1
                row = dict(zip(columns, values, strict=True))
                yield _table_row(row, f"{path / name if name else path}:{number}")


def read_hub(name: str) -> Iterator[Found]:
    """Yield the documents of a data set on the hub, streamed (`HUB_NAME` is the form of the name)."""
    import datasets

    parts = _name_parts(name)
    config, split = parts["config"] or None, parts["split"] or "train"
    number = 0
    check_data_set(name)
    try:
        rows: Any = datasets.load_dataset(
            parts["name"], config, split=split, streaming=True, revision=parts["revision"]
        )
        for number, row in enumerate(rows, start=1):
            yield _table_row(dict(row), f"{name}:{number}")
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds: no network, no such name, no such configuration
        raise InputError(
            f"{name}: no such file or folder, and as a data set on the hub, split {split!r}, it cannot be read after "
            f"{number} rows ({_first_line(error)}). "
            "Write it as OWNER/NAME, or with :CONFIGURATION or :CONFIGURATION:SPLIT behind."
        ) from error


def hub_revision(name: str) -> str:
    """Return the commit of a data set on the hub. Raises `InputError` when the hub cannot be reached."""
    from huggingface_hub import HfApi

    check_data_set(name)
    try:
        parts = _name_parts(name)
        return str(HfApi().dataset_info(parts["name"], revision=parts["revision"]).sha)
    except Exception as error:  # as above
        raise InputError(f"{name}: the hub does not report its revision ({_first_line(error)}).") from error


def _name_parts(name: str) -> re.Match[str]:
    """Return the parts of a name that `HUB_NAME` matches."""
    match = HUB_NAME.fullmatch(name)
    if match is None:
        raise InputError(f"{name}: not the name of a data set on the hub (OWNER/NAME).")
    return match


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
