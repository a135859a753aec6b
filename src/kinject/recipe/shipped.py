"""The recipes that come with kinject: their headers, and copies of them with every file that they
refer to."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from kinject.disk import write_text
from kinject.errors import InputError
from kinject.recipe.check import suggestion, texts_in
from kinject.recipe.yaml_lines import read_yaml

SCHEMA = "recipe.schema.json"
# By setuptools' data-files: with the recipes as a mapped package directory, editable installs
# became an import hook.
_INSTALLED = f"share/kinject/recipes/{SCHEMA}"


def _folder() -> Path:
    """Return recipes/ of a checkout, else the folder into which pip installed it (pyproject's
    data-files)."""
    checkout = Path(__file__).parents[3] / "recipes"
    if (checkout / SCHEMA).is_file():
        return checkout
    try:
        files = distribution("kinject").files or ()
    except PackageNotFoundError:
        files = ()  # a copied part of a checkout, without its recipes
    for file in files:
        if file.as_posix().endswith(_INSTALLED):
            return Path(str(file.locate())).resolve().parent
    return checkout


FOLDER = _folder()
"""The shipped recipes, with their schema."""

_FIELD = re.compile(r"^# (Purpose|Needs|Run|Expect): +(.*)$")
_MENTION = re.compile(r"\brecipes/([\w./-]+)\.yaml\b")
_SANDBOX = re.compile(r"(?:data|eval|runs)/sandbox/")
_DATA = re.compile(
    r"\b(?:(?:(?:data|eval)/(?:company|handbook|subjects)|eval/chat)/[\w-]+\.jsonl"
    r"|data/styles/\w+\.yaml)\b"
)
"""Data that ships as files, beside recipes/; the sandbox's is written by its own code."""


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe by its `name` (its path below recipes/ without .yaml), with the fields of its
    header, each in one line.

    `verb` is the first verb of kinject in its header, or accelerate for a configuration of
    `accelerate launch`.
    """

    name: str
    verb: str
    purpose: str
    needs: str
    run: str
    expect: str
    text: str
    values: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """Its path, relative to the folder that kinject runs in."""
        return Path("recipes") / f"{self.name}.yaml"

    @property
    def is_sandbox(self) -> bool:
        """Whether it reads the sandbox's documents, questions or models."""
        return is_sandbox(self.values)

    def copies(self, path: Path) -> bool:
        """Return whether a copy of this recipe (`copy_recipes`) brings the data at `path`."""
        return str(path) in _DATA.findall(self.text)


@dataclass(frozen=True)
class CopiedRecipes:
    """Files that were `written`, files that were `unchanged`, and `missing_inputs` that are not
    shipped."""

    written: tuple[Path, ...]
    unchanged: tuple[Path, ...]
    missing_inputs: tuple[str, ...]


def read_shipped() -> dict[str, ShippedRecipe]:
    """Return every shipped recipe by name. Raises `InputError` if kinject was installed without
    them."""
    files = sorted(FOLDER.rglob("*.yaml"))
    if not files:
        raise InputError(
            f"{FOLDER}: no recipes there; kinject was installed without them. Install it again."
        )
    return {recipe.name: recipe for recipe in map(_read, files)}


def find_recipes(names: Sequence[str], shipped: Mapping[str, ShippedRecipe]) -> list[ShippedRecipe]:
    """Return the recipes of `names` (names, paths or folders). Raises `InputError` for another."""
    matching: dict[str, ShippedRecipe] = {}
    for entry in names:
        name = entry.removeprefix("recipes/").removesuffix(".yaml").rstrip("/")
        below = {
            key: recipe
            for key, recipe in shipped.items()
            if key == name or key.startswith(f"{name}/")
        }
        if not below:
            raise InputError(
                f"{entry}: no such recipe.{suggestion(name, shipped)} kinject recipes lists them."
            )
        matching |= below
    return list(matching.values())


def copy_recipes(
    recipes: Sequence[ShippedRecipe], into: Path, write_sandbox: Callable[[Path], Iterable[Path]]
) -> CopiedRecipes:
    """Copy `recipes` below `into`, with the recipes that their values name or that make their
    inputs, data and the schema.

    The sandbox's recipes and data come with recipes of the sandbox only: beside one for documents
    of one's own they would be taken for these.

    `write_sandbox` writes the sandbox's data into a folder and returns the files. No file is
    overwritten: raises `InputError` if one is there with another text, before anything is written.
    """
    shipped = read_shipped()
    to_copy = _with_references(recipes, shipped)
    files = {Path("recipes") / SCHEMA: (FOLDER / SCHEMA).read_text("utf-8")}
    files |= {recipe.path: recipe.text for recipe in to_copy}
    if any(recipe.is_sandbox for recipe in to_copy):
        files |= _sandbox_files(write_sandbox)
    data = {name for recipe in to_copy for name in _DATA.findall(recipe.text)}
    files |= {Path(name): (FOLDER.parent / name).read_text("utf-8") for name in sorted(data)}
    differing = [path for path, content in files.items() if _differs(into / path, content)]
    if differing:
        others = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        fault = (
            "is there and differs from the shipped file. Move it away, or copy into another "
            "folder: --out FOLDER."
        )
        raise InputError(f"{into / differing[0]}{others}: {fault}")
    written = [path for path in files if not (into / path).exists()]
    for path in written:
        write_text(into / path, files[path])
    inputs = {
        text
        for recipe in to_copy
        for _, text in texts_in(recipe.values)
        if text.startswith(("data/", "../"))
    }
    missing = sorted(text for text in inputs if not (into / text).exists())
    return CopiedRecipes(
        tuple(written), tuple(path for path in files if path not in written), tuple(missing)
    )


def is_sandbox(values: Mapping[str, Any]) -> bool:
    """Return whether the values of a recipe name the sandbox's files, or its generator."""
    texts = list(texts_in(values))
    writes = any(key[-1:] == ("kind",) and text == "sandbox" for key, text in texts)
    return writes or any(_SANDBOX.match(text) for _, text in texts)


def data_in(text: str) -> list[str]:
    """Return the paths in a recipe's text of data that ships as files."""
    return _DATA.findall(text)


def holds_only_shipped(root: Path, name: str) -> bool:
    """Return whether the folder `name` below `root` has files, and all of them are copies of
    shipped data."""
    files = [path for path in (root / name).rglob("*") if path.is_file()]
    return bool(files) and all((FOLDER.parent / f.relative_to(root)).is_file() for f in files)


@cache
def _read(file: Path) -> ShippedRecipe:
    name = file.relative_to(FOLDER).with_suffix("").as_posix()
    text = file.read_text("utf-8")
    values = read_yaml(file).root
    fields = _header(text)
    command = re.search(r"\bkinject(?:\.cli)? ([a-z]+)", fields.get("Run", ""))
    verb = ""
    if "compute_environment" in values:
        verb = "accelerate"
    elif command:
        verb = command[1]
    return ShippedRecipe(
        name,
        verb,
        fields.get("Purpose", ""),
        fields.get("Needs", ""),
        fields.get("Run", ""),
        fields.get("Expect", ""),
        text,
        values,
    )


def _header(text: str) -> dict[str, str]:
    """Return the fields of the comment at the top of a recipe; without fields, its first line is
    the purpose."""
    fields: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("# yaml-language-server:"):
            continue
        match = _FIELD.match(line)
        if match:
            last = match[1]
            fields[last] = match[2].strip()
        elif last:
            fields[last] += " " + line.lstrip("# ")
        elif "Purpose" not in fields:
            fields["Purpose"] = line.lstrip("# ")
        elif "accelerate launch" in line or fields.get("Run", "").endswith("\\"):
            fields["Run"] = f"{fields.get('Run', '').rstrip(chr(92))}{line.lstrip('# ')}"
    return fields


def _with_references(
    recipes: Sequence[ShippedRecipe], shipped: Mapping[str, ShippedRecipe]
) -> list[ShippedRecipe]:
    """Return `recipes` and, recursively, the recipes that their values name or whose runs they
    read."""
    closure = {recipe.name: recipe for recipe in recipes}
    queue = list(recipes)
    while queue:
        recipe = queue.pop()
        inputs = [
            text for _, text in texts_in(recipe.values) if text != recipe.values.get("run_dir")
        ]
        names = _MENTION.findall("\n".join(inputs))
        named = [shipped[name] for name in names if name in shipped]
        makers = [
            other
            for other in shipped.values()
            if any(_makes(other, text) for text in inputs)
            and (recipe.is_sandbox or not other.is_sandbox)
        ]
        for other in [*named, *makers]:
            if other.name not in closure:
                closure[other.name] = other
                queue.append(other)
    return list(closure.values())


def _makes(recipe: ShippedRecipe, path: str) -> bool:
    # Those of recipes/own are no recipes of this folder before kinject try has filled them in.
    is_form = recipe.name.startswith("own/")
    return not is_form and path.startswith(f"{recipe.values.get('run_dir', '-')}/")


def _sandbox_files(write_sandbox: Callable[[Path], Iterable[Path]]) -> dict[Path, str]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return {path.relative_to(root): path.read_text("utf-8") for path in write_sandbox(root)}


def _differs(path: Path, content: str) -> bool:
    return path.exists() and (path.is_dir() or path.read_bytes() != content.encode())
