"""Checks plain values against the annotations of frozen dataclasses and reports every fault, not
only the first."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from kinject.secrets import secret_in

Section = TypeVar("Section")
Value: TypeAlias = Any
"""A plain value of a recipe: what YAML holds, and after its check the section made of it."""
Hint: TypeAlias = Any
"""An annotation of a field, which typing gives no type: a class, a union, a Literal, a generic."""
KeyPath = tuple[str | int, ...]
"""The keys and list indices that lead from the root of a file to a value."""

# Not None, which is a value that a field may have.
_INVALID = object()
_BOUNDS = ("min", "above", "max", "below", "or")
_NAMES: Mapping[Hint, str] = {
    str: "text",
    Path: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping",
}
"""Annotation -> what a value should be."""
_KINDS: Mapping[type, str] = {
    str: "text",
    dict: "a mapping",
    list: "a list",
    bool: "a switch",
    int: "a whole number",
    float: "a number",
}
"""Type of a value -> what it is."""
_EXAMPLES: Mapping[Hint, str] = {
    int: ", as 1000",
    float: ", as 0.5 or 1e-4",
}
"""What follows the name of a type in a message."""
_MOST_SUGGESTED = 24
"""Allowed words that one message lists; trainer has over a hundred keys."""


SHORT_NAMES = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "bs": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "wd": "weight_decay",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
}
"""What people write -> the key of the trainer that they mean; too far apart for a comparison of
letters."""
_SHORT_VALUES = {
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "gpu": "cuda",
    "wsd": "warmup_stable_decay",
}
"""The same of values: by letters adamw would be grokadamw, and gpu cpu."""


def suggestion(word: Value, allowed: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the nearest allowed word, else the list of the allowed."""
    names = sorted(allowed)
    # A value may be megabytes long, and difflib's time grows with the square of it.
    written = f"{word!s:.80}"
    for short in (SHORT_NAMES, _SHORT_VALUES):
        if short.get(written.lower()) in names:
            return f" Did you mean {short[written.lower()]}?"
    near = difflib.get_close_matches(written, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]}?"
    if not names:
        return ""
    end = "." if len(names) <= _MOST_SUGGESTED else ", ..."
    return f" Allowed: {', '.join(names[:_MOST_SUGGESTED])}{end}"


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Return the types of the fields of a section.

    Evaluated anew each time, they took half of the reading of a recipe (kinject study --dry-run).
    """
    return typing.get_type_hints(cls)


def _ignore_fault(key: KeyPath, fault: str) -> None:
    """Report nothing."""


def _ignore_input(key: KeyPath, kind: str, value: str) -> None:
    """Look for no file."""


def _know_no_other(key: KeyPath) -> str:
    """Know the keys of no other section."""
    return ""


@dataclass(frozen=True)
class Checker:
    """Builds sections from plain values.

    It calls `report` with (key, fault) for each fault, and `found_input` with (key, kind, value)
    for each text in a field whose metadata has `path`. `misplaced` returns a sentence on the other
    section that has an unknown key, "" if none has.
    """

    report: Callable[[KeyPath, str], None]
    found_input: Callable[[KeyPath, str, str], None] = _ignore_input
    misplaced: Callable[[KeyPath], str] = _know_no_other

    def section(self, cls: type[Section], value: Value, key: KeyPath) -> Section | None:
        """Return `cls` built from the mapping `value`, or None after reporting each fault in it."""
        if not isinstance(value, Mapping):
            self.report(key, f"found {_describe(value)}, expected a mapping.")
            return None
        built = self.fields(cls, value, key)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        required = {field.name for field in fields if is_required(field)}
        if built.keys() != value.keys() or not required <= built.keys():
            return None
        return cls(**built)

    def fields(self, cls: type, value: Mapping[str, object], key: KeyPath) -> dict[str, Any]:
        """Return the valid fields of `cls` in the mapping `value`, after reporting every fault in
        it."""
        hints = _hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        built: dict[str, Any] = {}
        for name, item in value.items():
            if name not in fields:
                hint = self.misplaced((*key, name)) or suggestion(name, fields)
                self.report((*key, name), f"unknown key.{hint}")
                continue
            metadata, item_key = fields[name].metadata, (*key, name)
            checked = self.value(hints[name], item, item_key)
            if (
                checked is not _INVALID
                and self.is_in_bounds(item, metadata, item_key)
                and self._is_no_secret(item, metadata.get("holds"), item_key)
                and self._are_words(checked, metadata.get("words"), item_key)
            ):
                built[name] = checked
                self._find_inputs(checked, metadata.get("path"), item_key)
        for name, field in fields.items():
            if is_required(field) and name not in value:
                self.report((*key, name), f"missing. {field.metadata.get('help', '')}".rstrip())
        return built

    def _find_inputs(self, value: Value, kind: str | None, key: KeyPath) -> None:
        if kind is not None:
            for text_key, text in texts_in(value, key):
                self.found_input(text_key, kind, text)

    def value(self, hint: Hint, value: Value, key: KeyPath) -> Value:
        """Return `value` as the annotation `hint` requires, or a private marker after reporting why
        it does not fit."""
        origin, arguments = _origin(hint), get_args(hint)
        if hint is Any:
            # Within mappings, too: pydantic let a NaN there pass, one reason why this is not
            # pydantic.
            return value if self._is_finite(value, key) else _INVALID
        if origin in (Union, types.UnionType):
            return self._union(arguments, value, key)
        if origin is Literal:
            # 1 == True in Python, so that the types are compared too
            if any(value == choice and type(value) is type(choice) for choice in arguments):
                return value
            hint_at = suggestion(value, map(str, arguments))
            return self._invalid(key, f"found {_describe(value)}.{hint_at}")
        if origin is tuple:
            return self._list(arguments[0], value, key)
        if origin in (dict, Mapping):
            return self._mapping(arguments[0], arguments[1], value, key)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            section = self.section(hint, value, key)
            return _INVALID if section is None else section
        return self._scalar(hint, value, key)

    def _list(self, hint: Hint, value: Value, key: KeyPath) -> Value:
        if not isinstance(value, list):
            # Many forget the brackets around a single value.
            example = ""
            if isinstance(value, str | int | float):
                example = f", as [{value!s:.40}]"
            return self._invalid(key, f"found {_describe(value)}, expected a list{example}.")
        # All of them before the look at any: every fault is reported.
        items = [self.value(hint, item, (*key, index)) for index, item in enumerate(value)]
        if any(item is _INVALID for item in items):
            return _INVALID
        return tuple(items)

    def _mapping(self, name_hint: Hint, hint: Hint, value: Value, key: KeyPath) -> Value:
        if not isinstance(value, Mapping):
            return self._invalid(key, f"found {_describe(value)}, expected a mapping.")
        names: list[Value] = []
        if _origin(name_hint) is Literal:
            names = [self.value(name_hint, name, (*key, name)) for name in value]
        built = {name: self.value(hint, item, (*key, name)) for name, item in value.items()}
        if any(item is _INVALID for item in (*names, *built.values())):
            return _INVALID
        return built

    def _union(self, arguments: tuple[Hint, ...], value: Value, key: KeyPath) -> Value:
        if value is None:
            if type(None) in arguments:
                return None
            return self._invalid(key, "found nothing; give it a value or remove the line.")
        options = [option for option in arguments if option is not type(None)]
        # Tried in silence: two errors for one value of a union are one reason why this is not
        # pydantic.
        silent = Checker(_ignore_fault)
        for option in options:
            if silent.value(option, value, key) is not _INVALID:
                return self.value(option, value, key)
        # None fits: report the fault of the option that has the value's own shape, at its own line.
        shaped = [option for option in options if _shape(option) is _shape(value)]
        if isinstance(value, Mapping) and len(shaped) > 1:
            # of several sections, the one whose keys the value has
            n_shared = [len(_field_names(option) & value.keys()) for option in shaped]
            shaped = [shaped[n_shared.index(max(n_shared))]]
        if len(shaped) == 1 and _shape(value) is not str:
            return self.value(shaped[0], value, key)
        if len(options) == 1:
            return self.value(options[0], value, key)
        return self._invalid(
            key, f"found {_describe(value)}, expected {' or '.join(map(_name, options))}."
        )

    def _scalar(self, hint: Hint, value: Value, key: KeyPath) -> Value:
        if hint is bool and isinstance(value, bool):
            return value
        # True is an int in Python.
        if hint is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) if self._is_finite(value, key) else _INVALID
        if hint in (str, Path) and isinstance(value, str):
            return hint(value)
        example = _EXAMPLES.get(hint, "")
        return self._invalid(key, f"found {_describe(value)}, expected {_name(hint)}{example}.")

    def _is_finite(self, value: Value, key: KeyPath) -> bool:
        """Return whether every number in `value` is finite, after reporting those that are not."""
        if isinstance(value, Mapping | list):
            # a list, not a generator: every fault is reported, not only the first
            finite = [self._is_finite(item, (*key, name)) for name, item in _items(value)]
            return all(finite)
        if not isinstance(value, int | float):
            return True
        largest = sys.float_info.max
        # So written, NaN is caught as well, and a whole number that no float can hold.
        if not -largest <= value <= largest:
            self.report(key, f"found {value}, expected a finite number.")
            return False
        return True

    def is_in_bounds(self, value: Value, metadata: Mapping[str, Any], key: KeyPath) -> bool:
        """Return whether `value`, or each number in it, is within the field's bounds, after
        reporting those that are not."""
        if metadata.get("nonempty") and not value:
            self.report(key, "is empty; give at least one.")
            return False
        if isinstance(value, Mapping | list | tuple):
            limits = {name: metadata[name] for name in _BOUNDS if name in metadata}
            if not limits:
                return True
            items = _items(value)
            in_bounds = [self.is_in_bounds(item, limits, (*key, name)) for name, item in items]
            return all(in_bounds)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        if not _is_within(value, metadata):
            self.report(key, f"found {value}, allowed: {allowed_range(metadata)}.")
            return False
        return True

    def _is_no_secret(self, value: Value, kind: str | None, key: KeyPath) -> bool:
        """Return whether a text is what its field `holds`. The fault does not repeat the text: it
        may be a secret."""
        if isinstance(value, list | tuple):
            are_fine = [
                self._is_no_secret(item, kind, (*key, index)) for index, item in enumerate(value)
            ]
            return all(are_fine)
        if not isinstance(value, str) or not kind:
            return True
        fault = secret_in(value, kind)
        if fault:
            self.report(key, fault)
        return not fault

    def _are_words(
        self, items: tuple[Value, ...] | None, allowed: Mapping[str, object] | None, key: KeyPath
    ) -> bool:
        """Return whether the texts of a list are keys of `allowed` (None: any value), after
        reporting those that are not."""
        if allowed is None:
            return True
        are_known = True
        for index, item in enumerate(items or ()):
            if item not in allowed:
                fault = f"found {_describe(item)}.{suggestion(item, allowed)}"
                self.report((*key, index), fault)
                are_known = False
        return are_known

    def _invalid(self, key: KeyPath, fault: str) -> object:
        self.report(key, fault)
        return _INVALID


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether a dataclass field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def allowed_range(bounds: Mapping[str, Any]) -> str:
    """Return the numbers that `bounds` (min or above, max or below, or) allow, in words."""
    # Both ends of the range: a message of pydantic's gives only the bound that was passed.
    low = bounds.get("min", bounds.get("above"))
    high = bounds.get("max", bounds.get("below"))
    if "above" in bounds:
        words = f"more than {low:,}"
        if high is not None:
            words += f", at most {high:,}"
    elif "below" in bounds:
        words = f"{low:,} to less than {high:,}"
    elif high is None:
        words = f"{low:,} or more"
    else:
        words = f"{low:,} to {high:,}"
    if "or" in bounds:
        return f"{bounds['or']} or {words}"
    return words


def _is_within(value: float, bounds: Mapping[str, Any]) -> bool:
    if "or" in bounds and value == bounds["or"]:
        return True
    if "above" in bounds and value <= bounds["above"]:
        return False
    if "below" in bounds and value >= bounds["below"]:
        return False
    return bool(bounds.get("min", -math.inf) <= value <= bounds.get("max", math.inf))


def texts_in(value: Value, key: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, text) for every text in a plain value."""
    if isinstance(value, str | Path):
        yield key, str(value)
    elif isinstance(value, Mapping | list | tuple):
        for name, item in _items(value):
            yield from texts_in(item, (*key, name))


def _items(
    value: Mapping[str, Any] | list[Any] | tuple[Any, ...],
) -> Iterable[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value)


def _origin(hint: Hint) -> Hint:
    """Return what an annotation is a form of: Union, Literal, tuple, Mapping; None for a class."""
    plain: Any = hint  # mypy takes an alias of Any for the first overload of get_origin
    return get_origin(plain)


def _shape(value_or_hint: Value | Hint) -> type:
    """Return dict, list or str: whether a value is, or an annotation wants, a mapping, a list, or a
    scalar."""
    if isinstance(value_or_hint, Mapping) or _origin(value_or_hint) in (dict, Mapping):
        return dict
    if isinstance(value_or_hint, list) or _origin(value_or_hint) is tuple:
        return list
    if isinstance(value_or_hint, type) and dataclasses.is_dataclass(value_or_hint):
        return dict
    return str


def _field_names(hint: Hint) -> set[str]:
    if not dataclasses.is_dataclass(hint):
        return set()
    return {field.name for field in dataclasses.fields(hint)}


def _describe(value: Value) -> str:
    if value is None:
        return "nothing"
    kind = _KINDS.get(type(value), type(value).__name__)
    if isinstance(value, dict | list):
        return kind
    return f"{value!r} ({kind})"


def _name(hint: Hint) -> str:
    if hint in _NAMES:
        return _NAMES[hint]
    if _origin(hint) is tuple:
        return "a list"
    if _origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    return "a mapping"
