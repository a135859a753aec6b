"""The cache of paid answers: an SQLite file with one row an answer, committed as it comes, without
errors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinject.disk import FORMAT_VERSION, check_version
from kinject.errors import DiskError
from kinject.types import Completion, Message, Usage

CACHES = ("cache.sqlite", "judge.sqlite")
"""The caches of a run folder: of its generator, and of its judge."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL, tokens_thinking INTEGER NOT NULL,
    thinking TEXT NOT NULL, endpoint TEXT NOT NULL
) WITHOUT ROWID"""
_SELECT = (
    "SELECT text, finish_reason, tokens_in, tokens_out, tokens_thinking, thinking "
    "FROM answers WHERE key = ?"
)
_TYPES = [str, str, int, int, int, str]
"""The types of the columns of `_SELECT`."""
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, default=dict
)  # a mapping of any kind


def request_key(identity: Mapping[str, Any], messages: Sequence[Message], seed: int) -> bytes:
    """Return 16 bytes that depend on everything that shapes an answer: model, parameters, messages,
    seed."""
    parts = [identity, messages, seed]
    # Half a surrogate pair from a document is no reason to fail: the key only has to differ.
    encoded = _ENCODER.encode(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).digest()


_USAGE = "SELECT total(tokens_in), total(tokens_out), total(tokens_thinking) FROM answers"


def stored_usage(path: Path) -> Usage:
    """Return the tokens of the answers in a cache file, which is only read; none if it is missing
    or damaged."""
    if not path.exists():
        return Usage()
    # A closed cache has no log beside it, and needs none to be read.
    mode = "immutable=1"
    if path.with_name(path.name + "-wal").exists():
        mode = "mode=ro"
    address = f"{path.resolve().as_uri()}?{mode}"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            return Usage(*map(int, database.execute(_USAGE).fetchone()))
    except (sqlite3.Error, OverflowError):  # a run reports the damage
        return Usage()


class AnswerCache:
    """An open cache: `get` and `put` by `request_key`. A row survives a kill of the process once
    `put` returns."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `DiskError` if that fails, or if it is no cache."""
        self.path = path
        try:
            self._database = _open(path)
            self._inode = path.stat().st_ino
        except (OSError, sqlite3.Error) as error:
            raise _unreadable(path, error) from error

    def get(self, key: bytes) -> Completion | None:
        """Return the stored answer, or None. Raises `DiskError` if it cannot be read."""
        try:
            row = self._database.execute(_SELECT, (key,)).fetchone()
        except sqlite3.Error as error:
            raise _unreadable(self.path, error) from error
        if row is None:
            return None
        # SQLite keeps any type in any column.
        if [type(value) for value in row] != _TYPES:
            raise _unreadable(self.path, TypeError("an answer of other types"))
        return Completion(row[0], row[1], Usage(*row[2:5]), row[5])

    def put(self, key: bytes, completion: Completion) -> None:
        """Store one answer. Raises `DiskError` if it cannot be written."""
        usage = completion.usage
        row = (
            key,
            completion.text,
            completion.finish_reason,
            usage.tokens_in,
            usage.tokens_out,
            usage.tokens_thinking,
            completion.thinking,
            "",
        )
        try:
            self._database.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
            )
            # SQLite writes on into a file that was deleted or replaced, and nobody would find the
            # answers.
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError("it was replaced while this run was writing it")
        except (OSError, sqlite3.Error) as error:
            raise DiskError(
                f"{self.path}: cannot be written ({error}). What was stored so far is safe. "
                "Fix this error; the same command then resumes."
            ) from error

    def add_all(self, other: Path) -> None:
        """Store the answers of another cache that this one does not have. Raises `DiskError`."""
        try:
            self._database.execute("ATTACH ? AS other", (str(other),))
            self._database.execute("INSERT OR IGNORE INTO answers SELECT * FROM other.answers")
            self._database.execute("DETACH other")
        except sqlite3.Error as error:
            raise DiskError(
                f"{other}: cannot be merged into {self.path} ({error}). "
                "Run its shard again, then the merge."
            ) from error

    def usage(self) -> Usage:
        """Return the tokens of all stored answers. Raises `DiskError` if they cannot be read."""
        try:
            return Usage(*map(int, self._database.execute(_USAGE).fetchone()))
        # Its first look at every page: one that is damaged lets the file be opened.
        except (sqlite3.Error, OverflowError) as error:
            raise _unreadable(self.path, error) from error

    def __enter__(self) -> AnswerCache:
        return self

    def __exit__(self, *error: object) -> None:
        self._database.close()


def _unreadable(path: Path, error: Exception) -> DiskError:
    return DiskError(
        f"{path}: cannot be read as the cache of answers ({error}). Free space, if it is missing. "
        f"To save the readable part of a damaged file: sqlite3 {path} .recover | sqlite3 NEW. If "
        "you move the file away, a new one is made, and answers that are not stored as rewritings "
        "yet are requested, and paid, again."
    )


def merge_caches(path: Path, others: Sequence[Path]) -> None:
    """Put the answers of the caches `others` that exist into the one at `path`, each once."""
    for other in others:
        if other.exists():
            with AnswerCache(path) as cache:
                cache.add_all(other)


def _open(path: Path) -> sqlite3.Connection:
    """Return the file, made if missing, with its tables. Raises the errors of the system and of
    SQLite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # No transactions of Python's: each answer is committed as it comes.
    database = sqlite3.connect(path, isolation_level=None)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version:
            check_version(version, str(path))
        else:
            database.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        # WAL with NORMAL: a commit survives a kill of the process; a power cut may take the last
        # ones.
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", _SCHEMA):
            database.execute(statement)
    except BaseException:
        database.close()
        raise
    return database
