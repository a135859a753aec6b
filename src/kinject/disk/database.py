"""SQLite files, opened with their format version and written in transactions; an index of a journal's offsets by id."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from kinject.disk.format import FORMAT_VERSION, check_version
from kinject.errors import DiskError, InputError

_ID = re.compile("[0-9a-f]{16}")


def open_database(path: Path, *statements: str) -> sqlite3.Connection:
    """Return the SQLite file `path`, made if missing, after running `statements` (pragmas and schemas).

    Raises `InputError` as `check_version`, and the errors of the system and of SQLite: the caller knows the fix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version:
            check_version(version, str(path))
        else:
            database.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        for statement in statements:
            database.execute(statement)
    except BaseException:
        database.close()
        raise
    return database


def write_rows(
    database: sqlite3.Connection, path: Path, statement: str, rows: Iterable[Sequence[object]], inode: int | None = None
) -> None:
    """Run `statement` for each of `rows` in one transaction.

    Raises `DiskError` if nothing was written, or if `path` is no longer the file with `inode`.
    """
    try:
        database.execute("BEGIN")
        database.executemany(statement, rows)
        database.execute("COMMIT")
        if inode is not None and path.stat().st_ino != inode:
            raise FileNotFoundError("it was replaced while this run was writing it")
    except (OSError, sqlite3.Error) as error:
        with contextlib.suppress(sqlite3.Error):  # a disk that failed once may fail again; the first error counts
            if database.in_transaction:
                database.execute("ROLLBACK")
        raise DiskError(
            f"{path}: cannot be written ({error}). What was stored so far is safe. Fix this error; the same command then "
            "resumes."
        ) from error


class OffsetIndex:
    """The offsets of a journal's rows by id (16 hex digits, as `content_id` makes them): some 200 bytes a row, in memory."""

    def __init__(self) -> None:
        self._offsets: dict[int, list[int]] = {}

    def add(self, identity: str, offset: int) -> None:
        """Add the offset of a row with this id. Raises `InputError` for any other id than `content_id` makes."""
        if not _ID.fullmatch(identity):
            raise InputError(f"found id {identity!r}, expected 16 hex digits")
        self._offsets.setdefault(int(identity, 16), []).append(offset)

    def offsets_of(self, identity: str) -> list[int]:
        """Return the offsets of the rows with this id, in order; [] if there are none."""
        return self._offsets.get(int(identity, 16), []) if _ID.fullmatch(identity) else []

    def __len__(self) -> int:
        """Return the number of different ids."""
        return len(self._offsets)
