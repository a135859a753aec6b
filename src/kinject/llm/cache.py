"""The cache of paid answers: an SQLite file with one row an answer, committed as it comes, without errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kinject.disk import FORMAT_VERSION, check_version
from kinject.errors import DiskError
from kinject.types import Completion, Message, Usage

CACHES = ("cache.sqlite", "judge.sqlite")
"""The caches of a run folder: of its generator, and of its judge."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL, tokens_thinking INTEGER NOT NULL, thinking TEXT NOT NULL,
    endpoint TEXT NOT NULL
) WITHOUT ROWID"""
_LOST = """CREATE TABLE IF NOT EXISTS lost (
    tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL, endpoint TEXT NOT NULL
)"""
_SELECT = "SELECT text, finish_reason, tokens_in, tokens_out, tokens_thinking, thinking FROM answers WHERE key = ?"

_Row = tuple[bytes, str, str, int, int, int, str, str]
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=dict)  # a mapping of any kind


def request_key(identity: Mapping[str, Any], messages: Sequence[Message], seed: int) -> bytes:
    """Return 16 bytes that depend on everything that shapes an answer: model, parameters, messages, seed."""
    parts = [identity, messages, seed]
    return hashlib.blake2b(_ENCODER.encode(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


_USAGE = (
    "SELECT total(tokens_in), total(tokens_out), total(tokens_thinking) FROM (SELECT tokens_in, tokens_out, "
    "tokens_thinking FROM answers UNION ALL SELECT tokens_in, tokens_out, 0 FROM lost)"
)


def stored_usage(path: Path) -> Usage:
    """Return the tokens of the answers in a cache file, which is only read; none if it is missing or damaged."""
    if not path.exists():
        return Usage()
    # A closed cache has no log beside it, and needs none to be read.
    mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)) as database:
            return Usage(*map(int, database.execute(_USAGE).fetchone()))
    except sqlite3.Error:  # a run reports the damage
        return Usage()


class AnswerCache:
    """An open cache: `get`, `put` and `keep` by `request_key`.

    A row survives a kill of the process once `put` returns, or once `keep` is awaited.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `DiskError` if that fails, or if it is no cache."""
        self.path = path
        self._waiting: list[_Row] = []
        self._committed: asyncio.Future[None] | None = None
        try:
            self._database = _open(path)
            self._inode = path.stat().st_ino
        except (OSError, sqlite3.Error) as error:
            raise DiskError(
                f"{path}: cannot be opened as the cache of answers ({error}). Free space, if it is missing. To save the "
                f"readable part of a damaged file: sqlite3 {path} .recover | sqlite3 NEW. If you move the file away, a new one "
                "is made, and answers that are not stored as rewritings yet are requested, and paid, again."
            ) from error

    def get(self, key: bytes) -> Completion | None:
        """Return the stored answer, or None. Raises `DiskError` if it cannot be read."""
        try:
            row = self._database.execute(_SELECT, (key,)).fetchone()
        except sqlite3.Error as error:
            raise DiskError(f"{self.path}: cannot be read ({error}). Run the same command again.") from error
        return None if row is None else Completion(row[0], row[1], Usage(*row[2:5]), row[5])

    def put(self, key: bytes, completion: Completion, endpoint: str = "") -> None:
        """Store one answer; `endpoint` names where it came from. Raises `DiskError` if it cannot be written."""
        self._write([_row(key, completion, endpoint)])

    async def keep(self, key: bytes, completion: Completion, endpoint: str = "") -> None:
        """Store one answer, in one transaction with others of the same moment. Raises `DiskError` as `put`."""
        if self._committed is None:
            self._committed = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self._commit)
        self._waiting.append(_row(key, completion, endpoint))
        await asyncio.shield(self._committed)

    def _commit(self) -> None:
        """Write the waiting rows and wake their callers."""
        rows, committed = self._waiting, self._committed
        self._waiting, self._committed = [], None
        try:
            self._write(rows)
        except Exception as error:
            if committed is None:
                raise
            committed.set_exception(error)  # raised by the waiting callers
        else:
            if committed is not None:
                committed.set_result(None)

    def _write(self, rows: Sequence[_Row]) -> None:
        self._insert("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def put_lost(self, usage: Usage, endpoint: str = "") -> None:
        """Add the possible cost of a lost answer. Raises `DiskError` as `put`."""
        row = (usage.tokens_in, usage.tokens_out, endpoint)
        self._insert("INSERT INTO lost VALUES (?, ?, ?)", [row])

    def _insert(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        try:
            self._database.execute("BEGIN")
            self._database.executemany(statement, rows)
            self._database.execute("COMMIT")
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError("it was replaced while this run was writing it")
        except (OSError, sqlite3.Error) as error:
            with contextlib.suppress(sqlite3.Error):  # a disk that failed once may fail again; the first error counts
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
            raise DiskError(
                f"{self.path}: cannot be written ({error}). What was stored so far is safe. Fix this error; the same "
                "command then resumes."
            ) from error

    def usage(self) -> Usage:
        """Return the tokens of all stored and lost answers."""
        return Usage(*map(int, self._database.execute(_USAGE).fetchone()))

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


def _row(key: bytes, completion: Completion, endpoint: str) -> _Row:
    usage = completion.usage
    return (
        key, completion.text, completion.finish_reason, usage.tokens_in, usage.tokens_out, usage.tokens_thinking,
        completion.thinking, endpoint,
    )  # fmt: skip


def _open(path: Path) -> sqlite3.Connection:
    """Return the file, made if missing, with its tables. Raises the errors of the system and of SQLite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version:
            check_version(version, str(path))
        else:
            database.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", _SCHEMA, _LOST):
            database.execute(statement)
    except BaseException:
        database.close()
        raise
    return database
