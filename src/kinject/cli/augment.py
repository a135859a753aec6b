"""kinject augment, kinject questions and kinject recipes styles."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.errors import InputError
from kinject.terminal import show

_AUGMENT = """\
Rewrite documents into a training corpus, passage by passage. In the recipe's run_dir:
  corpus.jsonl     the input of kinject train
  variants.jsonl   every accepted rewriting; a rerun pays for nothing twice
  rejected.jsonl   every refused one, with the reason
  report.html      yield by style and document, facts carried, cost

examples:
  kinject augment
  kinject augment --dry-run    planned requests, cost and time; nothing is sent
  kinject augment recipes/augment.yaml augment.styles.paraphrase=4 run_dir=runs/augment-4"""


def add_augment(verbs: Any) -> None:
    """Add `kinject augment`."""
    parser = add_verb(verbs, "augment", "rewrite documents into a training corpus", _AUGMENT, "recipes/augment.yaml")
    parser.add_argument(
        "--dry-run", action="store_true", help="read the documents, print the planned requests, cost and time, stop"
    )
    parser.set_defaults(run=_augment)


def _augment(arguments: argparse.Namespace) -> int:
    gc.set_threshold(20_000, 10, 10)  # requests make few cycles; the search for them took an eighth of the time
    recipe = recipe_of(arguments, "augment")
    if arguments.dry_run:
        from kinject.augment.preview import preview, render_preview

        show(render_preview(preview(recipe)))
        return 0
    from kinject.api import augment
    from kinject.augment.run import render_summary

    result = augment(recipe)
    show(render_summary(result))
    return 1 if result.short else 0


_QUESTIONS = """\
Write four-choice questions on documents. The model must answer each correctly with the passage, and
must not always be correct without it. In the recipe's run_dir:
  questions.jsonl    the questions; validation.jsonl and test.jsonl part them by document
  rejected.jsonl     every refused one, with the reason

examples:
  kinject questions
  kinject questions recipes/questions.yaml questions.n_questions=3 questions.documents=my-folder/
  OPENAI_API_KEY=... kinject questions 'questions.generator={kind: openai, model: gpt-4o-mini}'"""


def add_questions(verbs: Any) -> None:
    """Add `kinject questions`."""
    parser = add_verb(
        verbs, "questions", "write multiple-choice questions on documents", _QUESTIONS, "recipes/questions.yaml"
    )
    parser.add_argument(
        "--drop-known",
        type=Path,
        metavar="RUN",
        help="part the questions of an evaluation (kinject eval) by whether its base knows them",
    )
    parser.add_argument("--retry", action="store_true", help="ask again about passages that have too few questions")
    parser.add_argument("--dry-run", action="store_true", help="count passages and planned questions, then stop")
    parser.set_defaults(run=_questions)


def _questions(arguments: argparse.Namespace) -> int:
    if arguments.drop_known is not None:
        return _drop_known(arguments)
    from kinject.augment.questions import make_questions, render_questions

    if arguments.dry_run:
        from kinject.augment.preview import preview_questions

        show(preview_questions(recipe_of(arguments, "questions")))
        return 0

    gc.set_threshold(20_000, 10, 10)  # as in kinject augment
    result = make_questions(recipe_of(arguments, "questions"), retry=arguments.retry)
    show(render_questions(result))
    return 1 if result.short else 0


def _drop_known(arguments: argparse.Namespace) -> int:
    from kinject.eval.known import split_known

    if arguments.arguments:
        raise InputError(
            f"--drop-known: takes no recipe; found {arguments.arguments[0]!r}. Name the evaluation's folder alone."
        )
    for part in split_known(arguments.drop_known):
        n = part.n_known + part.n_unknown
        chosen, measured = ", ".join(part.chosen_by), ", ".join(part.measure_with)
        show(f"{part.question_set}: the base knows {part.n_known} of {n} questions, as asked by {chosen}")
        show(f"  {part.unknown}: {part.n_unknown} to learn\n  {part.known}: {part.n_known}")
        show(f"  Ask the known ones by {measured}, which chose none of them: so the base answers {part.kept:.1%}.")
    return 0
