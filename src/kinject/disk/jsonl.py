"""JSON lines: one object per line; every fault has file:line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard, TypeVar

from kinject.disk.files import atomic_file, read_bytes, read_lines, unwritable
from kinject.errors import DiskError, InputError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_Kind = TypeVar("_Kind")


class DataclassInstance(Protocol):
    """A value of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Row = dict[str, Any]
RowLike = Mapping[str, Any] | DataclassInstance
"""What is written as a row."""
FORMAT_VERSION = 1
"""The version of manifests, report.json and SQLite files (their user_version). A change that this
code's readers would misread raises it; readers ignore keys that they do not know.
"""
DEEPEST = 64
"""Levels of nesting in a row: copies, hashes and writes recurse."""


def check_version(version: object, location: str) -> None:
    """Raise `InputError` at `location` unless `version` is a format version that this kinject
    reads."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(
            f"{location}: damaged: format_version is {version!r:.40}, a whole number from 1 is "
            "needed. Restore it from a copy, or choose another run folder."
        )
    if version > FORMAT_VERSION:
        raise InputError(
            f"{location}: written by a newer kinject (format {version}; this one reads up to "
            f"{FORMAT_VERSION}). Update kinject, or choose another run folder."
        )


def _fields_of(value: object) -> Row:
    """Return the fields of a dataclass; `asdict` would copy every value in them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _names_of(type(value))}
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


@cache
def _names_of(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


# NaN raises: JSON has none, and other readers refuse it.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_fields_of)


class _RepeatedKeyError(ValueError):
    """An object has a key twice: two readers could take two values."""


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _RepeatedKeyError(
            f"the key {repeated!r:.80} is there {keys.count(repeated)} times in one object"
        )
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(data: bytes) -> Any:
    """Return the JSON value in `data` (UTF-8). Raises `ValueError`, also for a key that an object
    holds twice."""
    # json.loads would guess UTF-16 and UTF-32 from the first bytes.
    return _DECODER.decode(data.decode("utf-8"))


def read_json(path: Path, fix: str) -> Row:
    """Return the JSON object in `path`.

    Raises `DiskError` if the file cannot be read, and `InputError` with `fix` if it is no object or
    a newer kinject wrote it.
    """
    try:
        data = read_bytes(path)
    except DiskError as error:
        raise DiskError(f"{error} {fix}") from error
    try:
        value = parse_json(data.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged: not JSON ({error}). {fix}") from error
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: damaged: found {type(value).__name__}, an object is needed. {fix}"
        )
    if "format_version" in value:
        check_version(value["format_version"], str(path))
    return value


def is_amount(value: str | float | list[Any] | None) -> TypeGuard[float]:
    """Return whether a value of a file is a number from 0 that a float holds exactly: a count, a
    cost, a time. A switch is an int to isinstance; NaN is in no range."""
    return type(value) in (int, float) and 0 <= value < 2**53  # type: ignore[operator]


def parse_fields(kind: type[_Kind], value: Mapping[str, Any], location: str, fix: str) -> _Kind:
    """Return `value`, read from a JSON file, as the dataclass `kind`. Keys that it does not have
    are ignored.

    Raises `InputError` at `location`, with the first field of another type and `fix`.
    """
    from pydantic import ValidationError

    try:
        # Strict mode takes a list for a tuple only where it parses the JSON itself.
        parsed: _Kind = _type_adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part:.60}" for part in first["loc"]
        )
        found = f"found {first['input']!r:.60}: {first['msg']}"
        raise InputError(f"{location}: {place.removeprefix('.')}: {found}. {fix}") from None
    return parsed


_TYPE_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
"""Making one takes a hundredth of a second, and `kinject view` reads every run again and again."""


def _type_adapter(kind: type[_Kind]) -> TypeAdapter[_Kind]:
    from pydantic import TypeAdapter

    if kind not in _TYPE_ADAPTERS:
        _TYPE_ADAPTERS[kind] = TypeAdapter(kind)
    return _TYPE_ADAPTERS[kind]


def dotted(
    values: Mapping[str, Any], left_out: Set[str] = frozenset(), above: str = ""
) -> dict[str, Any]:
    """Return dotted key -> value of every value in nested mappings, but None and what lies below
    a key of `left_out`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in left_out or value is None:
            continue
        if isinstance(value, Mapping):
            flat |= dotted(value, left_out, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def encode_row(row: RowLike) -> str:
    """Return `row` (a mapping or a dataclass) as one line of JSON without the newline."""
    return _ENCODER.encode(row)


def parse_row(line: bytes, location: str) -> Row:
    """Return the object on one line. Raises `InputError` at `location` if it is not a UTF-8 JSON
    object.

    Also if an object holds a key twice, if it is nested deeper than `DEEPEST`, or holds an integer
    of more digits than Python reads.
    """
    try:
        value = parse_json(line)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{location}: not UTF-8 (byte {error.start}). Save the file as UTF-8."
        ) from error
    except RecursionError as error:
        raise _too_deep(location) from error
    except _RepeatedKeyError as error:
        raise InputError(f"{location}: {error}. Keep one.") from error
    except ValueError as error:  # also an integer of thousands of digits
        raise InputError(
            f"{location}: not JSON: {error}. Each line must hold one JSON object."
        ) from error
    if not isinstance(value, dict):
        raise InputError(
            f"{location}: found {type(value).__name__}, each line must hold one JSON object."
        )
    # Few rows have so many brackets: the others need no walk through their values.
    if line.count(b"[") + line.count(b"{") > DEEPEST and _depth(value) > DEEPEST:
        raise _too_deep(location)
    # Only an escape can be half a pair: the decoding of UTF-8 refuses any other.
    if b"\\u" in line:
        _check_surrogates(value, location)
    return value


def _too_deep(location: str) -> InputError:
    return InputError(
        f"{location}: nested more than {DEEPEST} levels deep. Each line must hold one plain JSON "
        "object."
    )


def _depth(value: object) -> int:
    """Return how many lists and objects are nested in one another."""
    depth, level = 0, [value]
    # Level by level: a function that called itself would end at Python's own limit.
    while nested := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = []
        for item in nested:
            level.extend(item.values() if isinstance(item, dict) else item)
    return depth


def _check_surrogates(value: Row, location: str) -> None:
    """Raise `InputError` if an escape is half a surrogate pair, which no file can hold."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(text[error.start]):04x}"
        raise InputError(
            f"{location}: half a surrogate pair ({escape}), which is no character. Write both "
            "halves, or take it out."
        ) from error


def read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, object) for every line that is not blank. A byte-order mark is
    skipped.

    Raises `DiskError` if the file cannot be opened and `InputError` (file:line) if a line is not a
    JSON object, or is longer than `LONGEST_LINE`.
    """
    for number, line in read_lines(path):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, parse_row(line, f"{path}:{number}")


@contextlib.contextmanager
def open_jsonl(path: Path) -> Iterator[Callable[[RowLike], int]]:
    """Yield a function that writes one row (a mapping or a dataclass) to a file, which replaces
    `path` as in `atomic_file`, and returns its bytes.

    Raises `DiskError` if a row cannot be written.
    """
    with atomic_file(path, "wb") as file:

        def write(row: RowLike) -> int:
            line = f"{encode_row(row)}\n".encode()
            try:
                n_bytes: int = file.write(line)
            except OSError as error:  # several files may be open: the error must name this one
                raise unwritable(path, error) from error
            return n_bytes

        yield write


def write_jsonl(path: Path, rows: Iterable[RowLike]) -> int:
    """Write `rows` (mappings or dataclasses), atomically; return how many."""
    n_rows = 0
    with atomic_file(path) as file:
        for row in rows:
            file.write(encode_row(row) + "\n")
            n_rows += 1
    return n_rows
