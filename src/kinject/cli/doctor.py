"""kinject doctor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Check this machine (devices, bfloat16, attention, memory, disk, packages, which keys are set, the
hub) and what each recipe would do on it: device, dtype, attention, missing inputs. Each problem
comes with its fix.
Exit code 0: no problems; 1: problems.

examples:
  kinject doctor                        every recipe below recipes/, if there is one
  kinject doctor recipes/cpt.yaml
  kinject doctor --offline              send nothing over the network"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor", help="check this machine and what keeps recipes from running", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "recipes", nargs="*", type=Path, help="recipe files or folders (default: recipes, if it exists)"
    )
    parser.add_argument("--offline", action="store_true", help="send nothing over the network")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.doctor import examine, render
    from kinject.errors import InputError

    paths = arguments.recipes or [path for path in (Path("recipes"),) if path.is_dir()]
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: does not exist. Give recipe files or folders.")
    files = [file for path in paths for file in (sorted(path.rglob("*.yaml")) if path.is_dir() else [path])]
    checkup = examine(files, offline=arguments.offline)
    show(render(checkup))
    return 1 if checkup.problems else 0
