"""Corpus rows as they stand on disk: one JSON object a line with `text`, `messages`, or `prompt` and `completion`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kinject.disk import Row, content_id, read_jsonl
from kinject.errors import InputError

Shape = Literal["text", "messages", "completion"]
_MAX_TOLD = 20


@dataclass(frozen=True, slots=True)
class CorpusRow:
    """One row: `shape` says which of `text`, `messages`, or `prompt` and `completion` it holds."""

    id: str
    document_id: str
    origin: str
    shape: Shape
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    prompt: str = ""
    completion: str = ""


def read_corpus(path: Path, origin: str = "") -> list[CorpusRow]:
    """Read a corpus whole. `origin`, where given, replaces the rows' own.

    Raises `InputError` with every faulty line (the first 20), each as file:line.
    """
    rows: list[CorpusRow] = []
    faults = LineFaults(path)
    for number, raw in read_jsonl(path):
        try:
            rows.append(parse_corpus_row(raw, origin))
        except InputError as error:
            faults.add(f"{path}:{number}: {error}")
    faults.tell(len(rows))
    return rows


class LineFaults:
    """The faults of a corpus: the first 20 in words, however many there are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: list[str] = []
        self._n = 0

    def add(self, what: str) -> None:
        """Note a fault."""
        self._n += 1
        if self._n <= _MAX_TOLD:
            self._told.append(what)

    def tell(self, n_rows: int) -> None:
        """Raise `InputError` with the faults, or because the corpus holds no rows."""
        if self._told:
            n_more = self._n - len(self._told)
            raise InputError("\n".join([*self._told, *([f"... and {n_more} more faulty lines."] if n_more else [])]))
        if not n_rows:
            raise InputError(
                f"{self.path}: no rows. A corpus holds one JSON object a line, with text, messages, or prompt and "
                "completion."
            )


def parse_corpus_row(raw: Row, origin: str) -> CorpusRow:
    """Return one row; `origin`, where given, replaces its own. Raises `InputError` for keys or values that do not fit."""
    shapes = [name for name, keys in _SHAPES.items() if all(key in raw for key in keys)]
    if len(shapes) != 1:
        found = ", ".join(raw) or "nothing"
        raise InputError(
            f"found the keys {found:.200}; each row must hold text, or messages, or prompt and completion."
        )
    shape: Shape = shapes[0]
    fields: dict[str, Any] = (
        {"messages": _messages(raw)} if shape == "messages" else {key: _text(raw, key) for key in _SHAPES[shape]}
    )
    given = raw.get("id")
    return CorpusRow(
        id=given if isinstance(given, str) and given else content_id(fields),
        document_id=str(raw.get("document_id", "")),
        origin=origin or str(raw.get("origin", "original")),
        shape=shape,
        **fields,
    )


_SHAPES: dict[Shape, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
}


def _text(raw: Row, key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise InputError(f"{key}: found {type(value).__name__}, expected text.")
    if not value.strip() and key != "prompt":
        raise InputError(f"{key}: is empty. Remove the row.")
    return value


def _messages(raw: Row) -> tuple[dict[str, str], ...]:
    messages = raw["messages"]
    well_formed = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not well_formed or not messages:
        raise InputError('messages: expected a list of {"role": ..., "content": ...}.')
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError("messages: no assistant turn, so there is nothing to learn. Remove the row.")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
