"""kinject eval."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.process import is_first_process
from kinject.terminal import show

_DETAIL = """\
Score models, loaded here or behind endpoints, on question sets: by the log-probability of each
choice, or by the answers that they write, with and without retrieved context. In the recipe's run_dir:
  answers.jsonl    log-probs of every choice; a rerun scores nothing twice
  harness/ARM/     the same in lm-evaluation-harness's layout
  report.html      verdict, tables, figures, changed answers (also report.md and report.json)
  flips.jsonl      every answer that differs from the base's, with its text and context
  manifest.json    inputs, settings and versions

Exit code 0: every question has a score; 1: some or all have none (the output names them).

examples:
  kinject eval
  kinject eval recipes/eval.yaml eval.limit=50 run_dir=runs/eval-quick
  kinject eval recipes/eval.yaml 'eval.formats=[letters, texts, hybrid, rotations]'
  kinject eval --show 5
  kinject eval --dry-run    prompts of each model, and what endpoints may cost; nothing is asked

GPUs, or processes on the CPU, divide the questions among themselves:
  accelerate launch --multi_gpu --num_processes 2 -m kinject.cli eval"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "eval", "score models on question sets, with a report", _DETAIL, "recipes/eval.yaml")
    parser.add_argument(
        "--show",
        type=int,
        metavar="N",
        help="print the first N prompts of each set and arm as tokenised, store nothing; an endpoint is not asked",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the prompts of each model, and what endpoints may cost; ask nothing",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "eval")
    if arguments.show is not None:
        from kinject.errors import InputError
        from kinject.eval.run import show_prompts

        if arguments.show < 1:
            raise InputError(f"--show: found {arguments.show}, expected 1 or more.")
        for text in show_prompts(recipe, arguments.show):
            show(text, end="\n\n")
        return 0
    if arguments.dry_run:
        from kinject.eval.run import preview

        for line in preview(recipe):
            show(line)
        return 0
    from kinject.api import evaluate
    from kinject.report.summary import render_summary

    report = evaluate(recipe)
    if not is_first_process():  # of several processes the first one prints
        return 0
    show(render_summary(report))
    show(f"report: {recipe.run_dir / 'report.html'}")
    return 1 if report.unscored or any(result.n_unscored for result in report.results) else 0
