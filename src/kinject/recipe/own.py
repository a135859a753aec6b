"""The recipes that `kinject try` writes for documents of one's own: recipes/own, filled in.

runs/NAME/try.json remembers what was chosen and what was written, so that a later call fills in
recipes that nobody has edited, and leaves the others as they are.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kinject.disk import (
    content_id,
    file_lock,
    file_name,
    parse_fields,
    path_exists,
    read_bytes,
    read_json,
    write_json,
    write_text,
)
from kinject.errors import DiskError, InputError
from kinject.hub_data import find_data_set
from kinject.recipe.shipped import FOLDER, data_in, find_recipes, read_shipped

_RECORD, _LOCK = "try.json", ".try.lock"


_CHOSEN = frozenset(
    {
        "method",
        "adapter",
        "techniques",
        "quantization",
        "mix",
        "assistant_only_loss",
        "model_defaults",
        "messages",
        "one_corpus",
        "chat",
    }
)
"""Keys that stand in a recipe for some models and cards only."""


@dataclass(frozen=True)
class Choices:
    """What a person has chosen: the `endpoint` that writes and the name of its model (`writer`),
    the `model` that learns, and the card (`gpu`) or the `memory` that trains it."""

    endpoint: str | None = None
    writer: str | None = None
    model: str | None = None
    gpu: str | None = None
    memory: str | None = None


@dataclass(frozen=True)
class _Record:
    """What try.json remembers: the choices, and the hash of each recipe that was written."""

    choices: Choices
    recipes: Mapping[str, str]


class OwnRecipes:
    """The recipes of the documents at a path, in recipes/NAME.

    `choices` are those of this call and of earlier ones, `has_new_choices` whether this call has
    any. `written` are the recipes that are as they should be, `kept` those that somebody edited,
    with the lines to change for the new choices.
    """

    def __init__(self, documents: Path) -> None:
        self.name = _name_of(documents)
        self.folder = Path("recipes", self.name)
        self.run_dir = Path("runs", self.name)
        self.choices, self.has_new_choices = Choices(), False
        self.written: list[Path] = []
        self.kept: dict[Path, list[str]] = {}
        self._shipped = own_texts(self.name)
        self._ids: dict[str, str] = {}
        record = self.run_dir / _RECORD
        if path_exists(record):
            fix = "Delete it: kinject try writes it again."
            row = parse_fields(_Record, read_json(record, fix), f"{record}: damaged", fix)
            self.choices, self._ids = row.choices, dict(row.recipes)

    def choose(
        self,
        *,
        endpoint: str | None = None,
        model: str | None = None,
        gpu: str | None = None,
        memory: str | None = None,
    ) -> None:
        """Take new choices; what is None stays as it was. Raises `InputError` for a GPU without a
        model."""
        choices = self.choices
        if endpoint is not None:
            choices = replace(choices, endpoint=endpoint, writer=None)
        if model is not None:
            choices = replace(choices, model=model)
        if gpu is not None or memory is not None:
            # Together: the memory of an earlier call is not that of another card.
            choices = replace(choices, gpu=gpu, memory=memory)
            if choices.model is None:
                raise InputError(
                    "--gpu and --memory are for the model that learns. Name it, a folder or a name "
                    "on the hub: --model Qwen/Qwen3-8B-Base"
                )
        self.has_new_choices = any(value is not None for value in (endpoint, model, gpu, memory))
        self.choices = choices

    def texts(self) -> dict[str, str]:
        """Return file name -> text of each recipe, with nothing filled in."""
        return dict(self._shipped)

    def write(self, file: str, text: str) -> None:
        """Write a recipe and the data that it reads, unless somebody has edited it."""
        path = self.folder / file
        for data in data_in(text):
            write_text(Path(data), (FOLDER.parent / data).read_text("utf-8"))
        if self._is_edited(path, text):
            self.kept[path] = []
            if self.has_new_choices and path.is_file():
                self.kept[path] = self._lines_to_change(path, text)
            return
        write_text(path, text)
        self._ids[file] = content_id(text)
        self.written.append(path)

    def save(self) -> None:
        """Remember the choices and what was written."""
        write_json(self.run_dir / _RECORD, asdict(_Record(self.choices, self._ids)))

    def _is_edited(self, path: Path, text: str) -> bool:
        if not path_exists(path):
            return False
        if path.is_dir():
            return True
        found = read_bytes(path).decode("utf-8", "replace")
        # One that is as it ships was never filled in, whether or not it is remembered.
        if found in (text, self._shipped[path.name]):
            return False
        return self._ids.get(path.name) != content_id(found)

    def _lines_to_change(self, path: Path, text: str) -> list[str]:
        """Return the lines that the choices ask for and an edited recipe lacks, and those of other
        choices."""
        there = read_bytes(path).decode("utf-8", "replace").splitlines()
        wanted = text.splitlines()
        # What stands in the recipe as it ships and not here, somebody took out on purpose.
        known = {*there, *self._shipped[path.name].splitlines()}
        lines = [line for line in wanted if line not in known and line[:1] != "#"]
        # Without these a model in 4 bits would stay in 4 bits, and a chat's turns be plain text.
        others = _CHOSEN - {_key_of(line) for line in wanted}
        lines += [f"{line} # take this line out" for line in there if _key_of(line) in others]
        return lines


@contextlib.contextmanager
def hold_recipes(documents: Path) -> Iterator[OwnRecipes]:
    """Yield the recipes of the documents at a path, for this process alone.

    Of two at once the second would fill in what it read before the first had written, and its
    record would call the recipes of the first edited. Raises `DiskError` for the second.
    """
    # Not lock_dir: its file would make one run of the folder that holds those of all steps.
    with file_lock(Path("runs", _name_of(documents), _LOCK), wait=False):
        yield OwnRecipes(documents)


def _name_of(documents: Path) -> str:
    """Return the name of the recipes for a folder, a file or a data set. Raises `DiskError` if
    nothing is there."""
    if not path_exists(documents) and find_data_set(str(documents)) is None:
        raise DiskError(f"{documents}: nothing is there. Check the path.")
    if documents.is_file():
        return file_name(documents.resolve().stem)
    return file_name(documents.resolve().name)


def own_names() -> list[str]:
    """Return the names of the documents of one's own that were collected."""
    found = sorted(Path("runs").glob("*/documents/documents.jsonl"))
    return [path.parent.parent.name for path in found]


def own_texts(name: str) -> dict[str, str]:
    """Return file name -> text of each recipe of recipes/own, for documents called `name`."""
    texts = {}
    for recipe in find_recipes(["own"], read_shipped()):
        # In one go at the end: the name itself may hold NAME.
        text = recipe.text.replace("recipes/own/", "recipes/NAME/")
        texts[recipe.path.name] = text.replace("NAME", name)
    return texts


def with_values(text: str, values: Mapping[str, str | None]) -> str:
    """Return a recipe's text with `values`: a key, or section.key, -> its value in YAML; None takes
    the line out, with the comments above it.

    A key that is not there comes first in its section, a section before `corpus:`.
    """
    lines = text.splitlines()
    for dotted, value in values.items():
        section, _, key = dotted.rpartition(".")
        first, end = 0, len(lines)
        begin = f"{key}:"
        if section:
            begin = f"  {key}:"
            first = end = _index(lines, f"{section}:") + 1
            while end < len(lines) and lines[end].startswith(" "):
                end += 1
        found = [index for index in range(first, end) if lines[index].startswith(begin)]
        if value is not None and found:
            lines[found[0]] = f"{begin} {value}"
        elif value is not None and section:
            lines.insert(first, f"{begin} {value}")
        elif value is not None:
            lines.insert(_index(lines, "corpus:"), f"{begin} {value}")
        elif found:
            first = found[0]
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            del lines[first : found[0] + 1]
    return "\n".join(lines) + "\n"


def _key_of(line: str) -> str:
    """Return the key of a line of a recipe, at the top or in a section; "" if it has none."""
    found = re.match(r"(?:  )?([a-z_]+):", line)
    return found[1] if found else ""


def _index(lines: list[str], line: str) -> int:
    return next(index for index, found in enumerate(lines) if found.startswith(line))
