"""report.json of a study: the whole result, written and read back with every value checked."""

from __future__ import annotations

import json
import sys
import types
import typing
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from kinject.disk import FORMAT_VERSION, check_version, read_checked_json, with_checksum, write_text
from kinject.errors import InputError
from kinject.results import Contrast, Score, StudyResult

_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_SHARES = {"chance", "accuracy", "low", "high", "p", "p_holm"}


class _Fault(Exception):
    """What is wrong at a place of the file."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place.removeprefix('.') or 'study'}: {what}")


def save_study(path: Path, result: StudyResult) -> None:
    """Write `result` as JSON, with the version of its format first."""
    value = {"format_version": FORMAT_VERSION, "kind": "study", **asdict(result)}
    # In ASCII: a question may hold half a surrogate pair, which UTF-8 cannot.
    write_text(path, json.dumps(with_checksum(value), indent=1) + "\n")


def read_study(path: Path) -> StudyResult:
    """Return the result of a study from its report.json.

    Raises `DiskError` when it cannot be read, and `InputError` naming the place when it is damaged, is not a study's, or
    is of a newer format. Keys that this version does not know are left out.
    """
    value = read_checked_json(path, "Run kinject study again.")
    try:
        check_version(value.get("format_version", 1), f"{path}: format_version")
        result = _read(StudyResult, value, "")
        assert isinstance(result, StudyResult)
        _check(result)
    except _Fault as fault:
        raise InputError(f"{path}: damaged study: {fault}. Run kinject study again.") from None
    return result


def _read(kind: Any, value: Any, place: str) -> Any:
    """Return `value` as `kind`, an annotation that outcomes.py uses. Raises `_Fault`."""
    if kind is Any:
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [one for one in inner if one is not types.NoneType]
        return None if value is None else _read(kinds[0], value, place)
    if origin is typing.Literal:
        if value not in inner:
            raise _Fault(place, f"found {value!r:.60}, allowed are {', '.join(map(str, inner))}")
        return value
    if origin is tuple:
        return _read_tuple(inner, value, place)
    if origin is dict:
        if not isinstance(value, dict):
            raise _Fault(place, f"found {type(value).__name__}, an object is needed")
        return {key: _read(inner[1], item, f"{place}.{key!r:.60}") for key, item in value.items()}
    return _read_object(kind, value, place) if is_dataclass(kind) else _read_plain(kind, value, place)


def _read_tuple(inner: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _Fault(place, f"found {type(value).__name__}, a list is needed")
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(value):
        raise _Fault(place, f"found {len(value)} values, {len(kinds)} are needed")
    return tuple(_read(one, item, f"{place}[{at}]") for at, (one, item) in enumerate(zip(kinds, value, strict=True)))


def _read_object(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise _Fault(place, f"found {type(value).__name__}, an object is needed")
    hints, found = typing.get_type_hints(kind), {}
    for field in fields(kind):
        if field.name in value:
            found[field.name] = _read(hints[field.name], value[field.name], f"{place}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _Fault(f"{place}.{field.name}", "missing")
    return kind(**found)


def _read_plain(kind: Any, value: Any, place: str) -> Any:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise _Fault(place, f"found {value!r:.60}, {_NAMES[kind]} is needed")
    if kind is float:
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise _Fault(place, f"found {value}, a finite number is needed")
        return float(value)
    return value


def _check(result: StudyResult) -> None:
    """Raise `_Fault` where a value cannot be what its name says."""
    seen: set[tuple[object, ...]] = set()
    for at, score in enumerate(result.scores):
        place = f"scores[{at}]"
        _check_shares(score, place)
        if score.n < 1 or score.k < 0 or score.shots < 0 or not score.by_seed:
            raise _Fault(place, f"found n {score.n}, k {score.k}, shots {score.shots}, {len(score.by_seed)} seeds")
        for name in ("to_base", "to_rag", "to_plain"):
            if getattr(score, name) is not None:
                _check_shares(getattr(score, name), f"{place}.{name}", least=-1.0)
        key = (score.model, score.arm, score.question_set, score.format, score.shots, score.k, score.subject)
        if key in seen:
            raise _Fault(place, f"the arm {score.arm!r:.60} on {score.question_set!r:.60} stands there twice")
        seen.add(key)


def _check_shares(value: Score | Contrast, place: str, least: float = 0.0) -> None:
    for field in fields(value):
        found = getattr(value, field.name)
        bound = least if field.name in ("low", "high") else 0.0
        if field.name in _SHARES and not bound - 1e-9 <= found <= 1 + 1e-9:
            raise _Fault(f"{place}.{field.name}", f"found {found}, allowed is {bound:g} to 1")
