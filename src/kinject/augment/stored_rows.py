"""Rows that a run keeps and finds again by an id: what kinject wrote there, checked when the file
is opened.

A field of another shape, as after a change by hand, is named with its place; else it ended a run
of hours in its last step, with a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kinject.disk import Journal, Row, RowLike
from kinject.disk.offsets import OffsetIndex
from kinject.errors import InputError
from kinject.llm import JsonValue

Fields = Mapping[str, Callable[[JsonValue], bool]]
"""Field of a row -> whether a value can be its own; None is that of a field that is missing."""


def is_text(value: JsonValue) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_count(value: JsonValue) -> bool:
    """Return whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_texts(value: JsonValue) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


def is_usage(value: JsonValue) -> bool:
    """Return whether a value has numbers of tokens by name."""
    return isinstance(value, Mapping) and all(map(is_count, value.values()))


def are_checks(value: JsonValue) -> bool:
    """Return whether a value has the measures of a variant."""
    if not isinstance(value, Mapping) or not is_text(value.get("language", "")):
        return False
    facts = value.get("facts", [])
    lists = [value.get("ids", []), value.get("repairs", [])]
    if isinstance(facts, list):
        lists += facts
    return isinstance(facts, list) and all(map(is_texts, lists))


class IndexedRows(Journal):
    """An append-only file of rows that are found by the text in their field `key`; neither rows nor
    index are in memory."""

    def __init__(self, path: Path, key: str, fields: Fields, fix: str = "") -> None:
        """Open it. Raises `InputError` for a row with another value than `fields` has, `DiskError`
        on I/O."""
        self._key, self._index = key, OffsetIndex()

        def index(offset: int, row: Row) -> None:
            for name, can_be in fields.items():
                if not can_be(row.get(name)):
                    changed = fix or "The file was changed by hand; move it away."
                    raise InputError(
                        f"{path}: byte {offset}: {name}: found {row.get(name)!r:.60}, which "
                        f"kinject does not write there. {changed}"
                    )
            self._index.add(row[key], offset)

        # Not synced at each row: what a power cut takes is in the cache, and is not paid again.
        super().__init__(path, sync=False, on_row=index, fix=fix)

    def get(self, name: str) -> list[Row]:
        """Return the rows with this text."""
        rows = (self.row_at(offset) for offset in self._index.get(name))
        return [row for row in rows if row[self._key] == name]

    def add(self, name: str, row: RowLike) -> None:
        """Store a row (a mapping or a dataclass) with this text."""
        self._index.add(name, self.append(row))

    def add_all(self, others: IndexedRows) -> None:
        """Store the rows of another file that this one does not have, in their order."""
        for offset in others._index.firsts():
            name = others.row_at(offset)[others._key]
            stored = self.get(name)
            for row in others.get(name):
                if row not in stored:
                    self.add(name, row)

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._index.close()
