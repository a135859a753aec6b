"""kinject demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
The whole job on the embedded sandbox, in this folder: one to two minutes on 2 CPU cores, without a GPU,
a key or a network. It writes recipes/, data/ and eval/ unless they are there, and

  runs/sandbox/base/      the base model that ships: 1M parameters, knows 300 people of a fictional
                          country, can answer from a passage, has read nothing about 120 others
  runs/augment/           16 paraphrases of each of the 120 documents on those others
  runs/cpt/               the base model, trained on the paraphrases
  runs/sandbox/repeat/    the control: trained for as many steps on the documents as they are
  runs/eval/report.html   the three models' answers, with and without retrieval

Stopped at any moment, the same command resumes it. Finished work is not repeated.

examples:
  kinject demo
  kinject demo --into demo       in another folder
  kinject demo --from-scratch    train the base model, too (about 9 minutes more)"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "demo", help="the whole job on the sandbox: a model, its control, a report", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    parser.add_argument("--from-scratch", action="store_true", help="train the base model instead of copying it")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.demo import REPORT, demo

    demo(arguments.into, from_scratch=arguments.from_scratch)
    show(f"report: {arguments.into / REPORT}")
    show(f"figure: {arguments.into / REPORT.parent / 'figures' / 'accuracy.png'}")
    show("what next: kinject", flush=True)
    return 0
