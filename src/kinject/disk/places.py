"""Where the rows of a journal stand, by id: an index on disk, so that memory does not grow with the journal."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from types import TracebackType

from kinject.errors import DiskError, InputError

_CACHE_KIB = 32_768
_MOST_NEW = 4096
"""Places that wait in memory to be written together, in the order of ids: far cheaper than one by one."""
_MOST_ASKED = 256
"""Ids in one query."""
_SCHEMA = "CREATE TABLE places (id INTEGER, place INTEGER, PRIMARY KEY (id, place)) WITHOUT ROWID"


class Places:
    """Ids (16 hex digits, as `content_id` makes them) with one or more places each, in a nameless temporary file.

    It goes with the process and is made anew from the journal. At most 32 MiB and some thousand new places are in
    memory.
    """

    def __init__(self) -> None:
        """Open an empty index. Raises `DiskError` where the temporary folder cannot be written."""
        self._new: dict[int, list[int]] = {}
        self._n_new = 0
        try:
            self._database = sqlite3.connect("", isolation_level=None)
            for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise _no_space(error) from error

    def add(self, identity: str, place: int) -> None:
        """Note that a row with this id stands at `place`. Raises `InputError` where the id is none of kinject's."""
        number = _number(identity)
        if number is None:
            raise InputError(f"found id {identity!r}, expected 16 hex digits")
        self._new.setdefault(number, []).append(place)
        self._n_new += 1
        if self._n_new >= _MOST_NEW:
            self._write()

    def of(self, identity: str) -> list[int]:
        """Return the places of the rows with this id, in order; [] where there are none."""
        return self.of_all([identity])[0]

    def of_all(self, identities: Sequence[str]) -> list[list[int]]:
        """Return `of` each of several ids, in one query."""
        numbers = [_number(identity) for identity in identities]
        found: dict[int, list[int]] = {}
        asked = [number for number in numbers if number is not None]
        for start in range(0, len(asked), _MOST_ASKED):
            part = asked[start : start + _MOST_ASKED]
            marks = ",".join("?" * len(part))
            query = f"SELECT id, place FROM places WHERE id IN ({marks}) ORDER BY place"  # noqa: S608  (marks alone)
            for number, place in self._database.execute(query, part):
                found.setdefault(number, []).append(place)
        return [self._with_new(number, found) for number in numbers]

    def _with_new(self, number: int | None, found: dict[int, list[int]]) -> list[int]:
        if number is None:
            return []
        return sorted({*found.get(number, ()), *self._new[number]}) if number in self._new else found.get(number, [])

    def _write(self) -> None:
        """Move what is new to the file."""
        rows = ((number, place) for number in sorted(self._new) for place in self._new[number])
        try:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR IGNORE INTO places VALUES (?, ?)", rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise _no_space(error) from error
        self._new.clear()
        self._n_new = 0

    def ids(self) -> Iterator[str]:
        """Yield the ids that are noted, each once."""
        self._write()
        for (number,) in self._database.execute("SELECT DISTINCT id FROM places"):
            yield f"{number + (1 << 63):016x}"

    def __len__(self) -> int:
        """How many different ids are noted."""
        self._write()
        return int(self._database.execute("SELECT count(DISTINCT id) FROM places").fetchone()[0])

    def close(self) -> None:
        """Give the temporary file back."""
        self._database.close()

    def __enter__(self) -> Places:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(identity: str) -> int | None:
    """Return an id as SQLite's signed 64-bit number, None where it is no id."""
    try:
        number = int(identity, 16)
    except ValueError:
        return None
    return number - (1 << 63) if len(identity) == 16 and 0 <= number < 1 << 64 else None


def _no_space(error: sqlite3.Error) -> DiskError:
    return DiskError(
        f"the temporary folder cannot hold the index of a journal ({error}). Free space there, or set SQLITE_TMPDIR."
    )
