"""kinject compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Compare runs question by question, with intervals and p values. A RUN is a run folder of kinject
eval, or a samples_*.jsonl of lm-evaluation-harness (or a folder with some). All runs are compared
with the first. With a single run, its other arms are compared with its first.

examples:
  kinject compare runs/eval
  kinject compare runs/eval-before runs/eval-after
  kinject compare runs/base runs/seed-1 runs/seed-2 runs/seed-3 --seeds
  kinject compare out/base/samples_mmlu_anatomy_2026-01-02T03-04-05.000000.jsonl out/tuned"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "compare",
        help="compare runs question by question",
        description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="run folder or samples file; the first is the base"
    )
    parser.add_argument(
        "--score",
        choices=("sum", "chars", "bytes", "tokens", "pmi", "match", "exact", "contains", "judge"),
        default="sum",
        help="the score to compare (default: sum; of written answers match)",
    )
    parser.add_argument("--seeds", action="store_true", help="the runs after the first differ only in their seed")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.eval.compare import compare_runs, read_run, render_comparison

    pairs = compare_runs([read_run(path, arguments.score) for path in arguments.runs])
    show(render_comparison(pairs, seeds=arguments.seeds))
    return 0
