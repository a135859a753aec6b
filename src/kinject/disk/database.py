"""SQLite files: opened with their format version, written in transactions, and an index of a journal's offsets by id."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from kinject.disk.format import FORMAT_VERSION, check_version
from kinject.errors import DiskError, InputError

_CACHE_KIB = 32_768
_MOST_NEW = 4096
"""Offsets that wait in memory to be written together, in the order of ids: far cheaper than one by one."""
_MOST_IDS = 256
"""Ids in one query."""
_SCHEMA = "CREATE TABLE offsets (id INTEGER, offset INTEGER, PRIMARY KEY (id, offset)) WITHOUT ROWID"


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
    """The offsets of a journal's rows by id (16 hex digits, as `content_id` makes them), in a nameless temporary file.

    The file ends with the process; opening the journal builds it again. At most 32 MiB and some thousand new offsets
    are in memory, whatever the length of the journal.
    """

    def __init__(self) -> None:
        """Open an empty index. Raises `DiskError` if the temporary folder cannot be written."""
        self._new: dict[int, list[int]] = {}
        self._n_new = 0
        self._has_stored = False
        try:
            self._database = sqlite3.connect("", isolation_level=None)
            for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise _no_space(error) from error

    def add(self, identity: str, offset: int) -> None:
        """Add the offset of a row with this id. Raises `InputError` for any other id than `content_id` makes."""
        number = _number(identity)
        if number is None:
            raise InputError(f"found id {identity!r}, expected 16 hex digits")
        self._new.setdefault(number, []).append(offset)
        self._n_new += 1
        if self._n_new >= _MOST_NEW:
            self._write()

    def offsets_of(self, identity: str) -> list[int]:
        """Return the offsets of the rows with this id, in order; [] if there are none."""
        return self.offsets_of_all([identity])[0]

    def offsets_of_all(self, identities: Sequence[str]) -> list[list[int]]:
        """Return `offsets_of` each of several ids, in one query."""
        numbers = [_number(identity) for identity in identities]
        stored: dict[int, list[int]] = {}
        valid = [number for number in numbers if number is not None]
        for start in range(0, len(valid) if self._has_stored else 0, _MOST_IDS):
            part = valid[start : start + _MOST_IDS]
            marks = ",".join("?" * len(part))
            query = f"SELECT id, offset FROM offsets WHERE id IN ({marks}) ORDER BY offset"  # noqa: S608  (only marks)
            for number, offset in self._database.execute(query, part):
                stored.setdefault(number, []).append(offset)
        return [self._with_new(number, stored) for number in numbers]

    def _with_new(self, number: int | None, stored: dict[int, list[int]]) -> list[int]:
        if number is None:
            return []
        return sorted({*stored.get(number, ()), *self._new[number]}) if number in self._new else stored.get(number, [])

    def _write(self) -> None:
        """Move the new offsets to the file."""
        rows = ((number, offset) for number in sorted(self._new) for offset in self._new[number])
        try:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR IGNORE INTO offsets VALUES (?, ?)", rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise _no_space(error) from error
        self._has_stored |= bool(self._new)
        self._new.clear()
        self._n_new = 0

    def ids(self) -> Iterator[str]:
        """Yield each id once."""
        self._write()
        for (number,) in self._database.execute("SELECT DISTINCT id FROM offsets"):
            yield f"{number + (1 << 63):016x}"

    def __len__(self) -> int:
        """Return the number of different ids."""
        self._write()
        return int(self._database.execute("SELECT count(DISTINCT id) FROM offsets").fetchone()[0])

    def close(self) -> None:
        """Close the temporary file, which deletes it."""
        self._database.close()

    def __enter__(self) -> OffsetIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(identity: str) -> int | None:
    """Return an id as SQLite's signed 64-bit number; None if it is no id."""
    try:
        number = int(identity, 16)
    except ValueError:
        return None
    return number - (1 << 63) if len(identity) == 16 and 0 <= number < 1 << 64 else None


def _no_space(error: sqlite3.Error) -> DiskError:
    return DiskError(
        f"the temporary folder cannot hold the index of a journal ({error}). Free space there, or set SQLITE_TMPDIR."
    )
