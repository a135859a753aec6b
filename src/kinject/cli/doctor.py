"""kinject doctor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
What this machine has (devices, bfloat16, attention, memory, disk, packages, keys present or not, the hub) and what each
recipe would do on it: device, dtype, attention, missing inputs. Each problem comes with its fix.
Exit code 0: no problems; 1: problems.

examples:
  kinject doctor                        every recipe below recipes/, where that is
  kinject doctor recipes/cpt.yaml
  kinject doctor --offline              send nothing over the network"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor", help="what this machine has, and what keeps recipes from running", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("recipes", nargs="*", type=Path, help="recipe files or folders (default: recipes, where it is)")
    parser.add_argument("--offline", action="store_true", help="send nothing over the network")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.doctor.run import examine, render
    from kinject.errors import InputError

    asked = arguments.recipes or [path for path in (Path("recipes"),) if path.is_dir()]
    for path in asked:
        if not path.exists():
            raise InputError(f"{path}: nothing is there. Give recipe files or folders.")
    files = [file for path in asked for file in (sorted(path.rglob("*.yaml")) if path.is_dir() else [path])]
    checkup = examine(files, offline=arguments.offline)
    show(render(checkup))
    return 1 if checkup.problems else 0
