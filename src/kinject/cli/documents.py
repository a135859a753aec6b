"""kinject try, kinject documents and kinject data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_TRY = """\
Look at documents, without a model or a key: what can be read and what not, languages, copies, the cost
of paraphrases, sample prompts. With NAME, the folder's name, it writes
  recipes/NAME/           pilot.yaml, pilot-eval.yaml: a first report on a laptop, as they are;
                          augment.yaml, questions.yaml, train.yaml, eval.yaml: the whole way
  runs/NAME/              documents/ (as kinject documents writes it), prompts.txt, pilot/
Recipes that are there already stay as they are.
Exit code 0: all was read; 1: something was skipped; 2: nothing could be read.

examples:
  kinject try handbook/
  kinject try handbook/ --endpoint http://127.0.0.1:8000/v1 --model Qwen/Qwen3-0.6B-Base"""


def add_try(verbs: Any) -> None:
    """Add `kinject try`."""
    parser = verbs.add_parser(
        "try", help="look at your documents, and write recipes for them", description=_TRY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("documents", type=Path, metavar="FOLDER", help="folder or file with documents")
    parser.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible endpoint that writes, for all recipes")
    parser.add_argument(
        "--model", metavar="PATH", help="model that learns, for all recipes: a folder, or a name on the hub"
    )
    parser.set_defaults(run=_try)


def _try(arguments: argparse.Namespace) -> int:
    from kinject.api import try_
    from kinject.augment.pilot import render_commands
    from kinject.augment.survey import render_survey

    survey = try_(arguments.documents, endpoint=arguments.endpoint, model=arguments.model)
    show(render_survey(survey))
    folder = min((*survey.recipes, *survey.kept)).parent
    counts = survey.preview.n_documents, *survey.pilot
    show("\n" + render_commands(survey.path, folder, counts, ready=survey.ready))
    return 1 if survey.skipped else 0


_DOCUMENTS = """\
Collect a heap of files into documents.jsonl, in parallel; a second run parses only new content.
PATH is a folder, a pattern in quotes, or a file. In the run folder:
  documents.jsonl    a row for each document; augment, questions and eval read it
  skipped.jsonl      every file, page or row that was not read, with the reason
  duplicates.jsonl   copies, passages and lines that were left out
  documents.html     counts, languages, skipped files, copies
Exit code 0: all was read; 1: something was skipped; 2: nothing could be read, or documents.strict.

examples:
  kinject documents handbook/
  kinject documents 'archive/**/*.pdf' run_dir=runs/archive/documents
  kinject documents handbook/ --recipe recipes/handbook/augment.yaml    its section documents"""


def add_documents(verbs: Any) -> None:
    """Add `kinject documents`."""
    parser = verbs.add_parser(
        "documents", help="collect a heap of files into documents.jsonl", description=_DOCUMENTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "arguments", nargs="+", metavar="PATH [documents.key=value ...]",
        help="folder, pattern or file; run_dir=FOLDER sets the run folder (default: runs/NAME/documents)",
    )  # fmt: skip
    parser.add_argument("--recipe", dest="recipe_file", metavar="FILE", help="recipe whose section documents is used")
    parser.set_defaults(run=_documents)


def _documents(arguments: argparse.Namespace) -> int:
    from kinject.api import documents
    from kinject.documents.collect import render_documents
    from kinject.recipe.read import read_section

    is_setting = [word.startswith(("documents.", "run_dir=")) and "=" in word for word in arguments.arguments]
    paths = [word for word, setting in zip(arguments.arguments, is_setting, strict=True) if not setting]
    settings = [word for word, setting in zip(arguments.arguments, is_setting, strict=True) if setting]
    folders = [word.partition("=")[2] for word in settings if word.startswith("run_dir=")]
    options = read_section(arguments.recipe_file, [word for word in settings if not word.startswith("run_dir=")])
    result = documents(*map(Path, paths), run_dir=folders[-1] if folders else None, options=options)
    show(render_documents(result))
    return 1 if result.n_skipped else 0
