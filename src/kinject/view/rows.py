"""Rows of files that a run may be writing, and what was made of them, of each file the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from kinject.disk import Row, file_stamp, parse_row, read_lines
from kinject.errors import InputError

Value = TypeVar("Value")


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. The last one is left out while it is there in part: it is being
    written, or was torn by a kill. Raises as `read_jsonl`."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = parse_row(line, f"{path}:{number}")
        except InputError:
            if line.endswith(b"\n"):
                raise
            return
        yield row


class Latest(Generic[Value]):
    """What `make` makes of each of at most `most` files, kept until the file changes.

    One value a file: with several, the page of a run that writes held every generation of its file.
    """

    def __init__(self, make: Callable[[Path], Value], most: int) -> None:
        self._make, self._most = make, most
        self._kept: dict[Path, tuple[tuple[int, int], Value]] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> Value:
        """Return the value of a file as it is now. Raises as `make`."""
        # Each request has a thread of its own: two would read a large file twice.
        with self._lock:
            stamp = file_stamp(path)
            if path in self._kept and self._kept[path][0] == stamp:
                return self._kept[path][1]
            # Before the new value is made, so that both are never in memory.
            self._kept.pop(path, None)
            value = self._make(path)
            while len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[path] = stamp, value
            return value
