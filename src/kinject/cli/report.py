"""kinject report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Draw the report of a finished run (again): of kinject eval from its report.json and the training
logs of its models, of kinject train from its log.jsonl, of kinject study from its report.json, of
kinject augment from its manifest and its texts (yield, refusals with examples, doubts, cost).

examples:
  kinject report runs/eval
  kinject report runs/cpt
  kinject report runs/augment
  kinject report runs/studies/sandbox"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "report",
        help="draw the report of a run folder",
        description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, help="run folder of kinject eval, train, augment or study")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.api import report

    show(f"report: {report(arguments.run_dir)}")
    return 0
