"""Reads YAML into plain values and keeps the line of every key; changes single values in a text."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kinject.disk import read_bytes
from kinject.errors import Problem, RecipeError
from kinject.recipe.check import KeyPath, Value

try:
    from yaml import CSafeLoader as _Parser
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader as _Parser  # type: ignore[assignment]

MOST_BYTES = 2**18
"""Bytes of a recipe: 256 KiB, thirty times the longest one that is shipped."""
_MOST_VALUES = 100_000
"""Values that a file may have, each alias counted as the values it repeats."""
_DEEPEST = 32
_LONGEST_NUMBER = 64
_TAG = "tag:yaml.org,2002:"
_PLAIN_WORD = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
"""A text that needs no quotes anywhere, unless it is a number, a switch or nothing."""
_READ = {"null": "no value", "bool": "true or false", "int": "a whole number", "float": "a number"}


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars: ``1e-5`` is a number, ``no``, ``1:30`` and ``2026-01-01``
    are words, 010 is ten."""

    # PyYAML's own are YAML 1.1's, which read 1e-5 as text, no as false, 1:30 as 90, 010 as 8 and
    # 2026-01-01 as a date.
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own class attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag == f"{_TAG}null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    f"{_TAG}bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    f"{_TAG}int",
    re.compile(r"^([-+]?\d[\d_]*|0o[0-7]+|0x[0-9a-fA-F]+)$", re.ASCII),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(
        r"^([-+]?(\.\d+|\d[\d_]*(\.[\d_]*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        re.ASCII,
    ),
    list("-+0123456789."),
)


class _FastLoader(_Parser):
    """The same of libyaml's parser."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


@dataclass(frozen=True)
class YamlFile:
    """A parsed file: its root mapping and the line (from 1) of every key and list item."""

    path: Path
    root: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def location(self, key: KeyPath) -> str:
        """Return ``file:line`` of `key`, or of its nearest ancestor in the file."""
        while key and key not in self.lines:
            key = key[:-1]
        return f"{self.path}:{self.lines.get(key, 1)}"


def key_path(dotted: str, values: Value) -> tuple[str, ...]:
    """Return the parts of a dotted key; a name that stands in `values` keeps its dots: the model
    qwen2.5 of eval.models.qwen2.5.dtype."""
    parts, path = dotted.split("."), list[str]()
    while parts:
        if not isinstance(values, Mapping):
            values = {}
        known = [n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in values]
        n = max(known, default=1)
        path.append(".".join(parts[:n]))
        values, parts = values.get(path[-1]), parts[n:]
    return tuple(path)


def parse_scalar(text: str) -> Any:
    """Return the value that `text` has in YAML (``1e-5`` a float, ``[0, 5]`` a list). Raises
    `RecipeError`."""
    value, _ = _parse(text, "command line")
    return value


def read_text(path: Path) -> str:
    """Return the text of a YAML file. Raises `RecipeError` if it is not UTF-8, `DiskError` if it
    cannot be read or is too long."""
    try:
        # Some editors write a byte-order mark.
        return read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            [Problem("", f"not UTF-8 (byte {error.start}). Save the file as UTF-8.", f"{path}:1")]
        ) from error


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML mapping. Raises `RecipeError` (file:line) on bad syntax, repeated keys, or
    another root.

    Aliases are read, but not tags, merge keys, or more than `MOST_BYTES`.
    """
    text = read_text(path)
    root, lines = _parse(text, str(path))
    # A file without a value is an empty recipe; a written null is no mapping.
    root = {} if root is None and () not in lines else root
    if not isinstance(root, dict):
        raise RecipeError(
            [
                Problem(
                    "",
                    f"found {type(root).__name__}, a recipe is a mapping of sections.",
                    f"{path}:1",
                )
            ]
        )
    return YamlFile(path, root, lines)


def with_changes(text: str, changes: Mapping[KeyPath, Value], path: Path) -> str:
    """Return the text of the recipe at `path` with other values at some keys, its comments and
    layout as they were.

    Raises `RecipeError` where a value cannot be changed alone: an alias, a text over several lines,
    a list or a mapping.
    """
    expected, lines = _parse(text, str(path))
    for key, value in changes.items():
        changed = _with_change(text, key, value)
        expected = _set(expected, key, value)
        # What was written is read again: a change must never reach another key.
        if changed is None or not _holds(changed, expected, path):
            place = f"{path}:{YamlFile(path, {}, lines).location(key).rpartition(':')[2]}"
            message = "this value cannot be changed alone. Change it in an editor."
            raise RecipeError([Problem(key, message, place)])
        text = changed
    return text


def _holds(text: str, expected: Value, path: Path) -> bool:
    """Return whether a text is read as `expected`; a change may have made it unreadable."""
    try:
        return bool(_parse(text, str(path))[0] == expected)
    except RecipeError:
        return False


def _set(root: Value, key: KeyPath, value: Value) -> Value:
    """Return a copy of `root` with `value` at `key`; what is not there is made."""
    root = copy.deepcopy(root)
    mapping = root
    for part in key[:-1]:
        if not isinstance(mapping.get(part), dict):
            mapping[part] = {}
        mapping = mapping[part]
    mapping[key[-1]] = value
    return root


def _with_change(text: str, key: KeyPath, value: Value) -> str | None:
    """Return `text` with `value` at `key`; None if a list or a mapping is there."""
    node = _Loader(text).get_single_node()
    missing = list(key)
    while missing and isinstance(node, yaml.MappingNode):
        below = [child for name, child in node.value if name.value == missing[0]]
        if not below:
            break
        node, missing = below[0], missing[1:]
    for part in reversed(missing[1:]):
        value = {part: value}
    # JSON is YAML, and its quotes keep a text a text: "1e5" and "no" are no numbers or switches.
    written = json.dumps(value, ensure_ascii=False)
    if node is None:  # an empty file
        return None
    begin, end = node.start_mark.index, node.end_mark.index
    if not missing and isinstance(node, yaml.ScalarNode):
        # An empty value begins right behind the colon.
        if begin == end:
            return f"{text[:begin]} {_plain(value, written)}{text[end:]}"
        return text[:begin] + _plain(value, written) + text[end:]
    if not isinstance(node, yaml.MappingNode) or not missing:
        return None
    entry = f"{json.dumps(missing[0], ensure_ascii=False)}: {written}"
    if _PLAIN_WORD.fullmatch(str(missing[0])):
        entry = f"{missing[0]}: {_plain(value, written)}"
    if node.flow_style:
        if node.value:
            entry += ", "
        return text[: begin + 1] + entry + text[begin + 1 :]
    return text[:begin] + entry + "\n" + " " * node.start_mark.column + text[begin:]


def _plain(value: Value, written: str) -> str:
    """Return a text without the quotes of `written` where it is the same without."""
    if isinstance(value, str) and _PLAIN_WORD.fullmatch(value) and parse_scalar(value) == value:
        return value
    return written


def _parse(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the value of `text` and the line of every key in it. Raises `RecipeError` with
    `source` (and the line)."""
    in_file = source != "command line"

    def error_at(line: int, message: str) -> RecipeError:
        return RecipeError([Problem("", message, f"{source}:{line}" if in_file else source)])

    reader = None
    try:
        loader, node = _compose(text)
        reader = _ValueReader(source, loader)
        value = reader.read(node, ()) if node is not None else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise error_at(line, f"bad YAML: {_yaml_fault(error)}") from error
    except yaml.YAMLError as error:
        raise error_at(
            1, f"bad YAML: {str(error).splitlines()[0]}. Write it as UTF-8 text."
        ) from error
    except RecursionError as error:
        raise error_at(1, f"bad YAML: nested more than {_DEEPEST} levels deep.") from error
    except _TooMuchError as error:
        raise error_at(error.line, f"bad YAML: {error}.") from error
    if reader.problems:
        raise RecipeError(reader.problems)
    return value, reader.lines


def _yaml_fault(error: yaml.MarkedYAMLError) -> str:
    """Return what PyYAML found, as a sentence, and the fix of the commonest."""
    problem = error.problem or error.context or ""
    # "but found another document" ends the sentence that the context begins.
    if problem.startswith("but ") and error.context:
        problem = f"{error.context}, {problem}"
    if "'\\t'" in problem:
        return f"{problem}. Indent by spaces, not tabs."
    return f"{problem}."


def _compose(text: str) -> tuple[_Loader | _FastLoader, yaml.Node | None]:
    """Return the root of `text`, None if it has none, and the loader that made it."""
    # libyaml reads the 151 files that ship in a sixth of the time. PyYAML's own parser gives the
    # messages, and reads half a surrogate pair, which a message then names. The name of a file that
    # is not UTF-8 comes from the command line as such halves, which libyaml cannot even be given.
    with contextlib.suppress(yaml.YAMLError, UnicodeEncodeError):
        if _is_shallow(text):
            fast = _FastLoader(text)
            return fast, fast.get_single_node()
    loader = _Loader(text)
    return loader, loader.get_single_node()


def _is_shallow(text: str) -> bool:
    """Return whether the values of `text` are nested about as deep as is read.

    At 130,000 levels libyaml's nodes overflow the stack, and the process ends; its events do not.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_FastLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > 2 * _DEEPEST:
            return False
    return True


class _TooMuchError(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _ValueReader:
    """Reads values from nodes, keeps their lines, and bounds the expansion of aliases."""

    def __init__(self, source: str, loader: _Loader | _FastLoader) -> None:
        self.source = source
        self.loader = loader
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self.n_values = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.n_values += 1
        if self.n_values > _MOST_VALUES:
            raise _TooMuchError(line, f"more than {_MOST_VALUES:,} values (aliases that multiply?)")
        if len(path) > _DEEPEST:
            raise _TooMuchError(
                line, f"nested more than {_DEEPEST} levels deep (an alias within itself?)"
            )
        # The line of the key stays, where there is one: a value may begin on the next.
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node, path)
        kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != _TAG + kind:
            self.report(line, path, _about_tag(node))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path)
        return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]

    def report(self, line: int, path: KeyPath, message: str) -> None:
        location = self.source if self.source == "command line" else f"{self.source}:{line}"
        self.problems.append(Problem(path, message, location))

    def _build_scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        line, text, kind = node.start_mark.line + 1, node.value, node.tag.removeprefix(_TAG)
        if kind == "str":
            if "\0" in text or (
                not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)
            ):
                self.report(
                    line,
                    path,
                    f"found {text!r}: a NUL, or half a surrogate pair, is no text. Remove it.",
                )
            return text
        resolve = self.loader.resolve
        resolved = resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        implied = str(resolved).removeprefix(_TAG)
        if kind not in _READ:
            self.report(line, path, _about_tag(node))
        # Before it is constructed: PyYAML raises KeyError, IndexError, AttributeError and
        # ValueError for such.
        elif kind != implied and (kind, implied) != ("float", "int"):
            self.report(
                line,
                path,
                f"found {text!r}, expected {_READ[kind]} to match its tag. Remove the tag.",
            )
        # Beyond 4,300 digits int() raises a plain ValueError.
        elif kind in ("int", "float") and len(text) > _LONGEST_NUMBER:
            self.report(
                line, path, f"found a number of {len(text)} characters, allowed: {_LONGEST_NUMBER}."
            )
        elif kind == "int":
            plain = text.replace("_", "").lower()
            return int(plain, {"0x": 16, "0o": 8}.get(plain[:2], 10))
        else:
            return self.loader.construct_object(node)
        return None

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self.report(line, (), "a key must be a plain word.")
            elif key == "<<":
                self.report(line, path, "a merge key (<<) is not read. Write the keys out.")
            elif key in values:
                first = self.lines[(*path, key)]
                self.report(
                    line, (*path, key), f"is there twice (first in line {first}). Keep one."
                )
            else:
                # For its checks of text alone: a key stays as it is written.
                self._build_scalar(
                    yaml.ScalarNode(f"{_TAG}str", key, key_node.start_mark), (*path, key)
                )
                self.lines[(*path, key)] = line
                values[key] = self.read(value_node, (*path, key))
        return values


def _about_tag(node: yaml.Node) -> str:
    return f"the tag {node.tag.replace(_TAG, '!!', 1)!r} is not read. Remove it."
