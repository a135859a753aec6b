"""YAML to plain values, remembering the line of every key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kinject.disk import read_bytes
from kinject.errors import Fault, RecipeError
from kinject.recipe.check import Place

_MAX_NODES = 100_000


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars: ``1e-5`` is a number, ``no`` and ``on`` are words, as ``eval_strategy: no`` wants."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own class attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class YamlFile:
    """A parsed file: its root mapping and the line (from 1) of every key and list item."""

    path: Path
    root: dict[str, Any]
    lines: Mapping[Place, int]

    def where(self, path: Place) -> str:
        """Return ``file:line`` of `path`, or of its nearest ancestor that stands in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.path}:{self.lines.get(path, 1)}"


def parse_scalar(text: str) -> Any:
    """Return the value that `text` has in YAML (``1e-5`` a float, ``[0, 5]`` a list). Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML mapping. Raises `RecipeError` (file:line) on bad syntax, repeated keys, or another root."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            [Fault(f"{path}:1", "", f"not UTF-8 (byte {error.start}). Save the file as UTF-8.")]
        ) from error
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        builder = _Builder(path, loader)
        root = builder.build(node, ()) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError([Fault(f"{path}:{line}", "", f"bad YAML: {error.problem or error.context}.")]) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError([Fault(f"{path}:1", "", f"bad YAML: {str(error).splitlines()[0]}.")]) from error
    if builder.faults:
        raise RecipeError(builder.faults)
    if not isinstance(root, dict):
        raise RecipeError([Fault(f"{path}:1", "", f"found {type(root).__name__}, a recipe is a mapping of sections.")])
    return YamlFile(path, root, builder.lines)


class _Builder:
    """Builds values from nodes so that lines are known; bounds what aliases can expand to."""

    def __init__(self, path: Path, loader: _Loader) -> None:
        self.path = path
        self.loader = loader
        self.lines: dict[Place, int] = {}
        self.faults: list[Fault] = []
        self.n_nodes = 0

    def build(self, node: yaml.Node, path: Place) -> Any:
        self.n_nodes += 1
        if self.n_nodes > _MAX_NODES:
            raise ValueError(f"more than {_MAX_NODES} values (aliases that multiply?)")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, index)) for index, child in enumerate(node.value)]
        return self.loader.construct_object(node)

    def _build_mapping(self, node: yaml.MappingNode, path: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self.faults.append(Fault(f"{self.path}:{line}", "", "a key must be a plain word."))
                continue
            if key in found:
                first = self.lines[(*path, key)]
                self.faults.append(
                    Fault(
                        f"{self.path}:{line}",
                        ".".join(map(str, (*path, key))),
                        f"stands twice (first in line {first}). Keep one.",
                    )
                )
                continue
            self.lines[(*path, key)] = line
            found[key] = self.build(value_node, (*path, key))
        return found
