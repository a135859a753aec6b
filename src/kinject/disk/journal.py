"""An append-only JSONL file that survives a kill at any moment, and tells when a bit of it has changed.

Each row is written with one ``write`` and, with ``sync=True``, an ``fsync``. A kill can tear only the last line: it is
the one line without a newline, and the next opening cuts it off. The last key of each line, `CHECK`, is the CRC-32 of the
line without it, in hex. A damaged line is refused by name. Lines of an older kinject, which has no such key, are read as
they are, but only before the first line that has one.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from kinject.disk.faults import unwritable
from kinject.disk.jsonl import Row, encode_row, parse_row
from kinject.disk.reading import read_lines
from kinject.errors import DiskError, InputError

CHECK = "line_crc32"
"""The last key of a line."""
_BOM = b"\xef\xbb\xbf"
_BEFORE, _AFTER = f', "{CHECK}": "'.encode(), b'"}'
_N_TAIL = len(_BEFORE) + 8 + len(_AFTER)


class Journal:
    """An open journal: `rows` holds what was there on opening, `append` adds one row durably.

    With `each`, called with (place in bytes, row) for every row there, `rows` stays empty: a journal larger than memory
    is read one row at a time, and again by its place with `row_at`.
    """

    def __init__(
        self, path: Path, *, sync: bool = True, each: Callable[[int, Row], None] | None = None, cure: str = ""
    ) -> None:
        """Open or create `path`, cutting a torn last line; `cure` says what to do about a damaged one.

        Raises `InputError` on a damaged line, `DiskError` on I/O.
        """
        self.path = path
        self._sync = sync
        self._cure = cure or "Delete this line; what stood there is made again."
        self._file = _opened(path, "ab")
        try:
            self._reader = _opened(path, "rb")
        except BaseException:
            self._file.close()
            raise
        try:
            self.torn_bytes = _cut_torn_tail(path)
            self.rows: list[Row] = []
            for _, place, row in _scan(self._reader, path, self._cure):
                if each is None:
                    self.rows.append(row)
                else:
                    each(place, row)
        except BaseException:
            self.close()
            raise

    def append(self, row: object) -> int:
        """Add one row (a mapping or a dataclass) and return its place in bytes.

        It is on disk when this returns. Raises `DiskError` when it is not, and when the file was moved or deleted.
        """
        line = checked(encode_row(row).encode("utf-8")) + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            left = memoryview(line)
            while left:  # unbuffered: a disk that fills takes a part, then refuses the rest
                left = left[self._file.write(left) :]
            if self._sync:
                os.fsync(self._file.fileno())
            self._check_place()
        except OSError as error:
            with contextlib.suppress(OSError):  # what remains is a torn tail, cut on the next opening
                os.ftruncate(self._file.fileno(), start)
            fault = unwritable(self.path, error)
            raise DiskError(f"{fault} What was stored so far is safe.") from error
        return start

    def _check_place(self) -> None:
        """Raise `DiskError` where the path is not the open file any more: what is written would be lost."""
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            there = False
        if not there:
            raise DiskError(
                f"{self.path}: was deleted or replaced while this run was writing it. Leave run folders alone while they "
                "are in use; the same command makes again what is missing."
            )

    def row_at(self, place: int) -> Row:
        """Return the row at a place that `append` returned or `each` was called with."""
        self._reader.seek(place)
        line = self._reader.readline().removeprefix(_BOM)
        return _parse(line, f"{self.path}: byte {place}", self._cure)[0]

    def close(self) -> None:
        """Close the file; appending and reading are over."""
        self._file.close()
        self._reader.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_journal(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, row) of a journal that nobody writes now, its checks verified and taken out.

    Raises as `read_jsonl`, and `InputError` (file:line) for a line that has changed since it was written.
    """
    lines = (line for _, line in read_lines(path))
    return ((number, row) for number, _, row in _scan(lines, path, "Run what wrote it again."))


def checked(body: bytes) -> bytes:
    """Return the JSON object `body` with its CRC-32 as its last key."""
    separator = _BEFORE if len(body) > 2 else _BEFORE[2:]
    return b"%b%b%08x%b" % (body[:-1], separator, zlib.crc32(body), _AFTER)


def _scan(file: Iterable[bytes], path: Path, cure: str) -> Iterator[tuple[int, int, Row]]:
    """Yield (line number, place in bytes, row) of every line that is not blank."""
    place, were_checked = 0, False
    for number, line in enumerate(file, start=1):
        body = line.removeprefix(_BOM) if number == 1 else line
        if body.strip():
            where = f"{path}:{number}"
            row, has_check = _parse(body, where, cure)
            if were_checked and not has_check:
                raise InputError(f"{where}: damaged: its {CHECK} is missing. {cure}")
            were_checked = has_check
            yield number, place, row
        place += len(line)


def _parse(line: bytes, where: str, cure: str) -> tuple[Row, bool]:
    """Return the row on a line without its check, and whether it had one."""
    body = line.rstrip(b"\r\n")
    tail = body[-_N_TAIL:]
    if not tail.endswith(_AFTER) or _BEFORE[2:] not in tail:
        try:
            return parse_row(body, where), False
        except InputError as error:
            raise InputError(f"{error} {cure}") from error
    at = body.rindex(_BEFORE[2:])
    bare = body[:at].removesuffix(b", ") + b"}"
    if b"%08x" % zlib.crc32(bare) != body[at + len(_BEFORE) - 2 : -len(_AFTER)]:
        raise InputError(f"{where}: damaged: its bytes are not those that were written ({CHECK}). {cure}")
    return parse_row(bare, where), True


def _opened(path: Path, mode: str) -> BinaryIO:
    """Open a file, unbuffered where it is written: a refused write must not be tried again on closing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, path.open(mode, buffering=0 if "a" in mode else -1))
    except OSError as error:
        raise unwritable(path, error, "opened for writing") from error


def _cut_torn_tail(path: Path) -> int:
    """Truncate `path` after its last newline; return how many bytes were cut."""
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            end = size
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
            return size - end
    except OSError as error:
        raise unwritable(path, error, "opened for writing") from error
