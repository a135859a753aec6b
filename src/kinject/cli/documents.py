"""kinject documents."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
Collect a heap of files into documents.jsonl: each file is read once, in parallel, and whatever cannot be
read is listed with its reason instead of ending the run. A second run reads only what changed.
PATH is a folder, a pattern in quotes, a file, or a text file that lists a path a line. In the run folder:
  documents.jsonl    a row for each document; augment, questions and eval read it
  skipped.jsonl      every file, page or row that was not read, with the reason
  duplicates.jsonl   copies that were left out, exact and near, and of what
  boilerplate.jsonl  lines that many documents share, left out of all but the first
  documents.html     counts, languages, skipped files, largest and strangest documents, a sample
Exit code 0: all was read; 1: something was skipped; 2: nothing could be read, or documents.strict.

examples:
  kinject documents handbook/
  kinject documents 'archive/**/*.pdf' run_dir=runs/archive/documents
  kinject documents handbook/ documents.personal_data=mask documents.licence=CC-BY-4.0
  kinject documents handbook/ --recipe recipes/handbook/augment.yaml    its section documents"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "documents", help="collect a heap of files into documents.jsonl", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "arguments", nargs="+", metavar="PATH [documents.key=value ...]",
        help="folder, pattern, file or list; run_dir=FOLDER sets the run folder (default: runs/NAME/documents)",
    )  # fmt: skip
    parser.add_argument("--recipe", dest="recipe_file", metavar="FILE", help="recipe whose section documents is used")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.api import documents
    from kinject.corpus.documents.collect import render_documents
    from kinject.recipe.read import read_section

    is_setting = [word.startswith(("documents.", "run_dir=")) and "=" in word for word in arguments.arguments]
    paths = [word for word, setting in zip(arguments.arguments, is_setting, strict=True) if not setting]
    settings = [word for word, setting in zip(arguments.arguments, is_setting, strict=True) if setting]
    folders = [word.partition("=")[2] for word in settings if word.startswith("run_dir=")]
    options = read_section(arguments.recipe_file, [word for word in settings if not word.startswith("run_dir=")])
    result = documents(*map(Path, paths), run_dir=folders[-1] if folders else None, options=options)
    show(render_documents(result))
    return 1 if result.n_skipped else 0
