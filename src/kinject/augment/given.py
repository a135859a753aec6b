"""Rewritings that someone else made: read from a file, to be checked and stored like any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kinject.disk import read_jsonl
from kinject.errors import InputError


@dataclass(frozen=True, slots=True)
class Given:
    """The texts of a file by document, in its order; `lines` holds the line of each document's first."""

    path: Path
    texts: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]

    def check_documents(self, known: Iterable[str]) -> None:
        """Raise `InputError` (file:line) where a text belongs to no document."""
        strangers = self.texts.keys() - set(known)
        if strangers:
            first = min(strangers, key=lambda name: self.lines[name])
            raise InputError(
                f"{self.path}:{self.lines[first]}: document_id {first!r} is the id of no document. "
                f"{len(strangers)} such ids in all; they must be those of augment.documents."
            )


def read_given(path: Path) -> Given:
    """Read rows of ``document_id`` and ``text``, all into memory. Raises `InputError` (file:line) on any other row."""
    texts: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        for key in ("document_id", "text"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise InputError(
                    f"{path}:{number}: {key}: found {row.get(key)!r}, expected a string that is not empty."
                )
        texts.setdefault(row["document_id"], []).append(row["text"])
        lines.setdefault(row["document_id"], number)
    if not texts:
        raise InputError(f"{path}: holds no rewritings. Expected rows with document_id and text.")
    return Given(path, {name: tuple(found) for name, found in texts.items()}, lines)
