"""The rows of a corpus, one JSON object a line with `text`, `messages`, or `prompt` and `completion`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from kinject.disk import Row, content_id, file_hash, open_to_read, parse_row, read_lines
from kinject.errors import InputError

Shape = Literal["text", "messages", "completion"]
_SHAPES: dict[Shape, tuple[str, ...]] = {
    "text": ("text",), "messages": ("messages",), "completion": ("prompt", "completion"),
}  # fmt: skip
"""Shape -> the keys that a row of it holds."""
_MAX_FAULTS = 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class CorpusRow:
    """One row. `shape` names the fields that it holds: `text`, `messages`, or `prompt` and `completion`."""

    id: str
    document_id: str
    origin: str
    shape: Shape
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    prompt: str = ""
    completion: str = ""


class CorpusFile(Sequence[CorpusRow]):
    """The rows of a JSONL corpus in order, read from disk when they are needed: the file may be larger than memory.

    Iterating parses and checks each row once. Length and random access need one pass that finds the beginnings of lines
    (16 bytes of memory a row) and parses nothing. `origin`, if not empty, replaces the rows' own. `sha256` is the file's
    hash, if it is known already. `on_row` is called with (line number, JSON object) of each row that is parsed.
    """

    def __init__(
        self, path: Path, origin: str = "", *, sha256: str = "", on_row: Callable[[int, Row], None] | None = None
    ) -> None:
        self.path, self.origin, self.on_row = path, origin, on_row
        self._sha256 = sha256
        self._starts, self._numbers = array("q"), array("q")
        self._indexed = False
        self._parsed: bytearray | None = None

    @property
    def cache_key(self) -> tuple[object, ...]:
        """The hash of the file, for the name of what is made from it."""
        if not self._sha256:
            self._sha256 = file_hash(self.path)
        return (self._sha256,)

    def __iter__(self) -> Iterator[CorpusRow]:
        """Yield every row, in one pass. Raises `InputError` with every faulty line (the first 20), each as file:line.

        After the first faulty line no more rows are yielded: the rest is read for further faults.
        """
        faults = _LineFaults()
        n_rows = 0
        for number, _, line in self._lines():
            n_rows += 1
            try:
                row = self._parse(line, number)
            except InputError as error:
                faults.add(str(error))
                continue
            if not faults:
                yield row
        faults.raise_if_any()
        self._require_rows(n_rows)

    def check(self, *, only_unread: bool = False) -> None:
        """Parse every row, or only those that were not picked. Raises `InputError` as iterating does."""
        parsed = self._parsed if only_unread else None
        faults = _LineFaults()
        index = -1
        for index, (number, _, line) in enumerate(self._lines()):
            if parsed is None or not parsed[index]:
                try:
                    self._parse(line, number)
                except InputError as error:
                    faults.add(str(error))
        faults.raise_if_any()
        self._require_rows(index + 1)

    def pick(self, indices: Sequence[int]) -> list[CorpusRow]:
        """Return the rows of `indices`, in their order. Raises `InputError` for a faulty one, as file:line."""
        self._index()
        if self._parsed is None:
            self._parsed = bytearray(len(self._starts))
        rows = []
        with open_to_read(self.path) as file:
            for index in indices:
                file.seek(self._starts[index])
                number = self._numbers[index]
                rows.append(self._parse(_strip_mark(file.readline(), number), number))
                self._parsed[index] = 1
        return rows

    def __len__(self) -> int:
        self._index()
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> CorpusRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[CorpusRow]: ...
    def __getitem__(self, index: int | slice) -> CorpusRow | list[CorpusRow]:
        """Read one row, or several."""
        if isinstance(index, slice):
            return self.pick(range(*index.indices(len(self))))
        return self.pick([range(len(self))[index]])[0]

    def _index(self) -> None:
        """Find where lines begin. Raises `InputError` if the corpus has no rows."""
        if self._indexed:
            return
        for number, start, _ in self._lines():
            self._starts.append(start)
            self._numbers.append(number)
        self._require_rows(len(self._starts))
        self._indexed = True

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (line number from 1, its first byte in the file, line) of every line that is not blank."""
        start = 0
        for number, line in read_lines(self.path):
            content = _strip_mark(line, number)
            if content.strip():
                yield number, start, content
            start += len(line)

    def _parse(self, line: bytes, number: int) -> CorpusRow:
        where = f"{self.path}:{number}"
        raw = parse_row(line, where)
        try:
            row = parse_corpus_row(raw, self.origin)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if self.on_row is not None:
            self.on_row(number, raw)
        return row

    def _require_rows(self, n_rows: int) -> None:
        if not n_rows:
            raise InputError(
                f"{self.path}: no rows. A corpus holds one JSON object a line, with text, messages, or prompt and "
                "completion."
            )


def _strip_mark(line: bytes, number: int) -> bytes:
    return line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line


class _LineFaults:
    """The faults of a corpus: the text of the first 20, and how many there are."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._n = 0

    def __bool__(self) -> bool:
        return self._n > 0

    def add(self, message: str) -> None:
        """Add a fault."""
        self._n += 1
        if self._n <= _MAX_FAULTS:
            self._messages.append(message)

    def raise_if_any(self) -> None:
        """Raise `InputError` with the faults."""
        if self._n:
            n_more = self._n - len(self._messages)
            more = [f"... and {n_more} more faulty lines."] if n_more else []
            raise InputError("\n".join([*self._messages, *more]))


def parse_corpus_row(raw: Row, origin: str) -> CorpusRow:
    """Return one row; `origin`, if not empty, replaces its own. Raises `InputError` for keys or values that do not fit."""
    shapes = [name for name, keys in _SHAPES.items() if all(key in raw for key in keys)]
    if len(shapes) != 1:
        keys = ", ".join(raw) or "nothing"
        raise InputError(f"found the keys {keys:.200}; each row must hold text, or messages, or prompt and completion.")
    shape: Shape = shapes[0]
    fields: dict[str, Any] = (
        {"messages": _messages(raw)} if shape == "messages" else {key: _text(raw, key) for key in _SHAPES[shape]}
    )
    row_id = raw.get("id")
    identity = row_id if isinstance(row_id, str) and row_id else content_id(fields)
    origin = origin or str(raw.get("origin", "original"))
    return CorpusRow(identity, str(raw.get("document_id", "")), origin, shape, **fields)


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
