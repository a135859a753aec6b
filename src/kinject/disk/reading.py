"""Files opened and read whole; a file that cannot be is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from kinject.errors import DiskError


def open_to_read(path: Path) -> BinaryIO:
    """Return `path` open for reading bytes. Raises `DiskError` when it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def read_bytes(path: Path) -> bytes:
    """Return the bytes of `path`. Raises `DiskError` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DiskError:
    return DiskError(f"{path}: cannot be read: {error.strerror}. Check the path.")
