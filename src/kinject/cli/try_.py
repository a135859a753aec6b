"""kinject try."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Look at documents; no model is asked and nothing is paid. Shows what can be read and what not, with the
reason; passages, tokens, languages, copies; what augmenting would cost; three sample prompts.
No model and no key. A file that cannot be read is left out. With NAME, the folder's name, it writes
  recipes/NAME/           augment.yaml, questions.yaml, train.yaml, eval.yaml: the way to a report
  runs/NAME/              documents/ (as kinject documents writes it), prompts.txt
Recipes that are there already stay as they are.
Exit code 0: all was read; 1: something was skipped; 2: nothing could be read.

examples:
  kinject try handbook/
  kinject try handbook/ --tokenizer Qwen/Qwen3-0.6B-Base"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "try", help="look at your documents, and write recipes for them", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("documents", type=Path, metavar="FOLDER", help="folder or file with documents")
    parser.add_argument("--tokenizer", metavar="NAME", help="count with this tokenizer: a folder, or a name on the hub")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.augment.survey import render_survey, try_documents

    survey = try_documents(arguments.documents, tokenizer=arguments.tokenizer)
    show(render_survey(survey))
    return 1 if survey.skipped else 0
