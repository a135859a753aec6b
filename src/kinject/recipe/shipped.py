"""The recipes that come with kinject: what each is for, and a copy of one with everything that it refers to."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from kinject.disk import write_text
from kinject.errors import InputError
from kinject.recipe.check import suggestion
from kinject.recipe.yaml_lines import read_yaml
from kinject.sandbox import write_sandbox

SCHEMA = "recipe.schema.json"
_INSTALLED = f"share/kinject/recipes/{SCHEMA}"


def _folder() -> Path:
    """Return the repository's recipes/ in a checkout, and where pip put it elsewhere (pyproject's data-files)."""
    checkout = Path(__file__).parents[3] / "recipes"
    if (checkout / SCHEMA).is_file():
        return checkout
    for file in distribution("kinject").files or ():
        if file.as_posix().endswith(_INSTALLED):
            return Path(str(file.locate())).resolve().parent
    return checkout


FOLDER = _folder()
"""The shipped recipes, with their schema."""

_FIELD = re.compile(r"^# (Purpose|Needs|Run|Expect): +(.*)$")
_MENTION = re.compile(r"\brecipes/([\w./-]+)\.yaml\b")
_SANDBOX = re.compile(r"\b(?:data|eval)/sandbox/")


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe by its `name` (its path below recipes/ without .yaml), with the fields of its header, each in one line.

    `verb` is what runs it first in its header: a verb of kinject's, or accelerate for a configuration of `accelerate launch`.
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
        """Where it stands, from the folder that kinject is run in."""
        return Path("recipes") / f"{self.name}.yaml"


@dataclass(frozen=True)
class Copied:
    """Files that were `written`, that were `there` with the same text, and inputs `to_bring` that nobody ships."""

    written: tuple[Path, ...]
    there: tuple[Path, ...]
    to_bring: tuple[str, ...]


def read_shipped() -> dict[str, ShippedRecipe]:
    """Return every shipped recipe by name. Raises `InputError` where the package was installed without them."""
    files = sorted(FOLDER.rglob("*.yaml"))
    if not files:
        raise InputError(f"{FOLDER}: no recipes there; kinject was installed without them. Install it anew.")
    return {recipe.name: recipe for recipe in map(_read, files)}


def find(names: Sequence[str], shipped: Mapping[str, ShippedRecipe]) -> list[ShippedRecipe]:
    """Return the recipes that `names` mean: a name, a path, or a folder of several. Raises `InputError` for another."""
    found: dict[str, ShippedRecipe] = {}
    for asked in names:
        name = asked.removeprefix("recipes/").removesuffix(".yaml").rstrip("/")
        below = {key: recipe for key, recipe in shipped.items() if key == name or key.startswith(f"{name}/")}
        if not below:
            raise InputError(f"{asked}: no such recipe.{suggestion(name, shipped)} kinject recipes lists them.")
        found |= below
    return list(found.values())


def copy(recipes: Sequence[ShippedRecipe], into: Path) -> Copied:
    """Copy `recipes` below `into`, with the recipes that they name or that make their inputs, data and the schema.

    Nothing is written over: raises `InputError` when a file is there with another text, before anything is written.
    """
    shipped = read_shipped()
    wanted = _with_references(recipes, shipped)
    files = {Path("recipes") / SCHEMA: (FOLDER / SCHEMA).read_text("utf-8")}
    files |= {recipe.path: recipe.text for recipe in wanted}
    if any(_SANDBOX.search(recipe.text) for recipe in wanted):
        files |= _sandbox_files()
    differing = [path for path, content in files.items() if _differs(into / path, content)]
    if differing:
        others = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        what = "is there and is not what kinject ships. Move it away, or copy into another folder: --into FOLDER."
        raise InputError(f"{into / differing[0]}{others}: {what}")
    written = [path for path in files if not (into / path).exists()]
    for path in written:
        write_text(into / path, files[path])
    inputs = {text for recipe in wanted for text in _strings(recipe.values) if text.startswith(("data/", "../"))}
    to_bring = sorted(text for text in inputs if not (into / text).exists())
    return Copied(tuple(written), tuple(path for path in files if path not in written), tuple(to_bring))


def _read(file: Path) -> ShippedRecipe:
    name = file.relative_to(FOLDER).with_suffix("").as_posix()
    text = file.read_text("utf-8")
    values = read_yaml(file).root
    fields = _header(text)
    said = re.search(r"\bkinject ([a-z]+)", fields.get("Run", ""))
    verb = "accelerate" if "compute_environment" in values else said[1] if said else ""
    return ShippedRecipe(
        name, verb, fields.get("Purpose", ""), fields.get("Needs", ""), fields.get("Run", ""),
        fields.get("Expect", ""), text, values,
    )  # fmt: skip


def _header(text: str) -> dict[str, str]:
    """Return the fields of the comment at a recipe's head; without fields, its first line as the purpose."""
    fields: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("# yaml-language-server:"):
            continue
        if match := _FIELD.match(line):
            last = match[1]
            fields[last] = match[2].strip()
        elif last:
            fields[last] += " " + line.lstrip("# ")
        elif "Purpose" not in fields:
            fields["Purpose"] = line.lstrip("# ")
        elif "accelerate launch" in line or fields.get("Run", "").endswith("\\"):
            fields["Run"] = f"{fields.get('Run', '').rstrip(chr(92))}{line.lstrip('# ')}"
    return fields


def _with_references(recipes: Sequence[ShippedRecipe], shipped: Mapping[str, ShippedRecipe]) -> list[ShippedRecipe]:
    """Return `recipes` and, again and again, the recipes that they name or whose run folder they read."""
    wanted = {recipe.name: recipe for recipe in recipes}
    queue = list(recipes)
    while queue:
        recipe = queue.pop()
        named = [shipped[name] for name in _MENTION.findall(recipe.text) if name in shipped]
        inputs = [text for text in _strings(recipe.values) if text != recipe.values.get("run_dir")]
        makers = [other for other in shipped.values() if any(_makes(other, text) for text in inputs)]
        for other in [*named, *makers]:
            if other.name not in wanted:
                wanted[other.name] = other
                queue.append(other)
    return list(wanted.values())


def _makes(recipe: ShippedRecipe, path: str) -> bool:
    return path.startswith(f"{recipe.values.get('run_dir', '-')}/")


def _strings(value: Any) -> Iterator[str]:
    """Yield every text among the values of a recipe."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


def _sandbox_files() -> dict[Path, str]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return {path.relative_to(root): path.read_text("utf-8") for path in write_sandbox(root)}


def _differs(path: Path, content: str) -> bool:
    return path.exists() and (path.is_dir() or path.read_bytes() != content.encode())
