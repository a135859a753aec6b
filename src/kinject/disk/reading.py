"""Files opened and read, within bounds; a file that cannot be is told in one line."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from kinject.disk.faults import cure_of
from kinject.errors import DiskError, InputError

LONGEST_LINE = 2**26
"""Bytes of a line, and so of a row or a document in one: 64 MiB, some forty times the longest novel."""
LARGEST_FILE = 2**28
"""Bytes of a file that is held in memory whole (a page, a PDF, a text that is one document): 256 MiB."""


def open_to_read(path: Path) -> BufferedReader:
    """Return the file `path` open for reading bytes.

    Raises `DiskError` when it cannot be opened, or is no file: a folder, a pipe or a device, which can be read neither
    twice nor to its end.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise DiskError(f"{path}: found {kind}, expected a file. Check the path.")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise unreadable(path, error) from error


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of `path`, at most `most` (default: `LARGEST_FILE`).

    Raises `DiskError` when it cannot be read and `InputError` when it holds more.
    """
    limit = LARGEST_FILE if most is None else most
    with open_to_read(path) as file:
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise unreadable(path, error) from error
    if len(data) > limit:
        raise InputError(f"{path}: longer than {size_in_words(limit)}, the most that is read whole. Split it.")
    return data


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its end) of a file of any length.

    Raises `DiskError` when it cannot be read and `InputError` (file:line) on a line longer than `LONGEST_LINE`.
    """
    with open_to_read(path) as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline(LONGEST_LINE + 1)
            except OSError as error:
                raise unreadable(path, error) from error
            if len(line) > LONGEST_LINE:
                raise InputError(
                    f"{path}:{number}: a line longer than {size_in_words(LONGEST_LINE)}. Split the document, one row each."
                )
            if not line:
                return
            yield number, line


def is_there(path: Path) -> bool:
    """Return whether something is at `path`; a name that no file can have (too long, with a NUL) is nowhere."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def size_in_words(n_bytes: int) -> str:
    """Return a number of bytes as in ``64 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:g} {unit}"
    return f"{n_bytes} bytes"


def unreadable(path: Path, error: OSError | ValueError) -> DiskError:
    """Return the fault to raise where `path` cannot be read."""
    cure = "Check the path."
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        cure = cure_of(error).replace("writable", "readable")
    return DiskError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}. {cure}")
