"""An append-only JSONL file that survives a kill at any moment.

Each row is written with one ``write`` and, with ``sync=True``, an ``fsync``. A kill can tear only the last line: it is
the one line without a newline, and the next opening cuts it off. A damaged line anywhere else is corruption and is
refused by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from kinject.disk.atomic import LOCK, delete_parts
from kinject.disk.format import mark_folder
from kinject.disk.inside import refuse_links_out
from kinject.disk.jsonl import Row, encode_row, parse_row
from kinject.errors import DiskError

_BOM = b"\xef\xbb\xbf"


class Journal:
    """An open journal: `rows` holds what was there on opening, `append` adds one row durably.

    With `each`, called with (place in bytes, row) for every row there, `rows` stays empty: a journal larger than memory
    is read one row at a time, and again by its place with `row_at`.
    """

    def __init__(self, path: Path, *, sync: bool = True, each: Callable[[int, Row], None] | None = None) -> None:
        """Open or create `path`, cutting a torn last line. Raises `InputError` on a damaged line, `DiskError` on I/O."""
        self.path = path
        self._sync = sync
        self._file = _opened(path, "ab")
        try:
            self._reader = _opened(path, "rb")
        except BaseException:
            self._file.close()
            raise
        try:
            self.torn_bytes = _cut_torn_tail(path)
            self._file.seek(0, os.SEEK_END)
            self.rows: list[Row] = []
            for place, row in self._scan():
                if each is None:
                    self.rows.append(row)
                else:
                    each(place, row)
        except BaseException:
            self.close()
            raise

    def _scan(self) -> Iterator[tuple[int, Row]]:
        place = 0
        for number, line in enumerate(self._reader, start=1):
            body = line.removeprefix(_BOM) if number == 1 else line
            if body.strip():
                yield place, parse_row(body, f"{self.path}:{number}")
            place += len(line)

    def append(self, row: object) -> int:
        """Add one row (a mapping or a dataclass) and return its place in bytes.

        It is on disk when this returns. Raises `DiskError` when it is not.
        """
        line = (encode_row(row) + "\n").encode("utf-8")
        start = self._file.tell()
        try:
            self._file.write(line)
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # the disk is full: what remains is a torn tail, cut on the next opening
                os.truncate(self.path, start)
            raise DiskError(
                f"{self.path}: cannot be written: {error.strerror}. What was stored so far is safe."
            ) from error
        return start

    def row_at(self, place: int) -> Row:
        """Return the row at a place that `append` returned or `each` was called with."""
        self._reader.seek(place)
        return parse_row(self._reader.readline().removeprefix(_BOM), f"{self.path}: byte {place}")

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


def _opened(path: Path, mode: str) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, path.open(mode))
    except OSError as error:
        raise DiskError(f"{path}: cannot be opened for writing: {error.strerror}.") from error


def _cut_torn_tail(path: Path) -> int:
    """Truncate `path` after its last newline; return how many bytes were cut."""
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


@contextlib.contextmanager
def lock_dir(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process while the block runs. Raises `DiskError` naming the holder when it is held, and
    `InputError` when a newer kinject wrote it (`kinject.disk.format`).

    The lock is the kernel's (flock), so it goes with the process, however that ends. What a killed process had begun to
    write is deleted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links_out(folder)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise DiskError(f"{folder}: cannot be written: {error.strerror}. Choose another run folder.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise DiskError(f"{folder}: in use by {holder}. Wait for it or choose another run folder.") from error
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        mark_folder(folder)
        delete_parts(folder)
        yield
