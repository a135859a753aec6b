"""kinject augment."""

from __future__ import annotations

import argparse
import gc
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.errors import InputError
from kinject.terminal import show

_DETAIL = """\
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


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "augment", "rewrite documents into a training corpus", _DETAIL, "recipes/augment.yaml")
    parser.add_argument(
        "--dry-run", action="store_true", help="read the documents, print the planned requests, cost and time, stop"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="share out the documents among N processes, each with its part of the limits",
    )
    parser.add_argument(
        "--executor",
        choices=["local", "ray"],
        default="local",
        help="where the processes run (ray: RAY_ADDRESS, or a local one)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    gc.set_threshold(20_000, 10, 10)  # requests make few cycles; the search for them took an eighth of the time
    recipe = recipe_of(arguments, "augment")
    if arguments.dry_run:
        from kinject.augment.preview import preview, render_preview

        show(render_preview(preview(recipe)))
        return 0
    if arguments.jobs is None and arguments.executor != "local":
        raise InputError("--executor ray: give --jobs N, the number of processes to share out the documents among.")
    from kinject.api import augment
    from kinject.augment.summary import render_summary

    result = augment(recipe, jobs=arguments.jobs, executor=arguments.executor)
    show(render_summary(result))
    return 1 if result.short else 0
