"""Which batches a run folder has handed in, so that a restart takes up their results instead of paying again."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from kinject.disk import settle_database
from kinject.errors import DiskError

_SCHEMA = """CREATE TABLE IF NOT EXISTS batches (
    submission TEXT PRIMARY KEY, url TEXT NOT NULL, batch TEXT, keys TEXT NOT NULL
) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class Handed:
    """One batch without results so far: our name for it, the endpoint's (None: maybe never made), its request keys."""

    submission: str
    batch: str | None
    keys: tuple[str, ...]


class BatchLog:
    """An open log. Each change is on disk when the call returns. Raises `DiskError` where it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None)
            settle_database(self._database, path)
            self._database.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise DiskError(f"{path}: cannot be opened as the log of batches ({error}).") from error

    def begin(self, submission: str, url: str, keys: list[str]) -> None:
        """Note a batch about to be made."""
        self._write("INSERT INTO batches VALUES (?, ?, NULL, ?)", (submission, url, json.dumps(keys)))

    def name(self, submission: str, batch: str) -> None:
        """Note the endpoint's name for it."""
        self._write("UPDATE batches SET batch = ? WHERE submission = ?", (batch, submission))

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

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise DiskError(f"{self.path}: cannot be written ({error}). What was stored so far is safe.") from error
