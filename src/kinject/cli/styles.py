"""kinject styles."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
List the styles of rewriting, show the prompts of one on a passage, or try one: send one request to
the generator of a recipe, and print the answer with the verdict of the checks.

examples:
  kinject styles                                         all of them
  kinject styles plain                                   its prompts on an example
  kinject styles plain --documents manual.md             the same on your first passage
  kinject styles mine.yaml --documents manual.md         a style of your own (docs/augmentation.md)
  kinject styles plain --recipe recipes/augment.yaml --try    one answer of its generator"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "styles", help="list the styles of rewriting, show or try one", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("style", nargs="?", metavar="STYLE", help="name of a style, or a style file (YAML)")
    parser.add_argument("--recipe", metavar="RECIPE", help="recipe with documents, style files and a generator")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="overrides of the recipe")
    parser.add_argument(
        "--documents", type=Path, metavar="PATH", help="documents; default: the recipe's, or an example"
    )
    parser.add_argument(
        "--passage", type=int, default=1, metavar="N", help="which passage of them; default: %(default)s"
    )
    parser.add_argument("--try", action="store_true", dest="attempt", help="send one request and print the verdict")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.augment.preview import find_passage, find_style, known_styles, render_prompts, try_style
    from kinject.errors import InputError
    from kinject.recipe import read_recipe

    recipe = read_recipe(Path(arguments.recipe), arguments.set, verb="augment") if arguments.recipe else None
    if arguments.style is None:
        styles = known_styles(recipe)
        width = max(map(len, styles))
        for name, style in styles.items():
            show(f"{name:{width}}  {style.about}" + (f" ({style.source})" if style.source else ""))
        return 0
    if arguments.passage < 1:
        raise InputError(f"--passage: found {arguments.passage}, allowed: 1 or more.")
    style = find_style(arguments.style, recipe)
    group = find_passage(style, recipe, arguments.documents, arguments.passage)
    if not arguments.attempt:
        show(render_prompts(group))
        return 0
    if recipe is None:
        raise InputError("--try: needs a generator. Give --recipe a recipe of kinject augment.")
    if arguments.style != style.name:
        files = [*recipe.augment.style_files, arguments.style]
        recipe = read_recipe(Path(arguments.recipe), [*arguments.set, f"augment.style_files={files}"], verb="augment")
    trial = try_style(group, recipe)
    for text in trial.accepted:
        show(f"accepted:\n{text}")
    for reason, text in trial.refused:
        show(f"refused, {reason}\n{text}\n")
    if trial.nothing:
        show("accepted: NONE, there is nothing to write")
    if group.style.missing_need(group.source):
        show(render_prompts(group).partition("\n")[0])
    show(f"{trial.n_requests} requests" + (f", cost {trial.cost:.4f}" if trial.cost else ""))
    return 0 if trial.accepted or trial.nothing else 1
