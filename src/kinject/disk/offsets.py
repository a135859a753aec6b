"""An index of rows by name, on disk: a run may have more rows than memory has room for their ids.

A dictionary of names took 250 bytes a row, 2.5 GiB of ten million; SQLite's pages are 16 bytes a
row on disk, and a few MiB of them in memory. `kinject.disk` does not import it, for the start of
the verbs that have no such run.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import sys
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kinject.errors import DiskError

_CACHE_KIB = 16 * 1024


class OffsetIndex:
    """Names -> the numbers added for each, in their order. Two names with one hash (once in 10^19)
    have their numbers together: who reads a row by its offset compares the name in it."""

    def __init__(self) -> None:
        """Open an empty index, in a temporary file of the system's (SQLITE_TMPDIR, TMPDIR,
        /var/tmp) that ends with this process. Raises `DiskError`."""
        try:
            # A notebook's event loop runs in another thread than the one that made the plan.
            self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            weakref.finalize(self, self._database.close)  # a plan's index has no other end
            for statement in (
                "PRAGMA journal_mode=OFF",
                f"PRAGMA cache_size=-{_CACHE_KIB}",
                "CREATE TABLE places (name INTEGER, place INTEGER, PRIMARY KEY (name, place)) "
                "WITHOUT ROWID",
                # Never committed: nobody reads it after this process.
                "BEGIN",
            ):
                self._database.execute(statement)
        except sqlite3.Error as error:
            raise _fault(error) from error

    def add(self, name: str, number: int) -> None:
        """Add a number to those of a name. Raises `DiskError`."""
        try:
            self._database.execute(
                "INSERT OR IGNORE INTO places VALUES (?, ?)", (_id(name), number)
            )
        except sqlite3.Error as error:
            raise _fault(error) from error

    def get(self, name: str) -> list[int]:
        """Return the numbers of a name, the smallest first. Raises `DiskError`."""
        return self._numbers("SELECT place FROM places WHERE name = ? ORDER BY place", _id(name))

    def firsts(self) -> Iterator[int]:
        """Yield the smallest number of each name, in order of the numbers; nothing may be added
        meanwhile. Raises `DiskError`: they are sorted in a temporary file."""
        return self._in_order("SELECT min(place) AS first FROM places GROUP BY name ORDER BY first")

    def lasts(self) -> Iterator[int]:
        """Yield the largest number of each name, as `firsts`."""
        return self._in_order("SELECT max(place) AS last FROM places GROUP BY name ORDER BY last")

    def _in_order(self, statement: str) -> Iterator[int]:
        try:
            for (number,) in self._database.execute(statement):
                yield number
        except sqlite3.Error as error:
            raise _fault(error) from error

    def __len__(self) -> int:
        """Return the number of names."""
        return self._numbers("SELECT count(DISTINCT name) FROM places")[0]

    def _numbers(self, statement: str, *values: int) -> list[int]:
        try:
            return [number for (number,) in self._database.execute(statement, values)]
        except sqlite3.Error as error:
            raise _fault(error) from error

    def close(self) -> None:
        """Delete it."""
        self._database.close()


class NameNumbers:
    """Numbers names from 0, in the order in which they first come. Neither names nor their index
    are in memory."""

    def __init__(self, names: BinaryIO, ends: BinaryIO) -> None:
        """`names` gets the bytes of all names joined, `ends` where each ends (64 bits); both are
        open for reading and writing, and empty. Raises `DiskError`."""
        self._names, self._ends = names, ends
        self._index = OffsetIndex()
        self._n = self._n_bytes = 0
        self._last = ("", -1)

    def number(self, name: str) -> int:
        """Return the number of a name. Raises `DiskError`, and `OSError` if a file cannot be
        written."""
        last, number = self._last
        # The rows of a document are together as a rule.
        if number >= 0 and name == last:
            return number
        data = name.encode("utf-8", "surrogatepass")
        for number in self._index.get(name):
            if self._read(number) == data:
                break
        else:
            number = self._add(name, data)
        self._last = (name, number)
        return number

    def _add(self, name: str, data: bytes) -> int:
        number = self._n
        self._index.add(name, number)
        self._n += 1
        self._n_bytes += len(data)
        for file, content in ((self._names, data), (self._ends, _encode(self._n_bytes))):
            file.seek(0, 2)
            file.write(content)
        return number

    def _read(self, number: int) -> bytes:
        start = 0
        if number:
            self._ends.seek(8 * (number - 1))
            start = int.from_bytes(self._ends.read(8), sys.byteorder)
        self._ends.seek(8 * number)
        end = int.from_bytes(self._ends.read(8), sys.byteorder)
        self._names.seek(start)
        return self._names.read(end - start)

    def close(self) -> None:
        """Delete the index."""
        self._index.close()


def number_names(names: Iterable[str]) -> array[int]:
    """Return the number of each of `names`, as `NameNumbers`, and -1 for "": 4 bytes a name.

    Raises `DiskError`.
    """
    numbers = array("i")
    with (
        tempfile.TemporaryFile() as file,
        tempfile.TemporaryFile() as ends,
        contextlib.closing(NameNumbers(file, ends)) as known,
    ):
        for name in names:
            number = -1
            if name:
                try:
                    number = known.number(name)
                except OSError as error:
                    raise _fault(error) from error
            numbers.append(number)
    return numbers


def _encode(number: int) -> bytes:
    return number.to_bytes(8, sys.byteorder)


def _fault(error: sqlite3.Error | OSError) -> DiskError:
    return DiskError(
        f"the folder of temporary files cannot hold the index of a run's rows ({error}). "
        "Free space, or name another one in SQLITE_TMPDIR."
    )


def _id(name: str) -> int:
    """Return 64 bits of a name's hash, as SQLite's integers are signed."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
