"""The rows of a corpus, one JSON object a line with `text`, `messages`, or `prompt` and
`completion`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from kinject.corpus.other_layouts import as_messages
from kinject.disk import Row, content_id, file_hash, open_to_read, parse_row, read_lines
from kinject.errors import InputError

Item = TypeVar("Item")
JsonValue = dict[str, Any] | list[Any] | str | float | bool | None
"""What a row may hold where kinject has not looked yet."""
Shape = Literal["text", "messages", "completion"]
_SHAPES: dict[Shape, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
}
"""Shape -> the keys that a row of it holds."""
_BESIDE = frozenset(
    {"id", "document_id", "origin", "source", "licence", "license", "title", "meta", "facts"}
)
_OF_CHAT = ("tools", "chat_template_kwargs")
_OF_MESSAGE = (
    "role",
    "content",
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
    "tool_calls",
    "tool_call_id",
)
RESERVED_KWARGS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
    }
)
"""Arguments of apply_chat_template that are no arguments of a template."""
_MAX_FAULTS = 20
# Editors on Windows write one in front of the first line.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class CorpusRow:
    """One row. `shape` names the fields that it holds: `text`, `messages`, or `prompt` and
    `completion`.

    `tools` and `template_kwargs` belong to `messages`: JSON schemas of functions, and arguments of
    the chat template. `location` is the row's file:line, if it was read from a file.
    """

    id: str
    document_id: str
    origin: str
    shape: Shape
    text: str = ""
    messages: tuple[Row, ...] = ()
    prompt: str = ""
    completion: str = ""
    tools: tuple[Row, ...] = ()
    template_kwargs: Row = field(default_factory=dict)
    # Rows are equal wherever they were read.
    location: str = field(default="", compare=False)

    @property
    def line(self) -> int:
        """The number of the row's line in its file; 0 if it was not read from one."""
        number = self.location.rpartition(":")[2]
        # Not isdigit(), which is true for "²".
        return int(number) if number.isdecimal() else 0


class LazyRows(Sequence[Item], ABC):
    """Rows that are made when they are read, by `read_row`."""

    @abstractmethod
    def read_row(self, index: int) -> Item:
        """Return the row with this number, which is from 0 to the length."""

    def __getitem__(self, index: int | slice) -> Any:
        """Return one row, or several."""
        if isinstance(index, slice):
            return [self.read_row(i) for i in range(*index.indices(len(self)))]
        # range refuses an index beyond the rows and counts negative ones from the end.
        return self.read_row(range(len(self))[index])


class CorpusFile(LazyRows[CorpusRow]):
    """The rows of a JSONL corpus in order, read from disk when they are needed: the file may be
    larger than memory.

    Iterating parses and checks each row once. Length and random access need one pass that finds the
    beginnings of lines (16 bytes of memory a row) and parses nothing. `origin`, if not empty,
    replaces the rows' own. `sha256` is the file's hash, if it is known already. `column` is a
    column that rows may have beside the known ones, or a field of one.
    """

    def __init__(
        self,
        path: Path,
        origin: str = "",
        *,
        sha256: str = "",
        column: str = "",
    ) -> None:
        self.path, self.origin, self.column = path, origin, column
        self._sha256 = sha256
        self._starts, self._numbers = array("q"), array("q")
        self._indexed = False

    @property
    def cache_key(self) -> tuple[object, ...]:
        """The hash of the file, for the names of files made from it."""
        if not self._sha256:
            self._sha256 = file_hash(self.path)
        return (self._sha256,)

    def __iter__(self) -> Iterator[CorpusRow]:
        """Yield every row, in one pass. Raises `InputError` with every faulty line (the first 20),
        each as file:line.

        After the first faulty line no more rows are yielded: the rest is read for further faults.
        """
        faults = LineFaults()
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

    def pick(self, indices: Sequence[int]) -> list[CorpusRow]:
        """Return the rows of `indices`, in their order. Raises `InputError` for a faulty one, as
        file:line."""
        self._index()
        rows = []
        with open_to_read(self.path) as file:
            for index in indices:
                file.seek(self._starts[index])
                number = self._numbers[index]
                rows.append(self._parse(_strip_mark(file.readline(), number), number))
        return rows

    def __len__(self) -> int:
        self._index()
        return len(self._starts)

    def read_row(self, index: int) -> CorpusRow:
        """Return the row with this number."""
        return self.pick([index])[0]

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
        """Yield (line number from 1, its first byte in the file, line) of every line that is not
        blank."""
        start = 0
        for number, line in read_lines(self.path):
            content = _strip_mark(line, number)
            if content.strip():
                if not start and content.lstrip().startswith(b"["):
                    raise InputError(
                        f"{self.path}: holds a JSON array, and a corpus one object a line. Write "
                        f"it so: jq -c '.[]' {self.path} > rows.jsonl."
                    )
                yield number, start, content
            # Of the line as it is in the file, with its mark, or blank.
            start += len(line)

    def _parse(self, line: bytes, number: int) -> CorpusRow:
        location = f"{self.path}:{number}"
        raw = parse_row(line, location)
        try:
            return parse_corpus_row(raw, self.origin, location, self.column)
        except InputError as error:
            raise InputError(f"{location}: {error}") from error

    def _require_rows(self, n_rows: int) -> None:
        if not n_rows:
            raise InputError(
                f"{self.path}: no rows. A corpus holds one JSON object a line, "
                "with text, messages, or prompt and completion."
            )


def _strip_mark(line: bytes, number: int) -> bytes:
    if number > 1:
        return line
    return line.removeprefix(_BYTE_ORDER_MARK)


class LineFaults:
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

    def raise_if_any(self, hint: str = "") -> None:
        """Raise `InputError` with the faults, and `hint` below them."""
        if not self._n:
            return
        lines, n_more = list(self._messages), self._n - len(self._messages)
        if n_more:
            lines.append(f"... and {n_more} more faulty lines.")
        if hint:
            lines.append(hint)
        raise InputError("\n".join(lines))


def parse_corpus_row(raw: Row, origin: str, location: str = "", column: str = "") -> CorpusRow:
    """Return one row; `origin`, if not empty, replaces its own. Raises `InputError` for keys or
    values that do not fit.

    A row of Alpaca's or ShareGPT's layout is one with `messages`. Beside `messages`, only keys that
    are known are allowed, and `column` with the fields of it.
    """
    raw = as_messages(raw)
    shapes = [name for name, keys in _SHAPES.items() if raw.keys() >= set(keys)]
    if len(shapes) != 1:
        keys = ", ".join(raw) or "nothing"
        raise InputError(
            f"found the keys {keys:.200}; each row must hold text, or messages, or prompt and "
            "completion, or Alpaca's instruction and output, or ShareGPT's conversations."
        )
    shape: Shape = shapes[0]
    # Beside messages every key must be known: no template would read another, without an error.
    if shape == "messages":
        fields = _conversation(
            raw, {*_BESIDE, *_OF_CHAT, "messages", column, column.partition(".")[0]}
        )
    else:
        fields = {key: _text(raw, key) for key in _SHAPES[shape]}
        for key in _OF_CHAT:
            if raw.get(key):
                raise InputError(
                    f"{key}: belongs to messages, and this row holds {shape}. Remove it."
                )
    row_id = raw.get("id")
    try:
        identity = row_id if isinstance(row_id, str) and row_id else content_id(fields)
    # content_id refuses numbers that JSON lacks.
    except ValueError:
        raise InputError(
            "found NaN or Infinity in tools, tool_calls or chat_template_kwargs. "
            "JSON has no such number."
        ) from None
    origin = origin or _label(raw, "origin") or "original"
    document_id = _label(raw, "document_id")
    return CorpusRow(identity, document_id, origin, shape, **fields, location=location)


def _label(raw: Row, key: str) -> str:
    """Return the text at `key`, a whole number as text; "" without one.

    Data sets with columns hold null where a row has no label: as the text "None" all such rows were
    one document, of which a packed row holds a single text.
    """
    value = raw.get(key)
    if value is None:
        return ""
    # pandas makes 12.0 of 12 in a column with gaps.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{key}: found {type(value).__name__}, expected text or a whole number.")
    return value


def _text(raw: Row, key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise InputError(f"{key}: found {type(value).__name__}, expected text.")
    if not value.strip() and key != "prompt":
        raise InputError(f"{key}: is empty. Remove the row.")
    return value


def _conversation(raw: Row, known: set[str]) -> dict[str, Any]:
    """Return messages, tools and template_kwargs of a row, without those that it lacks."""
    unknown = [key for key in raw if key not in known]
    if unknown:
        allowed = ", ".join([*sorted(_BESIDE), *_OF_CHAT])
        raise InputError(
            f"found the unknown key {unknown[0]!r:.80} beside messages. Allowed: {allowed}. "
            "Move it into meta, or remove it."
        )
    messages = raw["messages"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise InputError('messages: expected a list of {"role": ..., "content": ...}.')
    for number, message in enumerate(messages, 1):
        try:
            _check_message(message)
        except InputError as error:
            raise InputError(f"messages: message {number}: {error}") from error
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(
            "messages: no assistant turn, so there is nothing to learn. Remove the row."
        )
    fields: dict[str, Any] = {"messages": tuple(map(_without_nulls, messages))}
    if raw.get("tools"):
        fields["tools"] = tuple(_tools(raw["tools"]))
    kwargs = raw.get("chat_template_kwargs")
    if kwargs:
        if not isinstance(kwargs, dict):
            raise InputError(
                f"chat_template_kwargs: found {type(kwargs).__name__}, expected an object."
            )
        fields["template_kwargs"] = kwargs
    return fields


def _without_nulls(message: Row) -> Row:
    """Return a message without the keys of nulls, as transformers renders it.

    Data sets with columns hold null where a turn lacks a key, and templates that find "tool_calls"
    in a turn read it.
    """
    return {key: value for key, value in message.items() if value is not None}


def _check_message(message: Row) -> None:
    """Raise `InputError` for a message that a chat template could not take."""
    unknown = [key for key in message if key not in _OF_MESSAGE]
    if unknown:
        raise InputError(
            f"found the unknown key {unknown[0]!r:.80}. Allowed: {', '.join(_OF_MESSAGE)}."
        )
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(message.get("role"), str):
        raise InputError('expected {"role": ..., "content": ...}, found no role.')
    for key in ("name", "reasoning_content", "reasoning", "thinking", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            raise InputError(f"{key}: found {type(message[key]).__name__}, expected text.")
    if isinstance(content, list):
        if not all(map(_is_text_block, content)):
            raise InputError(
                "content: kinject trains on text. "
                'Expected text, or a list of {"type": "text", "text": ...}.'
            )
    # OpenAI's layout has null as the content beside tool_calls.
    elif not isinstance(content, str) and not (content is None and calls):
        raise InputError(f"content: found {type(content).__name__}, expected text.")
    if calls is not None:
        if message["role"] != "assistant":
            raise InputError(
                f"tool_calls: found in a turn of {message['role']!r:.40}; "
                "only the assistant calls tools."
            )
        if not isinstance(calls, list) or not all(map(_function_name, calls)):
            form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
            raise InputError(f"tool_calls: expected a list of {form}.")


def _is_text_block(block: JsonValue) -> bool:
    if not isinstance(block, dict) or block.get("type") != "text":
        return False
    return isinstance(block.get("text"), str)


def _tools(value: JsonValue) -> list[Row]:
    """Return the tools of a row: a list, or the JSON text of one, as data sets with columns hold
    it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        # Not JSONDecodeError: an integer of over 4,300 digits raises its parent.
        except ValueError as error:
            raise InputError(f"tools: found text that is no JSON ({error}).") from None
        except RecursionError:
            raise InputError("tools: found JSON that is nested too deeply.") from None
    if not isinstance(value, list) or not all(_function_name(tool) for tool in value):
        raise InputError(
            'tools: expected a list of {"type": "function", "function": {"name": ..., ...}}.'
        )
    return value


def _function_name(value: JsonValue) -> str:
    """Return the name of a tool or tool call, "" if it has none."""
    if not isinstance(value, dict):
        return ""
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return ""
    return str(function["name"])
