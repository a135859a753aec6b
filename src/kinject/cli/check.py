"""kinject check."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Check whole recipes: unknown keys, wrong types, values out of range, and what the libraries refuse
on this machine, each with its line. Inputs are not checked, except the names in a local model.
Exit code 0: all are valid; 2: some are not.

examples:
  kinject check                    every recipe below recipes/
  kinject check recipes/cpt.yaml"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "check", help="check recipes without running them", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("recipes", nargs="*", type=Path, help="recipe files or folders (default: recipes)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.augment.validation import check_sections
    from kinject.bench.strategies import custom_strategies
    from kinject.errors import InputError, KinjectError
    from kinject.eval.plan import check_section
    from kinject.recipe import read_recipe
    from kinject.recipe.yaml_lines import read_yaml
    from kinject.study.arms import expand_arms
    from kinject.study.check import check_names, check_shared_recipes
    from kinject.train.setup import check_training

    paths = arguments.recipes or [Path("recipes")]
    files = [file for path in paths for file in (sorted(path.rglob("*.yaml")) if path.is_dir() else [path])]
    if not files:
        raise InputError(f"{paths[0]}: no recipes (*.yaml) there. Give a file or a folder.")
    n_invalid = n_skipped = 0
    for file in files:
        try:
            if file not in paths and "compute_environment" in read_yaml(file).root:
                n_skipped += 1  # accelerate checks its own configuration files
                continue
            recipe = read_recipe(file)
            check_sections(recipe)
            check_section(recipe)
            custom_strategies(recipe)
            if {"model", "corpus", "trainer"} <= recipe.raw.keys() and "bench" not in recipe.raw:
                check_training(read_recipe(file, verb="train", check_inputs=False))
            if recipe.study is not None:
                study = read_recipe(file, verb="study", check_inputs=False)
                check_names(study, check_inputs=False)
                check_shared_recipes(study, expand_arms(study))
        except KinjectError as error:
            n_invalid += 1
            show(error, file=sys.stderr)
    n_recipes = len(files) - n_skipped
    skipped = f"; {n_skipped} files are accelerate's" if n_skipped else ""
    show(f"{n_recipes - n_invalid} of {n_recipes} recipes are valid{skipped}")
    return 2 if n_invalid else 0
