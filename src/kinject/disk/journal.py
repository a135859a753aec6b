"""An append-only JSONL file that survives a kill at any moment.

Each row is written with one ``write`` and, with ``sync=True``, an ``fsync``. A kill can tear only
the last line: it is the one line without a newline, and the next opening cuts it off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self, cast

from kinject.disk.files import open_regular, read_lines, unwritable
from kinject.disk.jsonl import Row, RowLike, encode_row, parse_row
from kinject.errors import DiskError, InputError

_BOM = b"\xef\xbb\xbf"


class Journal:
    """An open journal: `rows` holds the rows that were there on opening, `append` adds one row
    durably.

    With `on_row`, a function of (offset in bytes, row) that is called for every row on opening,
    `rows` stays empty: a journal larger than memory is read one row at a time, and again by offset
    with `row_at`.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync: bool = True,
        on_row: Callable[[int, Row], None] | None = None,
        fix: str = "",
    ) -> None:
        """Open or create `path` and cut a torn last line; `fix` is the advice for a damaged one.

        Raises `InputError` on a damaged line, `DiskError` on I/O.
        """
        self.path = path
        self._sync = sync
        self._fix = fix or "Delete this line; its row is made again."
        self._file = _open(path, "ab")
        try:
            self._reader = _open(path, "rb")
        except BaseException:
            self._file.close()
            raise
        try:
            _cut_torn_tail(path)
            self.rows: list[Row] = []
            for _, offset, row in _scan(self._reader, path, self._fix):
                if on_row is None:
                    self.rows.append(row)
                else:
                    on_row(offset, row)
        except BaseException:
            self.close()
            raise

    def append(self, row: RowLike) -> int:
        """Add one row (a mapping or a dataclass) and return its offset in bytes.

        It is on disk when this returns. Raises `DiskError` if it is not, or if the file was moved
        or deleted.
        """
        line = encode_row(row).encode("utf-8") + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            remaining = memoryview(line)
            while remaining:  # unbuffered: a disk that fills takes a part, then refuses the rest
                remaining = remaining[self._file.write(remaining) :]
            if self._sync:
                os.fsync(self._file.fileno())
            self._check_not_replaced()
        except OSError as error:
            with contextlib.suppress(OSError):  # a torn tail remains, and the next opening cuts it
                os.ftruncate(self._file.fileno(), start)
            fault = unwritable(self.path, error)
            raise DiskError(f"{fault} What was stored so far is safe.") from error
        return start

    def _check_not_replaced(self) -> None:
        """Raise `DiskError` if the path is not the open file any more: rows written to it would be
        lost."""
        try:
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise DiskError(
                f"{self.path}: was deleted or replaced while this run was writing it. Leave run "
                "folders alone while they are in use; the same command makes again what is missing."
            )

    def row_at(self, offset: int) -> Row:
        """Return the row at an offset that `append` returned or `on_row` was called with."""
        self._reader.seek(offset)
        line = self._reader.readline().removeprefix(_BOM)
        return _parse(line, f"{self.path}: byte {offset}", self._fix)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, row) of a journal that no process writes now. Raises as
    `read_jsonl`."""
    lines = (line for _, line in read_lines(path))
    return ((number, row) for number, _, row in _scan(lines, path, "Run what wrote it again."))


def _scan(file: Iterable[bytes], path: Path, fix: str) -> Iterator[tuple[int, int, Row]]:
    """Yield (line number, offset in bytes, row) of every line that is not blank."""
    offset = 0
    for number, line in enumerate(file, start=1):
        body = line.removeprefix(_BOM) if number == 1 else line
        if body.strip():
            yield number, offset, _parse(body, f"{path}:{number}", fix)
        offset += len(line)


def _parse(line: bytes, location: str, fix: str) -> Row:
    try:
        return parse_row(line.rstrip(b"\r\n"), location)
    except InputError as error:
        raise InputError(f"{error} {fix}") from error


def _open(path: Path, mode: str) -> BinaryIO:
    """Open a file, unbuffered for writing: a refused write must not be repeated on closing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cast(
            BinaryIO, open(path, mode, buffering=0 if "a" in mode else -1, opener=open_regular)
        )
    except OSError as error:
        raise unwritable(path, error, "opened for writing") from error


def _cut_torn_tail(path: Path) -> None:
    """Truncate `path` after its last newline."""
    try:
        with open(path, "rb+", opener=open_regular) as file:
            size = file.seek(0, os.SEEK_END)
            end = size
            # From the end, a block at a time: a journal may be larger than memory.
            while end > 0:
                step = min(65536, end)
                file.seek(end - step)
                newline = file.read(step).rfind(b"\n")
                if newline >= 0:
                    end = end - step + newline + 1
                    break
                end -= step
            if end < size:
                file.truncate(end)
    except OSError as error:
        raise unwritable(path, error, "opened for writing") from error
