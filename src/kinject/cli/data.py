"""kinject data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Fetch public data that the shipped recipes name: list it, or get some of it. Licence, size, revision and
checksums are said first. What was fetched is checked, written whole or not at all, and left alone the
next time; a download that was stopped resumes.

examples:
  kinject data                                           what there is
  kinject data get mmlu wikipedia-subjects instructions  for recipes/studies/paper-mmlu.yaml
  kinject data get mmlu current-events instructions      for recipes/studies/paper-current-events.yaml
  kinject data get replay                                general text, which the recipes of real models replay
  kinject data get mmlu --from copied/                   from a copy of its files, without a network"""


def add_parser(verbs: Any) -> None:
    """Add the verb and its action."""
    parser = verbs.add_parser(
        "data", help="fetch public data that the recipes name", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=_list, into=Path("data"))
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    get = actions.add_parser("get", help="fetch data sets, or print what would be fetched")
    get.add_argument("names", nargs="+", metavar="NAME", help="data sets, as `kinject data` lists them")
    get.add_argument("--into", type=Path, default=Path("data"), metavar="FOLDER", help="default: %(default)s")
    get.add_argument(
        "--from", type=Path, dest="copy", metavar="FOLDER", help="a copy of the files as they are at the source"
    )
    get.add_argument("--dry-run", action="store_true", help="print what would be fetched, then stop")
    get.set_defaults(run=_get)


def _list(arguments: argparse.Namespace) -> int:
    from kinject.corpus.public_data import DATA_SETS, describe

    for data in DATA_SETS.values():
        show("\n".join(describe(data, arguments.into)))
    show("kinject data get NAME fetches one.")
    return 0


def _get(arguments: argparse.Namespace) -> int:
    from kinject.corpus.public_data import describe, find_data, get_data

    for data in find_data(arguments.names):
        show("\n".join(describe(data, arguments.into)), flush=True)
        if not arguments.dry_run:
            found = get_data(data, arguments.into, arguments.copy)
            state = "were there, unchanged" if found.was_there else "written and recorded"
            show(f"{data.name}: {len(found.paths):,} files {state}")
    return 0
