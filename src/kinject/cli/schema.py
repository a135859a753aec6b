"""kinject schema."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Write the JSON schema of recipes: sections, keys, types, bounds and descriptions, from the grammar
that kinject check uses. An editor with the YAML language server (VS Code's YAML extension,
Neovim, Emacs, JetBrains) completes and checks a recipe whose first line names the schema; the
shipped recipes have that line.

examples:
  kinject schema                       write recipes/recipe.schema.json
  kinject schema mine/recipe.yaml      the same, and put the line into that recipe
  kinject schema --out -               print it"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "schema", help="write the JSON schema of recipes, for editors", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("recipes", nargs="*", type=Path, help="recipes to which the line is added")
    parser.add_argument(
        "--out", default="recipes/recipe.schema.json", metavar="FILE", help="default: %(default)s; -: print it"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import json

    from kinject.augment.styles import STYLES
    from kinject.errors import InputError
    from kinject.recipe.schema import recipe_schema, schema_line, write_schema, write_schema_line
    from kinject.recipe.yaml_lines import read_yaml

    styles = {name: style.about for name, style in STYLES.items()}
    if arguments.out == "-":
        if arguments.recipes:
            raise InputError("--out -: a recipe's line must name a file. Give --out a path, or no recipes.")
        show(json.dumps(recipe_schema(styles), indent=1, ensure_ascii=False))
        return 0
    for recipe in arguments.recipes:
        read_yaml(recipe)  # raises before anything is written if a file is missing or no YAML
    out = Path(arguments.out)
    write_schema(styles, out)
    show(out)
    for recipe in arguments.recipes:
        show(f"{recipe}: {'names it now' if write_schema_line(recipe, out) else 'names it already'}")
    if not arguments.recipes:
        show(f"first line of a recipe beside it: {schema_line(out.parent / 'recipe.yaml', out)}")
    return 0
