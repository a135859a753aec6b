"""The arguments of every verb that reads a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from kinject.errors import InputError

if TYPE_CHECKING:
    from kinject.recipe import AugmentRecipe, EvalRecipe, QuestionsRecipe, Recipe, StudyRecipe, TrainRecipe
    from kinject.recipe.read import Verb


def add_verb(verbs: Any, name: str, summary: str, detail: str, default: str | None) -> argparse.ArgumentParser:
    """Return the parser of a verb that takes ``[RECIPE] [section.key=value ...]``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, description=detail, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    recipe = f"recipe file (default: {default})" if default else "recipe file"
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[RECIPE] [section.key=value ...]",
        help=f"{recipe}; then overrides, values in YAML",
    )
    parser.set_defaults(default_recipe=default)
    return parser


@overload
def recipe_of(arguments: argparse.Namespace, verb: Literal["train", "plan"]) -> TrainRecipe: ...
@overload
def recipe_of(arguments: argparse.Namespace, verb: Literal["augment"]) -> AugmentRecipe: ...
@overload
def recipe_of(arguments: argparse.Namespace, verb: Literal["questions"]) -> QuestionsRecipe: ...
@overload
def recipe_of(arguments: argparse.Namespace, verb: Literal["eval"]) -> EvalRecipe: ...
@overload
def recipe_of(arguments: argparse.Namespace, verb: Literal["study"]) -> StudyRecipe: ...
def recipe_of(arguments: argparse.Namespace, verb: Verb) -> Recipe:
    """Return the checked recipe that the command line names. Raises `InputError` if it names none or several."""
    from kinject.recipe import read_recipe

    files = [word for word in arguments.arguments if "=" not in word]
    overrides = [word for word in arguments.arguments if "=" in word]
    if len(files) > 1:
        raise InputError(
            f"found {len(files)} recipes ({', '.join(files)}); give one, then section.key=value overrides."
        )
    if not files and arguments.default_recipe is None:
        raise InputError(f"no recipe given. For example: kinject {verb} recipes/cpt.yaml")
    path = Path(files[0] if files else arguments.default_recipe)
    if not path.exists():
        from kinject.recipe.shipped import read_shipped

        if any(path == recipe.path for recipe in read_shipped().values()):
            name = path.relative_to("recipes").with_suffix("")
            raise InputError(f"{path}: not in this folder. kinject recipes copy {name} puts it here.")
    recipe = read_recipe(path, overrides, verb)
    arguments.recipe = recipe  # for the message of an error
    return recipe
