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
    from kinject.api import check, recipe_files

    paths = arguments.recipes or [Path("recipes")]
    found = check(*paths)
    n_skipped = len(recipe_files(paths)) - len(found)
    faults = [error for error in found.values() if error is not None]
    for error in faults:
        show(error, file=sys.stderr)
    skipped = f"; {n_skipped} files are accelerate's" if n_skipped else ""
    show(f"{len(found) - len(faults)} of {len(found)} recipes are valid{skipped}")
    return 2 if faults else 0
