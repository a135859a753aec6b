"""kinject report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Draw the report of a finished run again: of kinject eval from its report.json and the training
logs of its models, of kinject train from its log.jsonl, of kinject study from its report.json.

examples:
  kinject report runs/eval
  kinject report runs/cpt
  kinject report runs/studies/sandbox"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "report", help="draw a report again", description=_DETAIL, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="run folder of kinject eval, train or study")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.disk import read_manifest, refuse_outside_links
    from kinject.report import redraw_report, write_training_report

    refuse_outside_links(arguments.run_dir)
    stage = (read_manifest(arguments.run_dir / "manifest.json") or {}).get("stage")
    draw = write_training_report if stage == "train" else redraw_report
    show(f"report: {draw(arguments.run_dir)}")
    return 0
