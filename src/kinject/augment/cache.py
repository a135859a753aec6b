"""Answers that were paid for, in SQLite: one row each, committed as it comes, never an error or a guess."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kinject.disk import settle_database
from kinject.errors import DiskError
from kinject.types import Completion, Message, Usage

_SCHEMA = """CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, text TEXT NOT NULL, finish_reason TEXT NOT NULL, tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL
) WITHOUT ROWID"""

_LOST = "CREATE TABLE IF NOT EXISTS lost (tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL)"
_Row = tuple[bytes, str, str, int, int]
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=dict)  # a mapping of any kind


def request_key(identity: Mapping[str, Any], messages: Sequence[Message], seed: int) -> bytes:
    """Return 16 bytes that depend on everything that shapes an answer: endpoint, model, parameters, messages, seed."""
    return hashlib.blake2b(
        _ENCODER.encode([identity, messages, seed]).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


class AnswerCache:
    """An open cache: `get`, `put` and `keep` by `request_key`.

    A row is safe from a kill of the process when `put` returns, or `keep` when it is awaited.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `DiskError` where it cannot be, or is not a cache."""
        self.path = path
        self._waiting: list[_Row] = []
        self._committed: asyncio.Future[None] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None)
            settle_database(self._database, path)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(_SCHEMA)
            self._database.execute(_LOST)
        except (OSError, sqlite3.Error) as error:
            raise DiskError(
                f"{path}: cannot be opened as the cache of answers ({error}). Move it away to begin a new one."
            ) from error

    def get(self, key: bytes) -> Completion | None:
        """Return the stored answer, or None."""
        row = self._database.execute(
            "SELECT text, finish_reason, tokens_in, tokens_out FROM answers WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else Completion(row[0], row[1], Usage(row[2], row[3]))

    def put(self, key: bytes, completion: Completion) -> None:
        """Store one answer. Raises `DiskError` where it cannot be written."""
        self._write([_row(key, completion)])

    async def keep(self, key: bytes, completion: Completion) -> None:
        """Store one answer, in one transaction with those that came at the same time. Raises `DiskError` as `put`."""
        if self._committed is None:
            self._committed = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self._commit)
        self._waiting.append(_row(key, completion))
        await asyncio.shield(self._committed)

    def _commit(self) -> None:
        """Write what waits, and tell those who wait for it."""
        rows, committed = self._waiting, self._committed
        self._waiting, self._committed = [], None
        try:
            self._write(rows)
        except Exception as error:
            if committed is None:
                raise
            committed.set_exception(error)  # whoever waits raises it
        else:
            if committed is not None:
                committed.set_result(None)

    def _write(self, rows: Sequence[_Row]) -> None:
        self._insert("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", rows)

    def note_lost(self, usage: Usage) -> None:
        """Count what an answer that came to nothing may have cost. Raises `DiskError` as `put`."""
        self._insert("INSERT INTO lost VALUES (?, ?)", [(usage.tokens_in, usage.tokens_out)])

    def _insert(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        try:
            self._database.execute("BEGIN")
            self._database.executemany(statement, rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise DiskError(f"{self.path}: cannot be written ({error}). What was stored so far is safe.") from error

    def usage(self) -> Usage:
        """Return the tokens of all stored answers, and of those that were lost."""
        row = self._database.execute(
            "SELECT total(tokens_in), total(tokens_out) FROM "
            "(SELECT tokens_in, tokens_out FROM answers UNION ALL SELECT tokens_in, tokens_out FROM lost)"
        ).fetchone()
        return Usage(int(row[0]), int(row[1]))

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM answers").fetchone()[0])

    def __enter__(self) -> AnswerCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._waiting:  # the run ended between an answer and its commit
                self._commit()
        finally:
            self._database.close()


def _row(key: bytes, completion: Completion) -> _Row:
    usage = completion.usage
    return key, completion.text, completion.finish_reason, usage.tokens_in, usage.tokens_out
