"""kinject recipes: list, copy and check recipes; their schema, styles and public data."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.cli import Outcome, option, verb
from kinject.errors import InputError
from kinject.terminal import format_count, show

if TYPE_CHECKING:
    from kinject.recipe.shipped import ShippedRecipe


@verb("recipes", names=[])
@verb(
    "recipes list",
    option("names", nargs="*", metavar="NAME", help="recipes or folders of them (default: all)"),
)
def _list(arguments: argparse.Namespace) -> Outcome:
    from kinject.recipe.shipped import find_recipes, read_shipped

    shipped = read_shipped()
    recipes = find_recipes(arguments.names or list(shipped), shipped)
    width = min(shutil.get_terminal_size().columns, 140)
    for kind in dict.fromkeys(recipe.verb for recipe in recipes):
        show(f"kinject {kind}" if kind != "accelerate" else "accelerate launch --config_file")
        for recipe in recipes:
            if recipe.verb == kind:
                show("\n".join(_lines(recipe, width)))
    show("kinject recipes copy NAME puts one here, with all it refers to.")
    return {"recipes": recipes}, 0


def _lines(recipe: ShippedRecipe, width: int) -> list[str]:
    lines = [f"  {recipe.path}"]
    for label, text in (
        ("", recipe.purpose),
        ("needs: ", recipe.needs),
        ("gives: ", recipe.expect),
    ):
        if text:
            lines += textwrap.wrap(
                label + text,
                width,
                initial_indent=" " * 6,
                subsequent_indent=" " * 8,
                # An option such as --real stays whole.
                break_on_hyphens=False,
            )
    return lines


@verb(
    "recipes copy",
    option("names", nargs="+", metavar="NAME", help="recipes or folders of them"),
    option("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here"),
)
def _copy(arguments: argparse.Namespace) -> Outcome:
    from kinject.recipe.shipped import copy_recipes, find_recipes, read_shipped
    from kinject.sandbox import write_chat_questions, write_sandbox

    recipes = find_recipes(arguments.names, read_shipped())

    def write(root: Path) -> list[Path]:
        return [*write_sandbox(root), *write_chat_questions(root)]

    copied = copy_recipes(recipes, arguments.out, write)
    for path in copied.written:
        show(arguments.out / path)
    if copied.unchanged:
        were = "was" if len(copied.unchanged) == 1 else "were"
        show(f"{len(copied.unchanged)} more {were} there already, the same")
    for recipe in recipes:
        show(f"\n{recipe.path}: {recipe.purpose}")
        for label, text in (("needs", recipe.needs), ("run", recipe.run)):
            if text:
                show(f"  {label}: {text}")
    if copied.missing_inputs:
        show(f"\nyours to bring (or name others in the recipe): {', '.join(copied.missing_inputs)}")
    return copied, 0


@verb(
    "recipes check",
    option("recipes", nargs="*", type=Path, help="recipe files or folders (default: recipes)"),
)
def _check(arguments: argparse.Namespace) -> Outcome:
    from kinject.api import check, recipe_files

    paths = arguments.recipes or [Path("recipes")]
    errors = check(*paths)
    n_skipped = len(recipe_files(paths)) - len(errors)
    faults = [error for error in errors.values() if error is not None]
    for error in faults:
        show(error, file=sys.stderr)
    skipped = f"; {n_skipped} files are accelerate's" if n_skipped else ""
    n_valid = len(errors) - len(faults)
    show(f"valid: {n_valid} of {format_count(len(errors), 'recipe')}{skipped}")
    return errors, 2 if faults else 0


@verb(
    "recipes schema",
    option(
        "--out", default="recipes/recipe.schema.json", metavar="FILE", help="default: %(default)s"
    ),
)
def _schema(arguments: argparse.Namespace) -> Outcome:
    from kinject.augment.styles import STYLES
    from kinject.recipe.schema import schema_line, write_schema

    out = Path(arguments.out)
    write_schema({name: style.about for name, style in STYLES.items()}, out)
    show(out)
    show(f"first line of a recipe beside it: {schema_line(out.parent / 'recipe.yaml', out)}")
    return {"schema": out}, 0


@verb(
    "recipes styles",
    option("style", nargs="?", metavar="STYLE", help="name of a style, or a style file (YAML)"),
    option("--documents", type=Path, metavar="PATH", help="documents; default: an example"),
)
def _styles(arguments: argparse.Namespace) -> Outcome:
    from kinject.augment.preview import find_style, first_group, render_prompts
    from kinject.augment.styles import STYLES

    if arguments.style is not None:
        text = render_prompts(first_group(find_style(arguments.style), arguments.documents))
        show(text)
        return {"text": text}, 0
    if arguments.documents is not None:
        raise InputError("--documents: is for the prompts of a style. Name one, as paraphrase.")
    width = max(map(len, STYLES))
    for name, style in STYLES.items():
        source = f" ({style.source})" if style.source else ""
        show(f"{name:{width}}  {style.about}{source}")
    return {name: style.about for name, style in STYLES.items()}, 0


@verb("recipes data", out=Path("data"))
def _data_list(arguments: argparse.Namespace) -> Outcome:
    from kinject.corpus.public_data import DATA_SETS, describe

    for data in DATA_SETS.values():
        show("\n".join(describe(data, arguments.out)))
    show("kinject recipes data get NAME fetches one.")
    return DATA_SETS, 0


@verb(
    "recipes data get",
    option(
        "names", nargs="+", metavar="NAME", help="data sets, as `kinject recipes data` lists them"
    ),
    option("--out", type=Path, default=Path("data"), metavar="FOLDER", help="default: %(default)s"),
)
def _data_get(arguments: argparse.Namespace) -> Outcome:
    from kinject.corpus.public_data import describe, find_data, get_data

    fetched: dict[str, Any] = {}
    for data in find_data(arguments.names):
        # Before the download, which may take minutes.
        show("\n".join(describe(data, arguments.out)), flush=True)
        fetched[data.name] = paths = get_data(data, arguments.out)
        state = f"{format_count(len(paths), 'file')} written" if paths else "was there already"
        show(f"{data.name}: {state}")
    return fetched, 0
