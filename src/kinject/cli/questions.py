"""kinject questions."""

from __future__ import annotations

import argparse
import gc
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_DETAIL = """\
Write four-choice questions on documents. A model proposes them for each passage. It must answer
each correctly when asked again with the passage, and must not always be correct without it. In
the recipe's run_dir:
  questions.jsonl    the most specific ones of each passage, with the ids of document and fact
  validation.jsonl   those on a fraction of the documents; test.jsonl: those on the others
  rejected.jsonl     every rejected one, with the reason
  manifest.json      inputs, settings and versions

examples:
  kinject questions
  kinject questions recipes/questions.yaml questions.n_questions=3 questions.documents=my-folder/
  OPENAI_API_KEY=... kinject questions 'questions.generator={kind: openai, model: gpt-4o-mini}'"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "questions", "write multiple-choice questions on documents", _DETAIL, "recipes/questions.yaml"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.augment.questions import make_questions, render_questions

    gc.set_threshold(20_000, 10, 10)  # as in kinject augment
    result = make_questions(recipe_of(arguments, "questions"))
    show(render_questions(result))
    return 1 if result.short else 0
