"""kinject questions."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
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
With --drop-known it writes no questions: it parts those that an evaluation asked by whether its base
(the first model) knows them, into RUN/known/ and RUN/unknown/.

examples:
  kinject questions
  kinject questions recipes/questions.yaml questions.n_questions=3 questions.documents=my-folder/
  OPENAI_API_KEY=... kinject questions 'questions.generator={kind: openai, model: gpt-4o-mini}'"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "questions", "write multiple-choice questions on documents", _DETAIL, "recipes/questions.yaml"
    )
    parser.add_argument(
        "--drop-known",
        type=Path,
        metavar="RUN",
        help="part the questions of an evaluation (kinject eval) by whether its base knows them",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.drop_known is not None:
        return _drop_known(arguments)
    from kinject.augment.questions import make_questions, render_questions

    gc.set_threshold(20_000, 10, 10)  # as in kinject augment
    result = make_questions(recipe_of(arguments, "questions"))
    show(render_questions(result))
    return 1 if result.short else 0


def _drop_known(arguments: argparse.Namespace) -> int:
    from kinject.errors import InputError
    from kinject.eval.compare import split_known

    if arguments.arguments:
        raise InputError(
            f"--drop-known: takes no recipe; found {arguments.arguments[0]!r}. Name the evaluation's folder alone."
        )
    for part in split_known(arguments.drop_known):
        n = part.n_known + part.n_unknown
        luck = f", by guessing alone {part.n_by_luck:.0f}" if part.n_by_luck >= 0.5 else ""
        show(
            f"{part.question_set}: the base knows {part.n_known} of {n} questions ({part.n_prompts} prompts each{luck})"
        )
        show(f"  {part.unknown}: {part.n_unknown} to learn\n  {part.known}: {part.n_known}")
    return 0
