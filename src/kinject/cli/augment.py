"""kinject augment, kinject questions and kinject styles."""

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
  variants.jsonl   every accepted rewriting, append-only: a rerun pays for nothing twice
  rejected.jsonl   every rejected one, with the reason
  failures.jsonl   requests without an answer, with the error; the next run repeats them
  corpus.jsonl     the input of kinject train
  manifest.json    inputs, settings and versions
  report.html      yield by style and document, refusals with examples, doubts, cost

examples:
  kinject augment
  kinject augment --dry-run    planned requests, cost and time; nothing is sent
  kinject augment recipes/augment.yaml augment.styles.paraphrase=4 run_dir=runs/augment-4
  kinject augment recipes/augment-endpoints.yaml --jobs 8
  kinject augment 'augment.styles={paraphrase: 8, permuted: 2}' run_dir=runs/augment-mixed
  OPENAI_API_KEY=... kinject augment recipes/augment-openai.yaml augment.budget=5"""


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
    from kinject.augment.summary import render_summary

    result = augment(recipe)
    show(render_summary(result))
    return 1 if result.short else 0


_QUESTIONS = """\
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
    parser.set_defaults(run=_questions)


def _questions(arguments: argparse.Namespace) -> int:
    if arguments.drop_known is not None:
        return _drop_known(arguments)
    from kinject.augment.questions import make_questions, render_questions

    gc.set_threshold(20_000, 10, 10)  # as in kinject augment
    result = make_questions(recipe_of(arguments, "questions"))
    show(render_questions(result))
    return 1 if result.short else 0


def _drop_known(arguments: argparse.Namespace) -> int:
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


_STYLES = """\
List the styles of rewriting, show the prompts of one on a passage, or try one: send one request to
the generator of a recipe, and print the answer with the verdict of the checks.

examples:
  kinject styles                                         all of them
  kinject styles plain                                   its prompts on an example
  kinject styles plain --documents manual.md             the same on your first passage
  kinject styles mine.yaml --documents manual.md         a style of your own (docs/augmentation.md)
  kinject styles plain --recipe recipes/augment.yaml --try    one answer of its generator"""


def add_styles(verbs: Any) -> None:
    """Add `kinject styles`."""
    parser = verbs.add_parser(
        "styles", help="list the styles of rewriting, show or try one", description=_STYLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("style", nargs="?", metavar="STYLE", help="name of a style, or a style file (YAML)")
    parser.add_argument("--recipe", metavar="RECIPE", help="recipe with documents, style files and a generator")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="overrides of the recipe")
    parser.add_argument(
        "--documents", type=Path, metavar="PATH", help="documents; default: the recipe's, or an example"
    )
    parser.add_argument(
        "--passage", type=int, default=1, metavar="N", help="which passage of them; default: %(default)s"
    )
    parser.add_argument("--try", action="store_true", dest="attempt", help="send one request and print the verdict")
    parser.set_defaults(run=_styles)


def _styles(arguments: argparse.Namespace) -> int:
    from kinject.augment.preview import find_passage, find_style, known_styles, render_prompts, try_style
    from kinject.recipe import read_recipe

    recipe = read_recipe(Path(arguments.recipe), arguments.set, verb="augment") if arguments.recipe else None
    if arguments.style is None:
        styles = known_styles(recipe)
        width = max(map(len, styles))
        for name, style in styles.items():
            show(f"{name:{width}}  {style.about}" + (f" ({style.source})" if style.source else ""))
        return 0
    if arguments.passage < 1:
        raise InputError(f"--passage: found {arguments.passage}, allowed: 1 or more.")
    style = find_style(arguments.style, recipe)
    group = find_passage(style, recipe, arguments.documents, arguments.passage)
    if not arguments.attempt:
        show(render_prompts(group))
        return 0
    if recipe is None:
        raise InputError("--try: needs a generator. Give --recipe a recipe of kinject augment.")
    if arguments.style != style.name:
        files = [*recipe.augment.style_files, arguments.style]
        recipe = read_recipe(Path(arguments.recipe), [*arguments.set, f"augment.style_files={files}"], verb="augment")
    trial = try_style(group, recipe)
    for text in trial.accepted:
        show(f"accepted:\n{text}")
    for reason, text in trial.refused:
        show(f"refused, {reason}\n{text}\n")
    if trial.nothing:
        show("accepted: NONE, there is nothing to write")
    if group.style.missing_need(group.source):
        show(render_prompts(group).partition("\n")[0])
    show(
        f"{trial.n_requests} request{'' if trial.n_requests == 1 else 's'}"
        + (f", cost {trial.cost:.4f}" if trial.cost else "")
    )
    return 0 if trial.accepted or trial.nothing else 1
