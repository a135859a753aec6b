"""Which batches a run folder has handed in, so that a restart takes up their results instead of paying again."""

from __future__ import annotations

import json
import sqlite3
import zlib
from dataclasses import dataclass
from pathlib import Path

from kinject.disk import settle_database
from kinject.errors import DiskError

_SCHEMA = """CREATE TABLE IF NOT EXISTS batches (
    submission TEXT PRIMARY KEY, url TEXT NOT NULL, batch TEXT, keys TEXT NOT NULL, crc32 INTEGER
) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class Handed:
    """One batch without results so far: our name for it, the endpoint's (None: maybe never made), its request keys."""

    submission: str
    batch: str | None
    keys: tuple[str, ...]


class BatchLog:
    """An open log. Each change is on disk when the call returns. Raises `DiskError` where it cannot be.

    Each row has its CRC-32 (those of an older kinject have none); on opening all are read.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `DiskError` where it cannot be, or a row is not as it was written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None)
            settle_database(self._database, path)
            self._database.execute(_SCHEMA)
            if all(column[1] != "crc32" for column in self._database.execute("PRAGMA table_info(batches)")):
                self._database.execute("ALTER TABLE batches ADD COLUMN crc32 INTEGER")
            rows = self._database.execute("SELECT submission, url, batch, keys, crc32 FROM batches").fetchall()
            if any(row[4] not in (None, _crc32(*row[:4])) for row in rows):
                raise sqlite3.DatabaseError("a row is not as it was written")
        except (OSError, TypeError, AttributeError, sqlite3.Error) as error:
            raise DiskError(
                f"{path}: cannot be opened as the log of batches ({error}). Move it away to go on without it: batches that "
                "are not finished are then handed in, and paid, again."
            ) from error

    def begin(self, submission: str, url: str, keys: list[str]) -> None:
        """Note a batch about to be made."""
        self._put(submission, url, None, json.dumps(keys))

    def name(self, submission: str, batch: str) -> None:
        """Note the endpoint's name for it."""
        found = self._database.execute("SELECT url, keys FROM batches WHERE submission = ?", (submission,)).fetchone()
        self._put(submission, found[0], batch, found[1])

    def end(self, submission: str) -> None:
        """Forget a batch: its results are in the cache, or it will never have any."""
        self._write("DELETE FROM batches WHERE submission = ?", (submission,))

    def waiting(self, url: str) -> list[Handed]:
        """Return the batches handed in at `url` that have not ended."""
        found = self._database.execute("SELECT submission, batch, keys FROM batches WHERE url = ?", (url,))
        return [Handed(submission, batch, tuple(json.loads(keys))) for submission, batch, keys in found]

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _put(self, submission: str, url: str, batch: str | None, keys: str) -> None:
        row = (submission, url, batch, keys)
        self._write("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?)", (*row, _crc32(*row)))

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise DiskError(
                f"{self.path}: cannot be written ({error}). What was stored so far is safe. Mend what the system says; the "
                "same command goes on."
            ) from error


def _crc32(submission: str, url: str, batch: str | None, keys: str) -> int:
    return zlib.crc32("\0".join((submission, url, "" if batch is None else f"={batch}", keys)).encode())
