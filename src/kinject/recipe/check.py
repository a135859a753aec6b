"""Plain values to frozen dataclasses, by their annotations; every fault is collected, none stops the check."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from kinject.recipe.secrets import secret_in

Section = TypeVar("Section")
Place = tuple[str | int, ...]
"""Where a value stands: keys and list indices from the root."""

_BAD = object()


def suggestion(word: object, allowed: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the nearest allowed word, else the list of what is allowed."""
    names = sorted(allowed)
    near = difflib.get_close_matches(f"{word!s:.80}", names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]}?"
    shown = ", ".join(names[:24]) + (", ..." if len(names) > 24 else "")
    return f" Allowed: {shown}." if names else ""


def _ignore_input(_place: Place, _kind: str, _value: str) -> None:
    return None


@dataclass(frozen=True)
class Checker:
    """Builds sections from plain values.

    `report` is called with (place, what is wrong) for each fault; `found_input` with (place, kind, value) for each
    text under a field whose metadata has `path`.
    """

    report: Callable[[Place, str], None]
    found_input: Callable[[Place, str, str], None] = _ignore_input

    def section(self, cls: type[Section], value: object, place: Place) -> Section | None:
        """Return `cls` built from the mapping `value`, or None after reporting every fault in it."""
        if not isinstance(value, Mapping):
            self.report(place, f"found {_describe(value)}, expected a mapping.")
            return None
        built = self.fields(cls, value, place)
        required = {field.name for field in dataclasses.fields(cls) if _is_required(field)}  # type: ignore[arg-type]
        return cls(**built) if built.keys() == value.keys() and required <= built.keys() else None

    def fields(self, cls: type, value: Mapping[str, object], place: Place) -> dict[str, Any]:
        """Return the fields of `cls` that the mapping `value` has without a fault, after reporting every fault in it."""
        hints = typing.get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        built: dict[str, Any] = {}
        for key, item in value.items():
            if key not in fields:
                self.report((*place, key), f"unknown key.{suggestion(key, fields)}")
                continue
            about = fields[key].metadata
            checked = self.value(hints[key], item, (*place, key))
            if checked is _BAD or not self._within_bounds(item, about, (*place, key)):
                continue
            if self._is_no_secret(checked, about.get("holds"), (*place, key)):
                built[key] = checked
                self._tell_inputs(checked, about.get("path"), (*place, key))
        for name, field in fields.items():
            if _is_required(field) and name not in value:
                self.report((*place, name), f"missing. {field.metadata.get('help', '')}".rstrip())
        return built

    def value(self, hint: Any, value: object, place: Place) -> Any:
        """Return `value` as `hint` demands, or a private marker after reporting why it does not fit."""
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is Any:
            return value if self._is_finite(value, place) else _BAD
        if origin in (Union, types.UnionType):
            return self._union(arguments, value, place)
        if origin is Literal:
            if any(value == choice and type(value) is type(choice) for choice in arguments):
                return value
            return self._bad(place, f"found {_describe(value)}.{suggestion(value, map(str, arguments))}")
        if origin is tuple:
            if not isinstance(value, list):
                return self._bad(place, f"found {_describe(value)}, expected a list.")
            items = [self.value(arguments[0], item, (*place, index)) for index, item in enumerate(value)]
            return _BAD if any(item is _BAD for item in items) else tuple(items)
        if origin in (dict, Mapping):
            if not isinstance(value, Mapping):
                return self._bad(place, f"found {_describe(value)}, expected a mapping.")
            built = {key: self.value(arguments[1], item, (*place, key)) for key, item in value.items()}
            return _BAD if any(item is _BAD for item in built.values()) else built
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            section = self.section(hint, value, place)
            return _BAD if section is None else section
        return self._scalar(hint, value, place)

    def _union(self, arguments: tuple[Any, ...], value: object, place: Place) -> Any:
        if value is None:
            if type(None) in arguments:
                return None
            return self._bad(place, "found nothing; give it a value or remove the line.")
        options = [option for option in arguments if option is not type(None)]
        silent = Checker(lambda _place, _what: None)
        for option in options:
            if silent.value(option, value, place) is not _BAD:
                return self.value(option, value, place)
        # none fits: tell the fault of the option that has the value's own shape, at its own line
        shaped = [option for option in options if _shape(option) is _shape(value)]
        if len(shaped) == 1 and _shape(value) is not str:
            return self.value(shaped[0], value, place)
        if len(options) == 1:
            return self.value(options[0], value, place)
        return self._bad(place, f"found {_describe(value)}, expected {' or '.join(map(_name, options))}.")

    def _scalar(self, hint: Any, value: object, place: Place) -> Any:
        if hint is bool and isinstance(value, bool):
            return value
        if hint is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) if self._is_finite(value, place) else _BAD
        if hint in (str, Path) and isinstance(value, str):
            return hint(value)
        return self._bad(place, f"found {_describe(value)}, expected {_name(hint)}.")

    def _is_finite(self, value: Any, place: Place) -> bool:
        """Return whether every number in `value` is finite, after reporting those that are not."""
        if isinstance(value, Mapping):
            items: list[tuple[str | int, Any]] = list(value.items())
        else:
            items = list(enumerate(value)) if isinstance(value, list) else []
        if items:
            found = [self._is_finite(item, (*place, key)) for key, item in items]
            return all(found)
        if isinstance(value, (int, float)) and not -sys.float_info.max <= value <= sys.float_info.max:
            self.report(place, f"found {value}, expected a finite number.")
            return False
        return True

    def _within_bounds(self, value: Any, metadata: Mapping[str, Any], place: Place) -> bool:
        if metadata.get("nonempty") and not value:
            self.report(place, "is empty; give at least one.")
            return False
        low, high = metadata.get("min", -math.inf), metadata.get("max", math.inf)
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, (int, float)) and not isinstance(item, bool) and not low <= item <= high:
                allowed = f"{low} to {high}" if high < math.inf else f"{low} or more"
                self.report(place, f"found {item}, allowed: {allowed}.")
                return False
        return True

    def _is_no_secret(self, value: Any, kind: str | None, place: Place) -> bool:
        """Return whether a text is what its field `holds`; a fault does not repeat it, for it may be a secret."""
        what = secret_in(value, kind) if isinstance(value, str) and kind else ""
        if what:
            self.report(place, what)
        return not what

    def _tell_inputs(self, value: Any, kind: str | None, place: Place) -> None:
        if kind is None:
            return
        if isinstance(value, str):
            self.found_input(place, kind, value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._tell_inputs(item, kind, (*place, key))
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                self._tell_inputs(item, kind, (*place, index))

    def _bad(self, place: Place, what: str) -> object:
        self.report(place, what)
        return _BAD


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _shape(value_or_hint: object) -> type:
    """Return dict, list or str for what a value is, or what an annotation wants: a mapping, a list, or a scalar."""
    if isinstance(value_or_hint, Mapping) or get_origin(value_or_hint) in (dict, Mapping):
        return dict
    if isinstance(value_or_hint, list) or get_origin(value_or_hint) is tuple:
        return list
    return dict if isinstance(value_or_hint, type) and dataclasses.is_dataclass(value_or_hint) else str


def _describe(value: object) -> str:
    if value is None:
        return "nothing"
    names = {str: "text", dict: "a mapping", list: "a list", bool: "a switch", int: "a whole number", float: "a number"}
    kind = names.get(type(value), type(value).__name__)
    return kind if isinstance(value, (dict, list)) else f"{value!r} ({kind})"


def _name(hint: Any) -> str:
    names = {
        str: "text",
        Path: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        dict: "a mapping",
    }
    if hint in names:
        return names[hint]
    if get_origin(hint) is tuple:
        return "a list"
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    return "a mapping"
